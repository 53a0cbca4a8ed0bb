"""What is read of an attempt: bounded, harmless for any content, and put in order in spite of clocks."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pitools.launch import fingerprint
from pitools.launch.diagnosis import diagnose, evidence, explain, log_timestamps, timeline, tracebacks
from pitools.launch.diagnosis.bounded_read import one_line
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Cause, RankFailure

BEGAN, ENDED = "2026-11-22T01:00:00.000Z", "2026-11-22T01:20:00.000Z"
GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:64728."
TRACE = (
    'Traceback (most recent call last):\n  File "/opt/venv/lib/python3.11/site-packages/torch/d.py", line 3\n    w()\n'
)


def attempt(run_dir: Path, name: str = "0", *, ranks: int = 2, code: int | None = 1, restart_count: int = 0) -> Path:
    """An attempt's folder with its records, and no logs yet."""
    created = run_dir / "attempts" / name
    (created / "logs").mkdir(parents=True)
    start = AttemptStart(
        attempt=name,
        job_number=0,
        job_id="12",
        cluster="c",
        restart_count=restart_count,
        node_list="n",
        nodes=2,
        started=BEGAN,
    )
    run_folder.write_record(created / "start.json", start)
    (created / "hostfile").write_text("".join(f"n{rank // 2}\n" for rank in range(ranks)))
    if code is not None:
        run_folder.write_record(created / "exit.json", run_folder.AttemptExit(job_id="12", exit_code=code, ended=ENDED))
    return created


def fail(made: Path, rank: int, t: str, error: str, message: str, source: str = "train.py") -> None:
    trace = f'Traceback (most recent call last):\n  File "/home/ada/{source}", line 7, in step\n    raise {error}()\n'
    rank_failure = RankFailure(
        t=t,
        rank=rank,
        node=f"n{rank // 2}",
        exit_code=1,
        error=error,
        message=message,
        trace=f"{trace}{error}: {message}",
    )
    run_folder.write_record(made / "failures" / f"{rank}.json", rank_failure)


def cascade(made: Path, rank: int, t: str) -> None:
    rank_failure = RankFailure(
        t=t, rank=rank, node=f"n{rank // 2}", exit_code=1, error="RuntimeError", message=GONE[14:], trace=TRACE + GONE
    )
    run_folder.write_record(made / "failures" / f"{rank}.json", rank_failure)


def judge(run_dir: Path, name: str = "0") -> Cause:
    return diagnose.diagnose_attempt(run_dir, run_dir / "attempts" / name)


def test_clocks_that_differ(tmp_path: Path) -> None:
    """Complaints with earlier times than the fault, by a clock 2 s slow, are still what followed."""
    created = attempt(tmp_path, ranks=8)
    fail(created, 5, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop")
    for rank in (0, 1, 2, 3, 4, 6, 7):
        cascade(created, rank, "2026-11-22T01:19:56.100Z")
    (created / "first_failure").write_text("1 0 n0\n")
    cause = judge(tmp_path)
    assert (cause.kind, cause.rank, cause.confidence) == ("program", 5, "certain")


def test_the_first_of_two_different_faults(tmp_path: Path) -> None:
    """Of two faults minutes apart the first decides; of two within clocks' reach, who left word first."""
    created = attempt(tmp_path, ranks=4)
    fail(created, 3, "2026-11-22T01:10:00.000Z", "OSError", "x")
    fail(created, 0, "2026-11-22T01:15:00.000Z", "KeyError", "y")
    assert judge(tmp_path).rank == 3
    (created / "cause.json").unlink()
    fail(created, 0, "2026-11-22T01:10:01.500Z", "KeyError", "y")
    (created / "first_failure").write_text("1 0 n0\n")
    assert judge(tmp_path).rank == 0


def test_a_killed_rank_goes_before_those_that_could_still_speak(tmp_path: Path) -> None:
    """Rank 1 was killed and left no word; what rank 0's own code then raised is not the cause."""
    created = attempt(tmp_path)
    fail(created, 0, "2026-11-22T01:19:59.000Z", "RuntimeError", "peer lost")
    (created / "first_failure").write_text("1 0 n0\n")
    (created / "logs" / "srun.err").write_text(
        "2026-11-22T01:19:58.900Z srun: error: n0: task 1: Killed\n"
        "2026-11-22T01:19:59.100Z srun: error: n0: task 0: Exited with exit code 1\n"
    )
    cause = judge(tmp_path)
    assert (cause.kind, cause.confidence, cause.rank, cause.signal, cause.nodes) == ("node", "guess", 1, 9, ())


def test_what_a_signal_makes_ranks_raise_is_no_fault(tmp_path: Path) -> None:
    """A handler that raises at SIGTERM is how that rank ended."""
    created = attempt(tmp_path)
    (created / "signals.jsonl").write_text(
        '{"schema":"pit.signal/1","t":"2026-11-22T01:19:50.000Z","signal":"SIGTERM","seconds_to_limit":5.0}\n'
    )
    fail(created, 0, "2026-11-22T01:19:51.000Z", "Preempted", "told to stop")
    assert judge(tmp_path).kind == "time-limit"


@pytest.mark.parametrize(
    ("saved_at", "recorded", "error", "expected"),
    [
        ("01:18:40", False, "", "time-limit"),  # Slurm's notice is in nobody's record, and not before 01:17:30
        ("01:18:40", False, "Stopping", "time-limit"),
        ("01:18:40", False, "MemoryError", "memory"),
        ("01:10:00", False, "Stopping", "program"),
        ("01:19:20", True, "Stopping", "time-limit"),
        ("01:18:40", True, "", "unknown"),
    ],
)
def test_a_save_after_the_notice_and_an_end_of_the_programs_own(
    tmp_path: Path, saved_at: str, recorded: bool, error: str, expected: str
) -> None:
    """Whatever code it ended with: the program was told to stop, and has saved. An older save is no answer."""
    created = attempt(tmp_path, code=3)
    start = json.loads((created / "start.json").read_text()) | {"time_limit_at": "2026-11-22T01:21:00.000Z"}
    (created / "start.json").write_text(json.dumps(start))
    (tmp_path / "plan.json").write_text('{"job": {"signal": "USR2@120"}}')
    (created / "first_failure").write_text("3 0 n0\n")
    if error:
        fail(created, 0, "2026-11-22T01:19:50.000Z", error, "so")
    if recorded:
        (created / "signals.jsonl").write_text(
            '{"schema":"pit.signal/1","t":"2026-11-22T01:19:10.000Z","signal":"SIGUSR2","seconds_to_limit":110.0}\n'
        )
    (tmp_path / "progress").write_text("97\n")
    seconds = datetime.fromisoformat(f"2026-11-22T{saved_at}Z").timestamp()
    os.utime(tmp_path / "progress", (seconds, seconds))
    cause = judge(tmp_path)
    assert (cause.kind, cause.progressed, cause.saved_steps) == (expected, True, 97), cause.reason


@pytest.mark.parametrize("where", ["start.json", "exit.json", "hang.json", "failures/0.json", "cause.json", "hostfile"])
def test_half_written_records(tmp_path: Path, where: str) -> None:
    """A record cut short says nothing, and hides nothing."""
    created = attempt(tmp_path)
    fail(created, 1, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop")
    (created / where).parent.mkdir(exist_ok=True)
    (created / where).write_bytes(b'{"schema":"pit.')
    assert (judge(tmp_path).kind, judge(tmp_path).rank) == ("program", 1)


def test_an_attempt_without_anything(tmp_path: Path) -> None:
    """An empty folder, or none at all, is unknown and never finished."""
    (tmp_path / "attempts" / "0").mkdir(parents=True)
    assert judge(tmp_path).kind == "unknown"
    assert diagnose.diagnose_attempt(tmp_path, tmp_path / "attempts" / "7").kind == "unknown"


def test_slurm_began_the_job_anew(tmp_path: Path) -> None:
    """An attempt without an end, after which Slurm restarted its job, was lost with its node or preempted."""
    attempt(tmp_path, code=None)
    attempt(tmp_path, "1", code=None, restart_count=1)
    assert (judge(tmp_path).kind, judge(tmp_path).confidence) == ("node", "guess")
    assert judge(tmp_path, "1").kind == "unknown"


def test_a_cause_only_becomes_surer(tmp_path: Path) -> None:
    """A guess gives way to Slurm's word; a certain cause stays, whatever is found later."""
    from pitools.slurm.records import AccountingRow

    created = attempt(tmp_path, code=None)
    assert judge(tmp_path).kind == "unknown"
    accounting_row = AccountingRow(job_id="12", raw_id="12", state="PREEMPTED")
    assert diagnose.diagnose_attempt(tmp_path, created, accounting=accounting_row).kind == "preempted"
    fail(created, 1, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop")
    assert judge(tmp_path).kind == "preempted"


def test_accounting_of_another_start_of_the_job(tmp_path: Path) -> None:
    """What accounting says of the start before, or of a job whose later attempt it ended, is not this attempt's."""
    from pitools.slurm.records import AccountingRow

    created = attempt(tmp_path)
    old = AccountingRow(
        job_id="12", raw_id="12", state="NODE_FAIL", start="2026-11-22T00:00:00Z", end="2026-11-22T00:59:00Z"
    )
    assert evidence.gather_evidence(tmp_path, created, slurm=old).accounting is None
    now = AccountingRow(
        job_id="12", raw_id="12", state="TIMEOUT", start="2026-11-22T00:59:59Z", end="2026-11-22T02:00:00Z"
    )
    assert evidence.gather_evidence(tmp_path, created, slurm=now).accounting == now
    attempt(tmp_path, "1")
    assert evidence.gather_evidence(tmp_path, created, slurm=now).accounting is None


def test_cancelled_by_a_person(tmp_path: Path) -> None:
    """`pit launch cancel` while the attempt ran is certain; one before it began says nothing of it."""
    attempt(tmp_path, code=143)
    event = '{"schema":"pit.event/1","t":"%s","event":"cancel","detail":{}}\n'
    (tmp_path / "events.jsonl").write_text(event % "2026-11-21T01:19:00.000Z")
    assert judge(tmp_path).kind == "unknown"
    (tmp_path / "events.jsonl").write_text(event % "2026-11-22T01:19:00.000Z")
    assert (judge(tmp_path).kind, judge(tmp_path).confidence) == ("cancelled", "certain")
    (tmp_path / "attempts" / "0" / "cause.json").unlink()  # a certain cause is not judged again
    withdrawn = event + event.replace("cancel", "reopened")  # by `resume --force`
    (tmp_path / "events.jsonl").write_text(withdrawn % (("2026-11-22T01:19:00.000Z",) * 2))
    assert judge(tmp_path).kind == "unknown"


def test_five_hundred_ranks(tmp_path: Path) -> None:
    """Of 500 interleaved ranks with 64 KiB of output each the one that began it is found, within seconds."""
    created = attempt(tmp_path, ranks=500)
    noise = "".join(f"step {step} error of prediction 0.01\n" for step in range(1800))
    for rank in range(500):
        text = f"[rank{rank}]: {TRACE}[rank{rank}]: {GONE}\n"
        if rank == 321:
            text = "CUDA error: uncorrectable ECC error encountered\nterminate called\n"
        (created / "logs" / f"{rank}.out").write_text(noise + text)
    lines = ["srun: error: n160: task 321: Aborted (core dumped)", "srun: Terminating StepId=12.0"]
    lines += [f"srun: error: n{node}: tasks {2 * node}-{2 * node + 1}: Exited with exit code 1" for node in range(160)]
    (created / "logs" / "srun.err").write_text("\n".join(lines) + "\n")
    began = time.process_time()
    cause = judge(tmp_path)
    assert (cause.kind, cause.rank, cause.nodes) == ("gpu", 321, ("n160",))
    assert time.process_time() - began < 8


def test_a_huge_log_is_read_at_its_end(tmp_path: Path) -> None:
    """A sparse log of 100 GB costs no more than a small one."""
    created = attempt(tmp_path)
    with (created / "logs" / "1.out").open("wb") as file:
        file.truncate(100 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\nTraceback (most recent call last):\n  File "/home/ada/t.py", line 1\n    x\nMemoryError\n')
    began = time.process_time()
    assert judge(tmp_path).kind == "memory"
    assert time.process_time() - began < 1


def test_a_fault_under_megabytes_of_complaints(tmp_path: Path) -> None:
    """Where the end of a log has only complaints, more of it is read."""
    created = attempt(tmp_path)
    (created / "logs" / "srun.err").write_text("srun: error: n0: task 1: Exited with exit code 1\n")
    complaint = f"n0:1:1 [0] NCCL WARN {'x' * 80}\n" * 8000
    (created / "logs" / "1.out").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n" + complaint)
    assert judge(tmp_path).kind == "memory"


def test_a_normal_attempt_is_judged_at_once(tmp_path: Path) -> None:
    """Two ranks with ordinary logs: less than 200 ms."""
    created = attempt(tmp_path)
    for rank in range(2):
        (created / "logs" / f"{rank}.out").write_text("step 1 loss 0.5\n" * 100_000)
    fail(created, 1, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop")
    judge(tmp_path)
    (created / "cause.json").unlink()
    began = time.process_time()
    judge(tmp_path)
    assert time.process_time() - began < 0.2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=st.binary(max_size=3000),
    said=st.binary(max_size=500),
    cut=st.sampled_from(
        [b"", b"\x1b]0;", b"Traceback (most recent call last):\n", b"srun: error: n1: tasks 0-99999999: "]
    ),
)
def test_any_bytes_are_harmless(tmp_path: Path, log: bytes, said: bytes, cut: bytes) -> None:
    """Whatever the logs hold, there is a cause, it can be kept, and nothing in it reaches a terminal as a command."""
    folder = tmp_path / "attempts" / "0"
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "cause.json").unlink(missing_ok=True)
    (folder / "logs" / "0.out").write_bytes(log + cut + b"\x1b[2J NCCL WARN \xe2\x80\xae" + said)
    (folder / "logs" / "srun.err").write_bytes(cut + said + b"\n" + cut + b"Killed\n" + log)
    cause = judge(tmp_path)
    assert msgspec.json.decode((folder / "cause.json").read_bytes(), type=Cause) == cause
    assert all(line.isprintable() for line in explain.explain_run(tmp_path))


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    """A log that is a link to a secret, or a pipe that nobody writes to, is left alone."""
    created = attempt(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("NCCL WARN password\n")
    (created / "logs" / "0.out").symlink_to(secret)
    os.mkfifo(created / "logs" / "1.out")
    (created / "hang.json").symlink_to(secret)
    assert "password" not in judge(tmp_path).reason + str(judge(tmp_path).evidence)


def test_times_of_lines() -> None:
    """The ways programs write times are read; those outside the attempt are no clocks."""
    within = log_timestamps.make_span(BEGAN, ENDED)
    assert (
        log_timestamps.timestamp_of_line("2026-11-22T01:10:00.250Z srun: error", within) == "2026-11-22T01:10:00.250Z"
    )
    assert (
        log_timestamps.timestamp_of_line("[rank0]:[E1122 01:10:00.250000000 Pro.cpp:6]", within)
        == "2026-11-22T01:10:00.250Z"
    )
    assert log_timestamps.timestamp_of_line(
        "E0000 00:00:1795310000.250 1 a.cc:1]", log_timestamps.TimeSpan(None, None)
    ).startswith("2026-11-2")
    assert log_timestamps.timestamp_of_line("2026-11-22 03:10:00,250+02:00 INFO", within) == "2026-11-22T01:10:00.250Z"
    assert (
        log_timestamps.timestamp_of_line("[Sun Nov 22 01:10:00 2026] NVRM: Xid", within) == "2026-11-22T01:10:00.000Z"
    )
    for text in ("2019-01-01 00:00:00 a date in data", "2026-13-45 99:99:99", "E9999 88:77:66.123456", "no time"):
        assert log_timestamps.timestamp_of_line(text, within) == ""


def test_fingerprints() -> None:
    """The same failure has one fingerprint on another day, rank and path; another place or type has another."""
    trace = 'File "/a/train.py", line 7, in step\n'
    one = fingerprint.fingerprint_exception("ValueError", "batch 7 at 0x7f00 of /data/a/3.zarr is bad", trace)
    assert one == fingerprint.fingerprint_exception(
        "ValueError", "batch 12 at 0x9e of /other/b.zarr is bad", trace.replace("/a/", "/b/c/")
    )
    assert one != fingerprint.fingerprint_exception("KeyError", "batch 7 at 0x7f00 of /data/a/3.zarr is bad", trace)
    assert one != fingerprint.fingerprint_exception(
        "ValueError", "batch 7 at 0x7f00 of /data/a/3.zarr is bad", trace.replace("step", "load")
    )
    assert fingerprint.fingerprint_exit("exit code 7") != fingerprint.fingerprint_exit("exit code 8")
    assert fingerprint.fingerprint_exception("", "x", "") == ""


def test_a_record_and_a_log_have_one_fingerprint(tmp_path: Path) -> None:
    """A failure known from its record, and the same one known only from its log, are the same failure."""
    created = attempt(tmp_path)
    fail(created, 1, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop of 7")
    first = judge(tmp_path).fingerprint
    record = json.loads((created / "failures" / "1.json").read_text())
    (created / "failures" / "1.json").unlink()
    (created / "cause.json").unlink()
    (created / "logs" / "1.out").write_text(record["trace"].replace("of 7", "of 9") + "\n")
    assert judge(tmp_path).fingerprint == first != ""


def test_the_innermost_raise_tells_whose_exception_it_is() -> None:
    """A `raise` in the user's file is the user's; the same type out of a call, or in a library, is not."""
    own = tracebacks.last_traceback(
        'Traceback (most recent call last):\n  File "/u/a.py", line 1, in f\n    raise X("y")\nX: y\n'
    )
    call = tracebacks.last_traceback(
        'Traceback (most recent call last):\n  File "/u/a.py", line 1, in f\n    x.cuda()\nX: y\n'
    )
    library = tracebacks.last_traceback(TRACE.replace("w()", "raise X()") + "X: y\n")
    assert [chain[0].raised_by_user for chain in (own, call, library)] == [True, False, False]


def test_nodes_are_never_all_to_blame(tmp_path: Path) -> None:
    """What every node of a job says is at fault on none of them."""
    created = attempt(tmp_path, ranks=4)
    (created / "logs" / "srun.err").write_text("srun: error: Node failure on n0\nsrun: error: Node failure on n1\n")
    observed = evidence.gather_evidence(tmp_path, created)
    assert timeline.build_timeline(observed).lost_nodes == ()
    assert (judge(tmp_path).kind, judge(tmp_path).nodes) == ("node", ("n0",))


def test_a_line_is_one_line() -> None:
    """Evidence is one printable line of bounded length."""
    text = one_line("a\x1b[31m\nb\t\u202ec" + "x" * 5000)
    assert text.isprintable()
    assert len(text) <= 300
    assert "\n" not in text


def test_why_says_what_only_followed(tmp_path: Path) -> None:
    """The text for people names what decided, what followed, and where each line stands."""
    created = attempt(tmp_path, ranks=4)
    fail(created, 1, "2026-11-22T01:19:58.000Z", "ValueError", "negative crop")
    for rank in (0, 2, 3):
        cascade(created, rank, f"2026-11-22T01:19:58.20{rank}Z")
    judge(tmp_path)
    text = "\n".join(explain.explain_run(tmp_path))
    assert text.count("consequence: another rank") == 1  # below the last of the lines it is about
    assert "program (certain): rank 1 on n0: ValueError: negative crop" in text
    assert "this decided the cause" in text
    assert "attempts/0/failures/0.json" in text
    assert "+1198.2 s" in text


def test_why_a_run_has_finished(tmp_path: Path) -> None:
    """A run that did well is not told what "followed"; what a program counts as safe is said where it logs no step."""
    created = attempt(tmp_path)
    run_folder.write_record(
        created / "exit.json", run_folder.AttemptExit(job_id="12", exit_code=0, ended="2026-11-22T01:20:00.000Z")
    )
    (tmp_path / "progress").write_text("120\n")
    assert "120 saved" in "\n".join(explain.explain_run(tmp_path) if judge(tmp_path) else ())
    assert "consequence" not in "\n".join(explain.explain_run(tmp_path))
    (tmp_path / "attempts" / "1").mkdir()
    assert list(explain.explain_run(tmp_path))[-1] == "attempt 1: not ended yet"


def test_attempts_of_one_job_share_its_output(tmp_path: Path) -> None:
    """What the job's output holds of the attempt before is not taken for this one's, an instant after it."""
    attempt(tmp_path, code=137)
    later = attempt(tmp_path, "1")
    start = AttemptStart(
        attempt="1",
        job_number=0,
        job_id="12",
        cluster="c",
        restart_count=0,
        node_list="n",
        nodes=2,
        started="2026-11-22T01:10:00.000Z",
    )
    run_folder.write_record(later / "start.json", start)
    (tmp_path / "slurm-12.out").write_text(
        "srun: unstamped words\n2026-11-22T01:09:59.900Z srun: error: n0: task 1: Killed\n"
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n"
        "2026-11-22T01:19:58.000Z srun: error: n0: task 0: Bus error\n"
    )
    assert (judge(tmp_path, "1").rank, judge(tmp_path, "1").signal) == (0, 7)
    assert judge(tmp_path, "1").kind == "storage"


def test_what_two_nodes_cannot_start_one_after_the_other_is_nowhere(tmp_path: Path) -> None:
    """One node that does not find a program is at fault; when the next does not either, neither is."""
    for name, node in (("0", "n0"), ("1", "n1")):
        created = attempt(tmp_path, name, ranks=4, code=127)
        (created / "logs" / "srun.err").write_text(f"srun: error: {node}: task 0: Exited with exit code 127\n")
    first = judge(tmp_path)
    assert (first.kind, first.nodes) == ("node", ("n0",))
    assert (judge(tmp_path, "1").kind, judge(tmp_path, "1").nodes) == ("program", ())


def test_a_place_to_stage_to_that_two_attempts_cannot_use_is_nowhere(tmp_path: Path) -> None:
    """The first time it is the node's disk; the second time the site's paths.nvme."""
    for name, node in (("0", "n0"), ("1", "n1")):
        created = attempt(tmp_path, name, ranks=4, code=4)
        (created / "logs" / "srun.err").write_text(f"srun: error: {node}: task 0: Exited with exit code 4\n")
        (created / "logs" / f"stage.{node}.out").write_text(f"pit: error: Not a directory\n  where: /nvme/{node}\n")
    first = judge(tmp_path)
    assert (first.kind, first.nodes) == ("storage", ("n0",))
    assert (judge(tmp_path, "1").kind, judge(tmp_path, "1").nodes) == ("program", ())


NO_FAULTS = (
    "step 7 done",
    "2019-01-01 00:00:00 the date of a recording",
    "2031-01-01T00:00:00Z a certificate expires",
    "restored what was saved at 2026-11-22 01:02:03",
    "2026-11-22T01:10:00.000Z srun: warning: can't run 1 processes on 2 nodes",
    "note: no oom_kill event so far",
)
FAULTS = ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.", "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, fell")
BETWEEN = "x" * 400_000


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(NO_FAULTS) | st.sampled_from(FAULTS) | st.integers(0, 7), max_size=25),
    gap=st.none() | st.integers(0, 25),
    name=st.sampled_from(["slurm-12.out", "attempts/0/logs/srun.err"]),
)
@example(lines=[NO_FAULTS[5]] * 4 + [FAULTS[0], NO_FAULTS[5]], gap=None, name="attempts/0/logs/srun.err")
@example(lines=[3, 1], gap=1, name="attempts/0/logs/srun.err")
def test_the_faults_of_any_log(tmp_path: Path, lines: list[str | int], gap: int | None, name: str) -> None:
    """Whatever dates and texts stand between, the exits of ranks keep the order of the log, and no fault is missed."""
    created = tmp_path / "attempts" / "0" if (tmp_path / "attempts").exists() else attempt(tmp_path, ranks=8)
    for path in (tmp_path / "slurm-12.out", created / "logs" / "srun.err"):
        path.unlink(missing_ok=True)
    texts = [f"srun: error: n{one // 2}: task {one}: Killed" if isinstance(one, int) else one for one in lines]
    if gap is not None:
        texts.insert(gap, BETWEEN)
    (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    os.utime(tmp_path / name, (0, datetime.fromisoformat(ENDED).timestamp()))
    observed = evidence.gather_evidence(tmp_path, created)
    assert [end.rank for end in observed.rank_exits] == [one for one in lines if isinstance(one, int)]
    orders = [end.order for end in observed.rank_exits]
    assert orders == sorted(set(orders))
    assert {piece.text for piece in observed.evidence} == {text for text in texts if text in FAULTS}
