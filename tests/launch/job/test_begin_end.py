"""The beginning and the end of an attempt: a folder of its own, leave, and an exit code whatever else fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import ClusterError, UsageError
from pitools.launch import exit_codes, time_limit_signal
from pitools.launch.diagnosis import evidence
from pitools.launch.job import __main__ as program
from pitools.launch.job import begin_attempt, end_attempt, fencing, job_context, job_recovery, signals, wait_for
from pitools.launch.recovery import apply_decision
from pitools.launch.submission import grant, submissions
from pitools.run import attempt_records as records
from pitools.run import cancel_request, run_folder
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow, SlurmJob

ENDS = "2030-01-01T00:00:00.000Z"


def job(run_dir: Path, **more: object) -> job_context.JobContext:
    created = job_context.JobContext(
        run_dir=run_dir,
        job_number=0,
        job_id="7",
        cluster="alpha",
        restart_count=0,
        node_list="n[1-2]",
        nodes=2,
        task="",
        mode="none",
    )
    return msgspec.structs.replace(created, **more)


def test_attempts_are_counted_over_all_jobs(tmp_path: Path) -> None:
    """Each beginning makes the first free number, with its start beside it."""
    assert [begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS).name for _ in range(3)] == ["0", "1", "2"]
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path, job_id="8", job_number=1), time_limit_at=ENDS)
    start = run_folder.read_record(attempt_dir / "start.json", records.AttemptStart)
    assert start is not None
    assert (start.attempt, start.job_number, start.job_id, start.node_list, start.time_limit_at) == (
        "3",
        1,
        "8",
        "n[1-2]",
        ENDS,
    )


def test_two_at_once_get_two(tmp_path: Path) -> None:
    """Making the folder decides: no number is given twice."""
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: begin_attempt.create_attempt_dir(job(tmp_path)).name, range(24)))
    assert sorted(map(int, names)) == list(range(24))


def test_a_task_of_an_array_keeps_its_name(tmp_path: Path) -> None:
    """`<task>.<restart>`, as before."""
    assert begin_attempt.create_attempt_dir(job(tmp_path, task="3", restart_count=1)).name == "3.1"


def test_of_two_jobs_one_has_leave(tmp_path: Path) -> None:
    """A second job of the same number makes no attempt, and ends with 75; the first may begin again."""
    (tmp_path / "jobs" / "1").mkdir(parents=True)
    begin_attempt.begin_attempt(job(tmp_path, job_number=1), time_limit_at=ENDS)
    begin_attempt.begin_attempt(job(tmp_path, job_number=1, restart_count=1), time_limit_at=ENDS)
    with pytest.raises(begin_attempt.AttemptRefused) as caught:
        begin_attempt.begin_attempt(job(tmp_path, job_number=1, job_id="8"), time_limit_at=ENDS)
    assert caught.value.code == exit_codes.NOT_GRANTED
    assert grant.read_grant(tmp_path / "jobs" / "1") == "run.7"
    assert len(run_folder.attempt_dirs(tmp_path)) == 2


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("refused", [True, False])
def test_a_cancel_of_root_s_is_not_carried_out_before_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """One that Slurm refuses while the job begins does not end the run; one that stays pending does."""
    run_folder.write_record(tmp_path / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))
    os.chown(tmp_path, 12345, -1)
    monkeypatch.setattr(begin_attempt, "_CANCEL_TIMEOUT_S", 1e9 if refused else 0.0)
    monkeypatch.setattr(wait_for.time, "sleep", lambda _: (tmp_path / "cancel.json").unlink())
    with contextlib.nullcontext() if refused else pytest.raises(begin_attempt.AttemptRefused):
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    assert (apply_decision.read_verdict(tmp_path) is None, len(run_folder.attempt_dirs(tmp_path))) == (refused, refused)


def test_a_run_that_is_to_be_cancelled_is_not_begun(tmp_path: Path) -> None:
    """A job that began before Slurm took its cancel ends at once, and the run is cancelled."""
    run_folder.write_record(tmp_path / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))
    with pytest.raises(begin_attempt.AttemptRefused) as caught:
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    verdict = apply_decision.read_verdict(tmp_path)
    assert verdict is not None
    assert (caught.value.code, verdict.code, verdict.kind) == (1, "cancelled", "cancelled")
    assert not (tmp_path / "attempts").exists()


@pytest.mark.parametrize(("kind", "code"), [("succeeded", 0), ("program", 3)])
def test_a_run_that_is_over_is_not_begun(tmp_path: Path, kind: records.CauseKind, code: int) -> None:
    """A verdict ends the job with the run's own exit code, whoever started it again."""
    apply_decision.write_verdict(tmp_path, kind, "so", code)
    with pytest.raises(begin_attempt.AttemptRefused) as caught:
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    assert caught.value.code == code
    assert not run_folder.attempt_dirs(tmp_path)


def test_one_of_two_sees_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose leave is taken while it begins has shown itself before it looks; it leaves no attempt behind."""
    (tmp_path / "jobs" / "0").mkdir(parents=True)
    real, shown = fencing.superseded_by, []

    def taken_by_now(asks: job_context.JobContext) -> str:
        shown.extend(path for path in run_folder.attempt_dirs(tmp_path) if (path / "start.json").exists())
        os.replace(_link(tmp_path, grant.REVOKED), tmp_path / "jobs" / "0" / grant.GRANT_LINK)
        return real(asks)

    monkeypatch.setattr(fencing, "superseded_by", taken_by_now)
    with pytest.raises(begin_attempt.AttemptRefused) as caught:
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    assert (caught.value.code, len(shown), run_folder.attempt_dirs(tmp_path)) == (exit_codes.NOT_GRANTED, 1, [])


def test_a_revocation_that_an_nfs_client_had_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job's folder shows only once it is revalidated ends the attempt."""
    (tmp_path / "jobs" / "0").mkdir(parents=True)

    def revalidate(folder: Path) -> None:
        if folder == tmp_path / "jobs" / "0":
            os.replace(_link(tmp_path, grant.REVOKED), folder / grant.GRANT_LINK)

    monkeypatch.setattr(begin_attempt, "revalidate_nfs", revalidate)
    with pytest.raises(begin_attempt.AttemptRefused) as caught:
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    assert (caught.value.code, run_folder.attempt_dirs(tmp_path)) == (exit_codes.NOT_GRANTED, [])


def _link(at: Path, word: str) -> Path:
    (at / "link").symlink_to(word)
    return at / "link"


def test_the_time_left_is_that_after_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that came back with the last minute: another attempt would not fit into what is left."""
    ends = timestamps.to_rfc3339(datetime.now(UTC) + timedelta(seconds=0.3))
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ends)
    left: list[float] = []

    def away(left_s: float) -> bool:
        left.append(left_s)
        time.sleep(0.4)
        return False

    def judged(*_: object, seconds_left: float, **__: object) -> records.Decision:
        left.append(seconds_left)
        return records.Decision(attempt="0", action="resubmit", kind="node", reason="")

    monkeypatch.setattr(end_attempt.wait_for, "wait_for_slurm", away)
    monkeypatch.setattr(end_attempt.job_recovery, "diagnose_and_decide", judged)
    end_attempt.end_attempt(job(tmp_path, mode="run"), attempt_dir, 9, in_slurm=True)
    assert left[0] > 0 > left[1]


@pytest.mark.parametrize("code", [1, exit_codes.STOPPED_FOR_RESUME])
def test_a_preemption_is_asked_for_after_any_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Ranks that Slurm told to end may end in their own way: their job begins no other attempt before its end."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    asked: list[object] = []

    def judged(*_: object, **more: object) -> records.Decision:
        asked.append((more["accounting_row"], more["seconds_left"], more["before_slurm_ends"]))
        return records.Decision(attempt="0", action="retry", kind="preempted", reason="")

    row = AccountingRow(job_id="7", raw_id="7", state="PREEMPTED")
    record = SlurmJob(job_id="7", raw_id="7", state="RUNNING", preempted=timestamps.now_rfc3339())
    monkeypatch.setattr(end_attempt.wait_for, "wait_for_slurm", lambda _: False)
    monkeypatch.setattr(end_attempt.job_recovery, "query_job", lambda _: record)
    monkeypatch.setattr(end_attempt.job_recovery, "diagnose_and_decide", judged)
    assert end_attempt.end_attempt(job(tmp_path, mode="run"), attempt_dir, code, in_slurm=True) == code
    assert asked == [(row, 0.0, True)]


def test_a_suspended_job_has_its_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm moves the end of a job by the time that it was suspended: what fails then is tried again in the job."""
    past, end = (timestamps.to_rfc3339(datetime.now(UTC) + timedelta(hours=hours)) for hours in (-1, 2))
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=past)
    left: list[float] = []

    def judged(*_: object, seconds_left: float, **__: object) -> records.Decision:
        left.append(seconds_left)
        return records.Decision(attempt="0", action="retry", kind="network", reason="")

    record = SlurmJob(job_id="7", raw_id="7", state="RUNNING", end=end)
    monkeypatch.setattr(end_attempt.wait_for, "wait_for_slurm", lambda _: False)
    monkeypatch.setattr(end_attempt.job_recovery, "query_job", lambda _: record)
    monkeypatch.setattr(end_attempt.job_recovery, "diagnose_and_decide", judged)
    end_attempt.end_attempt(job(tmp_path, mode="run"), attempt_dir, 9, in_slurm=True)
    assert left[0] > 7000


@pytest.mark.parametrize(("action", "word"), [("retry", program.RETRY), ("stop", "9")])
def test_what_the_script_is_told(
    tmp_path: Path,
    repo: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: Literal["retry", "stop"],
    word: str,
) -> None:
    """One word for another attempt, which the script knows, or its own exit code."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    decided = records.Decision(attempt="0", action=action, kind="node", reason="")
    monkeypatch.setattr(end_attempt.wait_for, "wait_for_slurm", lambda _: False)
    monkeypatch.setattr(end_attempt.job_recovery, "diagnose_and_decide", lambda *_, **__: decided)
    monkeypatch.setattr(job_context, "load_context", lambda _: job(tmp_path, mode="run"))
    monkeypatch.setenv("PIT_ATTEMPT_DIR", str(attempt_dir))
    assert program.main(["end", "9"]) == 0
    assert capsys.readouterr().out == f"{word}\n"
    assert (
        f'[ "$result" = {program.RETRY} ] || exit "$result"' in (repo / "sbatch_templates" / "_loop.sh.j2").read_text()
    )


def test_the_first_failure_is_the_attempts(tmp_path: Path) -> None:
    """srun returns the highest code of all; what counts is the first rank's."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    (attempt_dir / "first_failure").write_text("3 1 n2\n")
    assert end_attempt.end_attempt(job(tmp_path), attempt_dir, 143) == 3
    record = run_folder.read_record(attempt_dir / "exit.json", run_folder.AttemptExit)
    assert record is not None
    assert record.exit_code == 3


def test_what_fails_of_recovery_does_not_hide_the_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose plan is damaged still ends with its ranks' code."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    (tmp_path / "plan.json").write_text("{")
    assert end_attempt.end_attempt(job(tmp_path, mode="run"), attempt_dir, 9) == 9
    assert "DataError" in capsys.readouterr().err
    assert (
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS).name == "1"
    )  # and an attempt that nobody could judge


@pytest.mark.parametrize("code", [0, 1])
def test_a_success_is_marked_after_its_record(tmp_path: Path, code: int) -> None:
    """An attempt whose record cannot be written has no mark."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    (attempt_dir / "exit.json").mkdir()
    with pytest.raises(ClusterError):
        end_attempt.end_attempt(job(tmp_path), attempt_dir, code)
    assert not (attempt_dir / records.SUCCEEDED).exists()
    (attempt_dir / "exit.json").rmdir()
    assert end_attempt.end_attempt(job(tmp_path), attempt_dir, code) == code
    assert (attempt_dir / records.SUCCEEDED).exists() == (code == 0)


def test_signals_are_written_down_with_what_is_left(tmp_path: Path) -> None:
    """Once each, though Slurm may send them to the script and to us; later ones again."""
    heard: list[int] = []
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    ears = signals.SignalRecorder(attempt_dir, heard.append)
    try:
        for number in (10, 10, 12):
            os.kill(os.getpid(), number)
    finally:
        ears.close()
    output = [
        msgspec.json.decode(line, type=records.SignalRecord)
        for line in (attempt_dir / "signals.jsonl").read_bytes().splitlines()
    ]
    assert [item.signal for item in output] == ["SIGUSR1", "SIGUSR2"]
    assert heard == [10, 12]
    assert output[0].seconds_to_limit is not None
    assert output[0].seconds_to_limit > 0
    with (attempt_dir / "signals.jsonl").open("a") as file:
        file.write('{"schema":"pit.signal/1","t":"SIGTERM","signal":"SIGHUP"}\n{"signal":"SIGTERM"\n')
    assert not evidence.was_signalled(attempt_dir)
    signals.append_signal(attempt_dir, 15, None)
    assert evidence.was_signalled(attempt_dir)


def test_how_far_recovery_goes(tmp_path: Path) -> None:
    """Nothing without a plan, for callables, or in an array; a ticket's allocation; a run's further jobs."""
    assert job_context.recovery_mode(tmp_path, {}) == "none"
    (tmp_path / "plan.json").write_text("{}")
    assert job_context.recovery_mode(tmp_path, {}) == "none"
    (tmp_path / "request.toml").write_text("")
    assert job_context.recovery_mode(tmp_path, {}) == "allocation"
    (tmp_path / "jobs").mkdir()
    assert job_context.recovery_mode(tmp_path, {}) == "run"
    assert job_context.recovery_mode(tmp_path, {"PIT_RECOVER": "allocation"}) == "allocation"
    assert job_context.recovery_mode(tmp_path, {"SLURM_ARRAY_TASK_ID": "1"}) == "none"


def test_the_job_says_its_number_by_its_name(tmp_path: Path) -> None:
    """`<run id>.<k>`; another name is the first job's."""
    names = ["r-1", "r-1.1", "r-1.12", "r-1.x", "r-12.1", "hello"]
    assert [job_context.job_number("r-1", name) for name in names] == [0, 1, 12, 0, 0, 0]
    with pytest.raises(UsageError, match="SLURM_JOB_ID"):
        job_context.load_context({"PIT_RUN_DIR": str(tmp_path)})


def test_the_notice_fits_the_framework() -> None:
    """JAX's preemption service listens to TERM; a site's longer grace makes the notice longer."""
    assert time_limit_signal.default_signal("jax") == "TERM@120"
    assert time_limit_signal.default_signal("torch", 300) == "USR2@300"
    assert time_limit_signal.default_signal("none", 1e9) == "USR2@65535"


def test_our_codes_are_free() -> None:
    """None is Slurm's 253, a signal's, or another's of ours."""
    ours = [
        exit_codes.NOT_GRANTED,
        exit_codes.RENDEZVOUS_FAILED,
        exit_codes.WRONG_RANK0_NODE,
        exit_codes.DATASET_MISSING,
        exit_codes.HUNG,
        exit_codes.ATTEMPT_NOT_STARTED,
        exit_codes.STOPPED_FOR_RESUME,
        exit_codes.NO_PORTS,
    ]
    assert len(set(ours)) == len(ours)
    assert not {253, *range(128, 193)} & set(ours)


def sent(run_dir: Path, *numbers: int, known: bool = True) -> None:
    """The run was sent as jobs of these numbers; the last one's sender may not have heard of it."""
    for number in numbers:
        submissions.record_intent(run_dir, number, Site(name="s"), ())
        if known or number != numbers[-1]:
            ref = run_folder.JobRef(job_id=str(7 + number), site="s", submitted=ENDS, job_number=number)
            run_folder.write_record(submissions.job_dir(run_dir, number) / "job.json", ref)


def test_a_job_that_was_followed_up_does_not_begin(tmp_path: Path) -> None:
    """Slurm puts it back after its successor was sent, and perhaps before its leave was taken; that one may begin."""
    sent(tmp_path, 0, 1)
    grant.claim(submissions.job_dir(tmp_path, 0), "run.7")
    with pytest.raises(begin_attempt.AttemptRefused, match="job 1 of the run") as caught:
        begin_attempt.begin_attempt(job(tmp_path, restart_count=1), time_limit_at=ENDS)
    assert caught.value.code == exit_codes.NOT_GRANTED
    assert begin_attempt.begin_attempt(job(tmp_path, job_number=1, job_id="8"), time_limit_at=ENDS).name == "0"


@pytest.mark.parametrize("refused", [False, True])
def test_what_its_own_end_began_it_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Killed while it sent its successor, then put back: it sends that one, and goes on itself where Slurm refuses."""
    sent(tmp_path, 0, 1, known=False)

    def finish(_: job_context.JobContext, number: int) -> None:
        if refused:
            shutil.rmtree(submissions.job_dir(tmp_path, number))
            raise ClusterError("Invalid account")
        sent(tmp_path, 0, 1)

    monkeypatch.setattr(job_recovery, "complete_submission", finish)
    if refused:
        assert begin_attempt.begin_attempt(job(tmp_path, restart_count=1), time_limit_at=ENDS).name == "0"
    else:
        with pytest.raises(begin_attempt.AttemptRefused, match="job 1 of the run"):
            begin_attempt.begin_attempt(job(tmp_path, restart_count=1), time_limit_at=ENDS)


def test_leave_is_asked_for_again_when_the_attempt_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows this job up takes its leave, and then looks for attempts: what came between leaves none."""
    sent(tmp_path, 0)
    make = begin_attempt.create_attempt_dir

    def late(one: job_context.JobContext) -> Path:
        created = make(one)
        (submissions.job_dir(tmp_path, 0) / "grant").unlink()
        grant.claim(submissions.job_dir(tmp_path, 0), grant.REVOKED)
        return created

    monkeypatch.setattr(begin_attempt, "create_attempt_dir", late)
    with pytest.raises(begin_attempt.AttemptRefused, match=grant.REVOKED):
        begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    assert run_folder.attempt_dirs(tmp_path) == []


@pytest.fixture
def went_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which 40 steps were safe when its first attempt ended, and whose checkpoints are not there."""
    monkeypatch.setattr(begin_attempt.wait_for, "STORAGE_TIMEOUT_S", 0.0)
    first = begin_attempt.begin_attempt(job(tmp_path, mode="run"), time_limit_at=ENDS)
    cause = records.Cause(attempt="0", kind="node", confidence="likely", reason="so", saved_steps=40)
    run_folder.write_record(first / "cause.json", cause)
    return tmp_path


@pytest.mark.parametrize("left", ["", "owner.json"])
@pytest.mark.parametrize("mode", ["run", "allocation"])
def test_a_run_whose_checkpoints_are_gone_is_stopped(went_far: Path, mode: str, left: str) -> None:
    """It does not begin anew where a store is not mounted or its checkpoints were removed; the verdict says how."""
    (went_far / "checkpoints" / left).mkdir(parents=True)
    with pytest.raises(begin_attempt.AttemptRefused, match=r"checkpoints.* 40 ") as caught:
        begin_attempt.begin_attempt(job(went_far, mode=mode), time_limit_at=ENDS)
    assert (caught.value.code, len(run_folder.attempt_dirs(went_far))) == (1, 1)
    verdict = run_folder.read_record(went_far / "verdict.json", records.Verdict)
    assert verdict is not None
    assert (verdict.state, verdict.kind, verdict.exit_code) == ("stopped", "storage", 1)
    assert f"echo 0 > {went_far}/progress" in verdict.reason
    with pytest.raises(begin_attempt.AttemptRefused, match=r"stopped: .*checkpoints"):
        begin_attempt.begin_attempt(job(went_far, mode="run"), time_limit_at=ENDS)


@pytest.mark.parametrize("left", ["step_40", "quarantine"])
def test_what_was_kept_there_and_is_no_good_is_not_waited_for(went_far: Path, left: str) -> None:
    """The store is there: damaged checkpoints, or ones that were set aside, are for the loop to go on without."""
    (went_far / "checkpoints" / left).mkdir(parents=True)
    assert begin_attempt.begin_attempt(job(went_far, mode="run"), time_limit_at=ENDS).name == "1"


def test_a_run_that_is_cancelled_while_it_waits_does_not_begin(went_far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verdict ends the wait."""
    monkeypatch.setattr(begin_attempt.wait_for, "STORAGE_TIMEOUT_S", 30.0)
    looks = iter(range(3))

    def cancelled(run_dir: Path) -> int:
        if next(looks) == 1:
            apply_decision.write_verdict(run_dir, "cancelled", "so")
        return 0

    monkeypatch.setattr(evidence, "saved_steps", cancelled)
    with pytest.raises(begin_attempt.AttemptRefused, match="stopped: so"):
        begin_attempt.begin_attempt(job(went_far, mode="allocation"), time_limit_at=ENDS)


def test_a_person_may_let_it_begin_anew(went_far: Path) -> None:
    """By the file in which a program with checkpoints of its own says how far it got."""
    (went_far / "progress").write_text("0\n")
    assert begin_attempt.begin_attempt(job(went_far, mode="run"), time_limit_at=ENDS).name == "1"


def test_checkpoints_that_come_back_are_gone_on_from(went_far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is mounted a moment late is waited for."""
    monkeypatch.setattr(begin_attempt.wait_for, "STORAGE_TIMEOUT_S", 30.0)
    looks = iter([0, 0])
    monkeypatch.setattr(evidence, "saved_steps", lambda run_dir: next(looks, 40))
    attempt_dir = begin_attempt.begin_attempt(job(went_far, mode="run"), time_limit_at=ENDS)
    start = run_folder.read_record(attempt_dir / "start.json", records.AttemptStart)
    assert start is not None
    assert start.saved_steps == 40


def test_retries_are_counted_by_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of one job: a run with many earlier jobs still retries in its newest."""
    monkeypatch.setattr(end_attempt, "_MAX_ATTEMPTS_PER_JOB", 3)
    for number in (0, 0, 0, 1):
        begin_attempt.begin_attempt(job(tmp_path, job_number=number), time_limit_at=ENDS)
    assert end_attempt._attempts_of_job(job(tmp_path, job_number=0)) == 3
    assert end_attempt._attempts_of_job(job(tmp_path, job_number=1)) == 1
