"""A site at one moment: its partitions, nodes and jobs, and what we may use there. Several sites are read at once.

What a site says is checked before anything is decided by it; a site that is silent, or makes no sense, is skipped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, PitError, UsageError, nearest
from pitools.core.record import Record
from pitools.place.clusters import cache
from pitools.place.clusters.account_limits import Standing, ask_standing
from pitools.place.clusters.parallel import gather
from pitools.site import load
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, parse_cluster, parse_jobs, parse_nodes
from pitools.slurm.batch import answer, batch
from pitools.slurm.fields import separator
from pitools.slurm.records import Job, Node, Partition, Reservation
from pitools.slurm.transport import Reach

MAX_AGE_S = 30.0
STANDING_S = 3600.0  # accounts and limits change with a person's mail, not with a job
_SILENT_S = 60.0  # a database that did not answer is not asked again at once: the cluster does without
_FIELDS = (
    "job_id",
    "state",
    "user",
    "account",
    "qos",
    "partition",
    "nodes",
    "node_list",
    "start",
    "end",
    "time_limit_s",
    "gres",
    "reason",
    "name",
    "raw_id",
)
_ENFORCES = "AccountingStorageEnforce"


class Seen(Record, frozen=True, kw_only=True, tag="pit.seen/1"):
    """What slurmctld said. skew_s: how far the cluster's clock is ahead of ours. enforces: of accounting's limits."""

    seen_s: float
    skew_s: float
    cluster: str
    enforces: tuple[str, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    version: tuple[int, ...] = ()
    reservations: tuple[Reservation, ...] = ()


class Snapshot(Record, frozen=True, kw_only=True, tag="pit.snapshot/1"):
    """A site as it was at `seen_s`, Unix time; times inside are those of the cluster's clock, `skew_s` ahead of ours.

    enforces: what slurmctld enforces of accounting (`associations`, `limits`, `qos`). jobs: running or pending, of
    everybody that we may see. standing: what we may use, None where accounting does not tell. notes: what is not
    known, for people.
    """

    site: str
    seen_s: float
    skew_s: float
    cluster: str
    enforces: tuple[str, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    version: tuple[int, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    standing: Standing | None = None
    notes: tuple[str, ...] = ()


class Skipped(Record, frozen=True, kw_only=True, tag="pit.skipped/1"):
    """A site about which nothing was decided, and why."""

    site: str
    reason: str
    hint: str = ""


def sites(names: Sequence[str] = ()) -> tuple[list[Site], list[Skipped]]:
    """The sites of these names; without names, every site with a Slurm whose host could exist.

    Raises UsageError or ConfigError for a named site that is wrong; of those that nobody named it is skipped.
    """
    found: list[Site] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names or load.names()):
        try:
            site = load.load(name)
        except PitError as error:
            if names:
                raise
            skipped.append(Skipped(site=name, reason=str(error), hint=error.hint))
            continue
        if names and site.scheduler != "slurm":
            raise UsageError(f'site "{name}" has no Slurm to place jobs on', hint="see: pit site list")
        # `.example` is nobody's (RFC 2606): a file to copy, not a site.
        if names or (site.scheduler == "slurm" and not site.reach.host.endswith((".example", ".invalid"))):
            found.append(site)
    return found, skipped


def read_all(
    sites: Sequence[Site], timeout_s: float, max_age_s: float = MAX_AGE_S
) -> tuple[list[Snapshot], list[Skipped]]:
    """Every site's snapshot, all asked at once, and the sites that gave none by the deadline."""
    questions = {
        site.name: lambda left_s, site=site: read(site, timeout_s=left_s, max_age_s=max_age_s) for site in sites
    }
    answers = gather(questions, timeout_s)
    skipped = [skip(name, error) for name, error in answers.items() if isinstance(error, PitError)]
    return [one for one in answers.values() if isinstance(one, Snapshot)], skipped


def skip(site: str, error: PitError) -> Skipped:
    """The site as skipped for this error."""
    return Skipped(site=site, reason=str(error), hint=error.hint)


def read(site: Site, *, timeout_s: float = 0.0, max_age_s: float = MAX_AGE_S) -> Snapshot:
    """The site, as of `max_age_s` ago or later, within `timeout_s` (its reach's own if 0). At most two calls.

    Raises Unreachable, and ClusterError for an answer that cannot be this site's.
    """
    timeout_s = min(timeout_s or site.reach.timeout_s, site.reach.timeout_s)
    answers = gather(
        {
            "slurmctld": lambda left_s: cache.get(
                key(site, "seen"), Seen, lambda left_s: ask_seen(site, left_s), max_age_s=max_age_s, timeout_s=left_s
            ),
            "accounting": lambda left_s: cache.get(
                key(site, "standing"),
                Standing,
                lambda left_s: ask_standing(site, reach(site, left_s)),
                max_age_s=STANDING_S,
                timeout_s=left_s / 2,
                failure_s=_SILENT_S,
            ),
        },
        timeout_s,
    )
    seen, standing = answers["slurmctld"], answers["accounting"]
    if isinstance(seen, PitError):
        raise seen
    assert isinstance(seen, Seen)
    known = standing if isinstance(standing, Standing) else None
    notes = (f"limits and quota are not known: {standing}",) if isinstance(standing, PitError) else ()
    said = {name: getattr(seen, name) for name in Seen.__struct_fields__}
    return Snapshot(site=site.name, standing=known, notes=notes, **said)


def reach(site: Site, timeout_s: float) -> Reach:
    """How the site's commands are run, with so many seconds at most."""
    return msgspec.structs.replace(client(site).reach, timeout_s=max(0.001, min(timeout_s, site.reach.timeout_s)))


def key(site: Site, what: str) -> str:
    """What an answer of the site is kept as. That of another host or cluster is not taken for this site's."""
    asked = hashlib.sha256(msgspec.json.encode((site.reach, site.slurm))).hexdigest()[:12]
    return f"{site.name}-{asked}-{what}"


def ask_seen(site: Site, timeout_s: float) -> Seen:
    """Ask slurmctld: five requests in one call. Raises as `read`."""
    sep = separator()
    squeue = ["squeue", "-h", "--noconvert", "-o", sep.join(parse_jobs.JOB_FORMAT[name] for name in _FIELDS)]
    where = reach(site, timeout_s)
    before = time.time()
    done = batch(where, [["date", "+%s"], argv.CONFIG, argv.PARTITIONS, argv.nodes(), argv.RESERVATIONS, squeue])
    clock, config, partitions, nodes, kept, jobs = (answer(where, one) for one in done)
    said = parse_cluster.config(config)
    seen = Seen(
        seen_s=before,
        skew_s=_skew_s(clock, before),
        cluster=said.cluster,
        enforces=tuple(word.strip() for word in said.values.get(_ENFORCES, "").split(",") if word.strip() != "none"),
        partitions=tuple(parse_nodes.partitions(partitions)),
        nodes=tuple(parse_nodes.scontrol_nodes(nodes, UTC)),
        jobs=tuple(parse_jobs.squeue(jobs, sep, _FIELDS, UTC)),
        version=said.version,
        reservations=tuple(parse_nodes.reservations(kept, UTC)),
    )
    _check(site, seen)
    return seen


def _skew_s(clock: str, before: float) -> float:
    try:
        skew_s = int(clock) - before
    except ValueError as error:
        raise ClusterError(
            f"its clock says {clock[:40]!r}", where="date", hint="log in and see what it prints"
        ) from error
    # Whole seconds, asked over a network: less than that is no skew.
    return skew_s if abs(skew_s) > 5 else 0.0


def _check(site: Site, seen: Seen) -> None:
    """Raise ClusterError for what cannot be this site, whole."""

    def refuse(what: str, hint: str) -> ClusterError:
        return ClusterError(what, where=site.name, hint=hint)

    if site.slurm.cluster and seen.cluster != site.slurm.cluster:
        what = f'cluster "{seen.cluster}" answered, and not "{site.slurm.cluster}"'
        raise refuse(what, "see slurm.cluster, slurm.conf and reach.host in the site file")
    names = {node.node for node in seen.nodes}
    if not seen.nodes or len(names) < len(seen.nodes):
        raise refuse(f"it names {len(seen.nodes)} nodes, {len(names)} of them different", "run: scontrol show node")
    partitions = {partition.partition for partition in seen.partitions}
    if site.partitions and partitions.isdisjoint(site.partitions):
        hint = nearest(next(iter(site.partitions)), partitions)
        raise refuse("it has none of the partitions of the site file", hint or "is it the right cluster?")
    lists = [one.node_list for one in seen.partitions] + [one.node_list for one in seen.jobs]
    for named in (*lists, *(one.node_list for one in seen.reservations)):
        if hostlist.count(named) > 1000 + len(names):  # those that are merely not there are named below
            raise refuse(f"{named[:80]!r} is more nodes than it has", "run: scontrol show partition, squeue -o %N")
    for partition in seen.partitions:
        try:
            unknown = set(hostlist.expand(partition.node_list)) - names
        except UsageError as error:
            raise refuse(f'partition "{partition.partition}": {error.what}', "run: scontrol show partition") from error
        if unknown:
            what = f'partition "{partition.partition}" has node {min(unknown)}, which the list of nodes has not'
            raise refuse(what, "the answer was cut, or nodes are hidden: ask the site's people")
