from __future__ import annotations

import tomllib
from pathlib import Path

from devcluster_parts import config, sites
from devcluster_parts.layout import Layout, Settings

HOST = config.Host(name="box", user="ann")
LAYOUT = Layout(root=Path("/srv/dc"), settings=Settings(nodes=4, base_port=20000, cloud="cloud[1-9]"))
ALPHA, BETA, CLOUD = LAYOUT.clusters


def parsed(text: str) -> dict[str, str]:
    """The settings of a slurm.conf that stand alone on a line."""
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith(("NodeName", "Partition", "#"))]
    return dict(line.split("=", 1) for line in lines)


def test_daemons_listen_on_the_loopback_address_alone():
    """Without authentication no daemon may bind to any other address."""
    conf = parsed(config.slurm_conf(LAYOUT, ALPHA, HOST))
    assert set(conf["CommunicationParameters"].split(",")) == {"NoCtldInAddrAny", "NoInAddrAny"}
    assert conf["SlurmctldHost"] == "box(127.0.0.1)"
    assert "CommunicationParameters=NoInAddrAny" in config.slurmdbd_conf(LAYOUT, HOST)


def test_nothing_is_set_twice():
    """A key that is written twice would hide one of its values."""
    for cluster in LAYOUT.clusters:
        text = config.slurm_conf(LAYOUT, cluster, HOST, "" if cluster.nodes else "cloud[1-9]")
        keys = [line.split("=")[0] for line in text.splitlines() if "=" in line and "Name=" not in line]
        assert len(set(keys)) == len(keys)


def test_each_node_has_its_own_line_and_port():
    """Names resolve nowhere: each node is this host at a port of its own."""
    lines = [line for line in config.slurm_conf(LAYOUT, BETA, HOST).splitlines() if line.startswith("NodeName=")]
    assert [line.split()[0] for line in lines] == [f"NodeName=beta0{n}" for n in range(1, 5)]
    assert [line.split()[3] for line in lines] == [f"Port={20200 + n}" for n in range(1, 5)]
    assert all("NodeHostname=box NodeAddr=127.0.0.1" in line for line in lines)


def test_preemption_requeues():
    """Jobs preempted by a higher QOS come back."""
    conf = parsed(config.slurm_conf(LAYOUT, ALPHA, HOST))
    assert (conf["PreemptType"], conf["PreemptMode"], conf["JobRequeue"]) == ("preempt/qos", "REQUEUE", "1")


def test_the_requeue_delay_is_what_was_asked_for():
    """Slurm derives it from the life of a credential."""
    layout = Layout(root=Path("/srv/dc"), settings=Settings(requeue_delay_s=120))
    assert parsed(config.slurm_conf(layout, layout.clusters[0], HOST))["AuthInfo"] == "cred_expire=120"
    assert parsed(config.slurm_conf(LAYOUT, ALPHA, HOST))["AuthInfo"] == "cred_expire=10"


def test_cloud_nodes_have_no_port():
    """The cloud cluster is its controller and a node list, in CLOUD state."""
    text = config.slurm_conf(LAYOUT, CLOUD, HOST, "cloud[1-9]")
    assert "NodeName=cloud[1-9] " in text
    assert "State=CLOUD" in text
    assert " Port=" not in text


def test_topology_is_a_tree_of_two_leaves():
    """Two leaves under one spine, as the design says."""
    assert config.topology_conf(ALPHA).splitlines() == [
        "SwitchName=leaf1 Nodes=alpha01,alpha03",
        "SwitchName=leaf2 Nodes=alpha02,alpha04",
        "SwitchName=spine Switches=leaf1,leaf2",
    ]


def test_site_files_name_their_cluster():
    """The site file of each cluster is of the cluster's root, with as many nodes as it has."""
    site_files = {cluster.name: tomllib.loads(sites.site_file_text(LAYOUT, cluster)) for cluster in LAYOUT.clusters}
    assert [site["slurm"]["conf"] for site in site_files.values()] == [str(cluster.conf) for cluster in LAYOUT.clusters]
    assert [site["partitions"]["dev"]["nodes"] for site in site_files.values()] == [4, 4, 9]
    assert {name for name, site in site_files.items() if name == site["name"] == site["slurm"]["cluster"]} == set(
        site_files
    )
