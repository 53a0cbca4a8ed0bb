"""Tell what runs left for a moment, or for unfinished jobs, from what is to stay: by the journal.

A policy leaves alone what it does not name, and so would keep for ever what a run that was cut had set on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from pitools.tenancy.apply import JournalEntry
from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import ClusterState, Key, Values, needs

_OPTIONS = ("QOS", "DefaultQOS")  # of associations: what else has other values on the way is named by its policy


class _OptionChange(NamedTuple):
    """What a run did with a value. value: before it; passing, final: what it may have left, for now or for good."""

    value: str
    passing: frozenset[str]
    final: frozenset[str]


_Left = dict[Key, dict[str, _OptionChange]]  # by option; a default tier goes with its list: both or none


def settled_state(now: ClusterState, entries: Sequence[JournalEntry], site: str) -> ClusterState:
    """Return a site's state without what its runs left there for now.

    Instead of what a run set on its way, the value before the run; instead of a tier that stays for jobs, what the run
    wanted. What somebody changed since stays, and what a later run's policy asked for.
    """
    objects = dict(now.objects)
    own = [entry for entry in entries if (entry.site, entry.cluster) == (site, now.cluster)]
    for key, options in _left(own).items():
        found = objects.get(key, {})
        values = {**found, **{option: each.value for option, each in options.items()}}
        is_as_left = all(found.get(option, "") in each.passing | each.final for option, each in options.items())
        is_passing = any(found.get(option, "") in each.passing for option, each in options.items())
        if key in objects and is_passing and is_as_left and needs(key, values) <= now.objects.keys():
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
            if not entry.undoes:  # what is undone counts as if it had never been
                left = {key: options for key, options in left.items() if key not in wanted}
            for each in start.postponed:
                changed = _differing(each)
                left[each.key] = {
                    o: _OptionChange(after, frozenset((before,)), frozenset()) for o, before, after in changed
                }
        elif entry.kind == "call" and entry.undoes not in undone:
            _add_call(left, entry.objects[0], wanted, is_made=is_known)
    return left


def _add_call(left: _Left, change: ObjectChange, wanted: dict[Key, Values | None], *, is_made: bool) -> None:
    """Add what a call changed, and whether its run wants that in the end. is_made: else it may not have been."""
    if change.key[0] not in ("team", "member"):
        return
    if change.after is None:
        if is_made:
            left.pop(change.key, None)
        return
    final, options = wanted.setdefault(change.key, change.before), left.setdefault(change.key, {})
    for option, before, after in _differing(change):
        earlier = options.get(option)
        if earlier is None or before not in earlier.passing | earlier.final:
            earlier = _OptionChange(before, frozenset(), frozenset((before,)))
        passing, for_good = (frozenset[str](), frozenset[str]()) if is_made else (earlier.passing, earlier.final)
        if final is not None and final.get(option, "") == after:
            for_good |= {after}
        else:
            passing |= {after}
        options[option] = _OptionChange(earlier.value, passing, for_good)


def _differing(change: ObjectChange) -> Iterator[tuple[str, str, str]]:
    """Yield each of the options that differs, with both values."""
    before, after = change.before or {}, change.after or {}
    for option in _OPTIONS:
        if before.get(option, "") != after.get(option, ""):
            yield option, before.get(option, ""), after.get(option, "")
