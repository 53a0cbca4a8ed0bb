"""Read tables in a child process, which is left behind where it hangs.

A read of a dead NFS server or disk may wait in the kernel and cannot be interrupted there, not even by SIGKILL. So one
child reads all tables, and sends each row as it has it. Where it stands still for longer than the table's time-out, the
row that it announced last does not respond: a new child goes on behind it, and the old one is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.record import decode_json
from pitools.node.gather.read import Query
from pitools.node.tables import TABLES
from pitools.node.types import FactTable, NodeFacts, Row

_MOST_HUNG = 8  # subjects of a table; then the table ends, as one that was read in part
_PR_SET_PDEATHSIG = 1
_KILL_POLLS, _KILL_POLL_S = 50, 0.002


class Collector(NamedTuple):
    """How a table is read.

    source: what is read, for people. read: yields rows; before a read that may hang a row with the subject and
    `responds` False, and afterwards the row again. timeout_s: without a new row.
    """

    table: str
    source: str
    read: Callable[[Query], Iterable[Row]]
    timeout_s: float = 5.0


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """From the child, a line of JSON: a row of its table, or the table's end and the error that ended it."""

    row: Row | None = None
    error: str = ""


def read_tables(
    collectors: Iterable[Collector], query: Query, names: Mapping[str, Collection[str]] = {}, *, timeout_s: float = 50.0
) -> NodeFacts:
    """Return the facts of this node, of all collectors' tables. What cannot be read is unknown, and raises nothing.

    names: what checks name, by table. timeout_s: for all tables together; those that are not reached are unknown.
    """
    started = timestamps.now_rfc3339()
    deadline = time.monotonic() + timeout_s
    reading = _Reading(list(collectors), query, names)
    while reading.queue:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            reading.end_table(reading.queue[0], f"not read: the tables before it took {timeout_s:g} s")
        else:
            reading.run_child(deadline)
    name = query.node or socket.gethostname().partition(".")[0]
    return NodeFacts(node=name, boot_id=_boot_id(), gathered_at=started, tables=reading.tables)


class _Reading:
    """The state of one gathering: the tables that are read, those that are not, and the rows of the current one."""

    def __init__(self, collectors: list[Collector], query: Query, names: Mapping[str, Collection[str]]) -> None:
        self.queue = collectors
        self.tables: dict[str, FactTable] = {}
        self._query, self._names = query, names
        self._begin_table()

    def _begin_table(self) -> None:
        self._rows: dict[object, Row] = {}
        self._hung: list[str] = []  # subjects of the first table of the queue
        self._started_s, self._read_at = time.monotonic(), timestamps.now_rfc3339()

    def end_table(self, collector: Collector, unknown: str = "", *, is_part: bool = False) -> None:
        """Keep the rows of the queue's first table, or why it is unknown, or both of a part; go on to the next."""
        self.queue.remove(collector)
        self.tables[collector.table] = FactTable(
            table=collector.table,
            source=collector.source,
            read_at=self._read_at,
            cost_s=round(time.monotonic() - self._started_s, 4),
            uptime_s=round(self._started_s, 4),
            rows=() if unknown and not is_part else tuple(self._rows.values()),
            unknown=unknown,
        )
        self._begin_table()

    def run_child(self, deadline: float) -> None:
        """Read tables in a child until all are read, or it hangs or dies."""
        pipe, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(pipe)
            self._child_main(write_end)
        os.close(write_end)
        try:
            self._receive(pipe, child, deadline)
        finally:
            os.close(pipe)
            _kill(child)

    def _receive(self, pipe: int, child: int, deadline: float) -> None:
        """Take the child's messages until it ends or hangs."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while self.queue:
                collector = self.queue[0]
                wait_s = min(collector.timeout_s, deadline - time.monotonic())
                if not selector.select(max(0.0, wait_s)):
                    self._handle_hang(collector, is_late=wait_s < collector.timeout_s)
                    return
                data = os.read(pipe, 1 << 16)
                if not data:
                    self.end_table(collector, f"its reader died ({_exit_text(child)})")
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._take(decode_json(line, _Message))

    def _take(self, message: _Message) -> None:
        collector = self.queue[0]
        if message.row is not None:
            subject = TABLES[collector.table].subject
            self._rows[message.row.get(subject) if subject else None] = message.row
        else:
            self.end_table(collector, message.error)

    def _handle_hang(self, collector: Collector, *, is_late: bool) -> None:
        """Leave out the subject that was announced last, or give the table up."""
        last = next(reversed(self._rows.values()), {})
        subject = last.get(TABLES[collector.table].subject)
        if is_late:
            self.end_table(collector, "no answer before the time-out of all tables")
        elif last.get("responds") is False and subject not in self._hung and len(self._hung) < _MOST_HUNG:
            self._hung.append(str(subject))
        elif self._hung:
            self.end_table(collector, f"read in part: {len(self._hung)} rows and the next do not respond", is_part=True)
        else:
            self.end_table(collector, f"no answer within {collector.timeout_s:g} s")

    def _child_main(self, pipe: int) -> NoReturn:
        """Read the tables of the queue and send their rows. Never returns."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _die_with_parent()
            hung = self._hung
            for collector in self.queue:
                query, hung, error = self._query._replace(names=self._names.get(collector.table, ()), hung=hung), [], ""
                try:
                    for row in collector.read(query):
                        _send(pipe, _Message(row=row))
                except Exception as problem:  # noqa: BLE001 - files of /sys can hold anything: that table is unknown
                    error = _error_text(problem)
                _send(pipe, _Message(error=error))
        finally:
            os._exit(0)


def _send(pipe: int, message: _Message) -> None:
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _error_text(error: Exception) -> str:
    """Return what the error says; of an unexpected one also its file and line."""
    if isinstance(error, PitError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _exit_text(child: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _die_with_parent() -> None:
    """Have the kernel end this child with its parent, which slurmd may kill at any time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(child: int) -> None:
    """End the child. One that hangs in the kernel is init's to wait for, after this process."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        for _ in range(_KILL_POLLS):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(_KILL_POLL_S)


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
