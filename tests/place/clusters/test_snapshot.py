"""Snapshots: what sites say at one moment, and what becomes of sites that say nothing, or nonsense."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist, subprocesses
from pitools.core.errors import ClusterError, ConfigError, PitError, Unreachable, UsageError
from pitools.place.clusters import snapshot
from pitools.place.clusters.pools import pool_states
from pitools.site.load import load_site
from pitools.site.schema import Slurm


@pytest.mark.slurm
def test_a_far_site_is_read_in_two_calls_and_then_not_again(far: Any) -> None:
    """slurmctld and accounting are one call each; the next reader within the age limit asks nobody."""
    site = load_site(far.site("a", "true"))
    observed = snapshot.read_snapshot(site)
    assert (observed.site, observed.cluster, len(observed.nodes)) == ("a", "alpha", 8)
    assert {partition.partition for partition in observed.partitions} == {"train", "dev"}
    assert observed.account
    assert ("lab", "root") in {(row.account, row.user) for row in observed.account.associations}
    assert {"associations", "limits", "qos"} <= set(observed.enforced_limits)
    assert far.called() == ["true", "true"]
    assert snapshot.read_snapshot(site).nodes == observed.nodes
    assert not far.calls.exists()
    assert snapshot.read_snapshot(site, max_age_s=0).seen_s > observed.seen_s
    assert far.called() == ["true"]  # accounts are known for an hour


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("host", "kind", "what"),
    [
        ("closed", Unreachable, 'ssh to "closed" failed'),
        ("garbage", ClusterError, "truncated"),
        ("nothing", ClusterError, "truncated"),
        ("half", ClusterError, "truncated"),
        ("lines", ClusterError, "is missing in the list of nodes"),
        ("twice", ClusterError, "16 nodes with 8 distinct names"),
        ("billion", ClusterError, "more nodes in a list"),
        ("noclock", ClusterError, "not a time"),
        ("wrong", ClusterError, '"beta" (expected "alpha")'),
    ],
)
def test_an_answer_that_cannot_be_the_site_s_is_none(far: Any, host: str, kind: type[PitError], what: str) -> None:
    """Garbage, half an answer, nodes that lack or come twice, another cluster: refused, and never kept."""
    far.without_accounting()
    site = load_site(far.site("a", host))
    for _ in range(2):
        with pytest.raises(kind) as caught:
            snapshot.read_snapshot(site, timeout_s=5)
        assert what in caught.value.message
    assert far.called().count(host) >= 2


def test_a_cluster_s_name_has_no_case(made: Any) -> None:
    """Slurm converts ClusterName to lower case: a site file may write it in capitals."""
    snapshot.require_consistent(made.site(slurm=Slurm(cluster="X")), made.snapshot())
    with pytest.raises(ClusterError):
        snapshot.require_consistent(made.site(slurm=Slurm(cluster="y")), made.snapshot())


@pytest.mark.slurm
def test_a_dark_site_delays_nobody_beyond_the_deadline(far: Any) -> None:
    """It is skipped with its reason, and the others' snapshots are there."""
    far.without_accounting()
    sites = [load_site(far.site(name, host)) for name, host in (("a", "true"), ("d", "dark"), ("b", "true2"))]
    actual, skipped = snapshot.read_snapshots(sites, 8)
    assert [item.site for item in actual] == ["a", "b"]
    assert [(item.site, "no answer within" in item.reason) for item in skipped] == [("d", True)]


@pytest.mark.slurm
def test_a_silent_database_only_hides_limits(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accounting there is a snapshot all the same, which says what it does not know."""
    folder = far.folder / "asked"
    (far.folder / "bin" / "sacctmgr").write_text(f"#!/bin/sh\necho >> {folder}\nexec sleep 600\n")
    (far.folder / "bin" / "sacctmgr").chmod(0o755)
    observed = snapshot.read_snapshot(load_site(far.site("a", "true")), timeout_s=8)
    assert len(observed.nodes) == 8
    assert observed.account is None
    assert "limits and quota are not known" in observed.notes[0]
    assert folder.read_text() == "\n"
    snapshot.read_snapshot(load_site("a"), timeout_s=8, max_age_s=0)
    assert folder.read_text() == "\n"  # it is not waited for again at once


@pytest.mark.slurm
def test_only_sites_that_could_exist_are_asked_unless_named(far: Any) -> None:
    """Examples and sites without Slurm are left out, a broken file is skipped; what is named must be right."""
    far.site("a", "true")
    (far.sites / "broken.toml").write_text('name = "broken"\nnosuch = 1\n')
    actual, skipped = snapshot.load_sites()
    names = {site.name for site in actual}
    assert {"a", "alpha", "beta"} <= names
    assert names.isdisjoint({"local", "h100-ib", "broken"})
    assert [(item.site, "nosuch" in item.reason) for item in skipped] == [("broken", True)]
    with pytest.raises(ConfigError):
        snapshot.load_sites(["broken"])
    with pytest.raises(UsageError, match="no Slurm"):
        snapshot.load_sites(["local"])


@pytest.mark.parametrize("text", ["", "n1", "n1,n2", "n[1-3,7],m", "r[1-2]n[01-10]", "a-1,b[3]c[4-5],d-[1-2]-x"])
def test_names_are_counted_without_being_made(text: str) -> None:
    """As many as there are; and a hostile list costs nothing."""
    assert hostlist.count_hosts(text) == len(hostlist.expand(text))
    assert hostlist.count_hosts("n[0-9999999]x[0-9999999]") == 10**14


@pytest.mark.slurm
def test_what_is_hidden_is_there_all_the_same(far: Any) -> None:
    """Partitions that are hidden, and the jobs there, take nodes as any others do: they are asked for too."""
    for name in ("scontrol", "squeue"):
        path, says = far.folder / "bin" / name, f"{name} ${{{name.upper()}_ALL-no}}"
        path.write_text(f'#!/bin/sh\necho "{says}" >> {far.folder}/all\nexec {shutil.which(name)} "$@"\n')
        path.chmod(0o755)
    far.without_accounting()
    snapshot.read_snapshot(load_site(far.site("a", "true")))
    assert set((far.folder / "all").read_text().splitlines()) == {"scontrol 1", "squeue 1"}


@pytest.mark.slurm
def test_how_far_a_cluster_s_clock_is_ahead_is_known(far: Any) -> None:
    """To the second or so; the time that the question takes is no skew."""
    far.without_accounting()
    assert snapshot.read_snapshot(load_site(far.site("b", "ahead"))).skew_s == pytest.approx(3600, abs=3)
    assert snapshot.read_snapshot(load_site(far.site("a", "true"))).skew_s == 0


@pytest.mark.slurm
def test_maintenance_that_is_planned_closes_the_pool(far: Any, clusters: Path) -> None:
    """A real reservation of all nodes: the pool is closed in just that window."""
    far.without_accounting()
    site, name = load_site(far.site("a", "true")), f"test_snapshot_{os.getpid()}"
    at_s = int(time.time()) + 7200
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))
    words = [f"starttime={start}", "duration=30", "users=root", "nodes=ALL", "flags=maint,ignore_jobs"]
    env = {"SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    done = subprocesses.run(
        ["scontrol", "create", "reservation", f"reservationname={name}", *words], timeout_s=20, env=env
    )
    assert done.code == 0, done.stderr
    try:
        actual = pool_states(snapshot.read_snapshot(site, max_age_s=0), (), site)
    finally:
        subprocesses.run(["scontrol", "delete", f"reservationname={name}"], timeout_s=20, env=env)
    assert {pool.pool: pool.maintenance_windows for pool in actual} == {
        key: [(at_s, at_s + 1800)] for key in ("a/train", "a/dev")
    }
    assert {
        pool.pool: pool.maintenance_windows for pool in pool_states(snapshot.read_snapshot(site, max_age_s=0), (), site)
    } == {
        "a/train": [],
        "a/dev": [],
    }
