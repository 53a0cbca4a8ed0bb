"""Jobs from recorded answers, and names and comments that imitate Slurm."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.slurm import parse_jobs
from pitools.slurm.parse_jobs import JOB_FORMAT
from pitools.slurm.records import SlurmJob

Recorded = Callable[[str], str]
START = {"22.05": ("01:22:46", 11), "23.11": ("01:24:01", 9), "25.05": ("01:26:22", 9)}


def test_recorded_queue(recorded: Recorded, version: str, squeue_fields: tuple[str, ...]) -> None:
    """The queue of each version: a running job and a pending array exactly, the ids and states of all."""
    jobs = parse_jobs.parse_squeue(recorded("squeue_fixed.txt"), fields=squeue_fields, zone=UTC)
    by_id = {job.job_id: job for job in jobs}
    assert list(by_id) == ["6_[3-9%3]", "11+1", "6_0", "6_1", "6_2", "10", "11+0", "8", "7", "9", "4", "5"]
    clock, elapsed = START[version]
    hour, rest = clock.split(":", 1)
    assert by_id["4"] == SlurmJob(
        job_id="4",
        raw_id="4",
        state="RUNNING",
        name="train-a",
        user="root",
        account="lab",
        qos="low",
        partition="train",
        nodes=4,
        node_list="h[01-04]",
        start=f"2026-11-21T{clock}.000Z",
        end=f"2026-11-21T{int(hour) + 2:02d}:{rest}.000Z",
        time_limit_s=7200,
        elapsed_s=elapsed,
        priority=1010,
        gres="gpu:8",
        work_dir="/srv/slurm",
    )
    assert by_id["6_[3-9%3]"].array_task == "3-9%3"
    assert (by_id["6_2"].array_job_id, by_id["6_2"].array_task, by_id["6_2"].raw_id) == ("6", "2", "15")
    assert (by_id["11+1"].raw_id, by_id["11+1"].array_job_id) == ("12", "")
    assert by_id["5"].comment == "pit:run=r-1;k=v"
    assert by_id["7"].reason.endswith("DOWN, DRAINED or reserved for jobs in higher priority partitions")
    assert by_id["10"].start
    assert by_id["8"].start == ""
    assert by_id["10"].time_limit_s == 604800


def test_recorded_short_queue(recorded: Recorded) -> None:
    """A format of seven columns gives the same records with less in them."""
    fields = ("job_id", "state", "reason", "name", "qos", "nodes", "node_list")
    jobs = parse_jobs.parse_squeue(recorded("squeue_preempted_fixed.txt"), fields=fields)
    assert len(jobs) == 13
    assert [job.job_id for job in jobs if job.state == "RUNNING"] == ["11+1", "6_0", "6_1", "6_2", "4", "11+0", "5"]
    assert {job.raw_id for job in jobs if job.name == "sweep"} == {"6"}


@pytest.mark.parametrize(
    ("name", "count"),
    [("running", 1), ("shared", 1), ("array", 4), ("het", 2), ("pending", 1), ("preempted", 1)],
)
def test_recorded_details(recorded: Recorded, squeue_fields: tuple[str, ...], name: str, count: int) -> None:
    """scontrol and squeue tell the same of a job."""
    queue = {
        job.job_id: job for job in parse_jobs.parse_squeue(recorded("squeue_fixed.txt"), fields=squeue_fields, zone=UTC)
    }
    jobs = parse_jobs.parse_scontrol_jobs(recorded(f"job_{name}_o.txt"), UTC)
    assert len(jobs) == count
    for job in jobs:
        assert job.restarts == 0
        for field in (
            "raw_id",
            "array_job_id",
            "array_task",
            "name",
            "user",
            "account",
            "qos",
            "partition",
            "state",
            "reason",
            "nodes",
            "node_list",
            "time_limit_s",
            "priority",
            "gres",
            "comment",
            "work_dir",
        ):
            assert getattr(job, field) == getattr(queue[job.job_id], field), field


@given(st.text(), st.text(), st.text())
def test_any_name_and_comment_come_back(name: str, comment: str, folder: str) -> None:
    """Whatever a user calls a job, it is one job, with that name."""
    row = dict.fromkeys(JOB_FORMAT, "") | {"job_id": "7", "raw_id": "7", "state": "RUNNING", "name": name}
    row |= {"comment": comment, "work_dir": folder}
    text = "|7f3a9c|".join(row.values()) + "\n"
    if text.count("|7f3a9c|") != len(JOB_FORMAT) - 1 or "(null)" in (comment, folder):
        return
    (job,) = parse_jobs.parse_squeue(text * 2, "|7f3a9c|")[1:]
    assert (job.job_id, job.state) == ("7", "RUNNING")
    assert (job.name, job.comment, job.work_dir) == (name, comment, folder)


def test_a_forged_line_is_no_job() -> None:
    """A comment that holds a whole line of another job stays a comment."""
    row = dict.fromkeys(JOB_FORMAT, "") | {"job_id": "7", "state": "RUNNING", "raw_id": "7"}
    forged = "|".join((row | {"job_id": "8", "state": "COMPLETED"}).values())
    text = "|7f3a9c|".join((row | {"comment": f"x\n{forged}\n"}).values()) + "\n"
    (job,) = parse_jobs.parse_squeue(text, "|7f3a9c|")
    assert (job.job_id, job.comment) == ("7", f"x\n{forged}\n")


@pytest.mark.parametrize("name", ["a b=c", "x JobState=COMPLETED Reason=None", "two\nlines JobId=9", "é\t|\x1f\"q'"])
def test_scontrol_names_are_kept_whole(recorded: Recorded, name: str) -> None:
    """A name with Slurm's own keys in it changes no other field."""
    plain = parse_jobs.parse_scontrol_jobs(recorded("job_shared_o.txt"), UTC)[0]
    (job,) = parse_jobs.parse_scontrol_jobs(
        recorded("job_shared_o.txt").replace("JobName=small", f"JobName={name}"), UTC
    )
    assert job.name == name
    assert (job.state, job.comment, job.node_list) == (plain.state, plain.comment, plain.node_list)


def test_a_name_that_cannot_be_told_apart_is_refused(recorded: Recorded) -> None:
    """When a name imitates the very keys that end it, there is no record rather than a wrong one."""
    forged = "JobName=x UserId=eve(7) GroupId=eve(7) MCS_label=N/A JobState=COMPLETED"
    with pytest.raises(ClusterError, match="imitates"):
        parse_jobs.parse_scontrol_jobs(recorded("job_shared_o.txt").replace("JobName=small", forged))


def test_later_versions_may_add(recorded: Recorded) -> None:
    """A new key and a new state leave the rest as it was; the state is kept and is not a finished one."""
    text = recorded("job_shared_o.txt").replace(" JobState=RUNNING", " NewKey=a b JobState=HIBERNATING")
    (job,) = parse_jobs.parse_scontrol_jobs(text, UTC)
    assert job.state == "HIBERNATING"
    assert job.comment == "pit:run=r-1;k=v"


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_half_a_job_is_refused(recorded: Recorded, data: st.DataObject) -> None:
    """An answer cut anywhere, by itself or with a line end behind the cut ids, is an error that shows it."""
    text = recorded("job_running_o.txt")
    short = text[: data.draw(st.integers(1, len(text.rstrip()) - 1))]
    with pytest.raises(ClusterError, match="the output of scontrol show job"):
        parse_jobs.parse_scontrol_jobs(short)
    with pytest.raises(ClusterError, match="the output of scontrol show job"):
        parse_jobs.parse_scontrol_jobs(short[: text.index(" JobState=")] + "\n")


def test_garbage_is_refused() -> None:
    """Text that is no job is an error."""
    with pytest.raises(ClusterError):
        parse_jobs.parse_scontrol_jobs("Unexpected message received\n")
    with pytest.raises(ClusterError, match="expected 21"):
        parse_jobs.parse_squeue("squeue: something else\n")


@pytest.mark.parametrize("text", ["", "No jobs in the system\n"])
def test_no_jobs(text: str) -> None:
    """An empty queue has no jobs."""
    assert parse_jobs.parse_scontrol_jobs(text) == []
    assert parse_jobs.parse_squeue("") == []
