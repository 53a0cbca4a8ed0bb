"""Garbage collection with nothing to do, of a version of 10⁶ chunks in 10³ shards, against icechunk and DVC.

perf/run dataset_gc [--quick] [--rounds 7] [--memory /dev/shm]

Ours twice: with nothing retired, and with a retired version that a tag still names, for which every manifest is read.
The limit and DVC are compared with the whole command, from the start of Python; icechunk's garbage_collect, on an array
in the same shards, with our function alone, both in a process that has started. DVC is `dvc gc --workspace` with as
many files as there are shards. Chunks have 16 bytes: no collection opens one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from perf.harness.harness import compare, from_ratios, interleave, report
from perf.harness.workspace import PEERS, arguments, execute, print_progress, workspace
from perf.stage.stage_data import make_file_set
from pitools.dataset.gc.collect import collect_garbage as collect
from pitools.store import tags, version_state
from pitools.store.retirement import Retirement
from pitools.store.version_list import published_at

PYTHON = PEERS / "bin" / "python"
PIT = Path(sys.executable).parent / "pit"
LIMIT_S = 1.0
INDEX_BYTES = 16


def install() -> dict[str, str]:
    """The peers' versions; installed beside us where they are missing."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    show = "from importlib.metadata import version; print(version('icechunk'), version('dvc'))"
    result = subprocess.run([PYTHON, "-c", show], capture_output=True, text=True, check=False)
    if result.returncode:
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "icechunk", "zarr", "dvc"], check=True)
        result = subprocess.run([PYTHON, "-c", show], capture_output=True, text=True, check=True)
    return dict(zip(("icechunk", "dvc"), result.stdout.split(), strict=True))


def dvc(folder: Path, *words: str) -> None:
    env = {**os.environ, "DVC_NO_ANALYTICS": "1", "PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([PEERS / "bin" / "dvc", *words], cwd=folder, env=env, capture_output=True, check=True)


def gc(root: Path, expected: str) -> None:
    runs = root.parent / "runs"
    runs.mkdir(exist_ok=True)
    if expected not in (
        out := execute(PIT, "dataset", "gc", root, "--runs", runs, "--grace", "0s", "--format", "jsonl")
    ):
        sys.exit(f"gc did something: {out}")


def alone(root: Path) -> None:
    """The same in this process."""
    if any(actual.state != "kept" for actual in collect(root, runs=[root.parent / "runs"], grace_s=0)):
        sys.exit("gc did something")


def main() -> int:
    args = arguments(__doc__)
    versions = install()
    shards, chunks = (100, 100) if args.quick else (1000, 1000)
    size = chunks * (16 + INDEX_BYTES + 4) + 4
    what = f"{shards * chunks:,} chunks in {shards:,} shards"
    with workspace(args.memory, needed=shards * size * 6) as home:
        print_progress(what)
        idle = make_file_set(home / "idle", [size] * shards)
        file_set = make_file_set(home / "kept", [size] * shards, seed=2)
        root, name, version = file_set.folder.parent.parent, file_set.folder.parent.name, file_set.version
        tags.move_tag(root, name, "prod", version)
        record = Retirement(
            name=name,
            version=version,
            retired_at="2020-01-01T00:00:00Z",
            retired_by="",
            published=published_at(file_set.folder),
        )
        version_state.write_catalog_record(version_state.retired_file(root, name, version), record)
        ice = home / "icechunk"
        began = time.perf_counter()
        execute(PYTHON, "-m", "perf.dataset.gc_peers", "icechunk", "make", ice, str(shards), str(chunks))
        print_progress(f"icechunk wrote it in {time.perf_counter() - began:.0f} s")
        work = home / "dvc"
        shutil.copytree(idle.folder, work / "data")
        dvc(work, "init", "--no-scm")
        dvc(work, "add", "data")
        spent: list[float] = []

        def icechunk() -> None:
            out = execute(PYTHON, "-m", "perf.dataset.gc_peers", "icechunk", "gc", ice)
            spent.append(float(out.splitlines()[-1]))

        times = interleave(
            args.rounds,
            {
                "idle": lambda: gc(idle.folder.parent.parent, ""),
                "kept": lambda: gc(root, "tag prod"),
                "idle, alone": lambda: alone(idle.folder.parent.parent),
                "kept, alone": lambda: alone(root),
                "icechunk": icechunk,
                "dvc": lambda: dvc(work, "gc", "--workspace", "--force"),
            },
        )
        spent = spent[1:]
        for key, took in (times | {"icechunk": spent}).items():
            print_progress(f"  {key}: {min(took) * 1e3:.1f} to {max(took) * 1e3:.1f} ms")
        cases = []
        for key, case in (("idle", "nothing retired"), ("kept", "one retired, a tag names it")):
            case = f"gc with nothing to do, {what}, {case}"
            cases += [
                from_ratios(case, "limit 1 s", "", [LIMIT_S / took for took in times[key]], target=1.0),
                compare(
                    case, "icechunk garbage_collect", versions["icechunk"], times[f"{key}, alone"], spent, target=1.0
                ),
                compare(case, "dvc gc --workspace", versions["dvc"], times[key], times["dvc"], target=1.0),
            ]
        return report(cases)


if __name__ == "__main__":
    sys.exit(main())
