"""The text of the site files by which pitools knows the clusters: pure functions of the layout."""

from __future__ import annotations

from devcluster_parts.accounting import ACCOUNTS
from devcluster_parts.cloud import expand_hosts
from devcluster_parts.layout import Cluster, Layout


def site_file_text(layout: Layout, cluster: Cluster) -> str:
    """The site file by which pitools knows a cluster."""
    if cluster.nodes:
        order = "do not follow" if cluster.name == layout.settings.clusters[0] else "follow"
        count = len(cluster.nodes)
        description = f"{count} nodes under {len(cluster.leaves)} leaves that {order} the names"
    else:
        count = len(list(expand_hosts(layout.settings.cloud or "", "cloud")))
        description = f"{count} nodes without slurmds"
    return f"""\
# Written by scripts/devcluster; `devcluster up` writes it again.
name = "{cluster.name}"
description = "Development cluster: {description}"
accounts = [{", ".join(f'"{account}"' for account in ACCOUNTS)}]

[slurm]
conf = "{cluster.conf}"
cluster = "{cluster.name}"

[dialect]
gpus = "none"

[defaults]
partition = "train"
account = "{ACCOUNTS[0]}"

[tiers]
low = "low"
normal = "normal"
high = "high"

[paths]
runs = "{layout.root}/runs"
nvme = "{cluster.folder}/nvme/{{node}}"

[stage]
fanout = {"false" if cluster.name == layout.settings.clusters[0] else "true"}

[partitions.train]
nodes = {count}
max_time = "7-00:00:00"

[partitions.dev]
nodes = {count}
max_time = "4:00:00"
"""
