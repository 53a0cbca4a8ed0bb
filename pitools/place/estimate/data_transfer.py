"""Estimate the time to copy the datasets of a plan that a site lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from pitools.core import units
from pitools.core.errors import PitError
from pitools.launch.plan import StagedDataset
from pitools.launch.tickets import remote
from pitools.place.clusters import wait_log
from pitools.place.clusters.snapshot import Snapshot, make_transport
from pitools.site.schema import Site


class DataTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Data to copy to a site before the job can start. wall_s: expected duration."""

    bytes: int = 0
    wall_s: float = 0.0


def missing_data(data: Sequence[StagedDataset], site: Site, snapshot: Snapshot, timeout_s: float) -> DataTransfer:
    """Return the bytes of these datasets that a submission would copy, and the time to copy them. At most one call.

    A site on this machine lacks nothing. Raises as `find_datasets`.
    """
    if not data or site.connection.kind == "local":
        return DataTransfer()
    user = snapshot.account.user if snapshot.account else ""
    found = remote.find_datasets(site, data, user=user, transport=make_transport(site, timeout_s))
    n_bytes = sum(staged.bytes for staged in data if staged.name not in found)
    return DataTransfer(bytes=n_bytes, wall_s=n_bytes / assumed_transfer_rate(site))


def assumed_transfer_rate(site: Site) -> float:
    """Return the bytes per second to the site: of the last transfers, else from the site file."""
    measured = None
    with contextlib.suppress(PitError):
        measured = wait_log.measured_transfer_rate(site.name)
    return measured or units.parse_size(site.place.bandwidth)
