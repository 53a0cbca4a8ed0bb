"""Judge facts by checks: pure, from a gathering and the one before it to findings. What is unknown never fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

import msgspec

from pitools.core import units
from pitools.core.timestamps import seconds_between
from pitools.node.check.rule import Check, Wanted
from pitools.node.check.values import REGEX, is_plain, listed, matches, rate_per_s, shown, unmet
from pitools.node.tables import TABLES
from pitools.node.types import FactTable, Finding, NodeFacts, Row, State, Value, draining

_MOST_FINDINGS = 16  # of one check; a further one says how many there are
_MAX_LINE = 300  # characters of a line of a log, in a message


def evaluate(checks: Iterable[Check], facts: NodeFacts, previous: NodeFacts | None = None) -> list[Finding]:
    """Return the findings of all checks: for each, those that failed or are unknown, or one that it passed.

    previous: an earlier gathering, for increases and rates, and for what failed. One of another boot is not used.
    """
    previous = _of_this_boot(previous, facts)
    findings: list[Finding] = []
    indexes = {name: _Index(table.rows) for name, table in facts.tables.items()}
    for check in checks:
        table, index = facts.tables.get(check.table), indexes.get(check.table)
        found = list(_findings(check, facts, table, index, previous.tables.get(check.table) if previous else None))
        if check.max_groups is not None and sum(one.state == "failed" for one in found) > check.max_groups:
            found = [one for one in found if one.state != "failed"]
        if previous and table and index and all(one.state == "failed" for one in found):
            found += _not_seen_healed(check, facts, table, index, found, previous.failed)
        if len(found) > _MOST_FINDINGS:
            found.sort(key=lambda finding: finding.state != "failed")
            rest = f"{len(found) - _MOST_FINDINGS + 1} more like it"
            last = msgspec.structs.replace(found[_MOST_FINDINGS - 1], subject="", message=rest)
            found = [*found[: _MOST_FINDINGS - 1], last]
        findings += found or [_finding(check, facts, "passed", at=table.read_at if table else "")]
    return findings


def remembered(findings: Iterable[Finding], facts: NodeFacts, previous: NodeFacts | None) -> tuple[Finding, ...]:
    """Return the findings that drain, of now and of before in this boot, of checks that have not passed since."""
    findings = list(findings)
    previous = _of_this_boot(previous, facts)
    not_passed = {one.check for one in findings if one.state != "passed"}
    before = [one for one in previous.failed if one.check in not_passed] if previous else []
    return tuple({(one.check, one.subject): one for one in (*before, *draining(findings))}.values())


def _of_this_boot(previous: NodeFacts | None, facts: NodeFacts) -> NodeFacts | None:
    return previous if previous and previous.boot_id and previous.boot_id == facts.boot_id else None


class _Index:
    """The rows of a table by key and value: most checks of a log are about few of its many lines."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._by_key: dict[str, dict[Value, list[int]]] = {}

    def numbers(self, where: dict[str, Wanted]) -> Sequence[int]:
        """Return the numbers of the rows that may have these values, in order."""
        fewest: Sequence[int] = range(len(self.rows))
        for key, wanted in where.items():
            values = listed(wanted)
            if all(map(is_plain, values)):
                by_value = self._values(key)
                some = [number for value in dict.fromkeys((*values, None)) for number in by_value.get(value, ())]
                fewest = some if len(some) < len(fewest) else fewest
        return sorted(fewest)

    def has(self, key: str, value: Value) -> bool:
        """Return whether a row has this value."""
        return value in self._values(key)

    def _values(self, key: str) -> dict[Value, list[int]]:
        if key not in self._by_key:
            by_value: dict[Value, list[int]] = {}
            for number, row in enumerate(self.rows):
                by_value.setdefault(row.get(key), []).append(number)
            self._by_key[key] = by_value
        return self._by_key[key]


def _findings(
    check: Check, facts: NodeFacts, table: FactTable | None, index: _Index | None, previous: FactTable | None
) -> Iterator[Finding]:
    if table is None or index is None or (table.unknown and not table.rows):
        reason = table.unknown if table else "not read"
        yield _finding(check, facts, "unknown", message=f"{check.table}: {reason}")
        return
    rows, doubtful = _rows_meant(check, table, index)
    if table.unknown and check.key:  # of the rows that were not read
        yield _finding(check, facts, "unknown", message=f"{check.table}: {table.unknown}", at=table.read_at)
    if check.key:
        older = {_subject(check, row): row for row in previous.rows} if previous and check.is_of_change else {}
        elapsed_s = _elapsed_s(previous, table) if previous else 0.0
        common = _most_common(row.get(check.key) for row in rows) if check.all_equal else None
        unknown: list[tuple[str, str]] = []
        for number, row in enumerate((*rows, *doubtful)):
            problem, is_unknown = _value_problem(check, row, older.get(_subject(check, row)), elapsed_s, common)
            if not problem:
                continue
            message = f"{_describe(check, row)}: {check.key} {problem}"
            if is_unknown or number >= len(rows):
                unknown.append((_subject(check, row), message))
            else:
                at = row.get("at")
                yield _finding(check, facts, "failed", _subject(check, row), message, str(at) if at else table.read_at)
        if not rows and not doubtful and (missing := _missing(check, index)):
            unknown.append(missing)
        if unknown:  # one finding: where a value cannot be read, it mostly cannot of any
            subject, message = unknown[0]
            rest = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            yield _finding(check, facts, "unknown", "" if rest else subject, f"{message}{rest}", table.read_at)
    yield from _count_findings(check, facts, table, rows, doubtful)


def _not_seen_healed(
    check: Check, facts: NodeFacts, table: FactTable, index: _Index, found: Sequence[Finding], before: Sequence[Finding]
) -> Iterator[Finding]:
    """Yield that a check is unknown for what failed it before and is gone, or of whose end the log does not tell.

    A process that is gone is healed; so are too many rows. For events without a line that ends them: see `is_event`.
    """
    failed = {one.subject for one in found if one.state == "failed"}
    rows = index.rows
    if check.cleared_by:
        rows = [row for row in rows if matches(row, check.cleared_by, check.table)]
    elif not check.key or check.table == "processes" or _is_of_events(check):
        return
    for one in before:
        is_whole = not (check.group_by if check.cleared_by else TABLES[check.table].subject)
        if one.check != check.name or one.subject in failed or not (one.subject or is_whole):
            continue
        if check.cleared_by:
            is_seen = any(
                _group(check, row) == one.subject and str(row.get("at") or "") >= one.evidence_at for row in rows
            )
        else:
            is_seen = any(_subject(check, row) == one.subject for row in rows)
        if not is_seen:
            why = "nothing says that it ended" if check.cleared_by else "it is not there any more"
            yield _finding(check, facts, "unknown", one.subject, f"it failed, and {why}: {one.message}", table.read_at)
            return


def _is_of_events(check: Check) -> bool:
    return "at" in TABLES[check.table].keys


def _group(check: Check, row: Row) -> str:
    return " ".join(shown(row.get(key)) for key in check.group_by)


def _missing(check: Check, index: _Index) -> tuple[str, str] | None:
    """Return the one row that a check names and that is not there, and a message; None if its number is a test."""
    subject = TABLES[check.table].subject
    name = check.where.get(subject)
    if name is None or isinstance(name, tuple) or not is_plain(name) or not check.count is check.min_count is None:
        return None
    return None if index.has(subject, name) else (str(name), f"{check.table}: no {subject} {shown(name)}")


def _rows_meant(check: Check, table: FactTable, index: _Index) -> tuple[list[Row], list[Row]]:
    """Return the rows that a check is about, and those that it may be about: a value or the time is unknown."""
    limit_s = units.parse_duration(check.max_age) if check.max_age else None
    meant: list[int] = []
    doubtful: list[int] = []
    for number in index.numbers(check.where):
        row = index.rows[number]
        if (is_meant := matches(row, check.where, check.table)) is False:
            continue
        is_recent = True if limit_s is None else _is_within(row, limit_s, table.read_at)
        if is_recent is not False:
            (meant if is_meant and is_recent else doubtful).append(number)
    if check.cleared_by and (meant or doubtful):
        meant, doubtful = (_without_cleared(check, numbers, index) for numbers in (meant, doubtful))
    return [index.rows[number] for number in meant], [index.rows[number] for number in doubtful]


def _elapsed_s(previous: FactTable, table: FactTable) -> float:
    """Return the seconds between two gatherings of a boot: by the clock that is never set, if both have it."""
    if previous.uptime_s and table.uptime_s:
        return table.uptime_s - previous.uptime_s
    return seconds_between(previous.read_at, table.read_at) or 0.0


def _value_problem(check: Check, row: Row, older: Row | None, elapsed_s: float, common: Value) -> tuple[str, bool]:
    """Return what is wrong with a row's value, or "", and whether it is unknown rather than wrong."""
    value = row.get(check.key)
    if value is None or value != value:  # NaN
        return "is unknown", True
    before = older.get(check.key) if older else None
    # The first gathering of a boot has nothing to compare with, and a device that was reset counts from 0: no fault.
    if check.is_of_change and _is_number(value) and _is_number(before):
        increase = value - before
        if check.max_increase is not None and increase > check.max_increase:
            return f"rose by {increase:g} in {elapsed_s:.0f} s (expected at most {check.max_increase:g})", False
        # One event between two gatherings is no rate, nor are as many as the rate allows in a minute. A clock that was
        # set back tells nothing of the time between them.
        if check.max_rate and elapsed_s > 0 and increase > max(1.0, rate_per_s(check.max_rate) * max(elapsed_s, 60.0)):
            return f"rose by {increase:g} in {elapsed_s:.0f} s (expected at most {check.max_rate})", False
    if (check.min is not None or check.max is not None) and not _is_number(value):
        return f"is {shown(value)} (expected a number)", True
    if instead := unmet(check, value):
        return f"is {shown(value)} (expected {instead})", False
    if check.all_equal and value != common:
        return f"is {shown(value)} (expected {shown(common)}, as most have)", False
    return "", False


def _is_number(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count_findings(
    check: Check, facts: NodeFacts, table: FactTable, rows: Sequence[Row], doubtful: Sequence[Row]
) -> Iterator[Finding]:
    """Yield the groups whose number of rows is wrong, or may be. Without group_by all rows are one group."""
    low = check.count if check.count is not None else check.min_count
    high = check.count if check.count is not None else check.max_count
    if low is None and high is None:
        return
    groups: dict[tuple[Value, ...], tuple[list[Row], list[Row]]] = {} if check.group_by else {(): ([], [])}
    for number, row in (*((0, row) for row in rows), *((1, row) for row in doubtful)):
        groups.setdefault(tuple(row.get(key) for key in check.group_by), ([], []))[number].append(row)
    for values, (members, maybe) in groups.items():
        fewest, most = sorted((_count(check, members), _count(check, [*members, *maybe])))
        most = sys.maxsize if table.unknown else most
        if (low is not None and most < low) or (high is not None and fewest > high):
            state: State = "failed"
        elif (low is not None and fewest < low) or (high is not None and most > high):
            state = "unknown"
        else:
            continue
        bounds = (f"exactly {low}", f"at least {low}", f"at most {high}")
        expected = bounds[0] if low == high else bounds[1] if low is not None and fewest < low else bounds[2]
        where = {**check.where, **dict(zip(check.group_by, values, strict=True))}
        example = members[-1] if members else {}  # its value is read more easily than an expression
        names = " ".join(
            f"{key} {shown(example[key] if _is_expression(value) and key in example else value)}"
            for key, value in where.items()
        )
        number_text = f"{fewest}" if fewest == most else f"{fewest} or more" if table.unknown else f"{fewest} to {most}"
        message = f"{check.table}{f' with {names}' if names else ''}: {number_text} (expected {expected})"
        if members and "text" in members[-1]:
            message = f"{message}: {shown(members[-1]['text'], _MAX_LINE)}"
        latest = max((str(row["at"]) for row in members if row.get("at")), default=table.read_at)
        yield _finding(check, facts, state, " ".join(map(shown, values)), message, latest)


def _is_expression(wanted: Wanted) -> bool:
    return isinstance(wanted, str) and wanted.startswith(REGEX)


def _count(check: Check, rows: Sequence[Row]) -> int:
    return len(_merge_bursts(rows, units.parse_duration(check.merge_within)) if check.merge_within else rows)


def _merge_bursts(rows: Sequence[Row], gap_s: float) -> list[Row]:
    """Return the first row of each burst: rows that follow the one before by at most `gap_s`, or at an unknown time.

    A row that stands for several lines of a log has the time of the first one, too.
    """
    ordered = sorted(rows, key=lambda row: str(row.get("at") or ""))
    return [
        row
        for number, row in enumerate(ordered)
        if not number
        or (seconds_between(ordered[number - 1].get("at"), row.get("began") or row.get("at")) or 0.0) > gap_s
    ]


def _without_cleared(check: Check, numbers: Sequence[int], index: _Index) -> list[int]:
    """Return the rows that no later row of their group, with the values of cleared_by, ends. Rows are in order."""

    def group(number: int) -> tuple[Value, ...]:
        return tuple(index.rows[number].get(key) for key in check.group_by)

    last_clear: dict[tuple[Value, ...], int] = {}
    for number in index.numbers(check.cleared_by):
        if matches(index.rows[number], check.cleared_by, check.table):
            last_clear[group(number)] = number
    return [number for number in numbers if number > last_clear.get(group(number), -1)]


def _most_common(values: Iterable[Value]) -> Value:
    counted = Counter(value for value in values if value is not None).most_common(1)
    return counted[0][0] if counted else None


def _is_within(row: Row, limit_s: float, now: str) -> bool | None:
    """Return whether an event is no older than the limit; None if its time is unknown."""
    age_s = seconds_between(row.get("at"), now)
    return None if age_s is None else age_s <= limit_s


def _subject(check: Check, row: Row) -> str:
    key = TABLES[check.table].subject
    value = row.get(key) if key else None
    return "" if value is None else str(value)


def _describe(check: Check, row: Row) -> str:
    subject = TABLES[check.table].subject
    return f"{subject} {_subject(check, row)}" if subject else check.table


def _finding(
    check: Check, facts: NodeFacts, state: State, subject: str = "", message: str = "", at: str = ""
) -> Finding:
    return Finding(
        node=facts.node,
        check=check.name,
        state=state,
        level=check.level,
        action=check.action,
        subject=subject,
        table=check.table,
        message=message,
        evidence_at=at or facts.gathered_at,
        is_shadow=check.is_shadow,
        hint=check.hint if state == "failed" else "",
        is_event=_is_of_events(check) and not check.cleared_by,  # a line ends the others, and is waited for
    )
