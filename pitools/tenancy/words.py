"""Say a change of accounting as a sentence, for a team lead: `team vision: shares 1 → 7, max_jobs removed`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pitools.tenancy.changes import ObjectChange
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.columns import COLUMNS

_NAMED = 5  # objects in a sentence


def describe(change: ObjectChange) -> str:
    """Return what a change does, in the words of the policy."""
    name = name_of(change.key)
    if change.after is None:
        return f"remove {name}"
    if change.before is None:
        values = difference_text(change.key[0], None, change.after)
        return f"add {name}" + (f": {values}" if values else "")
    return f"{name}: {difference_text(change.key[0], change.before, change.after)}"


def deviation_text(kind: str, expected: Values | None, found: Values | None) -> str:
    """Return how an object that somebody else changed differs from what was expected, None for no object."""
    if expected is None or found is None:
        return "made" if expected is None else "removed"
    return difference_text(kind, expected, found)


def name_of(key: Key) -> str:
    """Return an object's name: `team vision`, `ann in team vision`."""
    kind, name, *rest = key
    if kind == "lead":
        return f"lead {rest[0]} of team {name}"
    if kind == "member":
        return f"{rest[0]} in team {name}" + (f", partition {rest[1]}" if rest[1] else "")
    return f"{kind} {name}"


def difference_text(kind: str, before: Values | None, after: Values) -> str:
    """Return what differs between an object's values, each key from → to. before: None for the values of a new one."""
    parts = []
    for column in COLUMNS[kind]:
        old = "" if before is None else before.get(column.option, "") or column.unset
        new = after.get(column.option, "") or ("" if before is None else column.unset)
        if old != new:
            removed = f"{column.key} {old} removed"
            parts.append(f"{column.key} {f'{old} → ' if old else ''}{new}" if new else removed)
    return ", ".join(parts)


def forgotten_usage(before: Collection[Key], after: Collection[Key]) -> list[str]:
    """Return whose usage Slurm forgets with their associations, as a sentence, if any. before, after: the objects."""
    gone = sorted(key for key in before if key[0] in ("team", "member") and key not in after)
    names = [name_of(key) for key in gone if key[0] == "team" or ("team", key[1]) not in gone]
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return [f"what these used of budgets and shares is forgotten, also by an undo: {named}"] if names else []


def partition_gaps(then: ClusterState) -> Iterator[tuple[Key, str]]:
    """Yield rows of one partition, and which values of the member do not count there: Slurm takes the row alone."""
    for key, values in sorted(then.objects.items()):
        if key[0] == "member" and key[3]:
            own = then.objects.get((*key[:3], ""), {})
            lost = {option: text for option, text in own.items() if option not in values}
            if lost:
                yield key, f"without {difference_text('member', None, lost)} of {key[2]} in other partitions"
