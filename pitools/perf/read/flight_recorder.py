"""Read PyTorch's Flight Recorder dumps, one a rank, and find which rank a hang waits for.

A dump is a pickle, which could run any code: here it may hold containers, numbers and text alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import Record

_MAX_BYTES = 256 << 20


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


class _NoCode(pickle.Unpickler):
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


def find_hangs(paths: Sequence[Path]) -> list[Hang]:
    """Return where the ranks of these dumps wait, by group. Raises DataError.

    A dump's rank is that of its own groups' statistics, else the number that its file name ends with.
    """
    groups: dict[str, set[int]] = {}
    seen: dict[str, dict[int, dict[int, tuple[bool, str]]]] = {}  # group → rank → sequence → (ended, operation)
    for path in paths:
        dump, rank = read_dump(path), _rank_of(path)
        for name, members in _members(dump):
            groups.setdefault(name, set()).update(members)
        for entry in dump["entries"]:
            if not isinstance(entry, dict) or entry.get("is_p2p"):
                continue
            name = _group_name(entry)
            sequence = entry.get("collective_seq_id", entry.get("seq_id"))
            if isinstance(sequence, int):
                ended = entry.get("state") == "completed" or entry.get("time_discovered_completed_ns") is not None
                operation = str(entry.get("profiling_name", ""))
                seen.setdefault(name, {}).setdefault(rank, {})[sequence] = (ended, operation)
        if rank not in (known := {each for ranks in seen.values() for each in ranks}) and known:
            seen.setdefault(next(iter(seen)), {}).setdefault(rank, {})
    dumped = {_rank_of(path) for path in paths}
    return [hang for name in sorted(seen) if (hang := _hang(name, groups.get(name, set()), seen[name], dumped))]


def _hang(
    name: str, members: set[int], by_rank: Mapping[int, Mapping[int, tuple[bool, str]]], dumped: set[int]
) -> Hang | None:
    members = members or set(by_rank)
    open_ones = [number for log in by_rank.values() for number, (ended, _) in log.items() if not ended]
    newest = max((number for log in by_rank.values() for number in log), default=0)
    last = {rank: max(by_rank.get(rank, {0: 0})) if by_rank.get(rank) else 0 for rank in members & dumped}
    behind = [number + 1 for number in last.values() if number < newest]
    if not open_ones and not behind:
        return None
    sequence = min([*open_ones, *behind])
    missing = sorted(rank for rank, number in last.items() if number < sequence)
    waiting = sorted(rank for rank, log in by_rank.items() if sequence in log and not log[sequence][0])
    operation = next((log[sequence][1] for log in by_rank.values() if sequence in log), "")
    return Hang(
        group=name,
        operation=operation,
        sequence=sequence,
        missing=missing,
        waiting=waiting,
        no_dump=sorted(members - dumped),
    )


def _group_name(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, (tuple, list)) and group else str(entry.get("pg_id", ""))


def _members(dump: Mapping[str, Any]) -> list[tuple[str, set[int]]]:
    """Return the ranks of each group that a dump's `pg_config` names."""
    config = dump.get("pg_config")
    members = []
    for name, value in config.items() if isinstance(config, dict) else ():
        text = value.get("ranks", "") if isinstance(value, dict) else ""
        numbers = text if isinstance(text, list) else str(text).strip("[]").split(",")
        members.append((str(name), {int(each) for each in numbers if str(each).strip().isdecimal()}))
    return members


def _rank_of(path: Path) -> int:
    digits = path.stem[len(path.stem.rstrip("0123456789")) :] or path.name[len(path.name.rstrip("0123456789")) :]
    if not digits or len(digits) > 9:
        raise DataError("no rank in the name of this dump (expected it to end with a number)", where=str(path))
    return int(digits)
