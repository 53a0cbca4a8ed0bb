"""One node of a fan-out test, a process of its own: reads a set through the fan-out as the copy engine does.

python fanout_node.py SETTINGS.json; PIT_FANOUT_* in the environment say who it is. Prints what it received as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from pitools.core.errors import DataError, PitError
from pitools.stage.fanout.group import Timeouts, find_group
from pitools.stage.fanout.session import FanoutSession, join
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.store import digest as digests

BLOCK = 1 << 20


class ThrottledSource:
    """The stand-in for a source behind a slow link: the test's own server gives the bytes, and counts them."""

    label, block = "origin", BLOCK

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> ThrottledSource:
        self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        self.lines = self.socket.makefile("rb")
        twin = ThrottledSource(self.port)
        twin.socket, twin.lines = self.socket, self.lines
        return twin

    def open(self, path: str) -> ThrottledFile:
        return ThrottledFile(self, path)

    def ask(self, path: str, offset: int, length: int) -> int:
        self.socket.sendall(json.dumps([path, offset, length]).encode() + b"\n")
        return int(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class ThrottledFile:
    def __init__(self, source: ThrottledSource, path: str) -> None:
        self.source, self.path = source, path
        self.size = source.ask(path, 0, 0)
        if self.size < 0:
            raise DataError("missing", where=path)

    def read_into(self, view: memoryview, offset: int) -> int:
        count = self.source.ask(self.path, offset, len(view))
        actual = 0
        while actual < count:
            actual += self.source.lines.readinto(view[actual:count])
        return count

    def close(self) -> None: ...


def copy(dataset: DatasetVersion, fan: FanoutSession, partial: Path, settings: dict) -> None:
    """The threads of all workers take files in the fan-out's order, verify and write them."""
    take, feed = os.pipe()
    workers = []
    for _ in range(settings["workers"]):
        if not (pid := os.fork()):
            work(dataset, fan, partial, settings, take, feed)
        workers.append(pid)
    os.close(take)
    for group in fan.file_groups():
        for index in group:
            os.write(feed, index.to_bytes(4, "little"))
    os.close(feed)
    if any(os.waitpid(pid, 0)[1] for pid in workers):
        sys.exit("a worker failed")


def work(dataset: DatasetVersion, fan: FanoutSession, partial: Path, settings: dict, take: int, feed: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.close(feed)
    codes = []

    def thread() -> None:
        reader = fan.source.connect()
        buffer = memoryview(bytearray(settings["block"]))
        while number := os.read(take, 4):
            index = int.from_bytes(number, "little")
            one(dataset, fan, reader, partial, index, buffer, settings)
        reader.close()
        codes.append(0)

    threads = [threading.Thread(target=thread) for _ in range(settings["threads"])]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    os._exit(0 if len(codes) == len(threads) else 1)


def one(dataset, fan, reader, partial: Path, index: int, buffer: memoryview, settings: dict) -> None:
    entry = dataset.manifest.files[index]
    file = reader.open(entry.path)
    with (partial / entry.path).open("wb") as out:
        while True:
            out.seek(0)
            hasher, offset = digests.hasher_for(entry.digest), 0
            while offset < file.size:
                count = file.read_into(buffer, offset)
                hasher.update(buffer[:count])
                out.write(buffer[:count])
                offset += count
            if hasher.digest() == entry.digest:
                break
            if not file.distrust():
                raise DataError("wrong digest", where=entry.path)
    file.close()
    if settings["lies"] and entry.bytes:
        damage(partial / entry.path)
    fan.mark_done(index)


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    dataset = load_version(settings["data"])
    root, version = Path(settings["root"]), dataset.version
    partial, final = root / ".tmp" / f"{version}.partial", root / "objects" / version
    origin = ThrottledSource(settings["origin"])
    group = find_group(os.environ)
    timeouts = Timeouts(**settings["timeouts"])
    with join(origin, dataset.manifest.files, version, [partial, final], group, timeouts) as fan:
        if final.exists():
            fan.mark_all_done()
        else:
            for entry in dataset.manifest.files:
                (partial / entry.path).parent.mkdir(parents=True, exist_ok=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            copy(dataset, fan, partial, settings)
            os.rename(partial, final)
            fan.mark_all_done()
        fan.serve_until_done()
        print(json.dumps(fan.received()._asdict()))


if __name__ == "__main__":
    try:
        main()
    except PitError as error:
        sys.exit(f"{error} {error.hint}")
