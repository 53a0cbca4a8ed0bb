"""`up` and `down`. Each step first checks the state, so that both may be interrupted anywhere and repeated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster_parts import accounting, config, root, sites, stray_processes
from devcluster_parts.daemons import Daemon, check_port, daemons, is_listening, start, wait_for
from devcluster_parts.errors import ClusterProblem
from devcluster_parts.layout import Cluster, Layout, Overrides, resolve
from devcluster_parts.nodes import nodes_not_ready
from devcluster_parts.process import Identity, read_record, stop, write_atomically
from devcluster_parts.tools import check_tools, this_host


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """One `up` in progress: what it builds, and its time limit. began, until: monotonic times."""

    layout: Layout
    began: float
    until: float

    def left_s(self) -> float:
        """Seconds that remain, at least one."""
        return max(1.0, self.until - time.monotonic())

    def report(self, text: str) -> None:
        """One line of progress."""
        print(f"devcluster: [{time.monotonic() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)


def up(where: Path, overrides: Overrides, *, timeout_s: float) -> Layout:
    """Start what does not run. Raises ClusterProblem if that fails, UsageProblem before any change."""
    resolve(where, None, overrides)
    check_tools()
    host = this_host()
    began = time.monotonic()
    with root.lock_root(where, create=True, timeout_s=timeout_s):
        settings = resolve(where, root.read_settings(where), overrides)
        layout = Layout(root=where, settings=settings)
        work = StartUp(layout=layout, began=began, until=began + timeout_s)
        root.write_settings(where, settings)
        stop(stray_processes.setup_processes(where), term_s=1.0)  # of an interrupted `up`
        root.make_folders(layout)
        _write_configs(layout, host, overrides.cloud_topology)
        started = _start_all(work)
    if started:
        work.report(f"up, {len(started)} daemons started")
    else:
        work.report("already up")
    return layout


def _write_configs(layout: Layout, host: config.Host, cloud_topology: str) -> None:
    _write(layout.accounting / "slurmdbd.conf", config.slurmdbd_conf(layout, host), 0o600)
    # slurmdbd reads it only to find slurmdbd.conf beside it.
    _write(layout.accounting / "slurm.conf", "ClusterName=none\n")
    for cluster in layout.clusters:
        if cluster.nodes:
            topology = config.topology_conf(cluster)
            text = config.slurm_conf(layout, cluster, host)
        else:
            topology = cloud_topology
            text = config.slurm_conf(layout, cluster, host, layout.settings.cloud or "")
        _write_topology(cluster, topology)
        _write(cluster.conf, text)
        _write(layout.sites / f"{cluster.name}.toml", sites.site_file_text(layout, cluster))


def _write_topology(cluster: Cluster, text: str) -> None:
    path = cluster.folder / "topology.conf"
    if not text and path.exists():
        return  # a later `up` that does not name the cloud: it keeps the file it was made with
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ClusterProblem("the cluster has another topology", where=str(path), hint="run `devcluster down` first")
    _write(path, text)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text, mode)


def _start_all(work: StartUp) -> list[Daemon]:
    everyone = daemons(work.layout)
    for daemon in everyone:
        if daemon.identity() is None:
            check_port(daemon)
    started = _start_accounting(work, everyone)
    controllers = _start_kind(work, everyone, "slurmctld")
    slurmds = _start_kind(work, everyone, "slurmd")
    started += [*controllers, *slurmds]
    new = {daemon.name.removeprefix("slurmd-") for daemon in slurmds}
    for cluster in work.layout.clusters:
        _wait_for_nodes(work, everyone, cluster, new)
        if any(daemon.cluster == cluster.name for daemon in started):
            work.report(f"{cluster.name}: ready")
    return started


def _start_accounting(work: StartUp, everyone: list[Daemon]) -> list[Daemon]:
    database, dbd = everyone[:2]
    layout = work.layout
    started = []
    if database.identity() is None:
        if accounting.prepare_database(layout, limit_s=work.left_s()):
            work.report("made the database")
        started += _started(work, database)
    # Awaited even if another `up` started them: a killed one leaves daemons that run but do not answer yet.
    wait_for([database], lambda: "" if is_listening(layout.socket) else "mariadbd's socket", until=work.until)
    if dbd.identity() is None:
        started += _started(work, dbd)
    wait_for([dbd], lambda: "" if _listens(dbd) else "slurmdbd's port", until=work.until)
    unknown = any(not (cluster.folder / "state" / "clustername").exists() for cluster in layout.clusters)
    if (started or unknown) and accounting.ensure_accounts(layout, limit_s=work.left_s()):
        work.report(f"accounts {', '.join(accounting.ACCOUNTS)}; QOS {', '.join(accounting.QOS)}")
    return started


def _start_kind(work: StartUp, everyone: Iterable[Daemon], kind: str) -> list[Daemon]:
    alike = [daemon for daemon in everyone if daemon.kind == kind]
    wanted = [daemon for daemon in alike if daemon.identity() is None]
    if wanted:
        _started(work, *wanted)
    if kind == "slurmctld":
        wait_for(alike, lambda: ", ".join(f"port {d.port}" for d in alike if not _listens(d)), until=work.until)
    return wanted


def _started(work: StartUp, *wanted: Daemon) -> list[Daemon]:
    for daemon in wanted:
        start(daemon)
    work.report(f"started {', '.join(daemon.name for daemon in wanted)}")
    return list(wanted)


def _listens(daemon: Daemon) -> bool:
    return is_listening(config.LOOPBACK, daemon.port)


def _wait_for_nodes(work: StartUp, everyone: list[Daemon], cluster: Cluster, new: set[str]) -> None:
    waiting = [daemon for daemon in everyone if daemon.cluster == cluster.name]
    wait_for(
        waiting, lambda: nodes_not_ready(cluster, new, root=work.layout.root, limit_s=work.left_s()), until=work.until
    )


def down(where: Path, *, keep_logs: bool, timeout_s: float) -> bool:
    """End every process of this root and remove it; False when there is nothing."""
    with root.lock_root(where, create=False, timeout_s=timeout_s) as there:
        if not there:
            return False
        _stop_all(where)
        root.remove_contents(where, keep_logs=keep_logs)
    return True


def _stop_all(where: Path) -> None:
    recorded = _recorded(where)
    names = sorted(recorded)
    accounts = [recorded.pop(name) for name in ("slurmdbd", "mariadbd") if name in recorded]
    # Controllers and nodes first and all at once: then no job is started again, and no step waits for an answer.
    left = stop(recorded.values(), term_s=5.0)
    left += stop(stray_processes.job_processes(where), term_s=1.0)
    left += stop(stray_processes.job_processes(where), term_s=0.0)  # started by a task while it was stopped
    for who in accounts:
        left += stop([who], term_s=10.0)
    left += stop(stray_processes.setup_processes(where), term_s=1.0)
    if left:
        pids = ", ".join(str(who.pid) for who in left)
        raise ClusterProblem(f"processes {pids} do not end", where=str(where), hint="run `devcluster down` again")
    print(f"devcluster: ended {len(names)} daemons", file=sys.stderr)


def _recorded(where: Path) -> dict[str, Identity]:
    found = {path.stem: read_record(path) for path in sorted((where / "processes").glob("*.json"))}
    return {name: who for name, who in found.items() if who is not None}
