"""What an ingest asks of sacct, and that the store then has what Slurm has, however often and whenever it is asked."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError, Unreachable
from pitools.monitor.usage import ingest, store
from pitools.monitor.usage.sacct_text import COLUMNS
from pitools.site.schema import Paths, Site
from pitools.slurm.transport import Transport
from tests.monitor.usage.fake_sacct import DAY, T0, FakeJob, FakeSacct

HOUR = 3600
SITE = Site(name="alpha", paths=Paths(runs="/nonexistent"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An empty store."""
    with store.open_store(tmp_path / "usage.sqlite") as connection:
        yield connection


def read(opened: sqlite3.Connection, sacct: FakeSacct, since: int, clock: int | None = None) -> ingest.Ingest:
    """Ingest at the cluster's time; this machine's clock may show another."""
    now = sacct.now if clock is None else clock
    return ingest.ingest_site(opened, SITE, Transport(), since, run=sacct, now=lambda: float(now))


def rows(opened: sqlite3.Connection) -> list[tuple[object, ...]]:
    """What the store has: number, submission, state, start, end."""
    return opened.execute("SELECT raw_id, submit, state, start, end FROM job ORDER BY raw_id, submit").fetchall()


def truth(sacct: FakeSacct) -> list[tuple[object, ...]]:
    """The same of the cluster."""
    shown = []
    for job in sorted(sacct.jobs, key=lambda job: (str(job.raw_id), job.submit)):
        if job.submit <= sacct.now and job.visible <= sacct.now:
            start = job.start if job.start is not None and job.start <= sacct.now else None
            end = job.end if job.end is not None and job.end <= sacct.now else None
            state = job.state if end is not None else "PENDING" if start is None else "RUNNING"
            shown.append((str(job.raw_id), job.submit, state, start, end))
    return shown


def history(days: int, a_day: int) -> list[FakeJob]:
    """Jobs of an hour, evenly over days."""
    step = DAY // a_day
    return [FakeJob(i + 1, T0 + i * step, T0 + i * step + 60, T0 + i * step + HOUR) for i in range(days * a_day)]


def test_the_second_ingest_touches_what_is_new(opened: sqlite3.Connection) -> None:
    """Ten days are read by the day; an hour later one call reads that hour, the last one's overlap, and what runs."""
    sacct = FakeSacct([*history(10, 96), FakeJob(5000, T0 + DAY, T0 + DAY)], now=T0 + 10 * DAY)
    first = read(opened, sacct, T0)
    assert (len(sacct.asked), first.changed, first.bad) == (10, 961, 0)
    assert rows(opened) == truth(sacct)
    sacct.jobs.append(FakeJob(2000, sacct.now + 60, sacct.now + 70, sacct.now + 500))
    sacct.now += HOUR
    sacct.asked, sacct.printed = [], 0
    second = read(opened, sacct, T0)
    assert (len(sacct.asked), second.changed) == (1, 5)  # the new one, and those that ran
    assert (second.rows, sacct.printed) == (10, 10)
    assert rows(opened) == truth(sacct)
    third = read(opened, sacct, T0)
    assert third.changed == 0


def test_an_earlier_since_reads_only_the_days_before(opened: sqlite3.Connection) -> None:
    """A longer report asks for the days that are missing, and a shorter one for nothing old."""
    sacct = FakeSacct(history(10, 10), now=T0 + 10 * DAY)
    read(opened, sacct, T0 + 7 * DAY)
    assert store.covered(opened, "alpha") == (T0 + 7 * DAY, T0 + 10 * DAY)
    sacct.asked = []
    read(opened, sacct, T0 + 9 * DAY)
    read(opened, sacct, T0 + 5 * DAY)
    assert len(sacct.asked) == 1 + 3
    read(opened, sacct, T0)
    assert rows(opened) == truth(sacct)


def test_after_a_pause_no_day_is_left_out(opened: sqlite3.Connection) -> None:
    """A report of yesterday, after weeks without one, closes the gap: later ones would not know of it."""
    sacct = FakeSacct(history(20, 4), now=T0 + 3 * DAY)
    read(opened, sacct, T0)
    sacct.now = T0 + 20 * DAY
    read(opened, sacct, T0 + 19 * DAY)
    assert rows(opened) == truth(sacct)


def test_an_interrupted_ingest_goes_on(opened: sqlite3.Connection) -> None:
    """slurmdbd fails on the fourth day: three days stay, and the next call asks for the others."""
    sacct = FakeSacct(history(6, 4), now=T0 + 6 * DAY, failing=4)
    with pytest.raises(Unreachable):
        read(opened, sacct, T0)
    assert 12 <= len(rows(opened)) < 24
    sacct.asked = []
    read(opened, sacct, T0)
    assert len(sacct.asked) == 4
    assert rows(opened) == truth(sacct)


@pytest.mark.parametrize("ahead_s", [-3 * DAY, 3 * DAY])
def test_a_wrong_clock_here_loses_nothing(opened: sqlite3.Connection, ahead_s: int) -> None:
    """What was covered is what Slurm's clock says, also after this machine's was days ahead or behind."""
    sacct = FakeSacct(history(10, 24), now=T0 + 5 * DAY)
    read(opened, sacct, T0, clock=sacct.now + ahead_s)
    sacct.now = T0 + 7 * DAY
    read(opened, sacct, T0)
    assert rows(opened) == truth(sacct)


def test_what_slurm_forgot_ends_and_what_comes_late_is_found(opened: sqlite3.Connection) -> None:
    """A job whose record vanished ends when it was last seen; one that came late, or ended long ago, is read."""
    gone, late = FakeJob(1, T0, T0), FakeJob(2, T0, T0, T0 + HOUR)
    sacct = FakeSacct([gone], now=T0 + HOUR)
    read(opened, sacct, T0)
    # The end of job 2 reaches slurmdbd a day later: until then it is shown as running.
    sacct.jobs, late.end = [late], None
    sacct.now = T0 + 2 * HOUR
    read(opened, sacct, T0)
    sacct.now, late.end = T0 + DAY, T0 + HOUR
    read(opened, sacct, T0)
    assert rows(opened) == [("1", T0, "UNKNOWN", T0, T0 + HOUR), *truth(sacct)]
    assert any("--jobs=" in word for words in sacct.asked for word in words)


def test_what_slurm_forgot_may_come_back(opened: sqlite3.Connection) -> None:
    """A job of which Slurm says again that it runs runs; one whose record cannot be read is not forgotten."""
    job = FakeJob(1, T0, T0)
    sacct = FakeSacct([], now=T0 + HOUR)
    for jobs, values, state in (
        ([job], {}, "RUNNING"),
        ([job], {"ElapsedRaw": "nine"}, "RUNNING"),
        ([], {}, "UNKNOWN"),
        ([job], {"ElapsedRaw": "0"}, "RUNNING"),
    ):
        sacct.jobs, job.values = jobs, values
        read(opened, sacct, T0)
        assert rows(opened)[0][2] == state
        sacct.now += HOUR


def test_each_start_of_a_requeued_job_is_a_row(opened: sqlite3.Connection) -> None:
    """They have one number, and differ in their submission."""
    starts = [FakeJob(1, T0, T0, T0 + 60, "REQUEUED"), FakeJob(1, T0 + 60, T0 + 90, T0 + 500)]
    assert read(opened, FakeSacct(starts, now=T0 + DAY), T0).changed == 2
    assert [row[2] for row in rows(opened)] == ["REQUEUED", "COMPLETED"]


def test_an_older_file_takes_nothing_back(opened: sqlite3.Connection) -> None:
    """A file from before the last one changes nothing, also while the job runs; nor the same one again."""
    job = FakeJob(1, T0, T0, T0 + DAY, "FAILED")

    def dump(now: int) -> io.BytesIO:
        return io.BytesIO(f"{'|'.join(COLUMNS)}\n{'|'.join(job.cells(now))}\n".encode())

    changed = [ingest.ingest_file(opened, "alpha", dump(T0 + at), "x").changed for at in (10, 10, 9, 2 * DAY, 9)]
    assert (changed, rows(opened)[0][2]) == ([1, 0, 0, 1, 0], "FAILED")


def test_a_bad_record_is_reported_and_the_others_are_stored(opened: sqlite3.Connection) -> None:
    """With its line; a file of which nothing can be read is an error, and leaves the store as it was."""
    good, bad = ("|".join(FakeJob(i, T0, T0, T0 + 9).cells(T0 + 99)) for i in (1, 2))
    bad = bad.replace("|9|", "|nine|")
    done = ingest.ingest_file(opened, "alpha", io.BytesIO(f"{'|'.join(COLUMNS)}\n{bad}\n{good}\n".encode()), "x")
    assert str(done).startswith("x: 1 rows read, 1 new or changed, 1 unreadable: line 2: ")
    with pytest.raises(DataError, match="line 2"):
        ingest.ingest_file(opened, "beta", io.BytesIO(f"{'|'.join(COLUMNS)}\n{bad}\n".encode()), "x")
    assert len(rows(opened)) == 1


CELL = st.one_of(
    st.sampled_from(
        ["", "7", "Unknown", "2026-02-03T04:05:06", "cpu=9", f"gres/gpu={10**30}", "9" * 30, "-" + "9" * 30]
    ),
    st.binary(max_size=6).map(lambda raw: raw.decode("latin-1")),
)


@given(st.lists(st.lists(CELL, min_size=len(COLUMNS) - 1, max_size=len(COLUMNS)), max_size=6), st.binary(max_size=40))
def test_no_text_stops_an_ingest(table: list[list[str]], tail: bytes) -> None:
    """Whatever values a file has, and whatever follows them: the good record before it is stored."""
    good = "|".join(FakeJob(1, T0, T0, T0 + 9).cells(T0 + 99))
    text = "".join(f"{line}\n" for line in ["|".join(COLUMNS), good, *("|".join(["7", *cells[1:]]) for cells in table)])
    memory = sqlite3.connect(":memory:", isolation_level=None)
    store.create_tables(memory)
    done = ingest.ingest_file(memory, "alpha", io.BytesIO(text.encode("latin-1") + tail), "x")
    memory.close()
    assert done.rows >= 1


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.integers(1, 300)), min_size=1, max_size=12),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_any_ingests_give_what_slurm_has(jobs: list[tuple[int, int, int]], pauses: list[int]) -> None:
    """Whenever jobs come, start and end, and whenever they are read: the store is what Slurm has at that time."""
    fake = [
        FakeJob(i + 1, T0 + at * HOUR, T0 + (at + wait) * HOUR, T0 + (at + wait + run) * HOUR)
        for i, (at, wait, run) in enumerate(jobs)
    ]
    sacct = FakeSacct(fake)
    memory = sqlite3.connect(":memory:", isolation_level=None)
    store.create_tables(memory)
    for pause in pauses:
        sacct.now += pause * HOUR
        read(memory, sacct, T0)
        assert rows(memory) == truth(sacct)
    memory.close()
