"""Read all accounting of a site, by one call of a shell; several sites at once; and parts of it again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pitools.core.errors import ConfigError, PitError
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv
from pitools.slurm.client import Client
from pitools.slurm.errors import has_failed
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_cluster import parse_config
from pitools.slurm.parse_nodes import parse_partitions
from pitools.slurm.records import Config, Partition
from pitools.tenancy.cluster_state import QUERIES_OF, ClusterState, parse_state, queries

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
    done = run_queries(slurm.transport, [argv.CONFIG, ["id", "-un"], *queries()])
    config_text, runner, *answers = (stdout_or_raise(slurm.transport, each) for each in done)
    config = parse_config(config_text)
    if site.slurm.cluster not in ("", config.cluster):
        problem = f'its cluster is "{config.cluster}" (expected "{site.slurm.cluster}", [slurm] cluster)'
        raise ConfigError(problem, where=f"site {site.name}", hint=f"pit site check {site.name} --live")
    state = msgspec.structs.replace(parse_state(config.cluster, answers), runner=runner.strip())
    return SiteAccounting(site=site, client=slurm, config=config, state=state)


def read_again(accounting: SiteAccounting, kind: str) -> ClusterState:
    """Return what a site's accounting has now of one kind of object. Raises ClusterError, Unreachable."""
    commands, transport = queries(), accounting.client.transport
    done = run_queries(transport, [commands[i] for i in QUERIES_OF[kind]])
    texts = {i: stdout_or_raise(transport, each) for i, each in zip(QUERIES_OF[kind], done, strict=True)}
    return parse_state(accounting.state.cluster, [texts.get(i, "") for i in range(len(commands))])


def read_partitions(accounting: SiteAccounting) -> dict[str, list[Partition] | None]:
    """Return the partitions of each cluster of a site's database, its own first; None where one does not answer."""
    clusters = [accounting.state.cluster, *accounting.state.others]
    command, *words = argv.PARTITIONS
    done = run_queries(accounting.client.transport, [[command, "-M", cluster, *words] for cluster in clusters])
    answers = zip(clusters, done, strict=True)
    return {cluster: None if has_failed(each) else parse_partitions(each.stdout) for cluster, each in answers}


def read_sites(sites: Sequence[Site]) -> dict[str, SiteAccounting | PitError]:
    """Return the accounting of each site by name, or its error, in the order of the sites."""

    def read(site: Site) -> SiteAccounting | PitError:
        try:
            return read_site(site)
        except PitError as error:
            return error

    with ThreadPoolExecutor(_MAX_SITES) as pool:
        return dict(zip([site.name for site in sites], pool.map(read, sites), strict=True))
