"""Find which datasets of a plan a site lacks, in one call, by the digests of their manifests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.core import units
from pitools.core.errors import ClusterError, PitError
from pitools.launch.plan import StagedDataset
from pitools.place.clusters import wait_log
from pitools.place.clusters.snapshot import Snapshot, make_transport
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.store import manifest
from pitools.store.manifest import MANIFEST_FILE

# A version's name is the digest of its manifest: a site with that file has the version, or is receiving it.
_DIGEST_SCRIPT = f'for d; do sha256sum "$d/{MANIFEST_FILE}" 2>/dev/null | cut -c1-32 | grep . || echo -; done'
_DIGEST = re.compile(r"[0-9a-f]{32}|-")


class DataTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Data to copy to a site before the job can start. wall_s: expected duration."""

    bytes: int = 0
    wall_s: float = 0.0


def candidate_paths(site: Site, data: StagedDataset, user: str = "") -> list[str]:
    """Return where a dataset may be at the site: its path here, and the path where a submission would copy it.

    user: our user name at the site. Raises DataError for a missing dataset.
    """
    if not site.paths.data:
        return [data.source]
    root = Path(expand_placeholders(site.paths.data.replace("{user}", user or "{user}")))
    name = manifest.load_manifest(Path(data.source))[0].name
    return list(dict.fromkeys([data.source, str(root / name / data.version)]))


def missing_data(data: Sequence[StagedDataset], site: Site, snapshot: Snapshot, timeout_s: float) -> DataTransfer:
    """Return the bytes of these datasets that the site lacks, and the time to copy them. At most one call.

    A site on this machine lacks nothing. Raises Unreachable, ClusterError, DataError.
    """
    if not data or site.connection.kind == "local":
        return DataTransfer()
    user = snapshot.account.user if snapshot.account else ""
    checks = [(dataset, path) for dataset in data for path in candidate_paths(site, dataset, user)]
    transport = make_transport(site, timeout_s)
    (output,) = run_queries(transport, [["sh", "-c", _DIGEST_SCRIPT, "sh", *(path for _, path in checks)]])
    digests = stdout_or_raise(transport, output).split("\n")[:-1]
    if len(digests) != len(checks) or not all(map(_DIGEST.fullmatch, digests)):
        message = f"{len(digests)} lines (expected {len(checks)} digests of manifests)"
        raise ClusterError(message, where=site.name, hint="log in, and check that the shell prints nothing else")
    present = {dataset.name for (dataset, _), digest in zip(checks, digests, strict=True) if digest == dataset.version}
    n_bytes = sum(dataset.bytes for dataset in data if dataset.name not in present)
    return DataTransfer(bytes=n_bytes, wall_s=n_bytes / assumed_transfer_rate(site))


def assumed_transfer_rate(site: Site) -> float:
    """Return the bytes per second to the site: of the last transfers, else from the site file."""
    measured = None
    with contextlib.suppress(PitError):
        measured = wait_log.measured_transfer_rate(site.name)
    return measured or units.parse_size(site.place.bandwidth)
