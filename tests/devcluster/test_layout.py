from __future__ import annotations

from pathlib import Path

import pytest
from devcluster_parts.daemons import daemons
from devcluster_parts.errors import ClusterProblem, UsageProblem
from devcluster_parts.layout import DEFAULT_ROOT, Layout, Overrides, Settings, check_root_path, resolve

ROOT = Path("/srv/dc")


def test_default_names():
    """Golden files name alpha and beta under the default root, with nodes 01 to 08 each."""
    layout = Layout(root=DEFAULT_ROOT, settings=Settings())
    assert [str(cluster.conf) for cluster in layout.clusters] == [
        "/var/tmp/pit-devcluster/alpha/slurm.conf",
        "/var/tmp/pit-devcluster/beta/slurm.conf",
    ]
    assert layout.clusters[0].nodes[0] == "alpha01"
    assert layout.clusters[1].nodes[-1] == "beta08"


def test_leaves_of_the_first_cluster_do_not_follow_the_names():
    """On alpha an order by topology differs from an order by name; on beta it does not."""
    alpha, beta = Layout(root=ROOT, settings=Settings()).clusters
    assert alpha.leaves == (
        ("alpha01", "alpha03", "alpha05", "alpha07"),
        ("alpha02", "alpha04", "alpha06", "alpha08"),
    )
    assert beta.leaves == (("beta01", "beta02", "beta03", "beta04"), ("beta05", "beta06", "beta07", "beta08"))


def test_no_port_is_used_twice():
    """Every daemon has a port of its own, below those that the kernel hands out."""
    settings = Settings(clusters=("a", "b", "c"), nodes=90, cloud="cloud[1-4]")
    ports = [daemon.port for daemon in daemons(Layout(root=ROOT, settings=settings)) if daemon.port]
    assert len(ports) == 1 + 4 + 3 * 90
    assert len(set(ports)) == len(ports)
    assert max(ports) < 32768


@pytest.mark.parametrize(
    "asked",
    [
        Overrides(clusters=("alpha", "alpha")),
        Overrides(clusters=("Alpha",)),
        Overrides(clusters=("a\nNodeName=evil",)),
        Overrides(clusters=("cloud",)),
        Overrides(clusters=()),
        Overrides(nodes=0),
        Overrides(nodes=91),
        Overrides(base_port=32500),
        Overrides(base_port=80),
    ],
)
def test_settings_that_slurm_cannot_hold_are_refused(asked):
    """A name or number that would break a configuration file is a usage error, exit 2."""
    with pytest.raises(UsageProblem):
        resolve(ROOT, None, asked)


@pytest.mark.parametrize("root", ["relative", "/with space", "/a/../b", "/", "/new\nline"])
def test_roots_that_slurm_cannot_hold_are_refused(root):
    """A root must be an absolute path of plain characters."""
    with pytest.raises(UsageProblem):
        check_root_path(Path(root))


def test_too_long_a_root_is_refused():
    """slurmstepd's socket lies below the root, and a socket's address is short."""
    with pytest.raises(UsageProblem, match="too long"):
        resolve(Path("/" + "x" * 80), None, Overrides())


def test_kept_settings_hold_without_options():
    """A later `up` needs no options."""
    settings = Settings(clusters=("g",), nodes=3, base_port=20000, cloud="cloud[1-2]")
    assert resolve(ROOT, settings, Overrides()) == settings


def test_the_cloud_may_be_added_to_what_is_up():
    """The cloud cluster can come later."""
    assert resolve(ROOT, Settings(), Overrides(cloud="cloud[1-2]")) == Settings(cloud="cloud[1-2]")


@pytest.mark.parametrize(
    "asked",
    [Overrides(nodes=4), Overrides(base_port=20000), Overrides(cloud="cloud[1-3]"), Overrides(requeue_delay_s=120)],
)
def test_other_settings_than_those_that_are_up_are_refused(asked):
    """What is up is not silently rebuilt, and the message names what differs."""
    with pytest.raises(ClusterProblem, match="other settings"):
        resolve(ROOT, Settings(cloud="cloud[1-2]"), asked)
