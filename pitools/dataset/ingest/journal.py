"""What of an unfinished ingest is done, written down by each process in a file of its own, so that no lock is needed.

<work>/journal/<run>.<host>.<pid>.<random>.jsonl    one Entry a line; a last line without its end is not there

A line is written after its shard is on the disk under its name. It is a hint and no more: another run believes a shard
only while the bytes that are there have the digest that the line says, so a lost line costs work, and a wrong one
nothing. What a line says of a source's range is believed, for the folder is that of these very files, unchanged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

import msgspec

from pitools.dataset.ingest.statistics import PartialStats


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job that is done: a shard by its path, or a range of a source file by their numbers, as `source/3/0`.

    digest: of the shard, as manifests say it; of a range, the hex digits alone. statistics: statistics of its steps.
    """

    key: str
    bytes: int
    digest: str
    statistics: PartialStats | None = None


class IngestJournal:
    """One process's journal. run: whose work this is; entries of one's own run need not be looked at again."""

    def __init__(self, folder: Path, run: str) -> None:
        name = f"{run}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.jsonl"
        self._folder = folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder / name, flags, 0o644)

    def append(self, entry: FinishedJob) -> None:
        """One more is done. Raises OSError."""
        line = memoryview(msgspec.json.encode(entry) + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.utime(self._folder.parent)  # by which `gc` sees that somebody is at work

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


class JournalReader:
    """All that stands in the journals of a folder, read once each, however often it is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}
        self.entries: dict[str, FinishedJob] = {}
        self.runs: dict[str, str] = {}  # key → the run that wrote it last
        self.new: list[tuple[str, str]] = []  # run and key of what the last look brought

    def poll(self) -> int:
        """Read what has come since; returns how many jobs are done."""
        self.new = []
        decode = msgspec.json.Decoder(FinishedJob).decode
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                for line in self._read_new(name):
                    try:
                        entry = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        continue  # torn by a crash; its shard is made again
                    self.entries[entry.key] = entry
                    self.runs[entry.key] = name.partition(".")[0]
                    self.new.append((self.runs[entry.key], entry.key))
        return len(self.entries)

    def has_other_runs(self, run: str) -> bool:
        """Whether any other run has worked here, or is about to."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.partition(".")[0] != run for name in os.listdir(self._folder))
        return False

    def _read_new(self, name: str) -> list[bytes]:
        with (self._folder / name).open("rb") as file:
            file.seek(self._read.get(name, 0))
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read[name] = self._read.get(name, 0) + end
        return data[:end].splitlines()
