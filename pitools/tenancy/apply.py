"""Carry out changes, each noted in a journal before its call.

A run that ends in the middle needs no repair: the next one reads what accounting has, and finishes from there;
what it had set on its way alone is found by the journal (leftovers.py).

Slurm has no lock of its accounting. Lock and journal are of one user's home: runs of two users do not exclude each
other, nor does anything exclude sacctmgr. So each object is read again before the call that changes it, and a run ends
where somebody else changed one; what is changed between reading and call, a fraction of a second, is overwritten.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from pitools.core import timestamps
from pitools.core.errors import ClusterError, DataError
from pitools.core.journal import append_record, read_journal, read_lines
from pitools.core.locks import lock
from pitools.core.record import Record
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.tenancy.changes import ObjectChange, command, order_changes
from pitools.tenancy.cluster_state import ClusterState, needs
from pitools.tenancy.words import deviation_text, name_of

_NAME = "journal.jsonl"
Call = Callable[[Sequence[str]], None]
ReadAgain = Callable[[str], ClusterState]
Kind = Literal["start", "call", "done", "refused", "end"]


class JournalEntry(Record, frozen=True, kw_only=True, tag="pit.tenancy-entry/1"):
    """A line of the journal. kind: a run starts, a call is about to be made, was made, was refused, the run ends.

    objects: of a start, each object that differs at its end; of a call, the one that it changes. run: of all sites of a
    run. undoes: the run that it undoes. postponed: of a start, what stays for unfinished jobs → what is wanted.
    """

    kind: Kind
    run: str
    at: str
    user: str
    site: str
    cluster: str
    argv: list[str] = []
    objects: list[ObjectChange] = []
    undoes: str = ""
    postponed: list[ObjectChange] = []


def tenancy_dir() -> Path:
    """Return the folder of the journal, private to the user; create it if it is missing. Raises ClusterError."""
    return ensure_private_dir(_dir())


def _dir() -> Path:
    return xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "tenancy"


def journal_path() -> Path:
    """Return the journal of all sites. Raises ClusterError."""
    return tenancy_dir() / _NAME


def intact_entries() -> list[JournalEntry]:
    """Return the journal of all sites without damaged lines, [] if there is none. Raises PitError."""
    return [each for each in read_lines(_dir() / _NAME, JournalEntry) if isinstance(each, JournalEntry)]


def read_entries(journal: Path) -> list[JournalEntry]:
    """Return the entries of a journal. Raises DataError for a damaged one: no undo would know what was before it."""
    try:
        return read_journal(journal, JournalEntry)
    except DataError as error:
        name = shlex.quote(str(journal))
        raise error.with_hint(f"mv {name} {name}.damaged; what is in it cannot be undone then") from error


def lock_journal() -> AbstractContextManager[None]:
    """Hold the lock of this user's runs: sites may share a database. Raises TryLater while another process holds it."""
    return lock(tenancy_dir() / "lock", "the accounting of all sites", is_own=True)


def apply_changes(
    now: ClusterState,
    then: ClusterState,
    call: Call,
    read_again: ReadAgain,
    journal: Path,
    postponed: Sequence[ObjectChange] = (),
    *,
    is_noted: bool = False,
    **of_run: str,
) -> Iterator[JournalEntry]:
    """Make one state the other, one call of sacctmgr after another; yield each when it is made.

    call: runs an argv, and raises PitError if it failed: then the rest is left for the next run. read_again: returns
    what accounting has of a kind of object. postponed, run, site, user and undoes: of the entries. is_noted: in the
    journal even without a change. Raises ClusterError if somebody else changed an object meanwhile.
    """
    changes = order_changes(now, then)
    if not changes and not is_noted:
        return

    def note(kind: Kind, argv: Sequence[str] = (), *objects: ObjectChange) -> JournalEntry:
        of_call = {"at": timestamps.now_rfc3339(), "cluster": now.cluster}
        stays = [*postponed] if kind == "start" else []
        entry = JournalEntry(kind=kind, **of_run, **of_call, argv=[*argv], objects=[*objects], postponed=stays)
        append_record(journal, entry, durable=kind != "done")  # without it, a call is unknown
        return entry

    note("start", (), *differences(now, then))
    for change in changes:
        found = read_again(change.key[0])
        _require_unchanged(change, found)
        argv = command(change, found)
        entry = note("call", argv, change)
        try:
            call(argv)
        except ClusterError:
            note("refused")
            raise
        note("done")
        yield entry
    note("end")


def _require_unchanged(change: ObjectChange, found: ClusterState) -> None:
    rows = found.objects.items() if change.after is None else ()  # Slurm removes members with a team, and its leads
    used_by = {f"by {name_of(key)}": needs(key, values) for key, values in rows if key[0] != "lead"}
    used_by |= {f"on {cluster}": set(used) for cluster, used in found.others.items() if change.key[0] == "tier"}
    users = [user for user, used in used_by.items() if change.after is None and change.key in used]
    values = found.objects.get(change.key)
    if values in (change.before, change.after) and not users:
        return
    problem = f"in use {users[0]}" if users else deviation_text(change.key[0], change.before, values)
    hint = "what this run did until then stands; pit tenancy plan shows what differs"
    raise ClusterError(f"{name_of(change.key)}: somebody else changed it during this run: {problem}", hint=hint)


def differences(now: ClusterState, then: ClusterState) -> list[ObjectChange]:
    """Return the objects that two states do not share."""
    return [
        ObjectChange(key=key, before=now.objects.get(key), after=then.objects.get(key))
        for key in sorted({*now.objects, *then.objects})
        if now.objects.get(key) != then.objects.get(key)
    ]
