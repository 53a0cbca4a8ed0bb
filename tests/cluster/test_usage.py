"""Usage on a real Slurm: the hours are sreport's, to the second."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
HOUR = 3600
JOBS = [
    ("lab", "--wrap=true"),
    ("infra", "--wrap=true"),
    ("lab", "-n3", "--wrap=exit 3"),
    ("infra", "-N2", "--array=0-2", "--wrap=true"),
    ("lab", "-n1", ":", "-n2", "--wrap=true"),
    ("lab", "--job-name=two\nlines", "--comment=model=7b", "--wrap=true"),
]


@pytest.fixture
def slurm(clusters: Path) -> Callable[..., str]:
    """Runs a command of Slurm, or of its database, at alpha; its output."""

    def call(*argv: str, stdin: str = "") -> str:
        env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf"), "TZ": "UTC0"}
        done = subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    return call


def wait_for_states(slurm: Callable[..., str], ids: Sequence[str], *states: str) -> None:
    """Wait until all starts of these jobs are in one of the states."""
    for _ in range(200):
        shown = slurm("sacct", "-XnPD", "-o", "State", "-j", ",".join(ids)).split("\n")
        if all(line.split(" ")[0] in states for line in shown if line) and any(shown):
            return
        time.sleep(0.3)
    pytest.fail(f"states of {ids}: {shown}")


def test_hours_are_sreports_to_the_second(pit: Pit, slurm: Callable[..., str], clusters: Path, tmp_path: Path) -> None:
    """Arrays, parts, failed, cancelled, requeued and running jobs, that a window's edges cut; as `sreport` has them.

    sreport knows whole hours that have passed: the jobs' times are moved to three days ago, in slurmdbd's own table.
    They get GPUs there, too: no node has any.
    """
    ids = [slurm("sbatch", "--parsable", "-o", "/dev/null", "-A", *words).strip() for words in JOBS]
    held = ("sbatch", "--parsable", "-o", "/dev/null", "-A", "lab", "--requeue", "--wrap=sleep 600")
    requeued, cancelled, running = (slurm(*held).strip() for _ in range(3))
    wait_for_states(slurm, [requeued, cancelled, running], "RUNNING")
    slurm("scontrol", "requeue", requeued)
    slurm("scancel", cancelled)
    try:
        wait_for_states(slurm, [requeued], "REQUEUED", "PENDING", "RUNNING")
        slurm("scancel", requeued)
        wait_for_states(slurm, [*ids, cancelled, requeued], "COMPLETED", "FAILED", "CANCELLED", "REQUEUED")
        begin = int(time.time()) // HOUR * HOUR - 72 * HOUR + int(ids[0]) % 24 * HOUR
        move_jobs(slurm, clusters, [*ids, cancelled, requeued, running], begin)
        end = begin + 12 * HOUR
        slurm("sacctmgr", "-i", "rollup", _slurm_time(begin), _slurm_time(end))
        words = ["monitor", "usage", "--site", "alpha", "--store", "u.sqlite", "--by", "account", "--format", "jsonl"]
        total_s: Counter[str] = Counter()
        for since, until in ((begin, end), (begin + HOUR, begin + 2 * HOUR), (begin + 2 * HOUR, begin + 7 * HOUR)):
            done = pit(*words, "--since", _rfc3339(since), "--until", _rfc3339(until))
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            columns = {"cpu": "cpu_hours", "node": "node_hours", "gres/gpu": "gpu_hours"}
            ours = {(row["group"], tres): round(row[name] * HOUR) for row in rows for tres, name in columns.items()}
            assert {key: used_s for key, used_s in ours.items() if used_s} == sreport(slurm, since, until)
            for (_, tres), used_s in ours.items():
                total_s[tres] += used_s
        assert min(total_s.values()) > HOUR
    finally:
        slurm("scancel", running, requeued)


def move_jobs(slurm: Callable[..., str], clusters: Path, ids: Sequence[str], begin: int) -> None:
    """Move all starts of jobs to the hours from `begin` on, and let them take longer, so that hours cut them; add GPUs.

    The cluster's registration is moved too: sreport knows no jobs from before it.
    """
    socket = f"--socket={clusters / 'db' / 's'}"
    where = f"id_job BETWEEN {min(map(int, ids))} AND {max(map(int, ids)) + 3}"
    table = "slurm_accounting.alpha_job_table"
    gpu = slurm("mariadb", socket, "-N", "-e", "SELECT id FROM slurm_accounting.tres_table WHERE name='gpu'").strip()
    inx = slurm("mariadb", socket, "-N", "-e", f"SELECT job_db_inx FROM {table} WHERE {where} AND time_start").split()
    moves = [
        f"UPDATE {table} SET time_submit={start - 90}, time_eligible={start - 60}, time_start={start}, "
        f"time_end=IF(time_end, {start + 1234 + 777 * k}, 0), tres_alloc=CONCAT(tres_alloc, ',{gpu}={k % 3}') "
        f"WHERE job_db_inx={row};"
        for k, row in enumerate(inx)
        for start in [begin + 1801 * k]
    ]
    assert len(moves) >= len(JOBS) + 2 + 3 + 1
    registered = (
        f"UPDATE slurm_accounting.alpha_event_table SET time_start = LEAST(time_start, {begin}) WHERE node_name='';"
    )
    slurm("mariadb", socket, stdin="\n".join([registered, *moves]))


def sreport(slurm: Callable[..., str], since: int, until: int) -> dict[tuple[str, str], int]:
    """(account, cpu, node or gres/gpu) → seconds of its users, by sreport."""
    span = [f"start={_slurm_time(since)}", f"end={_slurm_time(until)}", "clusters=alpha"]
    report = ["AccountUtilizationByUser", *span, "format=Account,Login,TresName,Used"]
    rows = slurm("sreport", "-n", "-P", "-t", "seconds", "-T", "cpu,node,gres/gpu", "cluster", *report).splitlines()
    cells = [line.split("|") for line in rows]
    return {(account, tres): int(used_s) for account, login, tres, used_s in cells if login}


def _slurm_time(unix_s: int) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%S}"


def _rfc3339(unix_s: int) -> str:
    return f"{_slurm_time(unix_s)}Z"


def test_the_same_over_ssh(pit: Pit, far: Pit, slurm: Callable[..., str], tmp_path: Path) -> None:
    """Banners, start-up files' output and a variable of every kind change nothing; a dead site hides no other."""
    tag = f"--comment=model={tmp_path.name}"
    job = slurm("sbatch", "--parsable", "--wait", "-o", "/dev/null", tag, "--wrap=sleep 1").strip()
    # Slurm 22.05 lists a short job by its number at once, and by its times only seconds after its end.
    deadline = time.monotonic() + 60
    while job not in slurm("sacct", "-aXnP", "-S", "now-1hour", "-E", "now", "-o", "JobID").split():
        assert time.monotonic() < deadline
        time.sleep(0.3)
    end = slurm("sacct", "-XnP", "-o", "End", "-j", job).strip()
    until = datetime.fromisoformat(f"{end}+00:00")
    words = ["monitor", "usage", "--since", _rfc3339(int(until.timestamp()) - HOUR), "--until", f"{end}Z"]
    words += ["--by", "tag", "--format", "jsonl"]

    def own(text: str) -> list[str]:  # others run jobs meanwhile
        return [line for line in text.splitlines() if tmp_path.name in line]

    expected = own(pit(*words, "--site", "alpha", "--store", "near").stdout)
    assert len(expected) == 1
    for site in ("far", "bent"):
        done = far(*words, "--site", site, "--store", site)
        assert (done.returncode, own(done.stdout)) == (0, expected), done.stderr
    done = far(*words, "--site", "far", "--site", "down", "--site", "bare", "--store", "fleet")
    assert (done.returncode, own(done.stdout)) == (75, expected), done.stderr
    assert "not on the PATH of bare" in done.stderr
