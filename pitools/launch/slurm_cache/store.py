"""Read and write the cache file of a cluster, which is replaced atomically."""

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
    """A failed query. retry: whether a later query may succeed. times: consecutive failures."""

    message: str
    where: str
    hint: str
    retry: bool
    failed_at_s: float
    times: int = 1


class AccountedJob(msgspec.Struct, frozen=True, array_like=True):
    """A job that slurmctld has dropped. state: a final state, or UNKNOWN. tries: number of queries without an end."""

    state: str
    queried_at_s: float
    tries: int = 0


class CachedAnswers(Record, frozen=True, kw_only=True, tag="pit.slurm-cache/1"):
    """The cached answers of one cluster. Times are Unix times.

    queried_at_s: time of the last successful squeue; jobs: its rows. wait_s: seconds from then to the next.
    squeue_failure, accounting_failure: of the last squeue, of the last sacct. interest: job id → times of the first and
    the last request for it. accounts: by job id. bucket_calls: calls in the bucket of rate_limit.py at bucket_as_of_s.
    """

    queried_at_s: float = 0.0
    jobs: tuple[job_components.JobPart, ...] = ()
    wait_s: float = 0.0
    squeue_failure: QueryFailure | None = None
    accounting_failure: QueryFailure | None = None
    interest: dict[str, tuple[float, float]] = {}
    accounts: dict[str, AccountedJob] = {}
    bucket_calls: float = 0.0
    bucket_as_of_s: float = 0.0

    def states(self) -> dict[str, str]:
        """Return the state of each job id in the last squeue."""
        return job_components.states_from_squeue(self.jobs)


def cache_key(site: Site) -> str:
    """Return the cache key of a cluster: equal for site files with the same connection, from the same host.

    The host is part of the key because a home folder may be mounted by several clusters with the same slurm.conf path.
    """
    conf = site.slurm.conf or ("" if site.connection.host else os.environ.get("SLURM_CONF", ""))
    connection = (socket.gethostname(), site.connection.kind, site.connection.host, conf, site.slurm.bin)
    return hashlib.sha256(msgspec.json.encode(connection)).hexdigest()[:16]


def read_cache(path: Path) -> CachedAnswers:
    """Return the cache; an empty one for a missing or invalid file, or a clock that was set back."""
    try:
        with open_regular(path) as file:
            cached = decode_json(file.read(_MAX_BYTES), CachedAnswers)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return CachedAnswers()
    return cached if max(cached.queried_at_s, cached.bucket_as_of_s) <= time.time() else CachedAnswers()


def write_cache(path: Path, cached: CachedAnswers) -> None:
    """Write the cache. Raises NoSpace or ClusterError."""
    write_atomic(path, msgspec.json.encode(cached), mode=0o600, durable=False)
