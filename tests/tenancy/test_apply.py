"""A run of changes: killed at each call it is finished by the next; it ends at a foreign change; an undo restores."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.core.journal import append_record, read_journal
from pitools.tenancy import site_plan
from pitools.tenancy.apply import Call, JournalEntry, apply_changes
from pitools.tenancy.changes import order_changes
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.leftovers import settled_state
from pitools.tenancy.policy import Policy, policy_of
from pitools.tenancy.refusals import lost_defaults
from pitools.tenancy.undo import sites_of_run, undone_state
from tests.tenancy.sacctmgr_model import Sacctmgr
from tests.tenancy.states import large_change, states
from tests.tenancy.test_changes import read


class Killed(BaseException):
    """The process ends here."""


Objects = dict[Key, Values]


def _apply(
    now: ClusterState, then: ClusterState, journal: Path, slurm: Sacctmgr, call: Call | None = None, undoes: str = ""
) -> str:
    """Make all changes; return the run's ID, "" if nothing differs."""

    def again(kind: str) -> ClusterState:
        return read(slurm, kind)

    run = secrets.token_hex(4)
    of_run = {"run": run, "undoes": undoes, "site": "alpha", "user": "ann"}
    return run if list(apply_changes(now, then, call or slurm.run, again, journal, **of_run)) else ""


def _new_default(tier: str) -> ClusterState:
    """Return a state of a team with this default: on the way to another, its member of tier a may use both."""
    objects: Objects = {("tier", "a"): {}, ("tier", "b"): {}, ("team", "root"): {"QOS": "a,b"}}
    objects["team", "lab"] = {"QOS": "a,b", "DefaultQOS": tier}
    objects["member", "lab", "ann", ""] = {"QOS": "a", "DefaultQOS": "a"}
    objects["user", "ann"] = {"DefaultAccount": "lab"}
    return ClusterState(cluster="alpha", objects=objects)


def _policy_of(state: ClusterState, manage: str) -> Policy:
    return policy_of({**policy_tables(state), "manage": manage}, "", "p")


TWO_USERS: Objects = {("member", "vision", user, ""): {} for user in ("ann", "bob")}
VISION = ClusterState(
    cluster="alpha",
    objects={
        ("tier", "normal"): {},
        ("tier", "urgent"): {},
        ("team", "root"): {"QOS": "normal"},
        ("team", "lab"): {"QOS": "urgent"},
        ("team", "vision"): {"QOS": "normal,urgent", "DefaultQOS": "urgent"},
        **TWO_USERS,
        **{("user", key[2]): {"DefaultAccount": "vision"} for key in TWO_USERS},
    },
)
PLAIN = msgspec.structs.replace(VISION, objects={**VISION.objects, ("team", "vision"): {}})


def _vision(**keys: Any) -> Policy:
    return policy_of({"teams": {"vision": keys}}, "", "p")


@pytest.mark.parametrize(
    ("now", "policy", "least"),
    [
        (large_change()[0], _policy_of(large_change()[1], "all"), 40),
        (large_change()[0], _policy_of(large_change()[1], "listed"), 20),
        (_new_default("a"), _policy_of(_new_default("b"), "listed"), 3),
        (VISION, _vision(tiers=["+urgent"]), 6),
        (PLAIN, _vision(parent="lab"), 3),
    ],
)
def test_run_killed_at_any_call_is_finished_by_the_next(
    now: ClusterState, policy: Policy, least: int, tmp_path: Path
) -> None:
    """Of a run of so many calls, killed at each: before the first, after the second, ...; and both can be undone.

    The next one asks the policy again, and what it does not name is as it was before.
    """
    then = desired_state(policy, now)
    calls = len(order_changes(now, then))
    assert calls >= least
    for n in range(2 * calls if calls < 10 else calls):
        slurm, journal = Sacctmgr(now.objects), tmp_path / f"journal{n}"
        left, is_after = (n // 2, n % 2) if calls < 10 else (n, n % 2)

        def call(argv: Sequence[str], slurm: Sacctmgr = slurm, is_after: int = is_after) -> None:
            nonlocal left
            if left == 0 and not is_after:
                raise Killed
            slurm.run(argv)
            if left == 0:
                raise Killed
            left -= 1

        with pytest.raises(Killed):
            _apply(now, then, journal, slurm, call)
        if n % 5 in (2, 3):  # undone as it is
            run = read_journal(journal, JournalEntry)[0].run
            _apply(read(slurm), undone_state(read(slurm), journal, run, "alpha"), journal, slurm, undoes=run)
            assert read(slurm).objects == now.objects
        settled = settled_state(read(slurm), read_journal(journal, JournalEntry), "alpha")
        _apply(read(slurm), desired_state(policy, settled), journal, slurm)
        assert read(slurm).objects == then.objects
        settled = settled_state(read(slurm), read_journal(journal, JournalEntry), "alpha")
        assert settled.objects == then.objects
        if n % 5 == 1:
            for run in reversed(dict.fromkeys(entry.run for entry in read_journal(journal, JournalEntry))):
                _apply(read(slurm), undone_state(read(slurm), journal, run, "alpha"), journal, slurm, undoes=run)
            assert read(slurm).objects == now.objects


def test_run_ends_where_somebody_else_changes_an_object(tmp_path: Path) -> None:
    """Before it changes this object: the foreign value stays, and what the run did stands."""
    now = ClusterState(cluster="alpha", objects={("tier", name): {} for name in ("a", "b", "c")})
    then = ClusterState(cluster="alpha", objects={key: {"Priority": "5"} for key in now.objects})
    slurm = Sacctmgr(now.objects)

    def call(argv: Sequence[str]) -> None:
        slurm.run(argv)
        slurm.run(["sacctmgr", "-i", "modify", "qos", "where", "name=b", "set", "Priority=7"])

    with pytest.raises(ClusterError, match="tier b: somebody else changed it during this run: priority 0 → 7"):
        _apply(now, then, tmp_path / "journal", slurm, call)
    assert [values.get("Priority") for values in slurm.objects.values()] == ["5", "7", None]


@pytest.mark.parametrize(("key", "error"), [(("tier", "old"), "in use on beta"), (("team", "old"), "")])
def test_what_another_cluster_takes_into_use_during_a_run_is_left_to_it(key: Key, error: str, tmp_path: Path) -> None:
    """A tier stays, and the run ends; of an account the association of this cluster alone goes."""
    now = ClusterState(cluster="alpha", objects={("team", "root"): {}, key: {}})
    then = ClusterState(cluster="alpha", objects={("team", "root"): {}})
    found, calls = msgspec.structs.replace(now, others={"beta": frozenset({key})}), list[str]()
    of_run = {"run": "1", "site": "alpha", "user": "ann"}
    run = apply_changes(now, then, calls.extend, lambda _: found, tmp_path / "journal", **of_run)
    if error:
        with pytest.raises(ClusterError, match=error):
            list(run)
        return
    list(run)
    assert calls[-1] == "cluster=alpha"


IN_LAB: Objects = {("team", "lab"): {}, ("member", "lab", "eve", ""): {}, ("user", "eve"): {"DefaultAccount": "lab"}}


@pytest.mark.parametrize(
    ("gone", "added", "error"),
    [
        (("team", "old"), {("member", "old", "eve", ""): {"MaxJobs": "7"}}, "in use by eve in team old"),
        (("team", "old"), {("team", "new"): {"Parent": "old"}}, "in use by team new"),
        (("team", "old"), {("lead", "old", "eve"): {}}, ""),
        (("tier", "slow"), {("team", "lab"): {"QOS": "+slow"}}, "in use by team lab"),
    ],
)
def test_what_gets_a_user_during_a_run_is_not_removed(gone: Key, added: Objects, error: str, tmp_path: Path) -> None:
    """A team with its new members and a tier with its new users stay, and the run ends; a lead goes with the team."""
    then = ClusterState(cluster="alpha", objects={("team", "root"): {}, **IN_LAB})
    now = msgspec.structs.replace(then, objects={**then.objects, gone: {}})
    slurm = Sacctmgr({**now.objects, **added})
    if not error:
        assert _apply(now, then, tmp_path / "journal", slurm)
        return
    with pytest.raises(ClusterError, match=error):
        _apply(now, then, tmp_path / "journal", slurm)
    assert gone in slurm.objects


@given(states(), states())
@settings(max_examples=12, deadline=None)
def test_undo_restores(now: ClusterState, then: ClusterState) -> None:
    """An undo of a run leads back; of a run that is unknown, or whose objects changed since, it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        journal, slurm = Path(folder, "alpha.jsonl"), Sacctmgr(now.objects)
        run = _apply(now, then, journal, slurm)
        if not run:
            return
        with pytest.raises(UsageError):
            sites_of_run(journal, "none")
        key = next(
            key for key in sorted({*now.objects, *then.objects}) if now.objects.get(key) != then.objects.get(key)
        )
        changed = ClusterState(cluster="alpha", objects={**then.objects, key: {"GrpJobs": "77"}})
        with pytest.raises(ClusterError):
            undone_state(changed, journal, run, "alpha")
        assert undone_state(read(slurm), journal, run, "alpha").objects == now.objects
        _apply(read(slurm), undone_state(read(slurm), journal, run, "alpha"), journal, slurm)
        assert read(slurm).objects == now.objects


def test_undo_needs_the_start_of_a_run_and_its_cluster(tmp_path: Path) -> None:
    """A journal without it is damaged data; at a site that has another cluster now, nothing is restored.

    A line that a crash cut is left out, and one that is damaged says where.
    """
    now = ClusterState(cluster="alpha", objects={})
    then = ClusterState(cluster="alpha", objects={("tier", "a"): {}})
    journal, cut = tmp_path / "journal", tmp_path / "cut"
    run = _apply(now, then, journal, Sacctmgr({}))
    with pytest.raises(ClusterError, match='changed the cluster "alpha"'):
        undone_state(msgspec.structs.replace(then, cluster="beta"), journal, run, "alpha")
    for entry in read_journal(journal, JournalEntry)[1:]:
        append_record(cut, entry)
    with pytest.raises(DataError, match="lacks the start"):
        undone_state(then, cut, run, "alpha")
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:-2], lines[-2][:20]]))
    assert undone_state(then, journal, run, "alpha").objects == {}
    journal.write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(DataError) as caught:
        undone_state(then, journal, run, "alpha")
    assert caught.value.where == f"{journal}:2"


def test_undo_is_not_stopped_by_a_run_that_changed_nothing(tmp_path: Path) -> None:
    """Of what the first run left: all its calls were refused."""
    states = [ClusterState(cluster="alpha", objects={("tier", "a"): {"Priority": value}}) for value in ("1", "5", "9")]
    journal, slurm = tmp_path / "journal", Sacctmgr(states[0].objects)
    run = _apply(states[0], states[1], journal, slurm)

    def refuse(argv: Sequence[str]) -> None:
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        _apply(states[1], states[2], journal, slurm, refuse)
    assert undone_state(read(slurm), journal, run, "alpha").objects == states[0].objects


def test_journal_names_each_call(tmp_path: Path) -> None:
    """The journal has who, when, from and to of each call, before it is made."""
    now = ClusterState(cluster="alpha", objects={("tier", "normal"): {}})
    then = ClusterState(cluster="alpha", objects={("tier", "normal"): {"Priority": "5"}})
    journal = tmp_path / "alpha.jsonl"

    def refuse(argv: Sequence[str]) -> None:
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        _apply(now, then, journal, Sacctmgr(now.objects), refuse)
    start, call, refused = read_journal(journal, JournalEntry)
    assert (start.kind, call.kind, refused.kind, call.user, call.run) == ("start", "call", "refused", "ann", start.run)
    assert (call.objects[0].before, call.objects[0].after) == ({}, {"Priority": "5"})
    assert call.argv == ["sacctmgr", "-i", "modify", "qos", "where", "name=normal", "set", "Priority=5"]


ANN_IN_VLA: Objects = {("team", "vla"): {}, ("member", "vla", "ann", ""): {}}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({("tier", "a"): {"Priority": "5"}}, {("tier", "a"): {"Priority": "6"}}),
        ({("tier", "a"): {"Priority": "5"}}, {("tier", "a"): {}}),
        (ANN_IN_VLA, {("user", "ann"): {"DefaultAccount": "vla"}}),
        (ANN_IN_VLA, {("user", "ann"): {"DefaultAccount": "vla"}, ("member", "lab", "ann", ""): None}),
        ({("tier", "new"): {}}, {("team", "lab"): {"QOS": "new"}}),
        ({("team", "vla"): {}}, {("member", "vla", "ann", ""): {}}),
        ({("team", "vla"): {}}, {("team", "lab"): {"Parent": "vla"}}),
    ],
)
def test_undo_names_the_later_run_to_undo_first(
    first: Objects, second: dict[Key, Values | None], tmp_path: Path
) -> None:
    """One that changed the same object, or made one need it; undone first, the way back is open.

    A run of the same policy after an undo is a later one, too.
    """
    rows: Objects = {("tier", "a"): {}, ("team", "root"): {}, ("team", "lab"): {}, ("member", "lab", "ann", ""): {}}
    states = [ClusterState(cluster="alpha", objects={**rows, ("user", "ann"): {"DefaultAccount": "lab"}})]
    journal, slurm, runs = tmp_path / "journal", Sacctmgr(states[0].objects), []
    for change in (first, second):
        objects = {key: values for key, values in {**states[-1].objects, **change}.items() if values is not None}
        states.append(msgspec.structs.replace(states[-1], objects=objects))
        runs.append(_apply(states[-2], states[-1], journal, slurm))
    with pytest.raises(ClusterError, match=f"by run {runs[1]}"):
        undone_state(read(slurm), journal, runs[0], "alpha")
    for run, state in ((runs[1], states[1]), (runs[0], states[0])):
        _apply(read(slurm), undone_state(read(slurm), journal, run, "alpha"), journal, slurm, undoes=run)
        assert read(slurm).objects == state.objects
        assert undone_state(state, journal, run, "alpha").objects == state.objects
    again = _apply(states[0], states[1], journal, slurm)
    with pytest.raises(ClusterError, match=f"by run {again}"):
        undone_state(read(slurm), journal, runs[0], "alpha")


def _run_empty_policy(slurm: Sacctmgr, journal: Path) -> bool:
    """Run a policy that names nothing, and return whether it changed something."""
    found = read(slurm)
    entries = read_journal(journal, JournalEntry) if journal.exists() else []
    with patch.object(site_plan, "intact_entries", lambda: entries):
        wanted = site_plan.policy_states({"alpha": policy_of({}, "", "p")}, "p")["alpha"](found)
    assert not [*lost_defaults(wanted)]
    return bool(_apply(found, wanted, journal, slurm))


@settings(deadline=None)
@given(states(), states(), st.integers(0, 20))
def test_another_policy_runs_after_any_cut(now: ClusterState, then: ClusterState, calls: int) -> None:
    """It takes back what the cut run had set on its way, and nothing else: a second time there is nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        slurm, journal = Sacctmgr(now.objects), Path(folder, "journal")

        def call(argv: Sequence[str]) -> None:
            nonlocal calls
            if not calls:
                raise Killed
            calls -= 1
            slurm.run(argv)

        with contextlib.suppress(Killed):
            _apply(now, then, journal, slurm, call)
            assert not _run_empty_policy(slurm, journal)
        _run_empty_policy(slurm, journal)
        assert not _run_empty_policy(slurm, journal)


def test_default_account_that_is_set_again_stays(tmp_path: Path) -> None:
    """Slurm needs it again where the row that it marks as the default goes; no run takes it back."""
    rows: Objects = {("team", "root"): {}, ("team", "lab"): {}, ("member", "lab", "bob", "gpu"): {}}
    rows |= {("member", "lab", "bob", ""): {}, ("user", "bob"): {"DefaultAccount": "lab"}}
    slurm = Sacctmgr(rows)
    fewer = {key: values for key, values in rows.items() if key[-1] != "gpu"}
    assert _apply(read(slurm), ClusterState(cluster="alpha", objects=fewer), tmp_path / "journal", slurm)
    assert not _run_empty_policy(slurm, tmp_path / "journal")
    assert slurm.objects == fewer
