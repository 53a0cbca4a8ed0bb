"""Plan a policy for sites: the rows of a plan, what is refused; run it, and list what runs did."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Literal

import msgspec

from pitools.core.errors import ClusterError, ConfigError, PitError
from pitools.core.record import Record
from pitools.core.trust import user_name
from pitools.slurm.errors import is_denied
from pitools.tenancy.apply import JournalEntry, apply_changes, differences, intact_entries, journal_path, read_entries
from pitools.tenancy.changes import ObjectChange, command, order_changes, preempt_renewals
from pitools.tenancy.cluster_state import ClusterState, Key, Values, leads_above, needs, without_inherited_leads
from pitools.tenancy.columns import COLUMNS
from pitools.tenancy.desired import desired_state
from pitools.tenancy.leftovers import settled_state
from pitools.tenancy.lock_outs import lock_outs, partition_lock_outs
from pitools.tenancy.policy import Policy, table_name
from pitools.tenancy.read import SiteAccounting, read_again, read_partitions, read_site
from pitools.tenancy.refusals import lost_defaults, require_possible
from pitools.tenancy.removals import Kept, keep_used, read_unfinished_jobs
from pitools.tenancy.words import describe, deviation_text, name_of

_HINT = "run the same command again: it goes on from what accounting has"
_SHARED = ("Description", "Organization", "AdminLevel")  # by all clusters of a database, as are tiers and leads

DesiredState = Callable[[ClusterState], ClusterState]
State = Literal["planned", "done", "refused", "unknown"]


class ChangeRow(Record, frozen=True, kw_only=True, tag="pit.tenancy-change/1"):
    """A change of accounting: in words, as a command, and as an object's values (None: no object).

    state: planned; done; refused by Slurm; unknown: a run ended during the call. run, at, user: "" in a plan.
    """

    site: str
    cluster: str
    change: str
    command: str
    key: Key
    before: Values | None
    after: Values | None
    state: State = "planned"
    run: str = ""
    at: str = ""
    user: str = ""


def policy_states(policies: Mapping[str, Policy], where: str) -> dict[str, DesiredState]:
    """Return for each site how its policy changes its state, apart from what runs left there for now."""
    entries = intact_entries()

    def desired(site: str, now: ClusterState) -> ClusterState:
        then = desired_state(policies[site], settled_state(now, entries, site), where)
        # A default of before may be none of the tiers that a run has changed since for good.
        return desired_state(policies[site], now, where) if any(lost_defaults(then)) else then

    return {site: partial(desired, site) for site in policies}


def plan_rows(site: str, now: ClusterState, then: ClusterState) -> list[ChangeRow]:
    """Return the changes that make one state of a site's cluster the other, in order."""
    return [_row(site, now.cluster, change, command(change, now)) for change in order_changes(now, then)]


def require_agreement(accounting: Mapping[str, SiteAccounting], wanted: Mapping[str, DesiredState], where: str) -> None:
    """Raise ConfigError if sites that share a database want different values of what the database has once.

    So it is if the first one's policy would change what the second one's made.
    """
    for (first, one), (second, other) in combinations(accounting.items(), 2):
        if not _share(one.state, other.state):
            continue
        then = wanted[first](one.state)
        then = _after(then, wanted[second](_after(other.state, then)))
        for key in filter(None, map(_shared_key, differences(then, wanted[first](then)))):
            problem = f'"{key}" differs between sites {first} and {second}, which share a database'
            hint = f"[sites.{second}] must not change it, or name it alike in both"
            raise ConfigError(problem, where=where, hint=hint, key=key)


def _share(one: ClusterState, other: ClusterState) -> bool:
    return other.cluster in one.others and one.cluster in other.others


def _shared_key(change: ObjectChange) -> str:
    """Return the key of a policy whose change all clusters of a database see, "" for none."""
    kind, table = change.key[0], table_name(change.key)
    if kind in ("tier", "lead"):
        return table if kind == "tier" else f"{table}.leads"
    options = {o for o in _SHARED if (change.before or {}).get(o) != (change.after or {}).get(o)}
    return next((f"{table}.{column.key}" for column in COLUMNS[kind] if column.option in options), "")


def next_state(accounting: SiteAccounting, wanted: DesiredState, where: str, later: Sequence[SiteAccounting]) -> Kept:
    """Return what a run makes of a site. later: those whose turn comes after it.

    Raises ConfigError for what Slurm would refuse, ClusterError, Unreachable.
    """
    now = accounting.state
    then = _with_rights(now, wanted(now), [each.state for each in later if _share(now, each.state)])
    kept = keep_used(now, then, read_unfinished_jobs(accounting, then))
    require_possible(now, kept.state, f"{where} at site {accounting.site.name}")
    return kept


def _with_rights(now: ClusterState, then: ClusterState, of: Sequence[ClusterState]) -> ClusterState:
    """Return a state in which those who change the clusters `of` still have the rights that they have now."""
    objects = dict(then.objects)
    for key in {("user", state.runner) for state in of} & objects.keys() & now.objects.keys():
        objects[key] = _with_shared(objects[key], now.objects[key])
    return msgspec.structs.replace(then, objects=objects)


def planned_states(
    accounting: Mapping[str, SiteAccounting], wanted: Mapping[str, DesiredState], where: str
) -> list[tuple[SiteAccounting, Kept]]:
    """Return each site as it is after those before it, and what a run makes of it. Raises as `next_state`.

    Those come last that take rights from who makes the changes.
    """

    def takes_rights(site: SiteAccounting) -> bool:
        then = wanted[site.site.name](site.state)
        return _with_rights(site.state, then, [each.state for each in accounting.values()]) != then

    planned: list[tuple[SiteAccounting, Kept]] = []
    ordered = sorted(accounting.values(), key=takes_rights)
    for i, each in enumerate(ordered):
        now = each.state
        for earlier, kept in planned:
            now = _after(now, kept.state) if _share(earlier.state, now) else now
        each = msgspec.structs.replace(each, state=now)
        planned.append((each, next_state(each, wanted[each.site.name], where, ordered[i + 1 :])))
    return planned


def _after(now: ClusterState, then: ClusterState) -> ClusterState:
    """Return the state of a cluster once another one of its database has the state `then`."""
    objects = {key: values for key, values in now.objects.items() if key[0] not in ("tier", "lead")}
    objects |= {key: values for key, values in then.objects.items() if key[0] == "tier"}
    records, rights, used = dict(now.records), dict(now.other_rights), set[Key]()
    for key, values in then.objects.items():
        if key in objects and key[0] in ("team", "user"):
            objects[key] = _with_shared(objects[key], values)
        elif key[0] in ("team", "user"):
            (records if key[0] == "team" else rights)[key[1]] = _with_shared({}, values)
        if key[0] in ("team", "member"):
            used |= {("team", key[1]), *needs(key, values)}
    leads = {key for key in (*now.objects, *now.other_leads) if ("team", key[1]) not in then.objects}
    leads = {key for key in (*leads, *then.objects) if key[0] == "lead"}
    objects |= {key: {} for key in leads if ("team", key[1]) in objects}
    of_others = {"others": {**now.others, then.cluster: frozenset(used)}, "other_leads": leads - objects.keys()}
    state = msgspec.structs.replace(now, objects=objects, records=records, other_rights=rights, **of_others)
    return without_inherited_leads(state)


def _with_shared(own: Values, other: Values) -> Values:
    """Return an object's values, with those of another cluster that the database has once."""
    values = {option: text for option, text in own.items() if option not in _SHARED}
    return {**values, **{option: text for option, text in other.items() if option in _SHARED}}


def find_lock_outs(accounting: SiteAccounting, then: ClusterState, *, is_undo: bool = False) -> list[str]:
    """Return whom and which partitions a state of a site would lock out. Raises ClusterError, Unreachable.

    is_undo: the members who go were not there before.
    """
    now = accounting.state
    kept = {key: v for key, v in now.objects.items() if not is_undo or key[0] != "member" or key in then.objects}
    problems = lock_outs(msgspec.structs.replace(now, objects=kept), then)
    if any(key[0] in ("tier", "team") for key in {*now.objects} - {*then.objects}):
        problems += partition_lock_outs(now, then, read_partitions(accounting))
    return problems


def require_no_lock_out(accounting: SiteAccounting, then: ClusterState, sites: Sequence[str], *, is_undo: bool) -> None:
    """Raise ConfigError if a state locks users or partitions out, unless this site is one of those that may."""
    site = accounting.site.name
    if site not in sites and (problems := find_lock_outs(accounting, then, is_undo=is_undo)):
        raise ConfigError("; ".join(problems), where=f"site {site}", hint=f"if that is wanted: --lock-out {site}")


def run_changes(
    accounting: SiteAccounting, then: ClusterState, run: str, undoes: str = "", postponed: Sequence[ObjectChange] = ()
) -> Iterator[ChangeRow]:
    """Make a site's accounting the state, yield each change when it is made, and read the result.

    The caller holds the lock. run: its ID, alike at all sites. undoes: the run that it undoes. postponed: as of `Kept`.
    Raises ClusterError if what it changed then differs: somebody else changed it meanwhile.
    """
    site, slurm = accounting.site.name, accounting.client

    def call(argv: Sequence[str], *, is_again: bool = False) -> None:
        try:
            done = slurm.run_once(argv, _HINT)
            if not done.stdout.strip() and (refusal := done.stderr.strip()):  # of a default QOS, with exit code 0
                raise ClusterError(" ".join(refusal.split()))
        except PitError as error:
            if "QOS Preemption loop" in error.message and not is_again:  # there is none: `require_possible` looked
                for each in (*preempt_renewals(read_again(accounting, "tier")), argv):
                    call(each, is_again=True)
                return
            error.where = f"site {site}: {shlex.join(argv)}"
            if isinstance(error, ClusterError):
                left = "pit tenancy plan shows what is left to do"  # other hints are for those who submit jobs
                error.hint = "ask an administrator of Slurm's accounting" if is_denied(error) else left
            raise

    user = os.environ.get("SUDO_USER") or user_name(os.geteuid())
    noting = partial(apply_changes, journal=journal_path(), postponed=postponed)
    apply = partial(noting, run=run, site=site, user=user, undoes=undoes)
    now, own = accounting.state, {each.key for each in differences(accounting.state, then)}
    # Without a change: an undo, or its run would stand in the way; what stays for jobs; what a policy wants as left.
    is_noted = bool(undoes or postponed) or settled_state(now, intact_entries(), site) != now
    for _ in range(2):  # a team's own lead is seen once nobody above leads under the same name: removed next
        made = []
        for entry in apply(now, then, call, partial(read_again, accounting), is_noted=is_noted):
            made += entry.objects
            yield _entry_row(entry, "done")
        if not made:
            return
        is_noted = False
        now = read_site(accounting.site).state
        hidden = {key for key in now.objects if key[0] == "lead" and leads_above(accounting.state, key)}
        own |= hidden | {each.key for each in made}
        left = [each for each in differences(now, then) if each.key in own]
        if not left:
            return
        if any(each.key[0] != "lead" for each in left):
            break
        objects = {**now.objects, **{each.key: each.after for each in left}}
        then = msgspec.structs.replace(now, objects={key: v for key, v in objects.items() if v is not None})
    deviation = deviation_text(left[0].key[0], left[0].after, left[0].before)
    problem = f"{name_of(left[0].key)} is not as set by this run: {deviation}"
    hint = "somebody else may have changed it meanwhile: pit tenancy plan shows what differs"
    raise ClusterError(problem, where=f"site {site}", hint=hint)


def shared_changes(now: ClusterState, then: ClusterState) -> Iterator[str]:
    """Yield which other clusters of a database use tiers that a run changes: they have one value everywhere."""
    changed = {each.key for each in differences(now, then) if each.key[0] == "tier" and each.before is not None}
    for cluster, used in sorted(now.others.items()):
        if names := sorted(key[1] for key in changed & used):
            yield f"what changes of tier {', '.join(names)} holds on cluster {cluster}, too"


def history(sites: Sequence[str] = ()) -> list[ChangeRow]:
    """Return the changes of all runs at these sites, or at all, the oldest first. Raises DataError."""
    entries = [entry for entry in read_entries(journal_path()) if not sites or entry.site in sites]
    following: dict[str, str] = {}
    rows = []
    for entry in reversed(entries):
        kind, following[entry.run] = following.get(entry.run, ""), entry.kind
        if entry.kind == "call":
            rows.append(_entry_row(entry, "refused" if kind == "refused" else "done" if kind else "unknown"))
    return rows[::-1]


def _entry_row(entry: JournalEntry, state: State) -> ChangeRow:
    row = _row(entry.site, entry.cluster, entry.objects[0], entry.argv)
    return msgspec.structs.replace(row, state=state, run=entry.run, at=entry.at, user=entry.user)


def _row(site: str, cluster: str, change: ObjectChange, argv: list[str]) -> ChangeRow:
    values = {"change": describe(change), "command": shlex.join(argv), **msgspec.structs.asdict(change)}
    return ChangeRow(site=site, cluster=cluster, **values)
