"""A run of changes: killed at each call it is finished by the next, and an undo restores what was."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from pitools.core.errors import ClusterError, UsageError
from pitools.tenancy.apply import Call, JournalEntry, apply_changes, lock_outs, site_of_run, undone_state
from pitools.tenancy.changes import order_changes
from pitools.tenancy.cluster_state import ClusterState, parse_state
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.states import states


class Killed(BaseException):
    """The process ends here."""


def _read(slurm: Sacctmgr) -> ClusterState:
    return parse_state("alpha", slurm.answers())


def _apply(now: ClusterState, then: ClusterState, journal: Path, call: Call) -> str:
    """Make all changes; return the run's ID, "" if nothing differs."""
    entries = list(apply_changes(now, then, call, site="alpha", user="ann", journal=journal))
    return entries[0].run if entries else ""


@given(states(has_signed_teams=False), states(has_signed_teams=False))
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_killed_run_is_finished_by_the_next(now: ClusterState, then: ClusterState) -> None:
    """Killed before or after any call, the next run leads to the same state; undone, to the first."""
    calls = len(order_changes(now, then))
    for n in range(calls):
        with tempfile.TemporaryDirectory() as folder:
            journal, slurm, made = Path(folder, "alpha.jsonl"), Sacctmgr(now), 0

            def call(argv: Sequence[str], slurm: Sacctmgr = slurm, n: int = n) -> None:
                nonlocal made
                if made == n and n % 2:
                    raise Killed
                slurm.run(argv)
                made += 1
                if made == n + 1 and not n % 2:
                    raise Killed

            with pytest.raises(Killed):
                _apply(now, then, journal, call)
            first = _read(slurm)
            _apply(first, then, journal, slurm.run)
            assert _read(slurm).objects == then.objects


@given(states(has_signed_teams=False), states(has_signed_teams=False))
@settings(max_examples=12, deadline=None)
def test_undo_restores(now: ClusterState, then: ClusterState) -> None:
    """An undo of a run leads back; of a run that is unknown, or whose objects changed since, it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        journal, slurm = Path(folder, "alpha.jsonl"), Sacctmgr(now)
        run = _apply(now, then, journal, slurm.run)
        if not run:
            return
        with pytest.raises(UsageError):
            site_of_run(journal, "none")
        key = next(
            key for key in sorted({*now.objects, *then.objects}) if now.objects.get(key) != then.objects.get(key)
        )
        changed = ClusterState(cluster="alpha", objects={**then.objects, key: {"GrpJobs": "77"}})
        with pytest.raises(ClusterError):
            undone_state(changed, journal, run)
        assert undone_state(_read(slurm), journal, run).objects == now.objects
        _apply(_read(slurm), undone_state(_read(slurm), journal, run), journal, slurm.run)
        assert _read(slurm).objects == now.objects


def test_lock_out_is_said() -> None:
    """Nobody left, no administrator left, a user in no team, a user without tiers: each is said."""
    objects = {
        ("tier", "normal"): {},
        ("team", "root"): {"QOS": "normal"},
        ("team", "lab"): {},
        ("member", "lab", "ann", ""): {},
        ("member", "lab", "bob", ""): {},
        ("user", "ann"): {"DefaultAccount": "lab", "AdminLevel": "Administrator"},
        ("user", "bob"): {"DefaultAccount": "lab"},
    }
    now = ClusterState(cluster="alpha", objects=objects)

    def without(*keys: tuple[str, ...], **root: str) -> ClusterState:
        left = {key: values for key, values in objects.items() if key not in keys}
        return ClusterState(cluster="alpha", objects={**left, ("team", "root"): root})

    bob = ("member", "lab", "bob", "")
    ann = ("member", "lab", "ann", "")
    assert lock_outs(now, now) == []
    assert lock_outs(now, without(bob, QOS="normal")) == []
    assert len(lock_outs(now, without(bob, ann, QOS="normal"))) == 1
    assert len(lock_outs(now, without(("user", "ann"), QOS="normal"))) == 1
    assert len(lock_outs(now, without())) == 2


def test_journal_names_each_call(tmp_path: Path) -> None:
    """The journal has who, when, from and to of each call, before it is made."""
    from pitools.core.journal import read_journal

    now = ClusterState(cluster="alpha", objects={("tier", "normal"): {}})
    then = ClusterState(cluster="alpha", objects={("tier", "normal"): {"Priority": "5"}})
    journal = tmp_path / "alpha.jsonl"

    def refuse(argv: Sequence[str]) -> None:
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        _apply(now, then, journal, refuse)
    start, call = read_journal(journal, JournalEntry)
    assert (start.kind, call.kind, call.user, call.run) == ("start", "call", "ann", start.run)
    assert (call.objects[0].before, call.objects[0].after) == ({}, {"Priority": "5"})
    assert call.argv == ["sacctmgr", "-i", "modify", "qos", "where", "name=normal", "set", "Priority=5"]
