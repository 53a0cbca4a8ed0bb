"""Read the logs of several ranks, of staging and of the job script as one stream of lines with their source."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

from pitools.core import timestamps, units
from pitools.core.errors import PitError, UsageError
from pitools.launch.diagnosis import log_timestamps
from pitools.launch.monitor import wait
from pitools.launch.monitor.rank_log import iter_chunks, job_outputs
from pitools.launch.plan import load_plan
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site.schema import Site
from pitools.slurm.states import is_final

LogKind = Literal["ranks", "stage", "job", "all"]

_POLL_S = 0.5
_MAX_LINE_BYTES = 1 << 20
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


class LogLine(NamedTuple):
    """One line of a log, without its end. source: the rank's number, `stage.<node>…` or `job`. t: RFC 3339, or ""."""

    source: str
    text: str
    t: str


class LogFilter(NamedTuple):
    """Which lines are wanted. since: RFC 3339, "" for all. pattern: None for all."""

    since: str = ""
    pattern: re.Pattern[str] | None = None


def parse_ranks(text: str, count: int) -> list[int]:
    """Return the ranks of `all` or a list such as `0-3,7`. count: of the run's ranks. Raises UsageError."""
    if text == "all":
        return list(range(count))
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, count)
        if not match or last >= count or first > last:
            raise UsageError(f'no ranks "{part}"', where="--ranks", hint=f"all, or of 0-{count - 1}: 0-3,7")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def parse_since(text: str) -> str:
    """Return the RFC 3339 time of a text such as `10m`, `90s`, or a time with its date. Raises UsageError."""
    if moment := log_timestamps.parse_timestamp(text):
        return timestamps.to_rfc3339(moment)
    try:
        return timestamps.to_rfc3339(datetime.now(UTC) - timedelta(seconds=units.parse_duration(text)))
    except (UsageError, OverflowError) as error:
        problem = f'"{text}" is no time (expected how long ago, or RFC 3339)'
        raise UsageError(problem, hint="write 90s, 30m, 2h, 7d or 2026-11-21T01:33:41Z") from error


def log_files(run_dir: Path, ranks: Collection[int], kind: LogKind, attempt_name: str = "") -> dict[str, Path]:
    """Return source → log file of an attempt, ranks first, for those that exist. attempt_name: "" for the last one."""
    attempt = run_dir / "attempts" / attempt_name if attempt_name else run_folder.last_attempt(run_dir)
    files: dict[str, Path] = {}
    if attempt and kind in ("ranks", "all"):
        files |= {str(rank): attempt / "logs" / f"{rank}.out" for rank in ranks}
    if attempt and kind in ("stage", "all"):
        files |= {path.stem: path for path in sorted((attempt / "logs").glob("stage.*.out"))}
    if kind in ("job", "all") and (outputs := job_outputs(run_dir)):
        files["job"] = outputs[-1]
    return {source: path for source, path in files.items() if path.is_file()}


def read_lines(
    run_dir: Path,
    site: Site,
    ranks: Collection[int],
    kind: LogKind,
    wanted: LogFilter,
    *,
    follow: bool,
    report: Callable[[str], None],
    attempt: str = "",
) -> Iterator[LogLine]:
    """Yield the wanted lines; with `follow`, also later ones until the run has ended. attempt: "" for the last one.

    The lines that exist at one time are in the order of their own times; a line without a time follows the one before
    it. Lines before the first time of their log come first, in the order of the sources. report: gets a line for a log
    without times, if `since` cannot be applied to it.
    """
    readers: dict[Path, LogReader] = {}
    poller, ended = wait.RunPoller(run_dir, site), not follow
    load_plan(run_dir)  # raises for a folder that is not a run
    while True:
        for source, path in log_files(run_dir, ranks, kind, attempt).items():
            readers.setdefault(path, LogReader(source, path, _span(run_dir), report))
        lines = [reader.read(wanted, is_last=ended) for reader in readers.values()]
        yield from heapq.merge(*lines, key=lambda line: line.t)
        if ended:
            return
        time.sleep(_POLL_S)
        try:
            ended = is_final(poller.poll().state) or poller.lost
        except PitError as error:
            report(str(error))
            ended = True


def _span(run_dir: Path) -> log_timestamps.TimeSpan:
    attempt = run_folder.last_attempt(run_dir)
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart) if attempt else None
    return log_timestamps.make_span(start.started if start else "", timestamps.now_rfc3339())


class LogReader:
    """The lines of one growing file."""

    def __init__(self, source: str, path: Path, span: log_timestamps.TimeSpan, report: Callable[[str], None]) -> None:
        self._source, self._path, self._span, self._report = source, path, span, report
        self._offset, self._rest, self._t, self._is_reported = 0, b"", "", False

    def read(self, wanted: LogFilter, *, is_last: bool) -> Iterator[LogLine]:
        """Yield the wanted lines since the last call. is_last: also a line without its end."""
        is_empty = True
        try:
            for data in self._new_lines(is_last):
                is_empty, line = False, self._line(data.decode("utf-8", "replace"))
                if _is_wanted(line, wanted):
                    yield line
        except OSError as error:
            self._report_once(f"{self._path}: {error.strerror}")
        if wanted.since and not is_empty and not self._t:
            self._report_once("its log has no times: shown whole")

    def _new_lines(self, is_last: bool) -> Iterator[bytes]:
        """Yield the lines since the last call; a line of more than _MAX_LINE_BYTES in parts. Raises OSError."""
        for chunk in iter_chunks(self._path, self._offset):
            self._offset += len(chunk)
            *complete, self._rest = (self._rest + chunk).split(b"\n")
            yield from complete
            if len(self._rest) > _MAX_LINE_BYTES:
                part, self._rest = self._rest, b""
                yield part
        if is_last and self._rest:
            part, self._rest = self._rest, b""
            yield part

    def _report_once(self, problem: str) -> None:
        if not self._is_reported:
            self._report(f"{self._source}: {problem}")
            self._is_reported = True

    def _line(self, text: str) -> LogLine:
        self._t = log_timestamps.timestamp_of_line(text, self._span) or self._t
        return LogLine(self._source, text, self._t)


def _is_wanted(line: LogLine, wanted: LogFilter) -> bool:
    is_late = not (wanted.since and line.t) or line.t >= wanted.since
    return is_late and (wanted.pattern is None or wanted.pattern.search(line.text) is not None)


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression. Raises UsageError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"not a regular expression: {error}", where="--grep", hint="escape ( [ { * + ? . |") from error
