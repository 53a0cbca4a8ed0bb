"""The report's numbers: against a count of every second, and what they are when something is missing."""

from __future__ import annotations

import io
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pitools.commands.monitor_usage import usage as command
from pitools.core.errors import ConfigError, DataError, UsageError
from pitools.monitor.usage import ingest, report, store
from pitools.monitor.usage.report import UsageRow
from pitools.monitor.usage.sacct_text import COLUMNS
from pitools.site.schema import Paths, Site, SitePartition, Slurm
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.states import JOB_STATES
from pitools.slurm.transport import Transport
from tests.ledger import run_maker
from tests.monitor.usage.fake_sacct import T0, FakeJob, FakeSacct, text

SITE = Site(name="alpha", currency="EUR", partitions={"gpu": SitePartition(gpus_per_node=8, price_per_node_hour=40.0)})
HOUR = 3600


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An empty store."""
    with store.open_store(tmp_path / "usage.sqlite") as connection:
        yield connection


def dump(jobs: list[FakeJob], now: int = T0 + 1000 * HOUR) -> bytes:
    """What `sacct` prints of jobs."""
    return "".join("|".join(cells) + "\n" for cells in [list(COLUMNS), *(job.cells(now) for job in jobs)]).encode()


def usage(
    opened: sqlite3.Connection, jobs: list[FakeJob], by: str = "", hours: tuple[int, int] = (0, 1000), site: Site = SITE
) -> list[UsageRow]:
    """The report of these jobs, in hours from T0."""
    ingest.ingest_file(opened, site.name, io.BytesIO(dump(jobs)), "x", UTC)
    return report.usage_rows(opened, [site], T0 + hours[0] * HOUR, T0 + hours[1] * HOUR, by)


def job(number: int, state: str = "COMPLETED", hours: tuple[int, int] = (0, 10), **rest: object) -> FakeJob:
    """A job of 8 GPUs, in hours from T0, that waited a minute for each of its number."""
    start, end = (T0 + hour * HOUR for hour in hours)
    return FakeJob(number, start - 60 * number, start, end, state, **({"gpus": 8} | rest))  # type: ignore[arg-type]


def test_jobs_of_two_sites_are_two(opened: sqlite3.Connection) -> None:
    """Whatever the sites' names and the jobs' numbers are side by side."""
    sites = [Site(name="a"), Site(name="a1")]
    for site, number in zip(sites, (11, 1), strict=True):
        ingest.ingest_file(opened, site.name, io.BytesIO(dump([job(number)])), "x", UTC)
    (row,) = report.usage_rows(opened, sites, T0, T0 + 10 * HOUR)
    assert (row.jobs, row.starts) == (2, 2)


STATES = ["COMPLETED", "FAILED", "CANCELLED by 7", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "REQUEUED", "OUT_OF_MEMORY"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40), st.integers(0, 40), st.sampled_from(STATES), st.integers(0, 8), st.integers(1, 3)
        ),
        max_size=12,
    ),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_hours_are_those_inside_the_window(
    shapes: list[tuple[int, int, str, int, int]], begin: int, length: int
) -> None:
    """Of any jobs and window: GPU-, CPU- and node-seconds as counted one by one; useful and wasted hours are all."""
    jobs = [
        FakeJob(i, T0, T0 + at, T0 + at + run, state, gpus=gpus, nodes=nodes)
        for i, (at, run, state, gpus, nodes) in enumerate(shapes)
    ]
    memory = sqlite3.connect(":memory:", isolation_level=None)
    store.create_tables(memory)
    ingest.ingest_file(memory, "alpha", io.BytesIO(dump(jobs)), "x", UTC)
    since, until = T0 + begin, T0 + begin + length
    rows = report.usage_rows(memory, [SITE], since, until, "user")
    memory.close()
    inside = [sum((j.start or 0) <= t < (j.end or 0) for t in range(since, until)) for j in jobs]
    has_gpus = any(j.gpus for j in jobs if j.start is not None and j.start < until)
    if not rows:
        assert not any(inside)
        return
    (row,) = rows
    gpus = [j.gpus if has_gpus else 8 * j.nodes for j in jobs]
    assert round(row.gpu_hours * HOUR) == sum(s * n for s, n in zip(inside, gpus, strict=True))
    assert round(row.node_hours * HOUR) == sum(s * j.nodes for s, j in zip(inside, jobs, strict=True))
    assert round(row.cpu_hours * HOUR) == sum(s * 4 * j.nodes for s, j in zip(inside, jobs, strict=True))
    assert math.isclose(row.cost or 0, row.gpu_hours * 5, abs_tol=1e-9)
    hours = row.gpu_hours or row.node_hours
    assert math.isclose(row.useful_hours + sum(row.waste_hours.values()), hours, abs_tol=1e-9)
    assert min([row.useful_hours, *row.waste_hours.values()]) >= 0


def test_waste_has_its_cause(opened: sqlite3.Connection) -> None:
    """By Slurm's state; the cost of an hour, and of one that was useful; a requeued job is one, and starts twice."""
    jobs = [
        job(1),
        job(2, "FAILED"),
        job(3, "NODE_FAIL"),
        job(3, hours=(10, 15)),
        job(4, "CANCELLED by 7", hours=(0, 5)),
        job(5, "DEADLINE", hours=(0, 1)),
        job(6, hours=(1000, 1001)),  # the window is over
    ]
    (row,) = usage(opened, jobs)
    assert (row.jobs, row.starts, row.resource, row.gpu_hours) == (5, 6, "gpu", 328.0)
    assert row.waste_hours == {"failed": 80.0, "node_fail": 80.0, "cancelled": 40.0, "timeout": 8.0}
    assert (row.useful_hours, row.cost, row.currency) == (120.0, 1640.0, "EUR")
    assert (row.cost_per_hour, row.cost_per_useful_hour) == (5.0, pytest.approx(1640 / 120))
    assert (row.wait_p50_s, row.wait_p95_s, row.efficiency, row.efficiency_known) == (180, 300, None, 0.0)


@pytest.mark.parametrize("state", sorted(JOB_STATES - {"COMPLETED"} | {"LAUNCH_FAILED"}))
def test_only_jobs_that_completed_or_run_are_useful(opened: sqlite3.Connection, state: str) -> None:
    """The hours of every other state have a cause."""
    (row,) = usage(opened, [job(1, state)])
    goes_on = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"}
    goes_on |= {"SUSPENDED", "STOPPED", "RESV_DEL_HOLD"}
    assert (row.useful_hours, sum(row.waste_hours.values())) == ((80, 0) if state in goes_on else (0, 80))


def test_a_ledger_says_what_of_a_run_was_useful(opened: sqlite3.Connection) -> None:
    """A run whose job failed keeps its productive hours, and one that completed loses the others, as overhead."""
    names = {"a": "a-20260303-013341-9f3c2a", "b": "b-20260303-013341-9f3c2a"}
    jobs = [job(1, "TIMEOUT", values={"JobName": f"{names['a']}.0"}), job(2, values={"JobName": f"{names['b']}.1"})]
    store.set_goodput(opened, "alpha", {names["a"]: 0.75, names["b"]: 0.5})
    first, second = usage(opened, jobs, by="tag")
    assert (first.group, first.waste_hours, first.efficiency) == ("a", {"timeout": 20.0}, 0.75)
    assert (second.group, second.waste_hours, second.useful_hours) == ("b", {"overhead": 40.0}, 40.0)
    assert second.efficiency_known == 1.0


@pytest.mark.parametrize("name", ["", "sweepy-90162d-0-1"])
def test_the_goodput_of_runs_comes_with_the_accounting(opened: sqlite3.Connection, tmp_path: Path, name: str) -> None:
    """An ingest reads the folders of the site's runs; a job is of the run whose id is in its name, or that it has."""
    site = Site(name="alpha", paths=Paths(runs=str(tmp_path)), slurm=Slurm(bin=str(tmp_path)))
    row = "7_0|7||{2}|||gpu|COMPLETED|0:0|{0}|{0}|{1}|125||1||||".format(
        *(run_maker.text(s)[:19] for s in (-5, 120)), tmp_path.owner()
    )
    program = tmp_path / "sacct"  # asked for the jobs of runs
    replaced = 'for s; do case $s in --delimiter=*) s=${s#*=}; break; esac; done; sed "s/|/$s/g"'
    program.write_text(f"#!/bin/sh\n{replaced} <<E\n{'|'.join(ACCOUNTING_FORMAT)}\n{row}\nE\n")
    program.chmod(0o755)
    run_dir = run_maker.make_run(tmp_path)
    run_maker.add_steps(run_maker.add_attempt(run_dir, 0, 100), 0, 10, [10.0] * 5)
    run_maker.finish(run_dir, 100)
    began = int(run_maker.EPOCH)
    run = FakeJob(7, began - 5, began - 5, began + 120, values={"JobName": name or f"{run_dir.name}.0"})
    sacct = FakeSacct([run, FakeJob(8, began, began, began + 100)], now=began + HOUR)
    ingest.ingest_site(opened, site, Transport(), began, run=sacct, now=lambda: float(sacct.now))
    (run_dir / "plan.json").unlink()  # the row is read again, and the run is not
    ingest.ingest_site(opened, site, Transport(), began, run=sacct, now=lambda: float(sacct.now))
    rows = report.usage_rows(opened, [site], began - 5, began + HOUR, "tag")
    assert rows[0].group == "bc"
    assert (rows[0].efficiency, rows[0].useful_hours * HOUR) == (pytest.approx(50 / 125), pytest.approx(50))
    assert (rows[1].efficiency, rows[1].useful_hours * HOUR) == (None, pytest.approx(100))


def test_what_is_missing_is_said(opened: sqlite3.Connection) -> None:
    """Without gres/gpu in accounting, whole nodes; without a price, no cost; a clock that went back, no hours."""
    back = FakeJob(3, T0, T0 + HOUR, T0, values={"Start": "2026-05-28T22:26:40", "End": "2026-05-28T21:26:40"})
    (row,) = usage(opened, [job(1, gpus=0, nodes=2), back])
    assert (row.gpu_hours, row.node_hours, row.cost) == (160.0, 20.0, 800.0)
    free = Site(name="beta")
    (row,) = usage(opened, [job(1, gpus=0)], site=free)
    assert (row.resource, row.gpu_hours, row.cost, row.cost_per_hour) == ("node", 0.0, None, None)
    assert usage(opened, [], hours=(900, 1000)) == []


def test_later_jobs_change_no_report(opened: sqlite3.Connection) -> None:
    """Whether Slurm tracks GPUs is known from the jobs before the end; a job without GPUs pays none of their price."""
    before = usage(opened, [job(1, gpus=0), job(2, hours=(0, 1))], hours=(0, 20))
    assert (before[0].gpu_hours, before[0].cost) == (8.0, 40.0)
    assert usage(opened, [job(3, hours=(20, 30))], hours=(0, 20)) == before
    other = msgspec.structs.replace(SITE, name="beta")  # without GPUs until then
    before = usage(opened, [job(1, gpus=0)], hours=(0, 20), site=other)
    assert (before[0].gpu_hours, before[0].cost) == (80.0, 400.0)
    assert usage(opened, [job(3, hours=(20, 30))], hours=(0, 20), site=other) == before


def test_the_time_of_a_suspension_is_not_used(opened: sqlite3.Connection) -> None:
    """A job of ten hours that ran for five: half of each hour."""
    rows = usage(opened, [job(1, values={"ElapsedRaw": str(5 * HOUR)})], hours=(2, 6))
    assert rows[0].gpu_hours == 16.0


def test_no_wait_is_negative(opened: sqlite3.Connection) -> None:
    """Of a job that Slurm lets start before the time when it could."""
    (row,) = usage(opened, [job(1, values={"Eligible": text(T0 + 60)})])
    assert (row.wait_p50_s, row.wait_p95_s) == (0, 0)


def test_a_store_is_its_users_alone(tmp_path: Path) -> None:
    """It is created for its owner, refused where others can write it, and never another kind of file."""
    path = tmp_path / "usage.sqlite"
    with store.open_store(path):
        assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with pytest.raises(ConfigError), store.open_store(path):
        pass
    path.chmod(0o600)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(DataError, match="version 99"), store.open_store(path):
        pass
    path.write_text("no database, but long enough to be taken for one by its size" * 20)
    with pytest.raises(DataError, match="not a store"), store.open_store(path):
        pass
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="link"), store.open_store(link):
        pass


def test_the_command_reads_a_file_and_prints_records(tmp_path: Path) -> None:
    """A file on stdin, a store, a report by user and partition; the schema's keys are only added to."""
    text = dump([job(1, user="ada"), job(2, "FAILED", user="bob")])
    argv = [sys.executable, "-m", "pitools", "monitor", "usage", "--store", str(tmp_path / "u"), "--from", "-"]
    argv += ["--since", "2026-05-01", "--until", "2026-12-01", "--by", "user", "--by", "partition"]
    done = subprocess.run(argv, input=text, capture_output=True, env={**os.environ, "TZ": "UTC"}, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["group"], row["gpu_hours"], row["useful_hours"]) for row in rows] == [
        ("ada,gpu", 80, 80),
        ("bob,gpu", 80, 0),
    ]
    assert b"<stdin>: 2 rows read, 2 new or changed" in done.stderr
    keys = (
        "schema by group since until jobs starts gpu_hours cpu_hours node_hours resource useful_hours waste_hours cost"
    )
    keys += " currency cost_per_hour cost_per_useful_hour efficiency efficiency_known wait_p50_s wait_p95_s"
    assert list(rows[0])[:21] == keys.split()


@pytest.mark.parametrize("since", ["1795746000", "30d ago", "2026-13-01", "0001-01-01", "99999999d"])
def test_times_that_are_refused(since: str, tmp_path: Path) -> None:
    """A number of seconds, words, no date, and thousands of days of sacct are errors of use, before any store."""
    argv = ["--site", "local", "--store", f"{tmp_path}/u", "--since", since]
    assert isinstance(CliRunner().invoke(command, argv).exception, UsageError)
    assert not (tmp_path / "u").exists()


def test_a_window_without_an_hour_says_its_times() -> None:
    """8d is 8 days ago, so it is before 7d."""
    error = CliRunner().invoke(command, ["--site", "local", "--since", "7d", "--until", "2026-01-02"]).exception
    assert isinstance(error, UsageError)
    assert "2026-01-02T00:00:00" in str(error)
    assert "8 days ago" in error.hint
