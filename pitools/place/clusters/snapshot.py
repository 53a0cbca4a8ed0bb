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
from pitools.core.errors import ClusterError, PitError, UsageError, suggest
from pitools.core.record import Record
from pitools.place.clusters import cache
from pitools.place.clusters.account_limits import AccountLimits, query_account_limits
from pitools.place.clusters.parallel import query_all
from pitools.site import load
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, parse_cluster, parse_jobs, parse_nodes
from pitools.slurm.batch import run_batch, stdout_or_raise
from pitools.slurm.fields import new_separator
from pitools.slurm.records import Node, Partition, Reservation, SlurmJob
from pitools.slurm.transport import Transport

MAX_AGE_S = 30.0
ACCOUNT_TTL_S = 3600.0  # accounts and limits change with a person's mail, not with a job
_RETRY_FAILED_S = 60.0  # a database that did not answer is not asked again at once: the cluster does without
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


class ControllerState(Record, frozen=True, kw_only=True, tag="pit.controller-state/1"):
    """The answer of slurmctld at `seen_s`, Unix time. Times inside are of the cluster's clock, `skew_s` ahead of ours.

    enforced_limits: what slurmctld enforces of accounting (`associations`, `limits`, `qos`). jobs: running or pending,
    of every user that we may see.
    """

    seen_s: float
    skew_s: float
    cluster: str
    enforced_limits: tuple[str, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    jobs: tuple[SlurmJob, ...]
    version: tuple[int, ...] = ()
    reservations: tuple[Reservation, ...] = ()


class Snapshot(ControllerState, frozen=True, kw_only=True, tag="pit.snapshot/1"):
    """A site's controller state with its accounting.

    account: limits and usage of this user, None where accounting does not answer. notes: what is not known, as text.
    """

    site: str
    account: AccountLimits | None = None
    notes: tuple[str, ...] = ()


class SkippedSite(Record, frozen=True, kw_only=True, tag="pit.skipped-site/1"):
    """A site that was left out, and the reason."""

    site: str
    reason: str
    hint: str = ""


def load_sites(names: Sequence[str] = ()) -> tuple[list[Site], list[SkippedSite]]:
    """The sites of these names; without names, every site with a Slurm whose host could exist.

    Raises UsageError or ConfigError for a named site that is wrong; of those that nobody named it is skipped.
    """
    found: list[Site] = []
    skipped: list[SkippedSite] = []
    for name in dict.fromkeys(names or load.site_names()):
        try:
            site = load.load_site(name)
        except PitError as error:
            if names:
                raise
            skipped.append(SkippedSite(site=name, reason=str(error), hint=error.hint))
            continue
        if names and site.scheduler != "slurm":
            raise UsageError(f'site "{name}" has no Slurm to place jobs on', hint="see: pit site list")
        # `.example` is nobody's (RFC 2606): a file to copy, not a site.
        if names or (site.scheduler == "slurm" and not site.connection.host.endswith((".example", ".invalid"))):
            found.append(site)
    return found, skipped


def read_snapshots(
    sites: Sequence[Site], timeout_s: float, max_age_s: float = MAX_AGE_S
) -> tuple[list[Snapshot], list[SkippedSite]]:
    """Every site's snapshot, all asked at once, and the sites that gave none by the deadline."""
    questions = {
        site.name: lambda left_s, site=site: read_snapshot(site, timeout_s=left_s, max_age_s=max_age_s)
        for site in sites
    }
    answers = query_all(questions, timeout_s)
    skipped = [skipped_site(name, error) for name, error in answers.items() if isinstance(error, PitError)]
    return [one for one in answers.values() if isinstance(one, Snapshot)], skipped


def skipped_site(site: str, error: PitError) -> SkippedSite:
    """Return the record of a site that is left out because of this error."""
    return SkippedSite(site=site, reason=str(error), hint=error.hint)


def read_snapshot(site: Site, *, timeout_s: float = 0.0, max_age_s: float = MAX_AGE_S) -> Snapshot:
    """The site, as of `max_age_s` ago or later, within `timeout_s` (its transport's own if 0). At most two calls.

    Raises Unreachable, and ClusterError for an answer that cannot be this site's.
    """
    timeout_s = min(timeout_s or site.connection.timeout_s, site.connection.timeout_s)
    answers = query_all(
        {
            "slurmctld": lambda left_s: cache.get_or_query(
                cache_key(site, "seen"),
                ControllerState,
                lambda left_s: query_controller(site, left_s),
                max_age_s=max_age_s,
                timeout_s=left_s,
            ),
            "accounting": lambda left_s: cache.get_or_query(
                cache_key(site, "standing"),
                AccountLimits,
                lambda left_s: query_account_limits(site, make_transport(site, left_s)),
                max_age_s=ACCOUNT_TTL_S,
                timeout_s=left_s / 2,
                failure_s=_RETRY_FAILED_S,
            ),
        },
        timeout_s,
    )
    seen, standing = answers["slurmctld"], answers["accounting"]
    if isinstance(seen, PitError):
        raise seen
    assert isinstance(seen, ControllerState)
    known = standing if isinstance(standing, AccountLimits) else None
    notes = (f"limits and quota are not known: {standing}",) if isinstance(standing, PitError) else ()
    return Snapshot(site=site.name, account=known, notes=notes, **msgspec.structs.asdict(seen))


def make_transport(site: Site, timeout_s: float) -> Transport:
    """Return the transport for a site's commands. timeout_s: at most the site's own."""
    return msgspec.structs.replace(
        client(site).transport, timeout_s=max(0.001, min(timeout_s, site.connection.timeout_s))
    )


def cache_key(site: Site, query: str) -> str:
    """Return the cache key of a query to a site; it differs for another host or cluster of the same name."""
    asked = hashlib.sha256(msgspec.json.encode((site.connection, site.slurm))).hexdigest()[:12]
    return f"{site.name}-{asked}-{query}"


def query_controller(site: Site, timeout_s: float) -> ControllerState:
    """Ask slurmctld: five requests in one call. Raises as `read`."""
    sep = new_separator()
    squeue = ["squeue", "-h", "--noconvert", "-o", sep.join(parse_jobs.JOB_FORMAT[name] for name in _FIELDS)]
    transport = make_transport(site, timeout_s)
    before = time.time()
    done = run_batch(
        transport, [["date", "+%s"], argv.CONFIG, argv.PARTITIONS, argv.show_nodes(), argv.RESERVATIONS, squeue]
    )
    clock, config, partitions, nodes, reservations, jobs = (stdout_or_raise(transport, one) for one in done)
    config_values = parse_cluster.parse_config(config)
    seen = ControllerState(
        seen_s=before,
        skew_s=_skew_s(clock, before),
        cluster=config_values.cluster,
        enforced_limits=tuple(
            word.strip() for word in config_values.values.get(_ENFORCES, "").split(",") if word.strip() != "none"
        ),
        partitions=tuple(parse_nodes.parse_partitions(partitions)),
        nodes=tuple(parse_nodes.parse_nodes(nodes, UTC)),
        jobs=tuple(parse_jobs.parse_squeue(jobs, sep, _FIELDS, UTC)),
        version=config_values.version,
        reservations=tuple(parse_nodes.parse_reservations(reservations, UTC)),
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


def _check(site: Site, seen: ControllerState) -> None:
    """Raise ClusterError for an answer that is cut or is another cluster's."""

    def refuse(what: str, hint: str) -> ClusterError:
        return ClusterError(what, where=site.name, hint=hint)

    if site.slurm.cluster and seen.cluster != site.slurm.cluster:
        what = f'cluster "{seen.cluster}" answered, and not "{site.slurm.cluster}"'
        raise refuse(what, "see slurm.cluster, slurm.conf and connection.host in the site file")
    names = {node.node for node in seen.nodes}
    if not seen.nodes or len(names) < len(seen.nodes):
        raise refuse(f"it names {len(seen.nodes)} nodes, {len(names)} of them different", "run: scontrol show node")
    partitions = {partition.partition for partition in seen.partitions}
    if site.partitions and partitions.isdisjoint(site.partitions):
        hint = suggest(next(iter(site.partitions)), partitions)
        raise refuse("it has none of the partitions of the site file", hint or "is it the right cluster?")
    lists = [one.node_list for one in seen.partitions] + [one.node_list for one in seen.jobs]
    for named in (*lists, *(one.node_list for one in seen.reservations)):
        if hostlist.count_hosts(named) > 1000 + len(names):  # those that are merely not there are named below
            raise refuse(f"{named[:80]!r} is more nodes than it has", "run: scontrol show partition, squeue -o %N")
    for partition in seen.partitions:
        try:
            unknown = set(hostlist.expand(partition.node_list)) - names
        except UsageError as error:
            raise refuse(
                f'partition "{partition.partition}": {error.message}', "run: scontrol show partition"
            ) from error
        if unknown:
            what = f'partition "{partition.partition}" has node {min(unknown)}, which the list of nodes has not'
            raise refuse(what, "the answer was cut, or nodes are hidden: ask the site's people")
