"""Make the Slurm client of a site."""

from __future__ import annotations

from pitools.core.errors import UsageError
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport


def client(site: Site) -> Client:
    """Return the client of a site's Slurm. Raises UsageError for a site without Slurm."""
    if site.scheduler != "slurm":
        raise UsageError(f'site "{site.name}" has no Slurm', hint="choose another with --site; see: pit site list")
    environment = {"SLURM_CONF": site.slurm.conf} if site.slurm.conf else {}
    return Client(
        Transport(host=site.connection.host, env=environment, bin=site.slurm.bin, timeout_s=site.connection.timeout_s)
    )
