"""Scan the logs of an attempt: the output of ranks, of staging and of the job, and srun's messages.

Only the ends of logs are read; `deep` reads more, for when the ends explain nothing. Of many ranks, those with a
failure record are read first, then those whose output stopped earliest and latest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import PitError
from pitools.core.hostlist import expand
from pitools.launch.diagnosis import log_timestamps, patterns, symptoms, tracebacks
from pitools.launch.diagnosis.bounded_read import MAX_LINE, LogText, one_line, read_head, read_tail
from pitools.launch.diagnosis.patterns import LogSource, Pattern
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Evidence

_MAX_RANK_LOGS = 512
_TAIL_BYTES, _DEEP_TAIL_BYTES, _DEEP_HEAD_BYTES = 64 << 10, 2 << 20, 256 << 10
_MAX_TOTAL_BYTES, _DEEP_MAX_TOTAL_BYTES = 16 << 20, 96 << 20  # bytes of all ranks' logs together
_PIT_ERROR = re.compile(r"^(pit: error: .*)\n  where: (.*)", re.MULTILINE)
# Messages of srun and Slurm while they terminate ranks, and of pitools about the next attempt.
_NOISE = re.compile(r"srun: |slurmstepd|^submitit |^pit: attempt ")
# The clock of a line in the job's output: pitools and slurmd write it first, slurmstepd before the reason of an end.
_CLOCK = re.compile(r"^\[?(?=\d{4}-\d\d-\d\d[T ])|\bCANCELLED AT ")
_MAX_MATCHES = 3  # matches of a literal in a text: the first ones; the last is added
_MAX_TRIES = 2000  # occurrences of a literal in a text, from either end, that are matched


class LogScan(NamedTuple):
    """How ranks ended, and the lines that match patterns.

    last_lines: rank, or None for the job itself → the last line of its output.
    """

    rank_exits: tuple[symptoms.Symptom, ...]
    evidence: tuple[Evidence, ...]
    last_lines: dict[int | None, str]


def scan_logs(
    run_dir: Path,
    attempt: Path,
    start: AttemptStart | None,
    span: log_timestamps.TimeSpan,
    hosts: tuple[str, ...],
    prominent_ranks: set[int],
    *,
    deep: bool,
) -> LogScan:
    """Read the logs of an attempt. prominent_ranks: ranks whose logs are read even if there are too many."""
    slurm = _scan_slurm_logs(run_dir, attempt, start, span, deep=deep)
    stage = _scan_stage_logs(run_dir, attempt, start, span)
    named_ranks = {end.rank for end in slurm.rank_exits if end.rank is not None}
    rank_logs = _select_rank_logs(attempt / "logs", prominent_ranks | named_ranks)
    ranks = _scan_rank_logs(run_dir, rank_logs, span, hosts, deep=deep)
    last_lines = {**slurm.last_lines, **stage.last_lines, **ranks.last_lines}
    return LogScan(
        (*slurm.rank_exits, *ranks.rank_exits),
        tuple(_dedupe((*slurm.evidence, *stage.evidence, *ranks.evidence))),
        {rank: line for rank, line in last_lines.items() if line},
    )


def _scan_slurm_logs(
    run_dir: Path, attempt: Path, start: AttemptStart | None, span: log_timestamps.TimeSpan, *, deep: bool
) -> LogScan:
    exits: list[symptoms.Symptom] = []
    evidence: list[Evidence] = []
    job_line = ""
    max_bytes, head_bytes = (_DEEP_TAIL_BYTES, _DEEP_HEAD_BYTES) if deep else (4 * _TAIL_BYTES, _TAIL_BYTES)
    has_srun_log = any((attempt / "logs").glob("*.err"))
    job_began = _job_began(run_dir, start)
    for path, is_shared in _slurm_logs(run_dir, attempt, start):
        source, lines_before = _relative(path, run_dir), 0
        for text in _read_head_and_tail(path, max_bytes, head_bytes):
            own_lines = _lines_of_attempt(text, span, job_began) if is_shared else text
            if is_shared:
                job_line = last_line(own_lines.text) or job_line
            if not is_shared or not has_srun_log:
                exits += _srun_exits(own_lines, source, span, lines_before)
            lines_before += text.text.count("\n") + 1
            evidence += _match_patterns(own_lines, "slurm", source, span, None, "")
    return LogScan(tuple(exits), tuple(evidence), {None: job_line})


def _scan_stage_logs(
    run_dir: Path, attempt: Path, start: AttemptStart | None, span: log_timestamps.TimeSpan
) -> LogScan:
    evidence: list[Evidence] = []
    last_lines: dict[int | None, str] = {}
    for path in sorted((attempt / "logs").glob("stage.*.out"))[:_MAX_RANK_LOGS]:
        if tail := read_tail(path, _TAIL_BYTES):
            node, number = _stage_node(path.name, start), path.name.split(".")[-2]
            # Each error on one line: patterns need its message and its `where`.
            tail = tail._replace(text=_PIT_ERROR.sub(r"\1; where: \2", tail.text))
            evidence += _match_patterns(tail, "stage", _relative(path, run_dir), span, None, node)
            if number.isdecimal():
                last_lines[int(number)] = last_line(tail.text)
    return LogScan((), tuple(evidence), last_lines)


def _scan_rank_logs(
    run_dir: Path,
    rank_logs: Sequence[tuple[int, Path]],
    span: log_timestamps.TimeSpan,
    hosts: tuple[str, ...],
    *,
    deep: bool,
) -> LogScan:
    exits: list[symptoms.Symptom] = []
    evidence: list[Evidence] = []
    last_lines: dict[int | None, str] = {}
    max_bytes = _bytes_per_log(len(rank_logs), deep=deep)
    for rank, path in rank_logs:
        node = hosts[rank] if rank < len(hosts) else ""
        source = _relative(path, run_dir)
        texts = _read_head_and_tail(path, max_bytes, max_bytes // 8 if deep else 0)
        for text in texts:
            if text is texts[-1]:
                exits += _traceback_exits(text, source, span, rank, node)
            searched = text._replace(text=tracebacks.blank_tracebacks(text.text)) if "Traceback" in text.text else text
            evidence += _match_patterns(searched, "rank", source, span, rank, node)
            last_lines[rank] = last_line(text.text)
    return LogScan(tuple(exits), tuple(evidence), last_lines)


def last_line(text: str) -> str:
    """Return the line that most likely explains the end of a program: an error of pitools, else the last line."""
    lines = [line for line in text[-_TAIL_BYTES:].split("\n") if line.strip() and not _NOISE.search(line[:200])]
    pit_errors = [line for line in lines if line.startswith(("pit: error: ", "pit: no attempt: "))]
    return one_line((pit_errors or lines or [""])[-1])


def _stage_node(name: str, start: AttemptStart | None) -> str:
    """Return Slurm's name of the node of `stage.<host name>[.<number in the job>].out`; the host name may differ."""
    host, _, number = name.removeprefix("stage.").removesuffix(".out").partition(".")
    with contextlib.suppress(PitError):
        nodes = expand(start.node_list) if start and number.isdecimal() else []
        return nodes[int(number)] if number.isdecimal() and int(number) < len(nodes) else host
    return host


def _bytes_per_log(count: int, *, deep: bool) -> int:
    total_bytes, log_bytes = (_DEEP_MAX_TOTAL_BYTES, _DEEP_TAIL_BYTES) if deep else (_MAX_TOTAL_BYTES, _TAIL_BYTES)
    return max(4096, min(log_bytes, total_bytes // max(1, count)))


def _slurm_logs(run_dir: Path, attempt: Path, start: AttemptStart | None) -> Iterator[tuple[Path, bool]]:
    """Yield the files of srun's messages, and of the job's output with True: its attempts share that file."""
    for path in sorted((attempt / "logs").glob("*.err"))[:8]:
        yield path, False
    if start and re.fullmatch(r"[\w.-]{1,64}", start.job_id):
        for path in [path for path in run_folder.job_output_files(run_dir) if _is_output_of(path, start.job_id)][:4]:
            yield path, True
    elif not start:
        for path in run_folder.job_output_files(run_dir)[-1:]:
            yield path, True


def _is_output_of(path: Path, job_id: str) -> bool:
    """Whether a file is the output of this job, or of one of its array tasks."""
    return path.stem == f"slurm-{job_id}" or path.stem.startswith(f"slurm-{job_id}_")


def _read_head_and_tail(path: Path, max_bytes: int, head_bytes: int) -> list[LogText]:
    """Return the end of a log, preceded by its beginning if the end does not cover it."""
    tail = read_tail(path, max_bytes)
    if tail is not None and max_bytes < tail.size <= max_bytes + head_bytes:
        tail = read_tail(path, max_bytes + head_bytes)  # one text, since the line between two would be cut
    if tail is None:
        return []
    head = read_head(path, head_bytes) if head_bytes and tail.size > max_bytes + head_bytes else None
    return [head, tail] if head else [tail]


def _job_began(run_dir: Path, start: AttemptStart | None) -> datetime | None:
    """Return when the first attempt of the job began; None if unknown."""
    records = [run_folder.read_or_none(path / "start.json", AttemptStart) for path in run_folder.attempt_dirs(run_dir)]
    times = [
        log_timestamps.parse_timestamp(record.started)
        for record in records
        if start and record and record.job_id == start.job_id
    ]
    return min((moment for moment in times if moment), default=None)


def _lines_of_attempt(text: LogText, span: log_timestamps.TimeSpan, job_began: datetime | None) -> LogText:
    """Blank the lines of other attempts in the output that the attempts of a job share.

    A line without a clock belongs to the attempt of the previous line with one; the first lines, to that of the next.
    The output is in the order of time: a time before the job or after the output's last change, and one before the
    attempt after lines of the attempt, is some other date.
    """
    lines: list[str] = []
    job_span = log_timestamps.TimeSpan(job_began, datetime.fromtimestamp(text.mtime, UTC))
    is_own, has_clock, has_own = True, False, False
    for line in text.text.split("\n"):
        clock = _CLOCK.search(line[:MAX_LINE])
        stamp = log_timestamps.timestamp_of_line(line[clock.end() :], job_span) if clock else ""
        if stamp and not ((is_early := _is_before(stamp, span)) and has_own):
            is_own = not is_early and not _is_after(stamp, span)
            if not has_clock and not is_own:
                lines = [""] * len(lines)
            has_clock, has_own = True, has_own or is_own
        lines.append(line if is_own else "")
    return text._replace(text="\n".join(lines))


def _is_before(stamp: str, span: log_timestamps.TimeSpan) -> bool:
    moment = log_timestamps.parse_timestamp(stamp)
    slack_s = 1.0 if stamp.endswith(".000Z") else 0.0  # Slurm's times are whole seconds
    return bool(moment and span.first and (span.first - moment).total_seconds() > slack_s)


def _is_after(stamp: str, span: log_timestamps.TimeSpan) -> bool:
    moment = log_timestamps.parse_timestamp(stamp)
    return bool(moment and span.last and (moment - span.last).total_seconds() > 60)


def _srun_exits(
    text: LogText, source: str, span: log_timestamps.TimeSpan, lines_before: int
) -> Iterator[symptoms.Symptom]:
    """Yield how ranks ended, from srun's messages about tasks. lines_before: of the file's text before this one."""
    for number, line in enumerate(text.text.split("\n"), 1):
        if "srun" not in line[:200]:
            continue
        where = f"{source}:{text.line + number - 1}" if text.line else source
        yield from symptoms.symptoms_from_srun(
            line[: MAX_LINE * 8], log_timestamps.timestamp_of_line(line, span), where, lines_before + number
        )


def _traceback_exits(
    text: LogText, source: str, span: log_timestamps.TimeSpan, rank: int, node: str
) -> Iterator[symptoms.Symptom]:
    chain = tracebacks.last_traceback(text.text)
    if chain:
        number = text.line + text.text.count("\n", 0, chain[-1].offset) if text.line else 0
        where = f"{source}:{number}" if number else source
        yield symptoms.symptom_of_exception(
            chain, rank, node, log_timestamps.timestamp_of_file(text.mtime, span), where
        )


def _match_patterns(
    text: LogText, kind: LogSource, source: str, span: log_timestamps.TimeSpan, rank: int | None, node: str
) -> Iterator[Evidence]:
    """Yield the lines that match a pattern, as evidence."""
    for pattern in patterns.load_table().pattern:
        if kind not in pattern.source:
            continue
        for offset, line, match in _find_matches(text.text, pattern):
            line_start = text.text.rfind("\n", 0, offset) + 1
            number = text.line + text.text.count("\n", 0, line_start) if text.line else 0
            yield Evidence(
                t=log_timestamps.timestamp_of_line(text.text[line_start : line_start + 240], span),
                source=f"{source}:{number}" if number else source,
                text=one_line(line),
                kind=pattern.kind,
                rank=rank,
                node=match.groupdict().get("node") or node,
                role=pattern.role,
                rule=pattern.name,
            )


def _find_matches(text: str, pattern: Pattern) -> list[tuple[int, str, re.Match[str]]]:
    """Return the first few matches of each of a pattern's literals, and its last, as (offset, line, match)."""
    matches: dict[int, tuple[int, str, re.Match[str]]] = {}
    for literal in pattern.literals:
        for offsets, wanted in (
            (_occurrences(text, literal), _MAX_MATCHES),
            (_occurrences_from_end(text, literal), 1),
        ):
            tried = (_match_line(text, offset, pattern) for offset in islice(offsets, _MAX_TRIES))
            matches |= {match[0]: match for match in islice(filter(None, tried), wanted)}
    return [matches[offset] for offset in sorted(matches)]


def _match_line(text: str, offset: int, pattern: Pattern) -> tuple[int, str, re.Match[str]] | None:
    """Match a pattern with the line around the offset of its literal."""
    line_start, line_end = text.rfind("\n", 0, offset) + 1, text.find("\n", offset)
    line = text[
        max(line_start, offset - MAX_LINE // 2) : min(len(text) if line_end < 0 else line_end, offset + MAX_LINE // 2)
    ]
    match = patterns.compile_cached(pattern.line).search(line)
    return (offset, line, match) if match else None


def _occurrences(text: str, literal: str) -> Iterator[int]:
    offset = text.find(literal)
    while offset >= 0:
        yield offset
        offset = text.find(literal, offset + len(literal))


def _occurrences_from_end(text: str, literal: str) -> Iterator[int]:
    offset = text.rfind(literal)
    while offset >= 0:
        yield offset
        offset = text.rfind(literal, 0, offset)


def _dedupe(evidence: Iterable[Evidence]) -> Iterator[Evidence]:
    """Yield each line once per rule: srun's messages are in the job's output as well."""
    reported: set[tuple[int | None, str, str]] = set()
    for piece in evidence:
        key = (piece.rank, piece.rule, piece.text)
        if key not in reported:
            reported.add(key)
            yield piece


def _select_rank_logs(folder: Path, prominent_ranks: set[int]) -> list[tuple[int, Path]]:
    """Return the rank logs to read, as (rank, path), by rank."""
    dated_logs: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            stem, _, suffix = entry.name.partition(".")
            if suffix == "out" and stem.isdecimal() and len(stem) < 8:
                with contextlib.suppress(OSError):
                    dated_logs.append((entry.stat(follow_symlinks=False).st_mtime, int(stem), Path(entry.path)))
    dated_logs.sort()
    if len(dated_logs) > _MAX_RANK_LOGS:
        prominent = [log for log in dated_logs if log[1] in prominent_ranks][: _MAX_RANK_LOGS // 2]
        other_logs = [log for log in dated_logs if log[1] not in prominent_ranks]
        half = (_MAX_RANK_LOGS - len(prominent)) // 2
        dated_logs = [*prominent, *other_logs[:half], *other_logs[-half:]]
    return sorted((rank, path) for _, rank, path in dated_logs)


def _relative(path: Path, run_dir: Path) -> str:
    return str(path.relative_to(run_dir)) if path.is_relative_to(run_dir) else path.name
