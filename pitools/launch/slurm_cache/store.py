"""What is kept of a cluster's answers: one file, replaced whole."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path

import msgspec

from pitools.core.fs import open_regular, write_atomic
from pitools.core.record import Record, decode_json
from pitools.site.schema import Site
from pitools.slurm import job_components

_MAX_BYTES = 64 << 20


class QueryFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A question that got no answer: when, and how often in a row. retry: whether it may be answered later."""

    message: str
    where: str
    hint: str
    retry: bool
    failed_at_s: float
    times: int = 1


class AccountedJob(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a job that slurmctld has forgotten. tries: how often accounting gave no end to it."""

    state: str
    queried_at_s: float
    tries: int = 0


class CachedAnswers(Record, frozen=True, kw_only=True, tag="pit.slurm-cache/1"):
    """One cluster, as squeue had it. Times are Unix times.

    queried_at_s: when the last good answer was asked for; jobs: that answer. wait_s: until the next. failed,
    accounting_failure: why the last query of slurmctld, of accounting failed. interest: job id → when it was first, and
    last, asked for. accounts: by job id. bucket_calls: what the bucket of rate_limit.py held at bucket_as_of_s.
    """

    queried_at_s: float = 0.0
    jobs: tuple[job_components.SqueueRow, ...] = ()
    wait_s: float = 0.0
    failed: QueryFailure | None = None
    accounting_failure: QueryFailure | None = None
    interest: dict[str, tuple[float, float]] = {}
    accounts: dict[str, AccountedJob] = {}
    bucket_calls: float = 0.0
    bucket_as_of_s: float = 0.0

    def states(self) -> dict[str, str]:
        """State by every id that the last answer knew."""
        return job_components.states_from_squeue(self.jobs)


def cache_key(site: Site) -> str:
    """What a cluster's answers are kept as: the same for every site file that reaches it the same way from this host.

    A home folder may be seen by the hosts of several clusters, each with a Slurm of its own in the usual place.
    """
    conf = site.slurm.conf or ("" if site.connection.host else os.environ.get("SLURM_CONF", ""))
    way = (socket.gethostname(), site.connection.kind, site.connection.host, conf, site.slurm.bin)
    return hashlib.sha256(msgspec.json.encode(way)).hexdigest()[:16]


def read_cache(path: Path) -> CachedAnswers:
    """What is kept; nothing where there is no such file, no sense in it, or a clock that was set back since."""
    try:
        with open_regular(path) as file:
            found = decode_json(file.read(_MAX_BYTES), CachedAnswers)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return CachedAnswers()
    return found if max(found.queried_at_s, found.bucket_as_of_s) <= time.time() else CachedAnswers()


def write_cache(path: Path, cached: CachedAnswers) -> None:
    """Keep it. Raises NoSpace or ClusterError."""
    write_atomic(path, msgspec.json.encode(cached), mode=0o600, durable=False)
