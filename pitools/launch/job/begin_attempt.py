"""The beginning of an attempt: leave to run, a folder of its own, and what is known of how the one before it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import fencing, job_recovery, wait_for
from pitools.launch.job.job_context import Job
from pitools.launch.submission import grant, submissions
from pitools.run import attempt_records as records
from pitools.run import cancel_request, run_folder

_ASK_S = 10.0


class NoBeginning(Exception):
    """The job is to end here, with this code: nothing is to be done, or not by this job."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def begin(job: Job, *, ends: str = "") -> Path:
    """Make the next attempt of the run and return its folder. ends: the job's time limit, where it is known.

    Raises NoBeginning where this job has no leave, the run is over, or all that was safe is gone; and OSError.
    """
    _ask_leave(job)
    before = run_folder.attempts(job.run_dir)
    if job.mode != "none":
        _refuse_what_is_over(job.run_dir)
        _refuse_what_is_cancelled(job)
        if before:
            _judge(job, before[-1])
    safe = evidence.progress(job.run_dir)
    if job.mode != "none" and not safe and (known := _known(before)):
        safe = _found_again(job, known)
    made = make(job)
    start = records.Start(
        attempt=made.name,
        job=job.number,
        job_id=job.job_id,
        cluster=job.cluster,
        restart=job.restart,
        node_list=job.node_list,
        nodes=job.nodes,
        started=timestamps.now(),
        ends=ends or _ends(job, before, os.environ),
        progress=safe,
    )
    run_folder.write(made / "start.json", start)
    if job.mode == "run" and (why := fencing.overtaken(job)):
        # Whoever follows a job up takes its leave first, and then looks for starts: one of the two sees the other.
        shutil.rmtree(made)
        raise NoBeginning(grant.NO_LEAVE, why)
    if job.mode != "none":
        run_folder.note(job.run_dir, "attempt", attempt=made.name, job_id=job.job_id, nodes=job.node_list)
    return made


def make(job: Job) -> Path:
    """The folder of a new attempt: the first free number, taken by making it. Raises OSError."""
    root = job.run_dir / "attempts"
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    if job.task:
        made = root / f"{job.task}.{job.restart}"
        made.mkdir(mode=0o755, exist_ok=True)
    else:
        number = max(
            (int(path.name) + 1 for path in run_folder.attempts(job.run_dir) if path.name.isdecimal()), default=0
        )
        while True:
            made = root / str(number)
            try:
                made.mkdir(0o755)
                break
            except FileExistsError:
                number += 1
    for name in ("logs", "nodes"):
        (made / name).mkdir(mode=0o755, exist_ok=True)
    return made


def _known(before: list[Path]) -> int:
    """Steps that were safe once, as the attempts up to now saw them."""
    known = [0]
    for path in before:
        with contextlib.suppress(PitError, OSError):
            began = run_folder.read(path / "start.json", records.Start)
            ended = run_folder.read(path / "cause.json", records.Cause)
            known += [seen.progress for seen in (began, ended) if seen]
    return max(known)


def _found_again(job: Job, known: int) -> int:
    """Steps that are safe after all, once their store is back; a run whose checkpoints stay away is stopped.

    To begin anew, over what a store that is not mounted hides, is for a person to say: `progress` in the run's folder.
    """

    def is_there() -> bool:
        _refuse_what_is_over(job.run_dir)  # it may be cancelled, or moved, while this waits
        return evidence.progress(job.run_dir) > 0 or (job.run_dir / "progress").exists() or not _is_bare(at)

    at = job.run_dir / "checkpoints"
    if wait_for.until(is_there, f"{known} steps were safe, and {at} is empty"):
        return evidence.progress(job.run_dir)
    why = (
        f"{known} steps were safe, and {at} is empty: mount it, or put them back, and resume the run with --force; to "
        f"begin it anew instead: echo 0 > {job.run_dir / 'progress'}"
    )
    try:
        job_recovery.stop(job, "storage", why)
    except PitError as error:
        print(f"pit: the run has no verdict: {error}", file=sys.stderr)
    raise NoBeginning(1, why)


def _is_bare(checkpoints: Path) -> bool:
    """Whether nothing shows that checkpoints were ever kept there: not even damaged ones, or whose they are."""
    from pitools.checkpoint.store import layout, owner

    try:
        names = [path.name for path in checkpoints.iterdir()]
    except OSError:
        return True
    ours = (owner.FILE_NAME, layout.QUARANTINE)
    return not any(name in ours or layout.step_of(Path(name)) is not None for name in names)


def _ask_leave(job: Job) -> None:
    at = job.run_dir / "jobs" / str(job.number)
    if not at.parent.is_dir():
        return  # what a person submitted needs none
    if not at.is_dir():
        raise NoBeginning(grant.NO_LEAVE, "this job was taken back before anybody knew that it is there")
    _give_way(job)
    word = grant.word(job.job_id)
    if (told := grant.take(at, word)) != word:
        raise NoBeginning(grant.NO_LEAVE, f"this job has no leave to run: {told}")


def _give_way(job: Job) -> None:
    """A job that Slurm puts back when the run has its next one does not begin; what that one's sender left undone it
    does, for nobody else may come.
    """
    known = submissions.numbers(job.run_dir)
    if known and known[-1] > job.number and submissions.is_open(job.run_dir, known[-1]):
        try:
            job_recovery.finish(job, known[-1])
        except PitError as error:
            print(f"pit: job {known[-1]} of the run was begun, and is not submitted: {error}", file=sys.stderr)
        known = submissions.numbers(job.run_dir)
    if known and known[-1] > job.number:
        raise NoBeginning(grant.NO_LEAVE, f"job {known[-1]} of the run goes on with it")


def _refuse_what_is_over(run_dir: Path) -> None:
    verdict = run_folder.read(run_dir / "verdict.json", records.Verdict)
    if verdict and verdict.state == "finished":
        raise NoBeginning(0, f"the run has finished: {verdict.reason}")
    if verdict:
        raise NoBeginning(verdict.exit_code or 1, f"the run was stopped: {verdict.reason}")


def _refuse_what_is_cancelled(job: Job) -> None:
    """End a run here whose cancel Slurm has not taken while this job waited."""
    if not cancel_request.read(job.run_dir):
        return
    try:
        job_recovery.stop(job, "cancelled")
    except PitError as error:
        print(f"pit: the run has no verdict: {error}", file=sys.stderr)
    raise NoBeginning(1, "the run was stopped: its cancel was asked for")


def _judge(job: Job, last: Path) -> None:
    """Judge an attempt that ended with its node, or with all of its job, and was judged by nobody."""
    if (last / "cause.json").is_file():
        return
    try:
        decision = job_recovery.judged(job, last, told=job_recovery.told(job), begins=True)
    except Exception as error:  # noqa: BLE001 (a judge that fails must not keep a run from going on)
        print(f"pit: attempt {last.name} was not judged: {error!r}", file=sys.stderr)
        return
    ends = {"done": 0, "stop": 1, "resubmit": exit_codes.TO_BE_CONTINUED}  # here it goes on, or waits no longer
    if decision.action in ends:
        raise NoBeginning(ends[decision.action], decision.reason)


def _ends(job: Job, before: list[Path], environ: Mapping[str, str]) -> str:
    """The job's time limit as a moment, "" where it has none or nobody knows."""
    if (text := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return timestamps.text(datetime.fromtimestamp(int(text), UTC))
    # Slurm before 23.02: its controller is asked, once a start of the job.
    for path in reversed(before):
        start = run_folder.read(path / "start.json", records.Start)
        if start and (start.job_id, start.restart) == (job.job_id, job.restart):
            return start.ends
    try:
        from pitools.slurm.client import Client, Reach

        known = Client(Reach(timeout_s=_ASK_S)).job(job.job_id)
        return known[0].end if known else ""
    except PitError:
        return ""
