"""Which of a plan's data is not at a site yet: asked there, in one call, by the digests of the manifests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.core import units
from pitools.core.errors import ClusterError, PitError
from pitools.launch.plan import StagedDataset
from pitools.place.clusters import local_history
from pitools.place.clusters.snapshot import Snapshot, make_transport
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders
from pitools.slurm.batch import run_batch, stdout_or_raise
from pitools.store import manifest
from pitools.store.manifest import FILE_NAME

# A version is named by the digest of its manifest: whoever has that file has, or is just getting, the version.
_DIGEST_SCRIPT = f'for d; do sha256sum "$d/{FILE_NAME}" 2>/dev/null | cut -c1-32 | grep . || echo -; done'
_DIGEST = re.compile(r"[0-9a-f]{32}|-")


class DataTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be copied to a site before the job can start. wall_s: how long that takes."""

    bytes: int = 0
    wall_s: float = 0.0


def candidate_paths(site: Site, data: StagedDataset, user: str = "") -> list[str]:
    """Where a dataset of a plan may be at the site: where it is here, or where `launch.far` puts it.

    user: ours at the site. Raises DataError for a dataset that is gone.
    """
    if not site.paths.data:
        return [data.source]
    root = Path(expand_placeholders(site.paths.data.replace("{user}", user or "{user}")))
    name = manifest.load_manifest(Path(data.source))[0].name
    return list(dict.fromkeys([data.source, str(root / name / data.version)]))


def missing_data(data: Sequence[StagedDataset], site: Site, snapshot: Snapshot, timeout_s: float) -> DataTransfer:
    """The bytes of these datasets that the site lacks, and how long they take. No call, or one.

    A site on this machine's own storage lacks nothing. Raises Unreachable, ClusterError, DataError.
    """
    if not data or site.connection.kind == "local":
        return DataTransfer()
    user = snapshot.account.user if snapshot.account else ""
    asked = [(one, place) for one in data for place in candidate_paths(site, one, user)]
    where = make_transport(site, timeout_s)
    (done,) = run_batch(where, [["sh", "-c", _DIGEST_SCRIPT, "sh", *(place for _, place in asked)]])
    said = stdout_or_raise(where, done).split("\n")[:-1]
    if len(said) != len(asked) or not all(map(_DIGEST.fullmatch, said)):
        raise ClusterError("it does not say which data it has", where=site.name, hint="log in, and see what it prints")
    held = {one.name for (one, _), digest in zip(asked, said, strict=True) if digest == one.version}
    n_bytes = sum(one.bytes for one in data if one.name not in held)
    return DataTransfer(bytes=n_bytes, wall_s=n_bytes / assumed_transfer_rate(site))


def assumed_transfer_rate(site: Site) -> float:
    """Bytes a second to the site: as the last transfers went, or, where that cannot be read too, as its file says."""
    seen = None
    with contextlib.suppress(PitError):
        seen = local_history.measured_transfer_rate(site.name)
    return seen or units.parse_size(site.place.bandwidth)
