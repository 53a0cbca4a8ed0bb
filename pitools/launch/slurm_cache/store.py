"""What is kept of a cluster's answers: one file, replaced whole."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path

import msgspec

from pitools.core.fs import plain_file, write_atomic
from pitools.core.record import Record, decode_json
from pitools.site.schema import Site
from pitools.slurm import job_components

_MOST_BYTES = 64 << 20


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A question that got no answer: when, and how often in a row. retry: whether it may be answered later."""

    what: str
    where: str
    hint: str
    retry: bool
    t_s: float
    times: int = 1


class Account(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a job that slurmctld has forgotten. tries: how often accounting gave no end to it."""

    state: str
    asked_s: float
    tries: int = 0


class Kept(Record, frozen=True, kw_only=True, tag="pit.polling/1"):
    """One cluster, as squeue had it. Times are Unix times.

    asked_s: when the last good answer was asked for; jobs: that answer. wait_s: until the next. failed, unaccounted:
    why slurmctld, accounting gave none to the last question. wanted: job id → when somebody first, and last, asked
    about it. accounts: by job id. calls: that the bucket of rate_limit.py held at calls_s.
    """

    asked_s: float = 0.0
    jobs: tuple[job_components.Row, ...] = ()
    wait_s: float = 0.0
    failed: Failure | None = None
    unaccounted: Failure | None = None
    wanted: dict[str, tuple[float, float]] = {}
    accounts: dict[str, Account] = {}
    calls: float = 0.0
    calls_s: float = 0.0

    def states(self) -> dict[str, str]:
        """State by every id that the last answer knew."""
        return job_components.queued(self.jobs)


def key(site: Site) -> str:
    """What a cluster's answers are kept as: the same for every site file that reaches it the same way from this host.

    A home folder may be seen by the hosts of several clusters, each with a Slurm of its own in the usual place.
    """
    conf = site.slurm.conf or ("" if site.reach.host else os.environ.get("SLURM_CONF", ""))
    way = (socket.gethostname(), site.reach.kind, site.reach.host, conf, site.slurm.bin)
    return hashlib.sha256(msgspec.json.encode(way)).hexdigest()[:16]


def read(path: Path) -> Kept:
    """What is kept; nothing where there is no such file, no sense in it, or a clock that was set back since."""
    try:
        with plain_file(path) as file:
            found = decode_json(file.read(_MOST_BYTES), Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Kept()
    return found if max(found.asked_s, found.calls_s) <= time.time() else Kept()


def write(path: Path, found: Kept) -> None:
    """Keep it. Raises NoSpace or ClusterError."""
    write_atomic(path, msgspec.json.encode(found), mode=0o600, durable=False)
