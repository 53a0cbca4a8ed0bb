"""Carry out changes, each noted in a journal before its call; find what an undo restores, and what locks users out.

A run that ends in the middle needs no repair: the next one reads what accounting has, and finishes from there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import timestamps
from pitools.core.errors import ClusterError, UsageError
from pitools.core.journal import append_record, read_journal
from pitools.core.locks import lock
from pitools.core.record import Record
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.tenancy.changes import command, effective_tiers, order_changes
from pitools.tenancy.cluster_state import ClusterState, Key, Values

Call = Callable[[Sequence[str]], None]


class ObjectChange(Record, frozen=True, kw_only=True, tag="pit.tenancy-object/1"):
    """What an object had and gets. None: no object."""

    key: Key
    before: Values | None
    after: Values | None


class JournalEntry(Record, frozen=True, kw_only=True, tag="pit.tenancy-entry/1"):
    """A line of the journal. kind: a run starts, a call is about to be made, the run made all calls.

    objects: of a start, each object that differs at its end; of a call, the one that it changes.
    """

    kind: Literal["start", "call", "end"]
    run: str
    at: str
    user: str
    site: str
    cluster: str
    argv: list[str] = []
    objects: list[ObjectChange] = []


def tenancy_dir() -> Path:
    """Return the folder of the journal, private to the user; create it if it is missing. Raises ClusterError."""
    return ensure_private_dir(xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "tenancy")


def journal_path() -> Path:
    """Return the journal of all sites. Raises ClusterError."""
    return tenancy_dir() / "journal.jsonl"


def lock_journal() -> AbstractContextManager[None]:
    """Hold the lock of all runs: sites may share a database. Raises TryLater while another process holds it."""
    return lock(tenancy_dir() / "lock", "the accounting of all sites", is_own=True)


def apply_changes(
    now: ClusterState, then: ClusterState, call: Call, *, site: str, user: str, journal: Path
) -> Iterator[JournalEntry]:
    """Make one state the other, one call of sacctmgr after another; yield each when it is made.

    call: runs an argv, and raises PitError if it failed: then the rest is left for the next run.
    """
    changes = order_changes(now, then)
    if not changes:
        return
    run = secrets.token_hex(4)

    def note(kind: Literal["start", "call", "end"], argv: list[str], objects: list[ObjectChange]) -> JournalEntry:
        at, cluster = timestamps.now_rfc3339(), now.cluster
        entry = JournalEntry(
            kind=kind, run=run, at=at, user=user, site=site, cluster=cluster, argv=argv, objects=objects
        )
        append_record(journal, entry)
        return entry

    note("start", [], differences(now, then))
    for change in changes:
        argv = command(change, now.cluster)
        entry = note("call", argv, [ObjectChange(key=change.key, before=change.before, after=change.after)])
        call(argv)
        yield entry
    note("end", [], [])


def differences(now: ClusterState, then: ClusterState) -> list[ObjectChange]:
    """Return the objects that two states do not share."""
    return [
        ObjectChange(key=key, before=now.objects.get(key), after=then.objects.get(key))
        for key in sorted({*now.objects, *then.objects})
        if now.objects.get(key) != then.objects.get(key)
    ]


def site_of_run(journal: Path, run: str) -> str:
    """Return the site that a run changed. Raises UsageError for an unknown run."""
    sites = {entry.run: entry.site for entry in read_journal(journal, JournalEntry)}
    if run not in sites:
        raise UsageError(f'no run "{run}" in the journal', where=str(journal), hint="list them: pit tenancy history")
    return sites[run]


def undone_state(now: ClusterState, journal: Path, run: str) -> ClusterState:
    """Return the state with each object that a run changed as it was before.

    Raises ClusterError if an object was changed by somebody else since.
    """
    entries = [entry for entry in read_journal(journal, JournalEntry) if entry.run == run]
    on_the_way = [change for entry in entries for change in entry.objects]
    objects = dict(now.objects)
    for change in next(entry for entry in entries if entry.kind == "start").objects:
        values = now.objects.get(change.key)
        if values not in [
            own for other in on_the_way if other.key == change.key for own in (other.before, other.after)
        ]:
            problem = f"{' '.join(filter(None, change.key))} was changed after run {run}"
            raise ClusterError(problem, where=str(journal), hint="undo the later run first, or change the policy")
        if change.before is None:
            objects.pop(change.key, None)
        else:
            objects[change.key] = change.before
    return msgspec.structs.replace(now, objects=objects)


def lock_outs(now: ClusterState, then: ClusterState) -> list[str]:
    """Return how a desired state would lock users or administrators out, as sentences."""
    problems = []
    rows = {name: _rows(state) for name, state in (("now", now), ("then", then))}
    if rows["now"] and not rows["then"]:
        problems.append("nobody but the root account could submit: no user is left in any team")
    if _administrators(now) and not _administrators(then):
        problems.append(f"no administrator is left (now: {', '.join(_administrators(now))})")
    problems += [
        f'user "{key[2]}" could submit nothing in team "{key[1]}": no tier is left'
        for key in rows["then"]
        if effective_tiers(now, key) and not effective_tiers(then, key)
    ]
    users = {key[2] for key in rows["now"]}
    gone = users - {key[2] for key in rows["then"]}
    if rows["then"] and 2 * len(gone) > len(users):
        problems.append(
            f"{len(gone)} of {len(users)} users would be in no team any more: {', '.join(sorted(gone)[:5])}"
        )
    return problems


def _rows(state: ClusterState) -> list[Key]:
    """Return the associations of users but those of the root account, which every accounting has."""
    return [key for key in sorted(state.objects) if key[0] == "member" and key[1] != "root"]


def _administrators(state: ClusterState) -> list[str]:
    users = sorted(key[1] for key in state.objects if key[0] == "user")
    return [user for user in users if state.objects["user", user].get("AdminLevel") == "Administrator"]
