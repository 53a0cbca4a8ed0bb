"""Requests: the words of each command line, and what cannot become one."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from pitools.core.errors import UsageError
from pitools.slurm import argv


def test_squeue_narrows_and_separates() -> None:
    """Ids, user and name are options with `=`; the columns stand between the mark of the call."""
    words = argv.squeue(["4", "6_0", "11+1"], "ann", "run-1", all_states=True, each_task=True, sep="|m|")
    assert words[:-1] == [
        "squeue",
        "-h",
        "--noconvert",
        "--jobs=4,6_0,11+1",
        "--user=ann",
        "--name=run-1",
        "--states=all",
        "--array",
        "-o",
    ]
    assert words[-1].startswith("%i|m|%F|m|")
    assert words[-1].endswith("|m|%A")


def test_sacct_asks_in_utc() -> None:
    """A moment in any zone is asked for in UTC, which is the zone that sacct runs in."""
    since = datetime(2026, 11, 21, 10, 0, tzinfo=ZoneInfo("Asia/Tokyo"))
    words = argv.sacct(["4"], since=since, sep="|m|")
    assert "--starttime=2026-11-21T01:00:00" in words
    assert "-D" in words
    assert "--delimiter=|m|" in words
    assert "-D" not in argv.sacct(["4"], all_starts=False)
    with pytest.raises(UsageError, match="accounting"):
        argv.sacct(user="ann")


def test_a_script_file_comes_after_the_options() -> None:
    """A path that begins with a dash is still a path."""
    assert argv.submit(["--hold"], "-x.sh") == ["sbatch", "--parsable", "--hold", "--", "-x.sh"]
    assert argv.submit() == ["sbatch", "--parsable"]


@pytest.mark.parametrize("job_id", ["", "x", "-1", "4 5", "4,5", "--all", "4;rm", "4\n"])
def test_what_is_no_job_id(job_id: str) -> None:
    """Nothing but a job id goes where a job id belongs."""
    for request in (argv.cancel, argv.requeue, argv.squeue, argv.sacct):
        with pytest.raises(UsageError):
            request([job_id])
    with pytest.raises(UsageError):
        argv.show_job(job_id)


@pytest.mark.parametrize("job_id", ["4", "6_0", "6_[3-9%3]", "6_[1,3,5-7]", "11+1"])
def test_job_ids_as_slurm_prints_them(job_id: str) -> None:
    """Every id that a record holds can be cancelled."""
    assert argv.cancel([job_id]) == ["scancel", job_id]


def test_cancelling_nothing_is_refused() -> None:
    """scancel without an id could mean everything; it is never run."""
    with pytest.raises(UsageError):
        argv.cancel([])


@pytest.mark.parametrize("names", ["--all", "a b", "n1;x", "n1\n"])
def test_what_is_no_host_list(names: str) -> None:
    """An option or a second command is no host list."""
    with pytest.raises(UsageError):
        argv.show_nodes(names)


@pytest.mark.parametrize("name", ["a,b", "-x", "a\nb", "", " x"])
def test_what_is_no_name(name: str) -> None:
    """A comma would ask for two names, and an empty name for all."""
    with pytest.raises(UsageError):
        argv.associations(name or "a,b")
    with pytest.raises(UsageError):
        argv.squeue(user=name or "a,b")
