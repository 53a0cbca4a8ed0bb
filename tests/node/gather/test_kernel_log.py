"""The kernel's log: each form of line is told from others, floods cost little, and no text of any kind is too odd."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.node.gather import kernel_log
from pitools.node.gather.child import Collector, read_tables
from pitools.node.gather.kernel_lines import Event, parse_message
from pitools.node.gather.kernel_log import MOST_ROWS, event_rows, parse_dated_lines, read_kernel_log, read_kmsg
from pitools.node.gather.read import Query
from pitools.node.tables import TABLES

_VALUES = {"code": int, "job_pid": int, "is_fatal": lambda text: text == "True"}


def _lines() -> tuple[dict[str, tuple[str, Event]], list[str]]:
    """Return the messages of faults by name, with their events, and the messages that are none."""
    faults: dict[str, tuple[str, Event]] = {}
    others: list[str] = []
    for block in re.split(r"^@", (Path(__file__).parent / "kernel_log_lines.txt").read_text(), flags=re.M)[1:]:
        head, *lines = [line for line in block.split("\n") if not line.startswith("#")]
        message = "\n".join(lines).strip("\n")
        name, _, values = head.strip().partition(": ")
        if name:
            fields = dict(value.split("=", 1) for value in values.split("; "))
            faults[name] = message, Event(**{key: _VALUES.get(key, str)(text) for key, text in fields.items()})
        else:
            others.append(message)
    return faults, others


FAULTS, NO_FAULTS = _lines()
XID = "NVRM: Xid (PCI:0000:b5:00): {}, pid={}, name=python, text"


@pytest.mark.parametrize("name", FAULTS)
def test_line_of_a_fault_is_read_by_its_parts(name: str) -> None:
    """Each line gives its kind, code, device, part, action and process; inside of another line it gives nothing."""
    line, event = FAULTS[name]
    parsed = parse_message(line)
    assert parsed is not None
    assert parsed._replace(text="") == event
    assert parse_message(f"note: {line}") is None


@pytest.mark.parametrize("line", NO_FAULTS)
def test_other_lines_are_no_event(line: str) -> None:
    """Healthy lines, and those that follow another one about the same event, give none."""
    assert parse_message(line) is None


@given(
    st.text()
    | st.builds("{}{}{}".format, st.sampled_from(["NVRM: Xid ", "SXid (", "mce: ", "link "]), st.text(), st.text())
)
def test_any_text_is_parsed(text: str) -> None:
    """Arbitrary text is parsed, into a row of the table or none, and its text has no control character."""
    for row in event_rows([(None, text)]):
        assert row.keys() == TABLES["kernel_log"].keys.keys()
        assert str(row["text"]).isprintable()
        assert len(str(row["text"])) <= 300


@given(st.sampled_from([line for line, _ in FAULTS.values()]), st.data())
def test_damaged_lines_are_parsed(line: str, data: st.DataObject) -> None:
    """A real line with a piece taken out, changed or repeated is parsed, and its address is one or empty."""
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))
    piece = data.draw(st.text(max_size=8) | st.just(line[begin:end] * 3))
    event = parse_message(line[:begin] + piece + line[end:])
    if event and event.kind in ("xid", "sxid") and event.device:
        assert event.device.count(":") == 2
        assert event.device[-2] == "."


@given(st.lists(st.binary(max_size=200)))
def test_any_bytes_of_kmsg_are_read(records: list[bytes]) -> None:
    """Arbitrary bytes in place of the kernel's records end in rows or none."""
    pipe, write_end = os.pipe()
    os.write(write_end, b"\n".join(records))
    os.close(write_end)
    try:
        event_rows(read_kmsg(Path(f"/proc/self/fd/{pipe}"), 0.0))
    finally:
        os.close(pipe)


def test_records_of_kmsg_have_time_and_all_their_lines(tmp_path: Path) -> None:
    """Properties, fragments and what a process wrote are none; newlines are read, and times count from the boot."""
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(
        "3,100,5000000,-,caller=T7;NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this "
        "system has\\x0aNVRM: fallen off the bus and is not responding to commands.\n"
        " SUBSYSTEM=pci\n DEVICE=+pci:0000:b3:00.0\n"
        "6,101,6000000,-;usb 1-1: new device\n"
        "6,102,damaged,-;nfs: server fs1 not responding, still trying\n"
        "14,103,7000000,-;nfs: server fs2 not responding, still trying\n"
        "6,104,7000000,c,caller=T7;nfs: server fs2 not responding, still trying\n"
        "damaged;nfs: server fs2 not responding, still trying\n"
    )
    fallen, nfs = event_rows(read_kmsg(kmsg, 1_000_000_000.0))
    assert (fallen["code"], fallen["device"], fallen["at"]) == (79, "0000:b3:00.0", "2001-09-09T01:46:45.000Z")
    assert (nfs["device"], nfs["at"]) == ("fs1", "")


def test_records_that_were_overwritten_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel says EPIPE where it has overwritten the next record: reading goes on with the oldest left."""
    answers = iter([BrokenPipeError(32, "overwritten"), b"3,7,0,-;nfs: server fs1 OK\n", BlockingIOError()])

    def read(_descriptor: int, _size: int) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(kernel_log.os, "read", read)
    assert [text for _, text in read_kmsg(tmp_path / "kmsg", 0.0)] == ["nfs: server fs1 OK"]


def test_dated_lines_of_journalctl_are_read() -> None:
    """They have the time of each message, and the lines of one message together."""
    text = (
        "2026-11-26T15:16:30.123456+0000 kernel: NVRM: The NVIDIA GPU 0000:b3:00.0\n"
        "                                        NVRM: fallen off the bus and is not responding to commands.\n"
        "2026-11-26T15:16:31.000000+0000 kernel: nfs: server fs1 OK\n"
    )
    fallen, nfs = event_rows(parse_dated_lines(text))
    assert (fallen["code"], fallen["device"], fallen["at"]) == (79, "0000:b3:00.0", "2026-11-26T15:16:30.123Z")
    assert (nfs["state"], nfs["at"]) == ("ok", "2026-11-26T15:16:31.000Z")


@given(st.text())
def test_any_output_of_tools_is_read(text: str) -> None:
    """Arbitrary output of a tool ends in rows or none."""
    event_rows(parse_dated_lines(text))


def test_lines_alike_are_one_row() -> None:
    """A flood is one row, with its first and last time and its lines; a line after a pause or of another GPU is one."""
    lines = [(float(second), XID.format(95, second)) for second in range(150)]
    other = (151.0, XID.format(95, 1).replace("b5", "b6"))
    rows = event_rows([*lines[:100], other, *lines[100:], (200.0, XID.format(95, 1))])
    assert [(row["device"], row["count"], row["began"], row["at"]) for row in rows] == [
        ("0000:b6:00.0", 1, "1970-01-01T00:02:31.000Z", "1970-01-01T00:02:31.000Z"),
        ("0000:b5:00.0", 150, "1970-01-01T00:00:00.000Z", "1970-01-01T00:02:29.000Z"),
        ("0000:b5:00.0", 1, "1970-01-01T00:03:20.000Z", "1970-01-01T00:03:20.000Z"),
    ]


def test_lines_alike_with_another_state_between_are_apart() -> None:
    """A link that flaps each second has a row for each time that it goes down."""
    states = ["down", "up"] * 5
    rows = event_rows((float(at), f"mlx5_core 0000:17:00.0 ib0: Link {state}") for at, state in enumerate(states))
    assert [row["state"] for row in rows] == states


def test_lines_alike_of_before_are_apart() -> None:
    """As where a journal's clock was set back: no row gets an earlier time by a later line."""
    rows = event_rows([(1000.0, XID.format(95, 1)), (400.0, XID.format(95, 1))])
    assert [(row["at"], row["count"]) for row in rows] == [
        ("1970-01-01T00:16:40.000Z", 1),
        ("1970-01-01T00:06:40.000Z", 1),
    ]


@pytest.mark.parametrize("flags", [("CE", "UC"), ("UC", "CE")])
def test_fatal_line_makes_its_row_fatal(flags: tuple[str, str]) -> None:
    """Of lines alike one that says fatal counts, the first or the last."""
    texts = [f"[Hardware Error]: CPU:1 (17:31:0) MC{bank}_STATUS[-|{flag}|-]: 0x1" for bank, flag in enumerate(flags)]
    (row,) = event_rows((1.0, text) for text in texts)
    assert (row["count"], row["is_fatal"]) == (2, True)


def test_flood_costs_little_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 800,000 lines of Xid 95 each distinct one is parsed once, and another event before them still has its row."""
    calls = []
    monkeypatch.setattr(kernel_log, "parse_message", lambda text: calls.append(text) or parse_message(text))
    distinct = [XID.format(95, number).replace("b5", f"{number:02x}") for number in range(29)]
    flood = ((1000.0 + number / 10, distinct[number % 29]) for number in range(800_000))
    rows = event_rows([(0.0, XID.format(64, 1)), *flood])
    assert len(calls) == 30
    assert [row["code"] for row in rows] == [64, *[95] * 29]
    assert sum(int(row["count"] or 0) for row in rows) == 800_001


def test_disks_of_usb_are_told_from_others() -> None:
    """A stick that is pulled loses its file system; a disk that has its name or its host's number later is none."""
    lost = (1.0, "EXT4-fs (sdb1): Remounting filesystem read-only")

    def part(*plugged: tuple[int, str]) -> object:
        lines = [
            (1.0, line)
            for host, driver in plugged
            for line in (f"scsi host{host}: {driver}", f"sd {host}:0:0:0: [sdb] Attached SCSI disk")
        ]
        return event_rows([*lines, lost])[0]["part"]

    stick = (6, "usb-storage 1-2:1.0")
    assert (part(stick), part((6, "uas")), part(stick, stick)) == ("usb", "usb", "usb")
    for others in ((), ((6, "ahci"),), ((6, "uas[7]: segfault"),), (stick, (7, "ahci")), (stick, (6, "ahci"))):
        assert part(*others) == ""


def test_rows_are_bounded() -> None:
    """Of events that are all different the newest are kept, in order."""
    rows = event_rows((float(number), f"nfs: server fs{number} OK") for number in range(5000))
    assert [row["device"] for row in rows] == [f"fs{number}" for number in range(5000 - MOST_ROWS, 5000)]


def _tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_journalctl_is_asked_where_kmsg_is_not_to_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty journal is unknown, for it may be hidden; where no program may run it is not asked."""
    query = Query(root=tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _tool(tmp_path, "journalctl", "echo '2026-11-26T15:16:31.000000+0000 kernel: nfs: server fs1 OK'")
    assert [row["kind"] for row in read_kernel_log(query)] == ["nfs"]
    with pytest.raises(ClusterError):
        list(read_kernel_log(query._replace(runs_programs=False)))
    _tool(tmp_path, "journalctl", "echo '-- No entries --'")
    facts = read_tables([Collector("kernel_log", "a log", read_kernel_log)], query)
    assert facts.tables["kernel_log"].unknown


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg cannot be read here")
def test_log_of_this_machine_is_read() -> None:
    """The real log is read, and what it has is rows of the table."""
    table = read_tables([Collector("kernel_log", "/dev/kmsg", read_kernel_log)], Query()).tables["kernel_log"]
    assert table.unknown == ""
    assert all(row.keys() == TABLES["kernel_log"].keys.keys() for row in table.rows)
