"""Read all accounting of a site: one call of a shell with seven of Slurm's commands; several sites at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pitools.core.errors import ConfigError, PitError
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv
from pitools.slurm.client import Client
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_cluster import parse_config
from pitools.slurm.records import Config
from pitools.tenancy.cluster_state import ClusterState, parse_state, queries

_MAX_SITES = 16  # queried at once


class SiteAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """The accounting of a site, the configuration of its slurmctld, and the client that changes it."""

    site: Site
    client: Client
    config: Config
    state: ClusterState


def read_site(site: Site) -> SiteAccounting:
    """Return the accounting of a site. Raises UsageError without Slurm, ConfigError, ClusterError, Unreachable."""
    slurm = client(site)
    done = run_queries(slurm.transport, [argv.CONFIG, *queries()])
    config_text, *answers = (stdout_or_raise(slurm.transport, each) for each in done)
    config = parse_config(config_text)
    if site.slurm.cluster not in ("", config.cluster):
        problem = f'its cluster is "{config.cluster}" (expected "{site.slurm.cluster}", [slurm] cluster)'
        raise ConfigError(problem, where=f"site {site.name}", hint=f"pit site check {site.name} --live")
    return SiteAccounting(site=site, client=slurm, config=config, state=parse_state(config.cluster, answers))


def read_sites(sites: Sequence[Site]) -> dict[str, SiteAccounting | PitError]:
    """Return the accounting of each site by name, or its error, in the order of the sites."""

    def read(site: Site) -> SiteAccounting | PitError:
        try:
            return read_site(site)
        except PitError as error:
            return error

    with ThreadPoolExecutor(_MAX_SITES) as pool:
        return dict(zip([site.name for site in sites], pool.map(read, sites), strict=True))
