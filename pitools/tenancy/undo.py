"""Find what an undo of a run restores, at each of its sites."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.tenancy.apply import read_entries
from pitools.tenancy.cluster_state import ClusterState, Key, Values, needs, without_inherited_leads
from pitools.tenancy.words import name_of

_ACCOUNT = "DefaultAccount"
_HINT = "change the policy instead: pit tenancy run POLICY"


def sites_of_run(journal: Path, run: str) -> list[str]:
    """Return the sites that a run changed, the last one first. Raises UsageError for an unknown run."""
    sites = dict.fromkeys(entry.site for entry in read_entries(journal) if entry.run == run)
    if not sites:
        hint = "list them: pit tenancy history"
        raise UsageError(f'no run "{run}" in the journal of this user', where=str(journal), hint=hint)
    return [*reversed(sites)]


def undone_state(now: ClusterState, journal: Path, run: str, site: str) -> ClusterState:
    """Return the state of a site with each object that a run changed there as it was before.

    Raises ClusterError if an object, or one that needs it, was changed since, or the run changed another cluster.
    """
    entries = read_entries(journal)
    own = [entry for entry in entries if run in (entry.run, entry.undoes) and entry.site == site]
    starts = [entry for entry in own if entry.kind == "start" and entry.run == run]
    if not starts:
        raise DataError(f"lacks the start of run {run}, and so what was before it", where=str(journal), hint=_HINT)
    if starts[0].cluster != now.cluster:
        problem = f'run {run} changed the cluster "{starts[0].cluster}" (the site\'s is "{now.cluster}" now)'
        raise ClusterError(problem, where=f"site {site}", hint=_HINT)
    end = max(i for i, entry in enumerate(entries) if entry.run == run)
    undone = {(entry.site, entry.undoes) for entry in entries if entry.kind == "end"}
    later = {
        change.key: entry.run
        for entry in entries[end + 1 :]
        if entry.kind == "start" and not entry.undoes and (entry.site, entry.run) not in undone
        for change in entry.objects
        if now.objects.get(change.key) != change.before  # else that run did not change it, or it was changed back
        if entry.cluster == now.cluster or (entry.cluster in now.others and change.key[0] == "tier")
    }

    def refusal(*keys: Key) -> ClusterError:
        by = next((later[key] for key in keys if key in later), "")
        problem = f"{name_of(keys[0])} was changed after run {run}" + (f", by run {by}" if by else "")
        return ClusterError(problem, where=str(journal), hint=f"first: pit tenancy run --undo {by}" if by else _HINT)

    objects, ways = dict(now.objects), dict[Key, list[Values | None]]()
    for change in (each for entry in own for each in entry.objects):  # a start has what differs, a call all else
        ways.setdefault(change.key, []).extend((change.before, change.after))
    restored = {change.key for start in starts for change in start.objects}
    for key, way in ways.items():
        found = now.objects.get(key)
        if key not in later and _is_on_the_way(found, way):
            default = {option: text for option, text in (found or {}).items() if option == _ACCOUNT}
            objects[key] = {**default, **(way[0] or {})}  # Slurm cannot take the default away
            if way[0] is None:
                del objects[key]
        elif key in restored:
            raise refusal(key)
    teams = {(key[2], team) for key in objects if key[0] == "member" for team in (key[1], "")}  # "": any
    for key, values in objects.items():  # later runs may have made one that needs another, or removed the other
        for missing in needs(key, values) - objects.keys():
            if missing in now.objects or key not in now.objects:
                raise refusal(key, missing)
        if key[0] == "user" and (key[1], values.get(_ACCOUNT, "")) not in teams:
            raise refusal(key, *(each for each in later if each[0] == "member" and each[2] == key[1]))
    return without_inherited_leads(msgspec.structs.replace(now, objects=objects))


def _is_on_the_way(values: Values | None, way: list[Values | None]) -> bool:
    """Return whether an object had these values on its way. Slurm makes users itself, with a default account alone."""
    if values and _ACCOUNT in values and None in way:
        plain = [{o: text for o, text in (each or {}).items() if o != _ACCOUNT} for each in (values, *way)]
        return plain[0] in plain[1:]
    return values in way
