"""Check site files that load, and compare them with the running cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import ConfigError, PitError, ToolMissing, suggest
from pitools.core.record import Record
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.load import load_site, site_files
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders, list_templates
from pitools.site.user_scripts import render_for_user
from pitools.slurm.client import Client
from pitools.slurm.transport import IS_INSECURE, LIST_INSECURE, QUERY_ENV, Transport, command_paths, run_command

_PYTHON_HINT = "set a Python, 3.11 or newer, with pitools, by its path on the nodes"
_PLACEHOLDER = "??"  # marks values that `pit site probe` cannot determine
_COMMANDS_SCRIPT = 'for c in sbatch scontrol sinfo squeue srun; do [ -x "$1/$c" ] && exit; done; exit 1'
_CLUSTER = re.compile(r"^\s*ClusterName\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


class SiteFinding(Record, frozen=True, kw_only=True, tag="pit.site-finding/1"):
    """A fault of a site file. key: the key, file or line, "" if unknown."""

    site: str
    key: str
    problem: str
    hint: str = ""


def check_site(name: str, *, live: bool = False) -> Iterator[SiteFinding]:
    """Yield the faults of a site.

    live: compare with the running cluster too. Raises UsageError for an unknown site, Unreachable for a cluster that
    does not answer.
    """
    try:
        # Without variables: a wrong variable of this shell is no fault of the files.
        site = load_site(name, variables=False)
    except ConfigError as error:
        yield SiteFinding(site=name, key="", problem=str(error), hint=error.hint)
        return
    yield from _find_placeholders(site)
    yield from _check_paths(site, live)
    yield from _check_templates(site)
    if live and site.scheduler == "slurm":
        yield from _check_live(site)
    if live:
        yield from _check_python(site)


def _find_placeholders(site: Site) -> Iterator[SiteFinding]:
    """Yield placeholders that were not replaced."""
    for path in site_files(site.name):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _PLACEHOLDER in line:
                problem = f'placeholder "{_PLACEHOLDER}": {line.strip()}'
                hint = f"replace the {_PLACEHOLDER} by a value"
                yield SiteFinding(site=site.name, key=f"{path}:{number}", problem=problem, hint=hint)


def _check_paths(site: Site, live: bool) -> Iterator[SiteFinding]:
    if not site.paths.nvme:
        hint = 'nvme = "/scratch/{user}"'
        yield SiteFinding(site=site.name, key="paths.nvme", problem="not set: datasets cannot be staged", hint=hint)
    for key in ("runs", "data", "nvme"):
        try:
            path = Path(expand_placeholders(getattr(site.paths, key))).absolute()
        except PitError as error:
            yield SiteFinding(site=site.name, key=f"paths.{key}", problem=error.message, hint=error.hint)
            continue
        if key == "runs" and site.connection.kind == "local":
            # The first run makes its folder, and a user's own one above that, but no storage.
            storage = path.parents["{user}" in site.paths.runs]
            if live and not storage.exists():
                problem = f"no folder {storage} on this host: runs cannot be made, seen or continued here"
                yield SiteFinding(
                    site=site.name, key="paths.runs", problem=problem, hint="mount it, or correct the path"
                )
                continue
            existing_dir = next(part for part in (path, *path.parents) if os.access(part, os.F_OK))
            if not existing_dir.is_dir() or not os.access(existing_dir, os.W_OK | os.X_OK):
                yield SiteFinding(site=site.name, key="paths.runs", problem=f"{existing_dir} is not a writable folder")
                continue
            try:
                run_folder.require_safe_runs_dir(existing_dir, group=site.paths.runs_access == "group")
            except ConfigError as error:
                yield SiteFinding(site=site.name, key="paths.runs", problem=str(error), hint=error.hint)
    if site.accounts and site.defaults.account and site.defaults.account not in site.accounts:
        problem = f'"{site.defaults.account}" is not one of accounts'
        hint = suggest(site.defaults.account, site.accounts)
        yield SiteFinding(site=site.name, key="defaults.account", problem=problem, hint=hint)
    if site.scheduler == "slurm" and not site.partitions:
        yield SiteFinding(site=site.name, key="partitions", problem="none", hint=f"pit site probe {site.name}")
    if site.connection.kind == "local":
        yield from _check_local_files(site, live)


def _check_local_files(site: Site, live: bool) -> Iterator[SiteFinding]:
    """Check files on this machine or on shared storage. live: `_check_python` runs the interpreter instead."""
    python, conf = site.paths.python, site.slurm.conf
    if python and not live and not (Path(python).is_file() and os.access(python, os.X_OK)):
        yield SiteFinding(site=site.name, key="paths.python", problem=f"no such program: {python}")
    if (fabric := site.topology.file) and not Path(fabric).is_file():
        yield SiteFinding(site=site.name, key="topology.file", problem=f"no such file: {fabric}")
    if not conf:
        return
    try:
        cluster = _CLUSTER.search(Path(conf).read_text(errors="replace"))
    except OSError as error:
        yield SiteFinding(site=site.name, key="slurm.conf", problem=f"{conf}: {error.strerror}")
        return
    if cluster and site.slurm.cluster:
        yield from _check_cluster_name(site, cluster[1], f"{conf} is of")


def _check_cluster_name(site: Site, name: str, source: str) -> Iterator[SiteFinding]:
    if name.lower() != site.slurm.cluster.lower():  # Slurm converts ClusterName to lower case
        problem = f'cluster = "{site.slurm.cluster}", but {source} cluster "{name}"'
        yield SiteFinding(site=site.name, key="slurm.cluster", problem=problem, hint=f'cluster = "{name}"')


def _check_templates(site: Site) -> Iterator[SiteFinding]:
    for template in list_templates(site):
        try:
            rendered = render_for_user(
                site,
                template.script,
                ["true"],
                nodes=1,
                tasks_per_node=1,
                gpus_per_node=None,
                time="",
                framework="none",
                data={},
            )
        except PitError as error:
            yield SiteFinding(
                site=site.name, key=f"templates.{template.script}", problem=error.message, hint=error.hint
            )
            continue
        done = subprocesses.run(["bash", "-n"], timeout_s=20, stdin=rendered)
        if done.code:
            yield SiteFinding(site=site.name, key=f"templates.{template.script}", problem=done.stderr.strip())


def _check_python(site: Site) -> Iterator[SiteFinding]:
    """Check on the login node that the interpreter of the site's jobs has pitools."""
    if site.modules:
        return  # the interpreter may need them, and only jobs load them
    python = site.paths.python or sys.executable
    transport = client(site).transport if site.scheduler == "slurm" else Transport()
    try:
        # -P: do not import from the current folder.
        done = run_command(transport, [python, "-P", "-c", "import pitools.launch.job"], env={"LC_ALL": "C"})
    except ToolMissing as error:
        yield SiteFinding(site=site.name, key="paths.python", problem=error.message, hint=_PYTHON_HINT)
        return
    if done.code:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
        yield SiteFinding(site=site.name, key="paths.python", problem=f"{python}: {last_line}", hint=_PYTHON_HINT)


def _check_live(site: Site) -> Iterator[SiteFinding]:
    slurm = client(site)
    if site.connection.kind == "ssh" and (findings := list(_check_trust(site, slurm))):
        yield from findings  # no other check: files that others can change would run as this user
        return
    yield from _check_versions(site, slurm)
    if (
        site.slurm.bin
        and run_command(slurm.transport, ["sh", "-c", _COMMANDS_SCRIPT, "pit", site.slurm.bin], env=QUERY_ENV).code
    ):
        problem = f"{site.slurm.bin} has no Slurm commands: those of the PATH are used"
        yield SiteFinding(site=site.name, key="slurm.bin", problem=problem, hint='bin = "…"; pit site probe finds it')
    partitions = {row.partition: row for row in slurm.partitions()}
    for name, partition in site.partitions.items():
        if name not in partitions:
            hint = suggest(name, partitions)
            yield SiteFinding(
                site=site.name, key=f"partitions.{name}", problem="the cluster has no such partition", hint=hint
            )
        elif partition.nodes and partition.nodes != partitions[name].nodes:
            problem = f"nodes = {partition.nodes}, but the cluster has {partitions[name].nodes}"
            yield SiteFinding(site=site.name, key=f"partitions.{name}.nodes", problem=problem)
    qos = {row.qos for row in slurm.qos()}
    for tier, name in site.tiers.items():
        if qos and name not in qos:
            hint = suggest(name, qos)
            yield SiteFinding(
                site=site.name, key=f"tiers.{tier}", problem=f'the cluster has no QOS "{name}"', hint=hint
            )
    accounts = {row.account for row in slurm.associations()}
    for account in site.accounts:
        if accounts and account not in accounts:
            hint = suggest(account, accounts)
            yield SiteFinding(site=site.name, key="accounts", problem=f'you have no account "{account}"', hint=hint)


def _check_trust(site: Site, slurm: Client) -> Iterator[SiteFinding]:
    """Yield the cluster's slurm.conf and commands that others can write, best effort."""
    bare = msgspec.structs.replace(slurm.transport, env={}, bin="")
    for key, paths in (("slurm.conf", [site.slurm.conf]), ("slurm.bin", command_paths(site.slurm.bin))):
        insecure_paths = (
            run_command(bare, ["sh", "-c", LIST_INSECURE, "pit", *paths], env=QUERY_ENV).stdout.splitlines()
            if any(paths)
            else []
        )
        for path in dict.fromkeys(insecure_paths):
            problem = f"{site.connection.host}:{path} {IS_INSECURE}"
            yield SiteFinding(site=site.name, key=key, problem=problem, hint=f"there: chmod go-w {path}")


def _check_versions(site: Site, slurm: Client) -> Iterator[SiteFinding]:
    """Check the name of the running cluster, and that its version is that of the commands."""
    config, commands = slurm.config(), slurm.version()
    if site.slurm.cluster and config.cluster:
        yield from _check_cluster_name(site, config.cluster, "the running one is")
    if commands[:2] != config.version[:2]:
        own, running = (".".join(f"{part:02d}" for part in version[:2]) for version in (commands, config.version))
        problem = f"the commands are of Slurm {own}, the controller is of {running}"
        yield SiteFinding(site=site.name, key="slurm.bin", problem=problem, hint='bin = "…"; pit site probe finds it')
