"""Read the kernel's log of this boot: from /dev/kmsg, or by journalctl where that cannot be read.

Lines alike that follow each other closely are one row, and of each kind the newest rows are kept, so that a flood
neither costs much nor hides other events. What the log has lost, and earlier boots, are not seen, nor what processes
wrote to it. dmesg is not asked: where it falls back to syslog(2), a newline in a file's name begins a message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, PitError
from pitools.node.gather.kernel_lines import Event, parse_message
from pitools.node.gather.read import Query
from pitools.node.types import Row, Value

MOST_ROWS = 2000
_ROWS_OF_EACH = 20  # of events alike
_SAME_S = 5.0  # lines alike that follow each other this closely are one row
_CACHED = 4096
_RECORD_BYTES = 1 << 16
_MOST_MESSAGES = 100_000  # the newest ones
COMMAND_TIMEOUT_S = 4.0
_JOURNALCTL = (
    *("journalctl", "-k", "-b", "-q", "--no-hostname", "-o", "short-iso-precise", "-n", str(_MOST_MESSAGES)),
    "SYSLOG_FACILITY=0",  # the kernel's own
)
Message = tuple[float | None, str]
"""Seconds since 1970, and the text without its time. The lines of one message are separated by newlines."""


def read_kernel_log(query: Query) -> Iterator[Row]:
    """Yield the rows of the table `kernel_log`. Raises ClusterError if no log can be read, or it is empty."""
    kmsg = query.root / "dev/kmsg"
    try:
        if messages := deque(read_kmsg(kmsg, time.time() - time.monotonic()), _MOST_MESSAGES):
            yield from event_rows(messages)
            return
        problem = f"{kmsg}: empty"
    except OSError as error:
        problem = f"{kmsg}: {error.strerror}"
    if not query.runs_programs:
        raise ClusterError(problem)
    try:
        done = subprocesses.run(_JOURNALCTL, timeout_s=COMMAND_TIMEOUT_S, env={"LC_ALL": "C"})
    except PitError as error:
        raise ClusterError(f"{problem}; {error}") from error
    # A journal that this user may not see looks like an empty one.
    if done.code or not (messages := deque(parse_dated_lines(done.stdout), _MOST_MESSAGES)):
        raise ClusterError(f"{problem}; journalctl: {(done.stderr.strip() or 'empty').splitlines()[0]}")
    yield from event_rows(messages)


def read_kmsg(path: Path, boot_s: float) -> Iterator[Message]:
    """Yield the messages of /dev/kmsg, a record each; what is not the kernel's own is empty.

    boot_s: when the boot's clock was 0. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    rest = b""
    try:
        while True:
            try:
                data = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # the oldest record was overwritten meanwhile
                    continue
                raise
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                header, semicolon, text = line.partition(b";")
                if not semicolon or line.startswith(b" "):  # a property of the record before it
                    continue
                message = text.decode(errors="replace").replace("\\x0a", "\n") if _is_message(header) else ""
                yield _kmsg_time(header, boot_s), message
    finally:
        os.close(descriptor)


def _is_message(header: bytes) -> bool:
    """Return whether a record is a whole message of the kernel.

    No process can give it facility 0. A continuation that was cut off may begin with a control group's name.
    """
    fields = header.split(b",", 4)
    return len(fields) > 3 and fields[0] in b"0 1 2 3 4 5 6 7".split() and fields[3] == b"-"


def _kmsg_time(header: bytes, boot_s: float) -> float | None:
    """Return the time of a record's header: priority, number, microseconds since boot, flags."""
    try:
        return boot_s + int(header.split(b",", 3)[2]) / 1e6
    except (ValueError, IndexError, OverflowError):
        return None


def parse_dated_lines(text: str) -> Iterator[Message]:
    """Yield the messages of `journalctl -o short-iso-precise`.

    A line without a time continues the message before it; before the first message it is none.
    """
    at: float | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        date, _, rest = line.partition(" ")
        try:
            moment = datetime.fromisoformat(date).timestamp() if len(date) > 18 else None
        except (ValueError, OverflowError):
            moment = None
        if moment is None:
            if lines and line.strip():
                lines.append(line.strip())
            continue
        if lines:
            yield at, "\n".join(lines)
        at, lines = moment, [rest.removeprefix("kernel: ")]
    if lines:
        yield at, "\n".join(lines)


def event_rows(messages: Iterable[Message]) -> list[Row]:
    """Return the rows of the events that messages tell of, the newest MOST_ROWS of them, in order of their last lines.

    A link that goes down, up and down again in between gives three rows.
    """
    parsed: dict[str, Event | None] = {}
    disks = _UsbDisks()
    rows: dict[tuple[object, ...], deque[Row]] = {}
    last_s: dict[tuple[object, ...], float] = {}
    states: dict[tuple[str, str], str] = {}
    number = 0
    for at, text in messages:
        if text in parsed:
            event = parsed[text]
        else:
            if len(parsed) >= _CACHED:
                parsed.clear()
            event = parsed[text] = parse_message(text)
        if event is None:
            disks.read(text)
            continue
        if event.kind in ("disk", "filesystem") and disks.has(event.device):
            event = event._replace(part="usb")
        number += 1
        key = (event.kind, event.state, event.code, event.device, event.part, event.action)
        device = (event.kind, event.device)
        now_s = last_s.get(key, 0.0) if at is None else at
        alike = rows.setdefault(key, deque(maxlen=_ROWS_OF_EACH))
        if alike and states[device] == event.state and 0 <= now_s - last_s[key] <= _SAME_S:
            _add_line(alike[-1], number, at, event)
        else:
            alike.append({"event": number, **event._asdict(), "at": at, "began": at, "count": 1})
        last_s[key] = now_s
        states[device] = event.state
    ordered = sorted((row for alike in rows.values() for row in alike), key=lambda row: int(row["event"] or 0))
    return [{**row, "at": _rfc3339(row["at"]), "began": _rfc3339(row["began"])} for row in ordered[-MOST_ROWS:]]


class _UsbDisks:
    """The disks that USB connects, by the lines of their drivers: to pull a stick is no fault of the node."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        self._disks: dict[str, str] = {}  # their hosts, of those that SCSI's driver names

    def read(self, line: str) -> None:
        """Take what a line says: `scsi host6: usb-storage 1-2:1.0`, then `sd 6:0:0:0: [sdb] Attached SCSI disk`."""
        if line.startswith("scsi host") and (host := re.match(r"scsi host(\d+): (usb-storage \S+$|uas$)?", line)):
            (self._hosts.add if host[2] else self._hosts.discard)(host[1])
        elif line.startswith("sd ") and (disk := re.match(r"sd (\d+):[\d:]+: \[(sd[a-z]+)\] Attached ", line)):
            self._disks[disk[2]] = disk[1]

    def has(self, device: str) -> bool:
        """Return whether a disk, or the disk of a partition, is one of them."""
        return self._disks.get(device.rstrip("0123456789")) in self._hosts


def _add_line(row: Row, number: int, at: float | None, event: Event) -> None:
    row["event"], row["at"], row["count"] = number, at, int(row["count"] or 0) + 1
    if event.is_fatal is not None:
        row["is_fatal"] = event.is_fatal or bool(row["is_fatal"])


def _rfc3339(at: Value) -> str:
    """Return a time as text; "" for one that is unknown or out of range."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        if isinstance(at, float):
            return timestamps.unix_to_rfc3339(at)
    return ""
