"""Load the fabric that the options of a topology command name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pitools.site.schema import Site
    from pitools.slurm.client import Client
    from pitools.topology.fabric_model import Fabric


def load_fabric(site_name: str | None, source: Path | None = None) -> tuple[Fabric, Client | None, Site | None]:
    """Return the fabric, the Slurm client of its nodes and the site; client and site may be None.

    site_name: None without `source` means the cluster that Slurm's commands use. source: file of the fabric, instead
    of the site's. Raises what `discover` and `site.load` raise.
    """
    from pitools.site.connect import client
    from pitools.site.load import load_site
    from pitools.slurm.client import Client
    from pitools.topology import discover

    if not site_name:
        return (
            (discover.read_fabric(source), None, None) if source else (discover.query_fabric(Client()), Client(), None)
        )
    site = load_site(site_name)
    slurm = client(site) if site.scheduler == "slurm" else None
    return discover.read_fabric(source) if source else discover.fabric_of_site(site, slurm), slurm, site
