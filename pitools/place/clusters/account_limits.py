"""Who we are at a site: our associations, the QOS, and the GPU hours we used, as accounting has them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pitools.core.record import Record
from pitools.site.schema import Site
from pitools.slurm import argv, parse_accounting
from pitools.slurm.batch import run_batch, stdout_or_raise
from pitools.slurm.fields import new_separator, parse_count
from pitools.slurm.records import AccountingRow, Association, Qos
from pitools.slurm.transport import Transport

QUOTA_DAYS = 30


class AccountLimits(Record, frozen=True, kw_only=True, tag="pit.account-limits/1"):
    """What accounting says of us. associations: ours, and those of the accounts themselves (user "").

    groups: those of the system that we are in. gpu_hours: that our jobs of the last 30 days used.
    """

    user: str
    associations: tuple[Association, ...]
    qos: tuple[Qos, ...]
    gpu_hours: float
    groups: frozenset[str] = frozenset()


def query_account_limits(site: Site, transport: Transport) -> AccountLimits:
    """Ask who we are, and slurmdbd, in one call. Raises Unreachable, ClusterError where there is no accounting."""
    sep = new_separator()
    since = datetime.now(UTC) - timedelta(days=QUOTA_DAYS)
    # sacct without a user's name asks for the jobs of whoever asks, except for those who may see all.
    ours = ["sh", "-c", 'user=$(id -un) && exec "$@" --user="$user"', "sh", *argv.sacct(since=since, sep=sep)]
    done = run_batch(transport, [argv.USER, ["id", "-Gn"], argv.associations(), argv.QOS, ours])
    user, groups, associations, qos, jobs = (stdout_or_raise(transport, one) for one in done)
    name = user.strip()
    per_node = {name: partition.gpus_per_node for name, partition in site.partitions.items()}
    return AccountLimits(
        user=name,
        associations=tuple(a for a in parse_accounting.parse_associations(associations) if a.user in ("", name)),
        qos=tuple(parse_accounting.parse_qos(qos)),
        gpu_hours=sum(_gpu_hours(job, since, per_node) for job in parse_accounting.parse_sacct(jobs, sep, UTC)),
        groups=frozenset(groups.split()),
    )


def _gpu_hours(job: AccountingRow, since: datetime, per_node: Mapping[str, int]) -> float:
    """What a job used of its GPUs since a moment: one that ran across it counts from there on."""
    if not job.start:
        return 0.0
    # A Slurm that does not track gres/gpu says nothing of them: whole nodes then.
    tracked = job.alloc_tres.get("gres/gpu")
    gpus = parse_count(tracked) or 0 if tracked else job.nodes * per_node.get(job.partition, 0)
    before_s = max(0.0, (since - datetime.fromisoformat(job.start)).total_seconds())
    return gpus * max(0.0, job.elapsed_s - before_s) / 3600
