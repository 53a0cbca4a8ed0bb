"""What a run's folder holds at one moment: what `status` makes a run's record of."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.launch.diagnosis import evidence
from pitools.launch.plan import Plan, load_plan
from pitools.launch.recovery import apply_decision
from pitools.launch.submission import submissions
from pitools.run import cancel_request, run_folder, steps
from pitools.run.attempt_records import Cause, Decision, Verdict

_TAIL_BYTES = 4096  # bytes: a step's line is a few hundred


class RunSnapshot(NamedTuple):
    """What a run's folder holds at one moment. attempt: the newest's name. exit: how it did.

    damaged: what is wrong with the record of that, "" for nothing: it has ended, and only Slurm knows how. created:
    when the folder was made, however many jobs it has had since; where that is not known, when its job was.
    """

    run_dir: Path
    plan: Plan
    job: run_folder.JobRef | None
    attempt: str
    attempts: int
    steps: int
    exit: run_folder.AttemptExit | None
    cause: Cause | None
    decision: Decision | None
    verdict: Verdict | None
    cancel: cancel_request.CancelRequest | None
    damaged: str
    created: str

    @classmethod
    def read(cls, run_dir: Path) -> RunSnapshot:
        """Read it. Raises DataError for what is no run."""
        made = run_folder.attempt_dirs(run_dir)
        last = made[-1] if made else run_dir / "attempts"
        step = last_step(last)
        ended, damaged = None, ""
        try:
            ended = run_folder.read_record(last / "exit.json", run_folder.AttemptExit)
        except DataError as error:
            is_empty = not (last / "exit.json").stat().st_size
            what = "empty, as a full disk leaves a file" if is_empty else error.message
            damaged = f"attempts/{last.name}/exit.json is {what}"
        job, first = _newest_job(run_dir), run_folder.first_event(run_dir)
        return cls(
            run_dir,
            load_plan(run_dir),
            job,
            made[-1].name if made else "",
            len(made),
            step.step + 1 if step else evidence.saved_steps(run_dir),
            ended,
            run_folder.read_or_none(last / "cause.json", Cause),
            run_folder.read_or_none(last / "decision.json", Decision),
            apply_decision.read_verdict(run_dir),
            cancel_request.last_cancel(run_dir),
            damaged,
            first.t if first and first.event == "created" else job.submitted if job else "",
        )

    @property
    def job_id(self) -> str:
        """Its newest job's, "" where it has none."""
        return self.job.job_id if self.job else ""

    @property
    def continues(self) -> bool:
        """Whether the last attempt was decided not to be the last."""
        return bool(self.decision and self.decision.action in ("retry", "resubmit", "wait"))


def _newest_job(run_dir: Path) -> run_folder.JobRef | None:
    """The run's newest job; from its own folder where `<run>/job.json` cannot be read. Raises DataError."""
    try:
        return run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    except DataError:
        return submissions.latest_job(run_dir)


def last_step(attempt: Path) -> steps.Step | None:
    """The last step that rank 0 wrote down, from the end of its log; None before there is one."""
    try:
        with (attempt / "steps" / "0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return decode_json(lines[-1], steps.Step) if lines else None
    except (OSError, msgspec.DecodeError):
        return None
