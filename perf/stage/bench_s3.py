"""442 KB ranges of objects in an S3-compatible server on loopback: what staging reads with, against s3fs and boto3.

perf/run stage_s3 [--quick] [--rounds 7] [--ranges 600]
    needs the extras s3 and test; nginx is installed where missing (apt-get as root), s3fs and boto3 into .venv-peers

Two servers. nginx serves the files unsigned, as a public bucket does: it is the fastest there is and takes the least
of the machine, so that the clients are what is measured. SeaweedFS checks signatures, If-Match and all, but takes
longer for a range than any client: there the time is the server's, and is told; compared is the clients' CPU time.
Each client is a process of its own that stays, with its connections, over all rounds. Ours reads as staging does: a
forked process a core, a few threads in each, into buffers that are used again; boto3's bytes are let go at once, and
s3fs returns all of them together. Before the race each hands over every byte, and their hashes are compared. Ours and
s3fs run with the best of a few settings.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from perf.harness.workspace import PEERS, REPO, print_progress

BUCKET, RANGE, OBJECT, OBJECTS = "lab", 442 * 1000, 64 << 20, 4
# Peer and its threads → least ratio.
TARGETS = {"s3fs": 4.0, "boto3 8": 5.0, "boto3 32": 5.0}
CPU_TARGETS = {"s3fs": 1.5, "boto3 8": 1.5, "boto3 32": 1.5}
TRIALS = {"s3fs": (8, 32, 128), "ours": (4, 8, 16)}

# All ranges once; where asked to, kept, and returned in their order.
Fetch = Callable[[bool], Sequence[Any]]
CpuSeconds = Callable[[], float]
Seconds = dict[str, list[float]]


def jobs(count: int) -> list[tuple[str, int]]:
    """(object, offset) of each range: the same for every client."""
    chosen = random.Random(1)
    return [(f"o{chosen.randrange(OBJECTS)}", chosen.randrange(OBJECT - RANGE)) for _ in range(count)]


# --- clients: each in a process of its own; the peers' has nothing of ours installed ---


def ours(ranges: Sequence[tuple[str, int]], threads: int) -> tuple[Fetch, CpuSeconds]:
    """What staging does: a forked process a core, its threads each with a reader, its files and a buffer."""
    take, feed = os.pipe()
    reported, tell = os.pipe()
    retained = memoryview(mmap.mmap(-1, len(ranges) * RANGE))
    processes = min(threads, len(os.sched_getaffinity(0)))
    # A thread takes a job's number from the pipe, as in `pitools.core.forked_pool`.
    pids = []
    for _ in range(processes):
        if not (pid := os.fork()):
            os.close(feed)  # so that it ends when its parent does
            _work(ranges, threads // processes, take, tell, retained)
        pids.append(pid)

    def fetch(keep: bool) -> Sequence[Any]:
        for index in range(len(ranges)):
            os.write(feed, struct.pack("=I?", index, keep))  # one by one, so that none is ever read in halves
        left = len(ranges)
        while left:
            left -= len(os.read(reported, left))
        return [retained] if keep else []

    # Linux: the clock of another process's CPU time is named by its number.
    return fetch, lambda: sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def _work(ranges: Sequence[tuple[str, int]], threads: int, take: int, tell: int, kept: memoryview) -> NoReturn:
    from pitools.stage.sources.object_store.remote import ObjectStoreSource

    source = ObjectStoreSource(f"s3://{BUCKET}")

    def worker() -> None:
        reader, buffer = source.connect(), memoryview(mmap.mmap(-1, RANGE))
        files = {key: reader.open(key) for key in {key for key, _ in ranges}}
        while job := os.read(take, 5):
            index, keep = struct.unpack("=I?", job)
            key, offset = ranges[index]
            position = 0
            while position < RANGE:
                position += files[key].read_into(buffer[position:], offset + position)
            if keep:
                kept[index * RANGE : (index + 1) * RANGE] = buffer
            os.write(tell, b".")

    others = [threading.Thread(target=worker) for _ in range(threads)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    os._exit(0)


def s3fs(ranges: Sequence[tuple[str, int]], batch: int) -> tuple[Fetch, CpuSeconds]:
    """cat_ranges, all of them in one call, `batch` at a time."""
    import s3fs as library

    signed = not os.environ.get("AWS_NO_SIGN_REQUEST")
    system = library.S3FileSystem(
        anon=not signed, endpoint_url=os.environ["AWS_ENDPOINT_URL"], config_kwargs={"max_pool_connections": batch}
    )
    paths = [f"{BUCKET}/{key}" for key, _ in ranges]
    starts = [offset for _, offset in ranges]
    ends = [offset + RANGE for offset in starts]
    return lambda _: system.cat_ranges(paths, starts, ends, batch_size=batch, on_error="raise"), time.process_time


def boto3(ranges: Sequence[tuple[str, int]], threads: int) -> tuple[Fetch, CpuSeconds]:
    """get_object with a Range, from a pool of threads that share a client, as its manual says."""
    import boto3 as library
    from botocore import UNSIGNED
    from botocore.config import Config

    unsigned = {"signature_version": UNSIGNED} if os.environ.get("AWS_NO_SIGN_REQUEST") else {}
    client = library.client("s3", config=Config(max_pool_connections=threads, **unsigned))
    pool = ThreadPoolExecutor(threads)

    def one(job: tuple[str, int], keep: bool) -> bytes:
        key, offset = job
        body = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={offset}-{offset + RANGE - 1}")["Body"].read()
        return body if keep else b""

    return lambda keep: list(pool.map(one, ranges, itertools.repeat(keep))), time.process_time


def serve_client(name: str, setting: int, count: int) -> int:
    """A client's process: for each line that comes, fetch all ranges and answer how long and, asked for, their hash."""
    fetch, cpu_s = {"ours": ours, "s3fs": s3fs, "boto3": boto3}[name](jobs(count), setting)
    for line in sys.stdin:
        began, cpu = time.perf_counter(), cpu_s()
        fetched = fetch(line.strip() == "hash")
        answer: dict[str, Any] = {"s": time.perf_counter() - began, "cpu_s": cpu_s() - cpu}
        if line.strip() == "hash":
            full = hashlib.sha256()
            for each in fetched:
                full.update(each)
            answer["hash"] = full.hexdigest()
        print(json.dumps(answer), flush=True)
    return 0


class Client:
    """A client's process, and what it has measured of itself: CPU seconds in each round."""

    def __init__(self, name: str, setting: int, count: int, env: dict[str, str]) -> None:
        python = sys.executable if name == "ours" else str(PEERS / "bin" / "python")
        self.cpu_s: list[float] = []
        argv = [python, "-m", "perf.stage.bench_s3", "--client", name, str(setting), str(count)]
        self._process = subprocess.Popen(
            argv, env=env, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def fetch(self, word: str = "go") -> dict[str, Any]:
        """All ranges once."""
        assert self._process.stdin
        assert self._process.stdout
        print(word, file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            sys.exit(f"{self._process.args}: ended with {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        self.cpu_s.append(answer["cpu_s"])
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


# --- servers ---


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[dict[str, str]]:
    """Static files, which is all that unsigned GETs of an S3 bucket are; the environment that names it."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if not program:
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx-light"], check=True)
        program = "/usr/sbin/nginx"
    from s3_server import free_ports

    port = free_ports(1)[0]
    temporary = "".join(
        f"{kind}_temp_path {folder}/tmp-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log;"
        "events { worker_connections 1024; } http { access_log off; sendfile on; tcp_nopush on;"
        f"keepalive_requests 1000000; {temporary} server {{ listen 127.0.0.1:{port}; root {folder}/www; }} }}"
    )
    process = subprocess.Popen([program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"])
    try:
        yield environment(port, AWS_NO_SIGN_REQUEST="1")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[dict[str, str]]:
    """The server of the tests, with the same objects."""
    from s3_server import put, serving

    with serving(folder / "weed") as server:
        put(server.port, {path.name: path for path in (folder / "www" / BUCKET).iterdir()}, BUCKET)
        yield environment(server.port)


def environment(port: int, **more: str) -> dict[str, str]:
    import s3_server

    clean = {key: text for key, text in os.environ.items() if not key.startswith("AWS_")}
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    return {**clean, **s3_server.environment(port), "PYTHONPATH": path, **more}


# --- the race ---


def race(server: str, env: dict[str, str], count: int, rounds: int) -> tuple[Seconds, Seconds, dict[str, str]]:
    """Wall and CPU seconds of every client, in turn over rounds, after their bytes were found to be the same; and
    what each was set to.
    """
    from perf.harness.harness import interleave

    clients: dict[str, Client] = {}
    settings: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in ("ours", *TARGETS):
            kind, _, fixed = name.partition(" ")
            setting = int(fixed) if fixed else fastest(kind, count, env)
            clients[name] = Client(kind, setting, count, env)
            settings[name] = f"{'batch_size' if kind == 's3fs' else 'threads'}={setting}"
            stack.callback(clients[name].close)
        hashes = {name: client.fetch("hash")["hash"] for name, client in clients.items()}
        if len(set(hashes.values())) != 1:
            sys.exit(f"{server}: not everybody got the same bytes: {hashes}")
        wall = interleave(rounds, {name: client.fetch for name, client in clients.items()}, rotate=True)
    cpu = {name: client.cpu_s[-rounds:] for name, client in clients.items()}
    for name in clients:
        gigabytes, took = count * RANGE / 1e9, statistics.median(wall[name])
        how = f"{count / took:.0f} ranges/s, {statistics.median(cpu[name]) / gigabytes:.2f} CPU s/GB"
        print_progress(f"  {server}: {name} ({settings[name]}): {how}")
    return wall, cpu, settings


def cases(what: str, seconds: Seconds, settings: dict[str, str], targets: Mapping[str, float]) -> list[Any]:
    """Every peer's ratio to ours."""
    from perf.harness.harness import compare

    versions, case = versions_of("s3fs", "boto3"), f"{what}, ours {settings['ours']}"
    return [
        compare(
            case,
            name,
            versions[name.partition(" ")[0]],
            seconds["ours"],
            seconds[name],
            target=target,
            command=settings[name],
        )
        for name, target in targets.items()
    ]


def fastest(kind: str, count: int, env: dict[str, str]) -> int:
    """The setting of a client that is best in the second of two short runs."""
    actual = {}
    for setting in TRIALS[kind]:
        client = Client(kind, setting, max(50, count // 3), env)
        try:
            client.fetch()
            actual[setting] = min(client.fetch()["s"] for _ in range(2))
        finally:
            client.close()
    return min(actual, key=lambda setting: actual[setting])


def versions_of(*names: str) -> dict[str, str]:
    """The peers' versions; they are installed first, where they are missing."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    show = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
    if done.returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--quiet", *names], check=True)
        done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def main() -> int:
    sys.path.insert(0, str(REPO / "tests" / "stage" / "sources" / "object_store"))
    from perf.harness.harness import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few ranges and three rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranges", type=int, default=600)
    args = parser.parse_args()
    rounds, count = (3, 100) if args.quick else (args.rounds, args.ranges)
    versions_of("s3fs", "boto3")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers end, too
    with tempfile.TemporaryDirectory(prefix="pit-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "www" / BUCKET).mkdir(parents=True)
        for number in range(OBJECTS):
            (folder / "www" / BUCKET / f"o{number}").write_bytes(random.Random(number).randbytes(OBJECT))
        with nginx(folder) as env:
            wall, _, settings = race("nginx", env, count, rounds)
            code = report(cases(f"{count} ranges of 442 KB, nginx", wall, settings, TARGETS))
        with seaweedfs(folder) as env:
            few = count // 3  # it is the server that is slow here
            wall, cpu, settings = race("SeaweedFS", env, few, rounds)
            case = f"{few} ranges of 442 KB, SeaweedFS, signed"
            reported = dict.fromkeys(TARGETS, 0.0)
            code |= report(cases(f"{case}, bound by the server", wall, settings, reported))
            code |= report(cases(f"{case}, CPU time of the client", cpu, settings, CPU_TARGETS))
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        sys.exit(serve_client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    sys.exit(main())
