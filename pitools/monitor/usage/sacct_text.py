"""Read the output of `sacct -P` as a stream: a million jobs in constant memory, and a bad record hides no other.

A job name or comment may contain newlines and separators. A record begins at a line whose first value is a job id, and
is complete with as many separators as the header has. A line that is a complete record by itself always begins one, so
after a torn record the next is read; a line that begins none belongs to the record before it, unless that is complete.
Only a record of several lines, the first of which just fills up a torn one, is lost with it; both are counted as bad.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from operator import itemgetter
from statistics import fmean
from typing import BinaryIO, NamedTuple

from pitools.core.errors import DataError, PitError
from pitools.core.output import printable
from pitools.ledger.job_stats import gpu_utilization
from pitools.slurm.fields import count_gpus, none_to_empty, parse_count, parse_tres
from pitools.slurm.states import parse_job_state

# Every version since 22.05 has these. The last one contains no text of users.
COLUMNS = (
    "JobIDRaw",
    "JobID",
    "JobName",
    "User",
    "Account",
    "QOS",
    "Partition",
    "State",
    "Submit",
    "Eligible",
    "Start",
    "End",
    "ElapsedRaw",
    "Comment",
    "AdminComment",
    "AllocTRES",
)
REQUIRED = ("JobID", "State", "Submit", "Start", "End", "ElapsedRaw", "AllocTRES")
_JOB_ID = re.compile(r"\d+(?:_\d+|_\[[^\]\n]*\]|\+\d+)?(?:\.[\w+]+)?")
_MAX_RECORD_LINES = 10_000
_MAX_NUMBER = 1 << 40  # SQLite refuses more than 63 bits
_SET_BACK_S = 3600  # in the hour that comes twice, a start may be taken for the later one
_COUNTED = re.compile(r"(?:^|,)(?:node|cpu|gres/gpu(?::[^=,]*)?)=[^,]*")  # of AllocTRES: the memory differs in each job
_SECONDS = {f":{s // 60:02}:{s % 60:02}": s for s in range(3600)}
_RUN_ID = re.compile(r"(.+)-\d{8}-\d{6}-[0-9a-f]{6}")
_MODEL = re.compile(r"(?:^|[\s,;])model=([^\s,;]+)")


class JobRow(NamedTuple):
    """An accounting row: a job, or one start of a requeued job. The columns of the store's table, after the site.

    raw_id, submit: identify the row. run: the run of pitools that the job belongs to, "" for none. tag: `model=TAG` of
    the comment, else the run's name. eligible, start, end: Unix time or None. gpu_util: mean, 0 to 1, None if unknown.
    """

    raw_id: str
    submit: int
    job_id: str
    user: str
    account: str
    qos: str
    partition: str
    state: str
    run: str
    tag: str
    eligible: int | None
    start: int | None
    end: int | None
    elapsed_s: int
    nodes: int
    cpus: int
    gpus: int
    gpu_util: float | None


class BadRecord(NamedTuple):
    """A record that cannot be read. line: of its first line, from 1."""

    line: int
    problem: str


def read_jobs(
    file: BinaryIO, sep: str = "|", zone: tzinfo | None = None, where: str = "sacct"
) -> Iterator[JobRow | BadRecord]:
    """Yield the jobs of `sacct -P` by its header line, and the records that cannot be read; steps are left out.

    zone: of its times; None is this machine's, with its change of clocks. Raises DataError for a missing column, and
    for jobs of several clusters, whose numbers are the same.
    """
    first = file.readline(1 << 20).decode(errors="replace")
    header = first.rstrip("\r\n").split(sep)
    if missing := [name for name in REQUIRED if name not in header]:
        raise DataError(
            f"no column {', '.join(missing)} in its first line",
            where=where,
            hint=f"write it by: sacct -a -X -D -P -S 2026-01-01 -o {','.join(COLUMNS)}",
        )
    parse = _row_parser(header, zone)
    id_column = header.index("JobIDRaw" if "JobIDRaw" in header else "JobID")
    cluster_column = header.index("Cluster") if "Cluster" in header else None
    cluster = ""
    for line, text, problem in _records(file, header, sep, id_column):
        cells = (text if text.isprintable() else printable(text)).split(sep)
        if problem:
            yield BadRecord(line, problem)
        elif not _JOB_ID.fullmatch(cells[id_column]):
            yield BadRecord(line, f"no job id: {cells[id_column][:40]!r}")
        elif "." not in cells[id_column]:
            try:
                row = parse(cells)
            except (ValueError, OverflowError, PitError) as error:
                yield BadRecord(line, str(error))
                continue
            if cluster_column is not None and cells[cluster_column] != (cluster := cluster or cells[cluster_column]):
                raise DataError(
                    f"jobs of {cluster} and of {cells[cluster_column]} (expected one cluster)",
                    where=f"{where}, line {line}",
                    hint=f"write a file of each, and read it as its site: sacct -M {cluster} ...",
                )
            yield row


def _records(file: BinaryIO, header: Sequence[str], sep: str, id_column: int) -> Iterator[tuple[int, str, str]]:
    """Yield line number, text and problem of each record: "" for one that is complete."""
    n_separators, ends_in_text = len(header) - 1, header[-1] != "AllocTRES"
    lines: list[str] = []
    count, number = 0, 1
    for number, raw in enumerate(file, start=2):
        line = raw.decode(errors="replace")
        line_count = line.count(sep)
        is_over = len(lines) >= _MAX_RECORD_LINES or (count == n_separators and not ends_in_text)
        is_next = count >= n_separators and _begins(line, sep, id_column)
        if not lines or is_over or is_next or line_count == n_separators:
            if lines:
                yield from _split_torn(lines, number - len(lines), sep, n_separators, id_column)
            lines, count = [line], line_count
        else:
            lines.append(line)
            count += line_count
    torn = lines.pop() if lines and not lines[-1].endswith("\n") else ""
    if lines:
        yield from _split_torn(lines, number + (not torn) - len(lines), sep, n_separators, id_column)
    if torn:
        yield number, "", "cut off: no end of line"


def _begins(line: str, sep: str, id_column: int) -> bool:
    head = line.split(sep, id_column + 1)
    return len(head) > id_column + 1 and _JOB_ID.fullmatch(head[id_column]) is not None


def _split_torn(
    lines: Sequence[str], number: int, sep: str, n_separators: int, id_column: int
) -> Iterator[tuple[int, str, str]]:
    """Yield a record; if it has not as many values as the header, its torn and its whole parts."""
    text = lines[0] if len(lines) == 1 else "".join(lines)
    if (count := text.count(sep)) == n_separators:
        yield number, text.rstrip("\r\n"), ""
        return
    if lines[0].count(sep) == n_separators:  # complete, until a line came that begins no record
        yield number, lines[0].rstrip("\r\n"), ""
        yield number + 1, "", "no job id"
        return
    after = count
    for i in range(1, len(lines)):
        after -= lines[i - 1].count(sep)
        if after == n_separators and _begins(lines[i], sep, id_column):
            yield number, "", f"{count - after + 1} values (expected {n_separators + 1})"
            yield from _split_torn(lines[i:], number + i, sep, n_separators, id_column)
            return
    yield number, "", f"{count + 1} values (expected {n_separators + 1})"


def _row_parser(header: Sequence[str], zone: tzinfo | None) -> Callable[[Sequence[str]], JobRow]:
    """Return the function that makes a row of a record's values."""
    places = {name: i for i, name in enumerate(header)}
    places.setdefault("JobIDRaw", places["JobID"])
    # A missing one has the value after the last: "".
    in_order = itemgetter(*(places.get(name, len(header)) for name in COLUMNS))
    clock = _Clock(zone)

    def parse(values: Sequence[str]) -> JobRow:
        cells = in_order([*values, ""])
        raw_id, job_id, name, user, account, qos, partition, state_text, submit_text = cells[:9]
        eligible_text, start_text, end_text, elapsed_text, comment, admin_comment, tres = cells[9:]
        state, elapsed_s = _job_state(state_text.partition(" ")[0]), int(elapsed_text or 0)
        amounts = _amounts("".join(_COUNTED.findall(tres)))
        if max(elapsed_s, *amounts) > _MAX_NUMBER:
            raise ValueError("a number is too large")
        submit = clock(submit_text)
        if submit is None:
            raise ValueError("no time of submission")
        start, end = clock.span(start_text, end_text, elapsed_s)
        if elapsed_s < 0 or (start is not None and end is not None and end < start - _SET_BACK_S):
            raise ValueError("it ends before its start")
        if not tres or (state == "CANCELLED" and not elapsed_s):
            start, elapsed_s = None, 0  # cancelled while pending: Slurm gives that time as start, and may give no end
        eligible = clock(eligible_text, before=start)
        run = _RUN_ID.match(name) if "-" in name else None
        model = _MODEL.search(comment) if comment else None
        tag = model[1] if model else run[1] if run else ""
        busy = gpu_utilization(admin_comment) if admin_comment else []
        util = fmean(busy) if busy else None
        who = (user, account, qos, partition, state, run[0] if run else "", tag)
        return JobRow(raw_id, submit, job_id, *who, eligible, start, end, elapsed_s, *amounts, util)

    return parse


_job_state = lru_cache(maxsize=256)(parse_job_state)


@lru_cache(maxsize=4096)
def _amounts(tres_text: str) -> tuple[int, int, int]:
    """Return the nodes, CPUs and GPUs of an allocation. Raises ClusterError for text that is no amount."""
    tres = parse_tres(tres_text)
    return parse_count(tres.get("node", "")) or 0, parse_count(tres.get("cpu", "")) or 0, count_gpus(tres)


class _Clock:
    """Converts Slurm's local times to Unix time; each hour's offset from UTC is looked up once."""

    def __init__(self, zone: tzinfo | None) -> None:
        self.zone = zone
        self._hour_begin = lru_cache(1 << 16)(self._look_up_hour)  # of seven years

    def __call__(self, text: str, before: int | None = None) -> int | None:
        """Return the Unix time, None for an empty value. before: choose the later of two that is not after it."""
        times = self.candidates(text)
        if len(times) < 2 or before is None:
            return times[0] if times else None
        return max((time for time in times if time <= before), default=times[0])

    def span(self, start: str, end: str, elapsed_s: int) -> tuple[int | None, int | None]:
        """Return start and end; of times that come twice, those that are as far apart as the job took, or just more."""
        starts, ends = self.candidates(start), self.candidates(end)
        if len(starts) == 1 and len(ends) == 1:
            return starts[0], ends[0]
        pairs = [(one, other) for one in starts for other in ends if other - one >= elapsed_s]  # suspended in between
        first = starts[0] if starts else None, ends[0] if ends else None
        return min(pairs, key=lambda pair: pair[1] - pair[0], default=first)

    def candidates(self, text: str) -> tuple[int, ...]:
        """Return the Unix times that a text can mean, earliest first: none if it is empty, two where clocks go back."""
        if not text or not text[0].isdigit():
            if none_to_empty(text) and text != "NONE":
                raise ValueError(f"not a time: {text[:40]!r}")
            return ()
        base, seconds = self._hour_begin(text[:13]), _SECONDS.get(text[13:])
        if base is not None and seconds is not None:
            return (base + seconds,)
        local = datetime.fromisoformat(text)
        return tuple(sorted({self._unix(local.replace(fold=fold)) for fold in (0, 1)}))

    def _look_up_hour(self, hour: str) -> int | None:
        """Return an hour's beginning; None if its offset changes within the hour, or the hour comes twice."""
        first = datetime.fromisoformat(f"{hour}:00:00")
        starts = {
            self._unix((first + timedelta(minutes=minutes)).replace(fold=fold)) - minutes * 60
            for minutes in (0, 59)
            for fold in (0, 1)
        }
        return starts.pop() if len(starts) == 1 else None

    def _unix(self, local: datetime) -> int:
        return int(local.replace(tzinfo=local.tzinfo or self.zone).timestamp())
