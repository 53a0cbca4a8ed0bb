"""Find what an undo of a run restores, at each of its sites."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.core.journal import read_journal
from pitools.tenancy.apply import JournalEntry
from pitools.tenancy.cluster_state import ClusterState, Key, Values, needs
from pitools.tenancy.words import name_of

_ACCOUNT = "DefaultAccount"
_HINT = "change the policy instead: pit tenancy run POLICY"


def sites_of_run(journal: Path, run: str) -> list[str]:
    """Return the sites that a run changed, the last one first. Raises UsageError for an unknown run."""
    sites = dict.fromkeys(entry.site for entry in read_journal(journal, JournalEntry) if entry.run == run)
    if not sites:
        hint = "list them: pit tenancy history"
        raise UsageError(f'no run "{run}" in the journal of this user', where=str(journal), hint=hint)
    return [*reversed(sites)]


def undone_state(now: ClusterState, journal: Path, run: str, site: str) -> ClusterState:
    """Return the state of a site with each object that a run changed there as it was before.

    Raises ClusterError if an object, or one that needs it, was changed since, or the run changed another cluster.
    """
    entries = read_journal(journal, JournalEntry)
    own = [entry for entry in entries if run in (entry.run, entry.undoes) and entry.site == site]
    starts = [entry for entry in own if entry.kind == "start" and entry.run == run]
    if not starts:
        raise DataError(f"lacks the start of run {run}, and so what was before it", where=str(journal), hint=_HINT)
    if starts[0].cluster != now.cluster:
        problem = f'run {run} changed the cluster "{starts[0].cluster}" (the site\'s is "{now.cluster}" now)'
        raise ClusterError(problem, where=f"site {site}", hint=_HINT)
    end = max(i for i, entry in enumerate(entries) if entry.run == run)
    undone = {entry.undoes for entry in entries if entry.kind == "end" and entry.site == site}
    later = {
        change.key: entry.run
        for entry in entries[end + 1 :]
        if not entry.undoes and entry.run not in undone
        for change in entry.objects
        if entry.cluster == now.cluster or (entry.cluster in now.others and change.key[0] == "tier")
    }

    def refusal(*keys: Key) -> ClusterError:
        by = next((later[key] for key in keys if key in later), "")
        problem = f"{name_of(keys[0])} was changed after run {run}" + (f", by run {by}" if by else "")
        return ClusterError(problem, where=str(journal), hint=f"first: pit tenancy run --undo {by}" if by else _HINT)

    objects = dict(now.objects)
    changes = [change for start in reversed(starts) for change in start.objects]  # the first has what was before
    if [entry.kind for entry in own if entry.run == run][-1] != "end":  # killed: some may have a value of the way only
        calls = [change for entry in own if entry.run == run and entry.kind == "call" for change in entry.objects]
        ends = {change.key for change in changes}
        changes += [change for change in reversed(calls) if change.key not in ends | later.keys()]
    for change in changes:
        now_values = now.objects.get(change.key)
        on_the_way = [each for entry in own for each in entry.objects if each.key == change.key]
        ways = [values for each in on_the_way for values in (each.before, each.after)]
        if now_values not in (change.before, change.after) and (
            change.key in later or not _is_between(now_values, ways)
        ):
            raise refusal(change.key)
        default = {option: text for option, text in (now_values or {}).items() if option == _ACCOUNT}
        if change.before is None:
            objects.pop(change.key, None)
        else:
            objects[change.key] = {**default, **change.before}  # Slurm cannot take the default away
    for key, values in objects.items():  # later runs may have made one that needs another, or removed the other
        for missing in needs(key, values) - objects.keys():
            if missing in now.objects or key not in now.objects:
                raise refusal(key, missing)
    return msgspec.structs.replace(now, objects=objects)


def _is_between(values: Values | None, ways: list[Values | None]) -> bool:
    """Return whether an object had each of its values on the way. Slurm makes users itself, with a default account."""
    if values is None:
        return None in ways
    options = {option for each in (values, *ways) for option in each or ()} - ({_ACCOUNT} if None in ways else set())
    return all(values.get(option, "") in {(each or {}).get(option, "") for each in ways} for option in options)
