"""What is said of jobs, and what it costs, as time goes by."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import ClusterError, Unreachable
from pitools.launch import slurm_cache
from pitools.launch.slurm_cache import store
from pitools.site.schema import Connection, Site
from pitools.slurm.errors import SlurmReason, SlurmRefused

RUNNING = [("4", "4", "RUNNING"), ("5", "5", "PENDING")]
DARK = Unreachable("Unable to contact slurm controller", hint="wait")


def test_one_question_is_for_all_jobs(slurm: Any, site: Site) -> None:
    """Whoever asks about another job of ours a moment later reads the same answer."""
    slurm.queue = RUNNING
    assert slurm_cache.require_states(site, ["4"]) == {"4": "RUNNING"}
    slurm.now += 1
    states = slurm_cache.cached_states(site, ["5"])["5"]
    assert (states.state, states.age_s) == ("PENDING", 1)
    assert slurm.calls() == ["squeue"]
    assert slurm_cache.cached_states(site, []) == {}


def test_it_is_asked_less_and_less_while_nothing_changes(slurm: Any, site: Site) -> None:
    """Ten minutes of looking twice a second cost at most 25 calls; a change is seen within two minutes."""
    slurm.queue, ages = RUNNING, []
    for _ in range(1200):
        slurm.now += 0.5
        ages.append(slurm_cache.cached_states(site, ["4"])["4"].age_s)
    calls = slurm.calls()
    assert set(calls) == {"squeue"}
    assert 8 <= len(calls) <= 12
    assert max(ages) <= 121


def test_what_is_new_is_asked_for_soon(slurm: Any, site: Site) -> None:
    """A job that was submitted after the last answer, and `changed`, do not wait for the interval."""
    slurm.queue = RUNNING
    for _ in range(200):
        slurm.now += 10
        slurm_cache.cached_states(site, ["4"])
    slurm.calls()
    slurm.queue = [*RUNNING, ("6", "6", "PENDING")]
    slurm.now += 3
    assert slurm_cache.require_states(site, ["6"]) == {"6": "PENDING"}
    assert slurm.calls() == ["squeue"]
    slurm.queue = [("4", "4", "CANCELLED"), ("6", "6", "PENDING")]
    slurm_cache.invalidate(site)
    assert slurm_cache.require_states(site, ["4"]) == {"4": "CANCELLED"}
    slurm.now += 60
    assert slurm_cache.cached_states(site, ["4"], max_age_s=5)["4"].age_s == 0


def test_accounting_is_asked_once_about_what_vanished(slurm: Any, site: Site) -> None:
    """One sacct for all that anybody wants to know of, and none about what was seen to have ended."""
    slurm.queue = [("4", "4", "RUNNING"), ("5", "5", "RUNNING"), ("6", "6", "COMPLETED")]
    slurm_cache.cached_states(site, ["4"])
    slurm_cache.cached_states(site, ["5", "6"])
    slurm.queue, slurm.accounts = [], [("4", "4", "TIMEOUT"), ("5", "5", "CANCELLED by 0")]
    slurm.now += 3
    slurm.calls()
    assert slurm_cache.require_states(site, ["4"]) == {"4": "TIMEOUT"}
    assert next(argv for argv in slurm.ran if argv[0] == "sacct")[3] == "--jobs=4,5"
    assert slurm.calls() == ["squeue", "sacct"]
    slurm.now += 5000
    assert slurm_cache.require_states(site, ["4", "5", "6"]) == {"4": "TIMEOUT", "5": "CANCELLED", "6": "COMPLETED"}
    assert slurm.calls() == []


def test_a_failed_question_is_no_answer(slurm: Any, site: Site) -> None:
    """Nothing changes but that it is not known: no job has ended, accounting is left alone, `ask` says why."""
    slurm.queue = [*RUNNING, ("6", "6", "FAILED")]
    slurm_cache.cached_states(site, ["4", "6"])
    slurm.calls()
    slurm.queue, slurm.accounts = DARK, [("4", "4", "COMPLETED")]
    slurm.now += 3
    states = slurm_cache.cached_states(site, ["4", "6", "7"])
    assert (states["4"].state, states["4"].age_s) == ("UNKNOWN", 3)
    assert states["4"].failure is not None
    assert states["4"].failure.message == DARK.message
    assert (states["6"].state, states["7"].state, states["7"].lost) == ("FAILED", "UNKNOWN", False)
    with pytest.raises(Unreachable, match="Unable to contact"):
        slurm_cache.require_states(site, ["4"])
    assert slurm.calls() == ["squeue"]
    for _ in range(120):
        slurm.now += 0.5
        assert slurm_cache.cached_states(site, ["4"])["4"].state == "UNKNOWN"
    assert 2 <= len(slurm.calls()) <= 4  # after 5, 10 and 20 s
    slurm.queue = RUNNING
    slurm.now += 100
    assert slurm_cache.require_states(site, ["4"]) == {"4": "RUNNING"}


def test_without_any_answer_the_age_is_infinite(slurm: Any, site: Site) -> None:
    """A controller that never answered has said nothing of any job; what it refuses is no time-out."""
    slurm.queue = ClusterError("Access denied", hint="ask")
    states = slurm_cache.cached_states(site, ["4"])["4"]
    assert (states.state, states.age_s) == ("UNKNOWN", math.inf)
    with pytest.raises(ClusterError, match="Access denied"):
        slurm_cache.require_states(site, ["4"])


def test_a_database_that_is_gone_loses_no_job(slurm: Any, site: Site) -> None:
    """What slurmctld forgot while slurmdbd is away is UNKNOWN for as long, and not lost."""
    slurm.queue, slurm.accounts = [], Unreachable("talking to the database", hint="wait")
    for _ in range(600):
        slurm.now += 1
        states = slurm_cache.cached_states(site, ["4"])["4"]
        assert (states.state, states.lost) == ("UNKNOWN", False)
        assert states.failure is None or "database" in states.failure.message
    slurm.accounts = [("4", "4", "NODE_FAIL")]
    slurm.now += 200
    assert slurm_cache.require_states(site, ["4"]) == {"4": "NODE_FAIL"}


@pytest.mark.parametrize("off", [False, True])
def test_what_nobody_knows_is_lost_in_the_end(slurm: Any, site: Site, off: bool) -> None:
    """Not before it was asked about again and again for a minute, whether there is accounting or not."""
    slurm.accounts = SlurmRefused("off", reason=SlurmReason.ACCOUNTING_DISABLED) if off else []
    begin = slurm.now
    while not slurm_cache.cached_states(site, ["4"])["4"].lost:
        assert slurm_cache.require_states(site, ["4"]) == {"4": "UNKNOWN"}
        slurm.now += 1
        assert slurm.now - begin < 600
    assert slurm.now - begin > 60
    slurm.queue = RUNNING
    slurm.now += 600
    assert slurm_cache.require_states(site, ["4"]) == {"4": "RUNNING"}


def test_arrays_are_as_the_client_has_them(slurm: Any, site: Site) -> None:
    """A whole array runs while a part does; that its last known parts have ended is asked of accounting."""
    slurm.queue = [("6_0", "13", "COMPLETED"), ("6_1", "6", "RUNNING"), ("7+1", "8", "PENDING")]
    states = {"6": "RUNNING", "6_0": "COMPLETED", "13": "COMPLETED", "7": "PENDING", "7+1": "PENDING"}
    assert slurm_cache.require_states(site, list(states)) == states
    slurm.queue = [("6_1", "6", "COMPLETED"), ("7+1", "8", "RUNNING")]
    slurm.accounts = [("6_0", "13", "FAILED"), ("6_1", "6", "COMPLETED")]
    slurm.now += 30
    assert slurm_cache.require_states(site, ["6", "6_0", "7"]) == {"6": "FAILED", "6_0": "COMPLETED", "7": "RUNNING"}
    assert "--jobs=6" in slurm.ran[-1]


def test_a_job_that_is_none_spoils_nothing(slurm: Any, site: Site) -> None:
    """What is no id, such as an option, is never part of a question."""
    slurm.accounts = [("4", "4", "COMPLETED")]
    states = slurm_cache.require_states(site, ["4", "", "--help", "4 5", "x"])
    assert states == {"4": "COMPLETED", "": "UNKNOWN", "--help": "UNKNOWN", "4 5": "UNKNOWN", "x": "UNKNOWN"}
    assert "--jobs=4" in slurm.ran[-1]
    slurm.calls()
    slurm_cache.require_states(site, ["x"])
    assert slurm.calls() == []


def test_a_requeued_job_is_believed_again(slurm: Any, site: Site) -> None:
    """A failure of long ago, that accounting kept, gives way to what squeue says now."""
    slurm.accounts = [("4", "4", "RUNNING")]
    assert slurm_cache.require_states(site, ["4"]) == {"4": "UNKNOWN"}
    slurm.queue = [("4", "4", "PENDING")]
    slurm.now += 200
    assert slurm_cache.require_states(site, ["4"]) == {"4": "PENDING"}


def test_each_cluster_has_its_own_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, slurm.conf or SLURM_CONF is another cluster; another name for it is not."""
    names = [
        store.cache_key(site),
        store.cache_key(Site(name="y")),
        store.cache_key(Site(name="x", connection=Connection(kind="ssh", host="far"))),
    ]
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    assert names[0] == names[1] != names[2] != store.cache_key(site) != names[0]


@pytest.mark.parametrize("text", ["", "{", "null", '{"schema":"pit.slurm-cache/1","queried_at_s":9e12}', "\xff"])
def test_what_cannot_be_read_is_asked_for_again(slurm: Any, site: Site, home: Path, text: str) -> None:
    """Whatever stands in the file, or from when, it is Slurm that answers."""
    slurm.queue = RUNNING
    slurm_cache.cached_states(site, ["4"])
    (path,) = (home / "cache" / "pitools" / "slurm-cache").glob("*.json")
    path.write_text(text)
    assert slurm_cache.require_states(site, ["4"]) == {"4": "RUNNING"}
    assert slurm.calls() == ["squeue", "squeue"]


def test_accounting_that_lost_the_end_of_a_job(slurm: Any, site: Site) -> None:
    """slurmctld does not have it any more, so it does not run, whatever accounting says; its end is still believed."""
    slurm.queue, slurm.accounts = [], [("4", "4", "RUNNING")]
    assert slurm_cache.require_states(site, ["4"]) == {"4": "UNKNOWN"}
    slurm.now += 600
    slurm.accounts = [("4", "4", "FAILED")]
    assert slurm_cache.require_states(site, ["4"]) == {"4": "FAILED"}


def test_hosts_of_two_clusters_may_share_a_home(slurm: Any, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its Slurm in the usual place: a job of the one is not the other's of the same number."""
    slurm.queue = [("4", "4", "COMPLETED")]
    assert slurm_cache.require_states(site, ["4"]) == {"4": "COMPLETED"}
    slurm.queue = [("4", "4", "RUNNING")]
    monkeypatch.setattr(socket, "gethostname", lambda: "login-b")
    assert slurm_cache.require_states(site, ["4"]) == {"4": "RUNNING"}


def test_why_a_job_waits_comes_with_its_state(slurm: Any, site: Site) -> None:
    """Slurm's reason and expected start, in UTC, of the same answer; of a job that runs, or ended, neither."""
    slurm.queue = [
        ("4", "4", "PENDING", "Resources", "2026-01-02T03:04:05"),
        ("6_1", "14", "PENDING", "JobHeldUser", "N/A"),
        ("5", "5", "RUNNING", "None", "2026-01-02T03:04:05"),
        ("8", "8", "PENDING", "None", "N/A"),
    ]
    states = slurm_cache.cached_states(site, ["4", "6", "5", "8"])
    waits = {job_id: (item.reason, item.start[:19]) for job_id, item in states.items()}
    assert waits == {
        "4": ("Resources", "2026-01-02T03:04:05"),
        "6": ("JobHeldUser", ""),
        "5": ("", ""),
        "8": ("", ""),
    }
    assert slurm.calls() == ["squeue"]
