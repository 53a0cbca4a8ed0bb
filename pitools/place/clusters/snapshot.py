"""A snapshot of a site: its partitions, nodes and jobs, and the limits of the user there. Sites are queried in
parallel.

Answers are checked for consistency first. A site that does not answer, or whose answer is inconsistent, is skipped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, PitError, Unreachable, UsageError, suggest
from pitools.core.record import Record
from pitools.limits.read import enforced_limits
from pitools.place.clusters import cache
from pitools.place.clusters.account_limits import AccountLimits, query_account_limits
from pitools.place.clusters.parallel import query_all
from pitools.site import load
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, parse_cluster, parse_jobs, parse_nodes
from pitools.slurm.fields import comma_list, new_separator
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.records import Node, Partition, Reservation, SlurmJob
from pitools.slurm.transport import Transport

MAX_AGE_S = 30.0
ACCOUNT_TTL_S = 3600.0  # administrators change accounts and limits by hand, rarely
_RETRY_FAILED_S = 60.0  # back-off for slurmdbd: a snapshot does without its answer
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


class ControllerState(Record, frozen=True, kw_only=True, tag="pit.controller-state/1"):
    """The answer of slurmctld at `seen_s`, Unix time. Times in the rows are of the cluster's clock, `skew_s` ahead of
    ours.

    enforced_limits: AccountingStorageEnforce of slurm.conf (`associations`, `limits`, `qos`). priority_flags: words of
    PriorityFlags, in lower case. jobs: running or pending jobs of every user that we may list.
    """

    seen_s: float
    skew_s: float
    cluster: str
    enforced_limits: tuple[str, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    jobs: tuple[SlurmJob, ...]
    version: tuple[int, ...] = ()
    priority_flags: tuple[str, ...] = ()
    reservations: tuple[Reservation, ...] = ()


class Snapshot(ControllerState, frozen=True, kw_only=True, tag="pit.snapshot/1"):
    """A site's controller state with its accounting.

    account: limits and usage of this user, None if accounting does not answer. notes: missing data, as text.
    """

    site: str
    account: AccountLimits | None = None
    notes: tuple[str, ...] = ()


class SkippedSite(Record, frozen=True, kw_only=True, tag="pit.skipped-site/1"):
    """A site that was left out, and the reason. exit_code: of the class of that error."""

    site: str
    reason: str
    hint: str = ""
    exit_code: int = Unreachable.exit_code


def load_sites(names: Sequence[str] = ()) -> tuple[list[Site], list[SkippedSite]]:
    """Return the sites of these names; without names, every site with Slurm, except reserved host names.

    Raises UsageError or ConfigError for an invalid named site; without names, an invalid site is skipped.
    """
    sites: list[Site] = []
    skipped: list[SkippedSite] = []
    for name in dict.fromkeys(names or load.site_names()):
        try:
            site = load.load_site(name)
        except PitError as error:
            if names:
                raise
            skipped.append(skipped_site(name, error))
            continue
        if names and site.scheduler != "slurm":
            raise UsageError(f'site "{name}" has no Slurm to place jobs on', hint="see: pit site list")
        # RFC 2606 reserves `.example`: such a file is a template, not a site.
        if names or (site.scheduler == "slurm" and not site.connection.host.endswith((".example", ".invalid"))):
            sites.append(site)
    return sites, skipped


def read_snapshots(
    sites: Sequence[Site], timeout_s: float, max_age_s: float = MAX_AGE_S
) -> tuple[list[Snapshot], list[SkippedSite]]:
    """Return the snapshots of all sites, queried in parallel, and the sites that gave none by the deadline."""
    queries = {
        site.name: lambda left_s, site=site: read_snapshot(site, timeout_s=left_s, max_age_s=max_age_s)
        for site in sites
    }
    answers = query_all(queries, timeout_s)
    skipped = [skipped_site(name, error) for name, error in answers.items() if isinstance(error, PitError)]
    return [snapshot for snapshot in answers.values() if isinstance(snapshot, Snapshot)], skipped


def skipped_site(site: str, error: PitError) -> SkippedSite:
    """Return the record of a site that is left out because of this error."""
    return SkippedSite(site=site, reason=str(error), hint=error.hint, exit_code=error.exit_code)


def read_snapshot(site: Site, *, timeout_s: float = 0.0, max_age_s: float = MAX_AGE_S) -> Snapshot:
    """Return the site's snapshot, at most `max_age_s` old. At most two calls.

    timeout_s: at most the time-out of the site file, which is the default (0). Raises Unreachable, and ClusterError for
    an inconsistent answer.
    """
    timeout_s = min(timeout_s or site.connection.timeout_s, site.connection.timeout_s)
    answers = query_all(
        {
            "slurmctld": lambda left_s: cache.get_or_query(
                cache_key(site, "controller"),
                ControllerState,
                lambda left_s: query_controller(site, left_s),
                max_age_s=max_age_s,
                timeout_s=left_s,
            ),
            "accounting": lambda left_s: cache.get_or_query(
                cache_key(site, "account"),
                AccountLimits,
                lambda left_s: query_account_limits(site, make_transport(site, left_s)),
                max_age_s=ACCOUNT_TTL_S,
                timeout_s=left_s / 2,
                failure_s=_RETRY_FAILED_S,
            ),
        },
        timeout_s,
    )
    controller, limits = answers["slurmctld"], answers["accounting"]
    if isinstance(controller, PitError):
        raise controller
    assert isinstance(controller, ControllerState)
    account = limits if isinstance(limits, AccountLimits) else None
    notes = (f"limits and quota are not known: {limits}",) if isinstance(limits, PitError) else ()
    return Snapshot(site=site.name, account=account, notes=notes, **msgspec.structs.asdict(controller))


def make_transport(site: Site, timeout_s: float) -> Transport:
    """Return the transport for a site's commands. timeout_s: at most the site's own."""
    return msgspec.structs.replace(
        client(site).transport, timeout_s=max(0.001, min(timeout_s, site.connection.timeout_s))
    )


def cache_key(site: Site, query: str) -> str:
    """Return the cache key of a query to a site; it differs for another host or cluster of the same name."""
    config_hash = hashlib.sha256(msgspec.json.encode((site.connection, site.slurm))).hexdigest()[:12]
    return f"{site.name}-{config_hash}-{query}"


def query_controller(site: Site, timeout_s: float) -> ControllerState:
    """Query slurmctld: five requests in one call. Raises Unreachable, and ClusterError for an inconsistent answer."""
    sep = new_separator()
    squeue = ["squeue", "-h", "--noconvert", "-o", sep.join(parse_jobs.JOB_FORMAT[name] for name in _FIELDS)]
    transport = make_transport(site, timeout_s)
    before_s = time.time()
    outputs = run_queries(
        transport, [["date", "+%s"], argv.CONFIG, argv.PARTITIONS, argv.show_nodes(), argv.RESERVATIONS, squeue]
    )
    clock, config, partitions, nodes, reservations, jobs = (stdout_or_raise(transport, output) for output in outputs)
    config_values = parse_cluster.parse_config(config)
    state = ControllerState(
        seen_s=before_s,
        skew_s=_skew_s(clock, before_s),
        cluster=config_values.cluster,
        enforced_limits=enforced_limits(config_values),
        partitions=tuple(parse_nodes.parse_partitions(partitions)),
        nodes=tuple(parse_nodes.parse_nodes(nodes)),
        jobs=tuple(parse_jobs.parse_squeue(jobs, sep, _FIELDS, UTC)),
        version=config_values.version,
        priority_flags=comma_list(config_values.values.get("PriorityFlags", "").lower()),
        reservations=tuple(parse_nodes.parse_reservations(reservations, UTC)),
    )
    require_consistent(site, state)
    return state


def _skew_s(clock: str, now_s: float) -> float:
    try:
        skew_s = int(clock) - now_s
    except ValueError as error:
        raise ClusterError(
            f"not a time: {clock[:40]!r} (expected seconds)", where="date", hint="log in and run: date +%s"
        ) from error
    # `date` prints whole seconds, over a network: a smaller difference is not skew.
    return skew_s if abs(skew_s) > 5 else 0.0


def require_consistent(site: Site, state: ControllerState) -> None:
    """Raise ClusterError for an answer that is incomplete or from another cluster."""

    def bad_answer(message: str, hint: str) -> ClusterError:
        return ClusterError(message, where=site.name, hint=hint)

    if site.slurm.cluster and state.cluster.lower() != site.slurm.cluster.lower():
        message = f'the wrong cluster answered: "{state.cluster}" (expected "{site.slurm.cluster}")'
        raise bad_answer(message, "see slurm.cluster, slurm.conf and connection.host in the site file")
    names = {node.node for node in state.nodes}
    if not state.nodes or len(names) < len(state.nodes):
        raise bad_answer(f"{len(state.nodes)} nodes with {len(names)} distinct names", "run: scontrol show node")
    partitions = {partition.partition for partition in state.partitions}
    if site.partitions and partitions.isdisjoint(site.partitions):
        hint = suggest(next(iter(site.partitions)), partitions)
        raise bad_answer("no partition of the site file exists there", hint or "run: scontrol show partition")
    node_lists = [row.node_list for row in state.partitions] + [row.node_list for row in state.jobs]
    for node_list in (*node_lists, *(row.node_list for row in state.reservations)):
        if hostlist.count_hosts(node_list) > 1000 + len(names):  # an unknown node is reported below
            message = f"more nodes in a list than in the cluster ({len(names)}): {node_list[:80]!r}"
            raise bad_answer(message, "run: scontrol show partition, squeue -o %N")
    for partition in state.partitions:
        try:
            unknown = set(hostlist.expand(partition.node_list)) - names
        except UsageError as error:
            raise bad_answer(
                f'partition "{partition.partition}": {error.message}', "run: scontrol show partition"
            ) from error
        if unknown:
            message = f'partition "{partition.partition}": node {min(unknown)} is missing in the list of nodes'
            raise bad_answer(message, "the answer is incomplete, or nodes are hidden: ask the site's administrators")
