"""Per-process journals of finished jobs, for resuming an ingest. Each process appends to its own file, without a lock.

<folder>/journal/<session>.<host>.<pid>.<random>.jsonl    one FinishedJob per line; an incomplete last line is ignored

A session is one call of the ingest, on any number of nodes. A line is written after its shard is on disk under its
final path. Another session verifies the shard's digest before using it, so a lost line costs work and a wrong line
costs nothing. A range's line is trusted: the folder's key includes the fingerprints of the recordings' files.
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
    """A finished job. key: a shard's path, or `#FILE/RANGE` for a range of a file, by their numbers.

    digest: of a shard, as in manifests; of a range, the hex digits alone. statistics: those of the shard's steps.
    """

    key: str
    bytes: int
    digest: str
    statistics: PartialStats | None = None


class IngestJournal:
    """One process's journal. session: id of the session, whose own entries are not verified again."""

    def __init__(self, folder: Path, session: str) -> None:
        name = f"{session}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.jsonl"
        self._folder = folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder / name, flags, 0o644)

    def append(self, entry: FinishedJob) -> None:
        """Append a finished job. Raises OSError."""
        line = memoryview(msgspec.json.encode(entry) + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.utime(self._folder.parent)  # `gc` keeps recently changed folders

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JournalReader:
    """Read the journals of a folder incrementally: each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}
        self.entries: dict[str, FinishedJob] = {}
        self.sessions: dict[str, str] = {}  # key → the session that wrote it last
        self.new: list[tuple[str, str]] = []  # (session, key) of the entries of the last poll

    def poll(self) -> int:
        """Read lines added since the last poll; return the number of finished jobs."""
        self.new = []
        decode = msgspec.json.Decoder(FinishedJob).decode
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                for line in self._read_new(name):
                    try:
                        entry = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        continue  # torn by a crash; the shard is written again
                    self.entries[entry.key] = entry
                    self.sessions[entry.key] = name.partition(".")[0]
                    self.new.append((self.sessions[entry.key], entry.key))
        return len(self.entries)

    def has_other_sessions(self, session: str) -> bool:
        """Return whether another session has a journal here."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.partition(".")[0] != session for name in os.listdir(self._folder))
        return False

    def _read_new(self, name: str) -> list[bytes]:
        with (self._folder / name).open("rb") as file:
            file.seek(self._read.get(name, 0))
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read[name] = self._read.get(name, 0) + end
        return data[:end].splitlines()
