"""Gather the evidence of an attempt from its files. Reads are bounded in bytes, and safe for any content."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.record import Record, decode_json
from pitools.launch import exit_codes
from pitools.launch.diagnosis import log_scan, log_timestamps
from pitools.launch.diagnosis.bounded_read import one_line, read_head, read_tail
from pitools.launch.diagnosis.symptoms import Symptom
from pitools.run import run_folder, steps
from pitools.run.attempt_records import (
    AttemptStart,
    Evidence,
    FirstFailure,
    HangReport,
    Preflight,
    RankFailure,
    SignalRecord,
    first_failure,
)
from pitools.slurm.records import AccountingRow

T = TypeVar("T", bound=Record)
S = TypeVar("S", bound=msgspec.Struct)
_MAX_FILES = 512  # the most rank files of a kind that are read
_MAX_JSON_BYTES = 1 << 20
_TERMINATION_SIGNALS = ("SIGTERM", "SIGINT")


class _Job(msgspec.Struct, frozen=True):
    signal: str = ""


class _Plan(msgspec.Struct, frozen=True):
    """The fields of plan.json that diagnosis needs; decoding a Plan would import all of planning."""

    job: _Job = _Job()
    nvme: str = ""


class AttemptEvidence(Record, frozen=True, kw_only=True, tag="pit.attempt-evidence/1"):
    """The evidence about one attempt.

    exit_code, ended: from exit.json; None and "" without it. state: of a local run, by its supervisor.
    restarted: whether Slurm has restarted this job since. cancelled: the time of a `pit launch cancel` during the
    attempt, or "". notice_signal, notice_s: the signal that the request wants before the time limit, and how long
    before, in seconds. shared_path: the folder of runs. nvme: the folder of a node's own disk, "" if unknown. hosts:
    the node of each rank. last_step: rank → (step, time). saved_steps: steps in a complete checkpoint at its end.
    saved_at: when the last of them was saved, by its file's time, or "".
    last_lines: rank, or None for the job itself → the last line of its output.
    """

    attempt: str
    started_record: AttemptStart | None = None
    exit_code: int | None = None
    ended: str = ""
    state: str = ""
    restarted: bool = False
    cancelled: str = ""
    notice_signal: str = ""
    notice_s: float = 0.0
    shared_path: str = ""
    nvme: str = ""
    hosts: tuple[str, ...] = ()
    first_failure: FirstFailure | None = None
    failures: tuple[RankFailure, ...] = ()
    signals: tuple[SignalRecord, ...] = ()
    preflight: Preflight | None = None
    hang: HangReport | None = None
    last_step: dict[int, tuple[int, str]] = {}
    saved_steps: int = 0
    saved_at: str = ""
    accounting: AccountingRow | None = None
    last_lines: dict[int | None, str] = {}
    rank_exits: tuple[Symptom, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    def node_of(self, rank: int | None) -> str:
        """Return the node of a rank, "" if unknown."""
        return self.hosts[rank] if rank is not None and 0 <= rank < len(self.hosts) else ""


def gather_evidence(
    run_dir: Path, attempt: Path, *, slurm: AccountingRow | None = None, deep: bool = False
) -> AttemptEvidence:
    """Return the evidence in the attempt's files, with Slurm's accounting if given. deep: read more of the logs."""
    start = _read_record(attempt / "start.json", AttemptStart)
    ended = _read_record(attempt / "exit.json", run_folder.AttemptExit)
    span = log_timestamps.make_span(start.started if start else "", ended.ended if ended else "")
    hosts = _read_hosts(attempt)
    failures = _read_failures(attempt / "failures")
    next_start, restarted = _next_start(run_dir, attempt, start)
    first = first_failure(attempt)
    failed_ranks = {failure.rank for failure in failures} | ({first.rank} if first else set())
    hang, plan = _read_record(attempt / "hang.json", HangReport), _read_plan(run_dir)
    notice = _parse_notice(plan.job.signal)
    last_saved_steps, saved_at = _last_save(run_dir)
    scan = log_scan.scan_logs(
        run_dir, attempt, start, span, hosts, failed_ranks | set(hang.slow_ranks if hang else ()), deep=deep
    )
    return AttemptEvidence(
        attempt=attempt.name,
        started_record=start,
        exit_code=ended.exit_code if ended else None,
        ended=ended.ended if ended else "",
        state=ended.state if ended else "",
        restarted=restarted,
        cancelled=_cancel_requested_at(run_dir, span),
        notice_signal=notice[0],
        notice_s=notice[1],
        shared_path=str(run_dir.parent),
        nvme=plan.nvme.partition("{")[0],
        hosts=hosts,
        first_failure=first,
        failures=failures,
        signals=read_signals(attempt),
        preflight=_read_record(attempt / "preflight.json", Preflight),
        hang=hang,
        last_step=_read_last_steps(attempt / "steps"),
        saved_steps=next_start.saved_steps if next_start else last_saved_steps,
        saved_at="" if next_start else saved_at,
        accounting=slurm if slurm and next_start is None and _is_same_start(slurm, start) else None,
        last_lines=scan.last_lines,
        rank_exits=scan.rank_exits,
        evidence=(*scan.evidence, *_node_evidence(attempt)),
    )


def saved_steps(run_dir: Path) -> int:
    """Return the saved steps: of the newest complete checkpoint, or by the program's `progress` file; 0 for none."""
    return _last_save(run_dir)[0]


def _last_save(run_dir: Path) -> tuple[int, str]:
    """Return the saved steps and when they were saved, RFC 3339; 0 and "" for none."""
    saves = [(0, "")]
    try:
        from pitools.checkpoint.store import layout, lookup

        with contextlib.suppress(PitError, OSError):
            if newest := lookup.latest_step(run_dir / "checkpoints"):
                saves.append((newest, _changed_at(layout.step_path(run_dir / "checkpoints", newest))))
    except Exception as error:  # noqa: BLE001 (an unreadable checkpoint must not prevent recovery)
        print(f"pit: cannot read the checkpoints: {error!r}", file=sys.stderr)
    progress = read_head(run_dir / "progress", 64)
    if progress and re.fullmatch(r"\s*\d{1,15}\s*", progress.text):
        saves.append((int(progress.text), _changed_at(run_dir / "progress")))
    return max(saves)


def _changed_at(path: Path) -> str:
    with contextlib.suppress(OSError):
        return timestamps.unix_to_rfc3339(path.stat().st_mtime)
    return ""


def _read_record(path: Path, record_type: type[S]) -> S | None:
    """Read a record; None if it is missing or cannot be decoded."""
    head = read_head(path, _MAX_JSON_BYTES)
    with contextlib.suppress(msgspec.DecodeError):
        return decode_json(head.text, record_type) if head else None
    return None


def _read_hosts(attempt: Path) -> tuple[str, ...]:
    text = read_head(attempt / "hostfile", _MAX_JSON_BYTES)
    return tuple(text.text.split()) if text else ()


def _read_plan(run_dir: Path) -> _Plan:
    text = read_head(run_dir / "plan.json", _MAX_JSON_BYTES)
    with contextlib.suppress(msgspec.DecodeError):
        return decode_json(text.text, _Plan) if text else _Plan()
    return _Plan()


def _parse_notice(spec: str) -> tuple[str, float]:
    """Return the notice before the time limit, such as `B:USR2@90`, as (`SIGUSR2`, seconds); ("", 0) for none."""
    name, _, seconds = spec.rpartition(":")[2].partition("@")
    return (f"SIG{name.removeprefix('SIG')}", float(seconds) if seconds.isdecimal() else 60.0) if name else ("", 0.0)


def _list_rank_files(folder: Path, suffix: str) -> list[Path]:
    """Return the files of single ranks, least recently changed first, at most _MAX_FILES."""
    dated_paths = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and entry.name[: -len(suffix)].isdecimal():
                with contextlib.suppress(OSError):
                    dated_paths.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    return [path for _, path in sorted(dated_paths)[:_MAX_FILES]]


def _read_failures(folder: Path) -> tuple[RankFailure, ...]:
    failures = [_read_record(path, RankFailure) for path in _list_rank_files(folder, ".json")]
    return tuple(sorted((failure for failure in failures if failure), key=lambda failure: failure.t))


class _UnreachableNode(msgspec.Struct, frozen=True):
    """The fields of `unreachable/<node>.json`, written when the ranks are terminated."""

    t: str
    node: str
    address: str
    error: str


class _OomKill(msgspec.Struct, frozen=True):
    """The fields of `oom/<rank>.json`: a rank that the kernel's OOM killer ended. pid: 0 if kills are only counted."""

    t: str
    rank: int
    node: str
    evidence: str
    pid: int = 0


def _node_evidence(attempt: Path) -> Iterator[Evidence]:
    """Yield the evidence about nodes that the job recorded after its ranks had ended."""
    attempt_path = f"attempts/{attempt.name}"
    for path in sorted((attempt / "unreachable").glob("*.json"))[:_MAX_FILES]:
        if unreachable := _read_record(path, _UnreachableNode):
            problem = (
                f"unreachable: {unreachable.error} ({unreachable.address})"
                if unreachable.address
                else unreachable.error
            )
            yield Evidence(
                t=unreachable.t,
                source=f"{attempt_path}/unreachable/{path.name}",
                text=one_line(f"node {unreachable.node}: {problem}"),
                kind="node",
                node=unreachable.node,
                rule="node-unreachable",
            )
    for path in _list_rank_files(attempt / "oom", ".json"):
        if oom := _read_record(path, _OomKill):
            # No time: the record is written later than the kill, which preceded the rank's end.
            yield Evidence(
                t="",
                source=f"{attempt_path}/oom/{path.name}",
                text=one_line(oom.evidence),
                kind="memory",
                rank=oom.rank,
                node=oom.node,
                rule="kernel-oom" if oom.pid else "oom-count",  # no pattern, thus a guess: it counts all jobs' kills
            )


def read_signals(attempt: Path) -> tuple[SignalRecord, ...]:
    """Return the signals that the job received during an attempt, oldest first."""
    return tuple(_read_records(attempt / "signals.jsonl", SignalRecord, 65536, from_end=True))


def was_signalled(attempt: Path) -> bool:
    """Whether the job received SIGTERM or SIGINT, from Slurm or a user: a new attempt would be killed with it."""
    return any(record.signal in _TERMINATION_SIGNALS for record in read_signals(attempt))


def first_failed_exit_code(attempt: Path, code: int) -> int:
    """Return the exit code of the rank that failed first, if recorded; else srun's, the highest of all ranks."""
    if code == 0 or code == exit_codes.HUNG:
        return code
    failed = first_failure(attempt)
    return failed.exit_code if failed else code


def _read_records(path: Path, kind: type[T], max_bytes: int, *, from_end: bool = False) -> list[T]:
    text = read_tail(path, max_bytes) if from_end else read_head(path, max_bytes)
    records = []
    for line in text.text.splitlines() if text else ():
        with contextlib.suppress(msgspec.DecodeError):
            records.append(decode_json(line, kind))
    return records


def _read_last_steps(folder: Path) -> dict[int, tuple[int, str]]:
    last_steps = {}
    for path in _list_rank_files(folder, ".jsonl"):
        if records := _read_records(path, steps.Step, 2048, from_end=True):
            last_steps[int(path.stem)] = (records[-1].step, records[-1].t)
    return last_steps


def _cancel_requested_at(run_dir: Path, span: log_timestamps.TimeSpan) -> str:
    """Return when the run was cancelled, if that was during this attempt and was not withdrawn; else ""."""
    requested_at = ""
    for event in _read_records(run_dir / "events.jsonl", run_folder.Event, 1 << 18, from_end=True):
        if event.event == "reopened":
            requested_at = ""
        elif event.event == "cancel" and log_timestamps.parse_timestamp(event.t) in span:
            requested_at = requested_at or event.t
    return requested_at


def _next_start(run_dir: Path, attempt: Path, start: AttemptStart | None) -> tuple[AttemptStart | None, bool]:
    """Return the start record of the next attempt, and whether Slurm restarted this attempt's job for it."""
    attempts = run_folder.attempt_dirs(run_dir)
    names = [path.name for path in attempts]
    if attempt.name not in names:
        return None, False
    for path in attempts[names.index(attempt.name) + 1 :]:
        if next_start := _read_record(path / "start.json", AttemptStart):
            was_restarted = (
                start is not None
                and next_start.job_id == start.job_id
                and next_start.restart_count > start.restart_count
            )
            return next_start, was_restarted
    return None, False


def _is_same_start(accounting: AccountingRow, start: AttemptStart | None) -> bool:
    """Whether the accounting row is about the start of the job that this attempt belongs to."""
    if start is None:
        return True
    until_end_s = log_timestamps.seconds_between(start.started, accounting.end)
    since_start_s = log_timestamps.seconds_between(accounting.start, start.started)
    return (until_end_s is None or until_end_s > -log_timestamps.TOLERANCE_S) and (
        since_start_s is None or since_start_s > -60
    )
