"""At the end of an attempt: what Slurm, the kernel and the storage are asked, and waited for."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from pitools.launch.job import begin_attempt, job_context, job_recovery, wait_for
from pitools.launch.plan import Plan
from pitools.launch.probes import oom
from pitools.launch.recovery import apply_decision
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site import dialect
from pitools.site.schema import Recovery, Site
from pitools.slurm.records import AccountingRow

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


def says(path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have `scontrol` be this script."""
    (path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)


@pytest.mark.parametrize(
    ("when", "found"), [("2026-11-22T01:10:00", True), ("2026-11-22T00:10:00", False), ("None", False)]
)
def test_a_job_that_is_to_make_room_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path, when: str, found: bool
) -> None:
    """Where Slurm told the ranks alone, its controller says of what: of this start of the job, not of one before."""
    record = (repo / "tests/replay/slurm-22.05/job_running_o.txt").read_text().splitlines()[0]
    record = re.sub(r"^JobId=\d+", "JobId=7", re.sub(r"PreemptTime=\S+", f"PreemptTime={when}", record))
    (tmp_path / "said").write_text(record + "\n")
    says(tmp_path, monkeypatch, f"cat {tmp_path}/said")
    reported = job_recovery.preemption_of(job_recovery.query_job(job(tmp_path)), "2026-11-22T01:00:00.123Z")
    assert (reported is not None) == found
    assert reported is None or (reported.raw_id, reported.state) == ("7", "PREEMPTED")


def test_a_controller_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt begins before slurmctld answers, but the wait has an end."""
    says(tmp_path, monkeypatch, f"[ -e {tmp_path}/up ] && echo 'Slurmctld(primary) at vm is UP' || exit 1")
    began = time.monotonic()
    assert not wait_for.wait_for_slurm(None, 1.0)
    assert not wait_for.wait_for_slurm(-5.0)
    assert time.monotonic() - began < 20
    threading.Timer(0.3, (tmp_path / "up").touch).start()
    assert wait_for.wait_for_slurm(600.0)


@pytest.mark.usefixtures("as_root")
def test_a_folder_that_is_read_only_is_waited_for(tmp_path: Path) -> None:
    """Until it takes a file again; what waiting cannot help is told at once."""
    place = tmp_path / "shared"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)], check=True)
    try:
        assert not wait_for.wait_writable(place, 0.2)
        remount = ["mount", "-o", "remount,rw", str(place)]
        threading.Timer(0.3, lambda: subprocess.run(remount, check=True)).start()
        assert wait_for.wait_writable(place)
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    began = time.monotonic()
    assert not wait_for.wait_writable(tmp_path / "nowhere")
    assert time.monotonic() - began < 10


KILLED = (
    b"4,7,49015002343,-;Memory cgroup out of memory: Killed process %d (python) total-vm:1305408kB, UID:%d x\n S=x\n"
)
OOM_KILL = b"6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=%s,task=python,pid=%d,uid=%d\n"


def test_kernel_log_records() -> None:
    """A record of the kernel's log gives its time, and the killed process, its user and its job where named."""
    age, kill = oom.parse_kmsg_record(KILLED % (11428, 1000))
    assert kill is not None
    assert (age.total_seconds(), kill.pid, kill.uid, kill.job_id) == (49015.002343, 11428, 1000, "")
    assert kill.text.startswith("Memory cgroup out of memory")
    _, kill = oom.parse_kmsg_record(OOM_KILL % (b"/slurm/uid_1/job_71/step_0/task_0", 12, 1))
    assert kill is not None
    assert kill[:3] == (12, 1, "71")
    assert oom.parse_kmsg_record(b"half")[1] is None


@pytest.mark.parametrize(
    ("records", "killed"),
    [
        ([KILLED % (1 << 22, os.getuid())], {0: 1 << 22}),  # the rank
        ([KILLED % (77, os.getuid())], {0: 77}),  # a child of the rank
        ([KILLED % (77, os.getuid() + 1)], {}),  # another user's
        ([KILLED % (1 + (1 << 22), os.getuid())], {}),  # another rank
        ([OOM_KILL % (b"/slurm/uid_0/job_8/step_0", 77, os.getuid())], {}),  # of another job
        ([OOM_KILL % (b"/slurm/uid_0/job_7/step_0", 77, 99)], {0: 77}),
        (None, {0: 0}),
        ([], {}),
    ],
)
def test_whom_the_kernel_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[bytes] | None, killed: dict[int, int]
) -> None:
    """The kill of a rank or its child is recorded, not another job's; without the kernel's log, a count of kills."""
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    count = oom.oom_kill_count()
    assert count is not None
    for rank in range(3):
        rank_record = run_folder.RankRecord(
            rank=rank, world_size=3, local_rank=0, node="n1", pid=rank + (1 << 22), coordinator="", data={}
        )
        if rank != 1:  # without a count at its start
            rank_record = msgspec.structs.replace(rank_record, oom_kills=count - 1)
        run_folder.write_record(attempt_dir / "ranks" / f"{rank}.json", rank_record)
    kills = None if records is None else [kill for _, kill in map(oom.parse_kmsg_record, records) if kill]
    monkeypatch.setattr(oom, "read_kernel_log", lambda _: kills)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    oom.record_for_node(attempt_dir, "n1", "0-1" if records is None else "0")
    written = [run_folder.read_record(path, oom.OomKill) for path in (attempt_dir / "oom").glob("*")]
    assert {record.rank: record.pid for record in written if record} == killed


@pytest.mark.parametrize(
    ("chain", "early", "action"),
    [
        ("requeue", True, "resubmit"),
        ("requeue", False, "defer"),
        ("fresh", True, "resubmit"),
        ("none", True, "defer"),
    ],
)
def test_a_job_that_ends_before_slurm_ends_it_is_not_put_back_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: str, early: bool, action: str
) -> None:
    """Preempted within its grace time it asks for what follows; ended by Slurm itself it is in the queue already."""
    request = Request(name="r", command="true", nodes=2)
    job_spec = dialect.JobSpec(name="r", nodes=2, partition="p")
    plan = Plan(
        name="r", site="s", request=request, job=job_spec, data=(), runs_dir=str(tmp_path), nvme="", python="python"
    )
    monkeypatch.setattr(job_recovery, "load_plan", lambda _: plan)
    monkeypatch.setattr(job_recovery, "site_of_run", lambda *_: Site(name="s", recovery=Recovery(chain=chain)))  # type: ignore[arg-type]
    monkeypatch.setattr(apply_decision, "apply_from_job", lambda *told, **_: told[-1])
    attempt_dir = begin_attempt.begin_attempt(job(tmp_path), time_limit_at=ENDS)
    run_folder.write_record(
        attempt_dir / "exit.json", run_folder.AttemptExit(job_id="7", exit_code=143, ended="2026-11-22T01:00:00.000Z")
    )
    accounting_row = AccountingRow(job_id="7", raw_id="7", state="PREEMPTED")
    decided = job_recovery.diagnose_and_decide(
        job(tmp_path, mode="run"), attempt_dir, accounting_row=accounting_row, seconds_left=0.0, before_slurm_ends=early
    )
    assert (decided.action, decided.kind) == (action, "preempted")


def test_what_is_left_of_a_step_is_ended_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this job alone; and a slurmctld that does not know its nodes yet is waited for, but not for ever."""
    output = "srun: Terminating StepId=7.0\nsrun: StepId=70.0 is another's\nsrun: error: StepId=7.1\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "srun.err").write_text(output)
    says(tmp_path, monkeypatch, "exit 0")
    for name, text in (
        ("scancel", f'echo "$@" >> {tmp_path}/ended'),
        ("srun", f"echo x >> {tmp_path}/tried; [ $(wc -l < {tmp_path}/tried) -gt 1 ]"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert wait_for.wait_for_step_creation(tmp_path, job(tmp_path, slurm_number="7"))
    assert (tmp_path / "ended").read_text() == "7.0 7.1\n" * 2
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    assert not wait_for.wait_for_step_creation(tmp_path, job(tmp_path, slurm_number="7"), timeout_s=0)
