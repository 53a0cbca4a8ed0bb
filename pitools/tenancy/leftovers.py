"""Tell what runs left for a moment, or for unfinished jobs, from what is to stay: by the journal.

A policy leaves alone what it does not name, and so would keep for ever what a run that was cut had set on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

from pitools.tenancy.apply import JournalEntry
from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import ClusterState, Key, Values, needs

_Left = dict[Key, dict[str, tuple[str, set[str]]]]  # option → the value to return to, and from which


def settled_state(now: ClusterState, entries: Sequence[JournalEntry], site: str) -> ClusterState:
    """Return a site's state without what its runs left there for now.

    Instead of what a run set on its way, the value before the run; instead of a tier that stays for jobs, what the run
    wanted. What somebody changed since stays, and what a later run's policy asked for.
    """
    objects = dict(now.objects)
    own = [entry for entry in entries if (entry.site, entry.cluster) == (site, now.cluster)]
    for key, options in _left(own).items():
        found = objects.get(key, {})
        values = {**found, **{option: value for option, (value, passing) in options.items() if passing}}
        # All or none: a default tier that comes back needs the list that it had.
        is_as_left = all(found.get(o, "") in {value, *passing} for o, (value, passing) in options.items() if passing)
        if key in objects and is_as_left and needs(key, values) <= now.objects.keys():
            objects[key] = {option: text for option, text in values.items() if text}
    return msgspec.structs.replace(now, objects=objects)


def _left(entries: Sequence[JournalEntry]) -> _Left:
    left: _Left = {}
    start: JournalEntry | None = None
    undone = {entry.undoes for entry in entries if entry.kind == "end"} - {""}
    for entry, following in zip_longest(entries, entries[1:]):
        is_known = following is not None and following.run == entry.run  # how a call ended
        if entry.run in undone or (following and is_known and following.kind == "refused"):
            continue
        if entry.kind == "start":
            start, wanted = entry, {change.key: change.after for change in (*entry.objects, *entry.postponed)}
            if not entry.undoes:  # what it does not name is wanted as it is
                left = {key: options for key, options in left.items() if key in wanted}
        elif start is None or start.run != entry.run:  # whose line is damaged, or gone
            continue
        elif entry.kind == "end":
            for change in start.postponed:
                left.setdefault(change.key, {}).update(
                    (o, (after, {before})) for o, before, after in _differing(change)
                )
        elif entry.kind == "call" and entry.undoes not in undone:
            _add_call(left, entry.objects[0], wanted, is_made=is_known)
    return left


def _add_call(left: _Left, change: ObjectChange, wanted: dict[Key, Values | None], *, is_made: bool) -> None:
    """Add what a call changed, if that is not what its run wants in the end. is_made: else it may not have been."""
    if change.after is None:
        if is_made:
            left.pop(change.key, None)
        return
    final, options = wanted.setdefault(change.key, change.before), left.setdefault(change.key, {})
    for option, before, after in _differing(change):
        value, passing = options.get(option, ("", set[str]()))
        if before not in passing:
            value, passing = before, set()
        is_final = final is not None and final.get(option, "") == after
        options[option] = value, (set() if is_made else passing) | (set() if is_final else {after})


def _differing(change: ObjectChange) -> Iterator[tuple[str, str, str]]:
    """Yield each option that differs, with both values."""
    before, after = change.before or {}, change.after or {}
    for option in before.keys() | after.keys():
        if before.get(option, "") != after.get(option, ""):
            yield option, before.get(option, ""), after.get(option, "")
