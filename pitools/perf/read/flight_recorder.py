"""Read PyTorch's Flight Recorder dumps, one a rank, and find which rank a hang waits for.

A dump is a pickle, which could run any code: here it may hold containers, numbers and text alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError, UsageError
from pitools.core.fs import open_regular
from pitools.core.record import Record

_MAX_BYTES = 256 << 20
_MAX_TEXT = 1000  # characters of a name
_Log = dict[int, tuple[bool, str]]  # sequence → whether it ended, operation


class Hang(Record, frozen=True, kw_only=True, tag="pit.perf-hang/1"):
    """The first collective of a group that did not end on all ranks.

    sequence: its number in the group. missing: ranks of the group that did not start it. waiting: those that did, and
    have not ended it. no_dump: ranks of the group of which no dump was given: nothing is known of them.
    """

    group: str
    operation: str
    sequence: int
    missing: list[int]
    waiting: list[int]
    no_dump: list[int]


class _NoCode(pickle._Unpickler):  # the one in Python: that in C takes memory for whatever index a dump names
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would run {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside")


def read_dump(path: Path) -> Mapping[str, Any]:
    """Return a dump. Raises DataError for damage, or for a pickle with anything but containers, numbers and text."""
    with open_regular(path.resolve()) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise DataError("more than 256 MiB (expected a Flight Recorder dump)", where=str(path))
    try:
        dump = _NoCode(io.BytesIO(data)).load()
    except Exception as error:
        raise DataError(f"not a Flight Recorder dump: {error or type(error).__name__}", where=str(path)) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise DataError("not a Flight Recorder dump (expected a dictionary with entries)", where=str(path))
    return dump


def find_hangs(paths: Sequence[Path], notes: list[str]) -> list[Hang]:
    """Return where the ranks of these dumps wait, by group. A dump's rank is the number that its name ends with.

    A damaged dump, as of a rank that was killed while it wrote, is one that is missing, said in the notes. Raises
    DataError if all are, UsageError for two of one rank.
    """
    members: dict[str, set[int]] = {}
    logs: dict[str, dict[int, _Log]] = {}
    dumps: dict[int, Mapping[str, Any]] = {}
    named: dict[int, Path] = {}
    for path in paths:
        if (earlier := named.setdefault(rank := _rank_of(path), path)) != path:
            problem = f"rank {rank} is also in {earlier} (expected one dump a rank, named by its number in the job)"
            raise UsageError(problem, where=str(path), hint="name the dumps of one job, such as dump_0 to dump_7")
        try:
            dumps[rank] = read_dump(path)
        except DataError as error:
            notes.append(f"not used: {error}")
            if len(notes) == len(paths):
                raise
    for rank, dump in dumps.items():
        for name, group in _members(dump):
            members.setdefault(name, set()).update(group)
        for entry in dump["entries"]:
            sequence = entry.get("collective_seq_id") if isinstance(entry, dict) else None
            if isinstance(sequence, int) and 0 <= sequence < 1 << 63 and not entry.get("is_p2p"):
                group = entry.get("process_group")
                name = _text(group[0] if isinstance(group, (tuple, list)) and group else entry.get("pg_id"))
                logs.setdefault(name, {}).setdefault(rank, {})[sequence] = (
                    entry.get("state") == "completed",
                    _text(entry.get("profiling_name")),
                )
    hangs = [_hang(name, members.get(name) or set(named), set(dumps), logs[name]) for name in sorted(logs)]
    return [hang for hang in hangs if hang is not None]


def _hang(name: str, members: set[int], dumped: set[int], logs: Mapping[int, _Log]) -> Hang | None:
    last = {rank: max(logs.get(rank, ()), default=0) for rank in members & dumped}
    newest = max(last.values(), default=0)
    unfinished = [
        *(number for log in logs.values() for number, (has_ended, _) in log.items() if not has_ended),
        *(number + 1 for number in last.values() if number < newest),
    ]
    if not unfinished:
        return None
    sequence = min(unfinished)
    states = {rank: log[sequence] for rank, log in logs.items() if sequence in log}
    return Hang(
        group=name,
        operation=next((operation for _, operation in states.values()), ""),
        sequence=sequence,
        missing=sorted(rank for rank, number in last.items() if number < sequence),
        waiting=sorted(rank for rank, (has_ended, _) in states.items() if not has_ended),
        no_dump=sorted(members - dumped),
    )


def _members(dump: Mapping[str, Any]) -> list[tuple[str, set[int]]]:
    """Return the ranks of each group that a dump's `pg_config` names."""
    config = dump.get("pg_config")
    members = []
    for name, value in config.items() if isinstance(config, dict) else ():
        ranks = value.get("ranks") if isinstance(value, dict) else None
        numbers = ranks.strip("[]").split(",") if isinstance(ranks, str) else ranks if isinstance(ranks, list) else ()
        texts = [_text(each).strip() for each in numbers]
        members.append((_text(name), {int(each) for each in texts if each.isdecimal() and len(each) < 10}))
    return members


def _text(value: Any) -> str:
    """Return a text, cut, or a number as text; "" for anything else: text of nested lists can double at each level."""
    if isinstance(value, int) and abs(value) < 1 << 63:
        return str(value)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _rank_of(path: Path) -> int:
    digits = path.stem[len(path.stem.rstrip("0123456789")) :]
    if not 0 < len(digits) < 10:
        raise DataError("no rank in the name of this dump (expected it to end with a number)", where=str(path))
    return int(digits)
