"""The queue's folder and its journals."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import ClusterError, DataError, NoSpace, UsageError
from pitools.launch.request import Request
from pitools.place.dispatch import options, status, store
from pitools.place.dispatch.journal import EntryKind, JournalEntry, QueueJob, append_entry, fold_entries
from pitools.site.schema import Defaults, Site, SitePartition

Pit = Callable[..., subprocess.CompletedProcess[str]]
REQUEST = Request(name="bc", command="true", tier="high")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    return store.queue_dir()


@pytest.fixture
def job(place: Path) -> QueueJob:
    (job,) = store.enqueue(place, [store.make_request(REQUEST, ("alpha", "beta"), user="ada")])
    return job


def entry(what: str, n: int = 1, **more: object) -> JournalEntry:
    return JournalEntry(t=timestamps.now_rfc3339(), kind=EntryKind(what), ticket=n, **more)  # type: ignore[arg-type]


def states(job: QueueJob, *whats: JournalEntry) -> list[str]:
    """The job's state after each entry."""
    actual = []
    for item in whats:
        job = fold_entries(job, [item])
        actual.append(job.state)
    return actual


def test_a_job_is_read_as_it_was_put_in(place: Path, job: QueueJob) -> None:
    """What is asked for survives, and nobody else may read it."""
    (queue_jobs,), broken = store.read_jobs(place)
    assert (queue_jobs.request, queue_jobs.state, broken) == (job.request, "queued", [])
    assert store.find_job(place, job.job_id).request.request == REQUEST
    assert place.stat().st_mode & 0o077 == 0


def test_a_full_disk_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot be written is not queued, and its hidden folder is removed."""
    write = store.write_atomic

    def second_is_too_much(path: Path, *given: object, **named: object) -> None:
        write(path, *given, **named)  # type: ignore[arg-type]
        if len(list((place / "jobs").iterdir())) > 1:
            raise NoSpace("disk full")

    monkeypatch.setattr(store, "write_atomic", second_is_too_much)
    with pytest.raises(NoSpace):
        store.enqueue(place, [store.make_request(REQUEST, ("alpha",), user="ada") for _ in range(2)])
    assert list((place / "jobs").iterdir()) == []


def test_a_queue_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write there decides what is run."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "open"))
    with pytest.raises(ClusterError, match="other users can write"):
        store.queue_dir()


def test_state_follows_from_the_journal(job: QueueJob) -> None:
    """A bound ticket: sent, taken by Slurm, started, ended."""
    done = entry("ended", state="COMPLETED", exit_code=0)
    path = [entry("submit", pool="alpha/train"), entry("submitted", slurm_id="7"), entry("started"), done]
    assert states(job, *path) == ["submitted", "submitted", "running", "done"]
    assert states(job, *path[:3], entry("ended", state="FAILED", exit_code=3))[-1] == "failed"
    assert states(job, *path[:2], entry("withdraw"), entry("void"))[-2:] == ["submitted", "queued"]


def test_a_line_cut_short_was_never_acted_on(job: QueueJob) -> None:
    """Power loss may leave half a line: it is left out, and the next entry does not stick to it."""
    job = append_entry(job, entry("submit", pool="alpha/train"))
    with (job.path / "journal.jsonl").open("ab") as file:
        file.write(b'{"schema":"pit.journal-entry/1","t":"x","wh')
    place = job.path.parent.parent
    assert store.find_job(place, job.job_id).tickets == job.tickets
    job = append_entry(store.find_job(place, job.job_id), entry("submitted", slurm_id="7"))
    assert store.find_job(place, job.job_id).tickets == job.tickets
    assert [ticket.slurm_id for ticket in job.tickets] == ["7"]


def test_one_broken_job_hides_no_other(place: Path, job: QueueJob) -> None:
    """A damaged journal is told, and the others are served."""
    (other,) = store.enqueue(place, [store.make_request(REQUEST, ("alpha",), user="ada")])
    (other.path / "journal.jsonl").write_text("garbage\n")
    queue_jobs, broken = store.read_jobs(place)
    assert [item.job_id for item in queue_jobs] == [job.job_id]
    assert isinstance(broken[0], DataError)
    assert other.job_id in str(broken[0])


def test_what_is_over_is_put_away_and_still_found(place: Path, job: QueueJob) -> None:
    """A job that is over leaves the folder that every tick reads."""
    job = append_entry(job, entry("cancelled", 0))
    store.archive(place, job)
    assert store.read_jobs(place) == ([], [])
    assert store.find_job(place, job.job_id).state == "cancelled"
    with pytest.raises(UsageError, match="is over"):
        store.write_mark(job, "cancel")


def test_what_has_long_been_over_is_removed(place: Path) -> None:
    """Of jobs that were put away those go that ended KEEP_S ago; one that ended now stays, and what is no job, too."""
    created = {}
    for name, (submitted, ended_days) in {"old": ("20200101", 31), "late": ("20200101", 29), "new": ("", 40)}.items():
        request = store.make_request(REQUEST, ("alpha",), user="ada")
        if submitted:
            request = msgspec.structs.replace(request, job_id=f"bc-{submitted}-000000-abcde{len(created)}")
        (job,) = store.enqueue(place, [request])
        store.archive(place, append_entry(job, entry("cancelled", 0)))
        created[name] = job.job_id
        ended_s = time.time() - ended_days * 86400
        os.utime(place / "done" / job.job_id / "journal.jsonl", (ended_s, ended_s))
    (place / "done" / "notes").write_text("")
    half = place / "done" / "bc-20200101-000000-ffffff"  # a removal that was killed
    half.mkdir()
    store.prune_archive(place)
    paths = {path.name for path in (place / "done").iterdir()}
    assert paths == {created["late"], created["new"], "notes"}
    assert [name for _, name in store.archived(place)] == ["notes", created["late"], created["new"]]


def test_names_that_are_no_job_are_refused(place: Path) -> None:
    """An id is never taken for a path."""
    for name in ("../jobs", "..", "", "a/b", "UPPER"):
        with pytest.raises(UsageError, match="no job"):
            store.find_job(place, name)


def test_the_lock_is_one_ticks_alone(place: Path) -> None:
    """A second tick is told so, and the lock ends with its holder."""
    with store.tick_lock(place) as first, store.tick_lock(place) as second:
        assert (first, second) == (True, False)
    with store.tick_lock(place) as third:
        assert third


def test_a_killed_tick_leaves_no_lock(place: Path) -> None:
    """The kernel frees the lock on any death."""
    child = os.fork()
    if not child:
        with store.tick_lock(place):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with store.tick_lock(place) as free:
        assert free


def test_a_job_archived_while_it_is_read_is_not_queued(
    place: Path, job: QueueJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal is gone from the first folder: it is read in the second."""
    append_entry(job, entry("cancelled"))
    read = store.read_journal

    def archive_first(path: Path) -> list[JournalEntry]:
        if path.is_relative_to(place / "jobs"):
            store.archive(place, job)
        return read(path)

    monkeypatch.setattr(store, "read_journal", archive_first)
    assert store.read_jobs(place)[0] == []
    assert store.find_job(place, job.job_id).is_over


def test_a_row_says_why_the_job_waits(job: QueueJob) -> None:
    """A job is in doubt while the site of its ticket is unreachable."""
    dispatch_status = status.DispatchStatus(
        ticked_at="t",
        sites=(status.SiteStatusRow(site="alpha", state="unreachable", since="noon", reason="no answer"),),
    )
    assert status.job_row(job, dispatch_status).reason.startswith("no site has room for it yet")
    job = fold_entries(job, [entry("submit", pool="alpha/train"), entry("submitted", slurm_id="7")])
    row = status.job_row(job, dispatch_status)
    assert (row.state, row.pool, row.slurm_id) == ("in-doubt", "alpha/train", "7")
    assert "unreachable since noon" in row.reason


def test_what_is_no_job_stops_nobody(place: Path, job: QueueJob) -> None:
    """A file, a link to nothing and a journal of something else in the queue's folder are told, and left alone."""
    (place / "jobs" / "notes").write_text("x")
    (place / "jobs" / "gone").symlink_to("nowhere")
    (place / "jobs" / "other").mkdir()
    (place / "jobs" / "other" / "job.json").mkdir()
    queue_jobs, broken = store.read_jobs(place)
    assert [item.job_id for item in queue_jobs] == [job.job_id]
    assert sorted(error.where.rpartition("jobs/")[2] for error in broken) == ["notes/job.json", "other/job.json"]


def test_a_slow_partition_gets_its_time(job: QueueJob) -> None:
    """What is submitted has the limit that was decided upon: twice the time where nodes are half as fast."""
    parts = {"fast": SitePartition(nodes=2), "slow": SitePartition(nodes=2, speed=0.5)}
    site = Site(name="x", partitions=parts, defaults=Defaults(partition="fast", time="2h"))
    limits = [options.make_job_plan(job, site, partition).job.time_s for partition in parts]
    assert limits == [7200, 14400]
