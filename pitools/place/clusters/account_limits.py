"""The user's limits at a site from Slurm's accounting: associations, QOS, and GPU hours used."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pitools.core.record import Record
from pitools.site.schema import Site
from pitools.slurm import argv, parse_accounting
from pitools.slurm.fields import new_separator, parse_count
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.records import AccountingRow, Association, Qos
from pitools.slurm.transport import Transport

QUOTA_DAYS = 30


class AccountLimits(Record, frozen=True, kw_only=True, tag="pit.account-limits/1"):
    """The user's limits and usage. associations: the user's, and those of the accounts themselves (user "").

    groups: the user's Unix groups. used_gpu_hours: used by the user's jobs in the last 30 days.
    """

    user: str
    associations: tuple[Association, ...]
    qos: tuple[Qos, ...]
    used_gpu_hours: float
    groups: frozenset[str] = frozenset()


def query_account_limits(site: Site, transport: Transport) -> AccountLimits:
    """Query the user's name, groups and accounting in one call. Raises Unreachable, ClusterError."""
    sep = new_separator()
    since = datetime.now(UTC) - timedelta(days=QUOTA_DAYS)
    # Without --user, sacct lists only the caller's jobs, but all users' jobs for an operator.
    sacct_own_jobs = ["sh", "-c", 'user=$(id -un) && exec "$@" --user="$user"', "sh", *argv.sacct(since=since, sep=sep)]
    outputs = run_queries(transport, [argv.USER, ["id", "-Gn"], argv.associations(), argv.QOS, sacct_own_jobs])
    user, groups, associations, qos, jobs = (stdout_or_raise(transport, output) for output in outputs)
    name = user.strip()
    rows = list(parse_accounting.parse_sacct(jobs, sep, UTC))
    # A Slurm that does not track gres/gpu reports no GPUs of any job: count whole nodes.
    is_tracked = any("gres/gpu" in row.alloc_tres for row in rows)
    per_node = {} if is_tracked else {name: partition.gpus_per_node for name, partition in site.partitions.items()}
    return AccountLimits(
        user=name,
        associations=tuple(a for a in parse_accounting.parse_associations(associations) if a.user in ("", name)),
        qos=tuple(parse_accounting.parse_qos(qos)),
        used_gpu_hours=sum(_gpu_hours(row, since, per_node) for row in rows),
        groups=frozenset(groups.split()),
    )


def _gpu_hours(job: AccountingRow, since: datetime, per_node: Mapping[str, int]) -> float:
    """Return the GPU hours of a job since a time. A job that started earlier counts from that time on.

    per_node: partition → GPUs of a node, for a job that reports none.
    """
    if not job.start:
        return 0.0
    tracked = job.alloc_tres.get("gres/gpu")
    gpus = parse_count(tracked) or 0 if tracked else job.nodes * per_node.get(job.partition, 0)
    skipped_s = max(0.0, (since - datetime.fromisoformat(job.start)).total_seconds())
    return gpus * max(0.0, job.elapsed_s - skipped_s) / 3600
