"""Judging a site file: what loads may still not work. One finding each."""

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
from pitools.slurm.transport import IS_OPEN, OPEN, QUERY_ENV, Transport, called, run_command

_PYTHON_HINT = "name an interpreter, 3.11 or newer, that has pitools, as the nodes see it"
_PLACEHOLDER = "??"  # what `pit site probe` leaves for a person to say
_COMMANDS_SCRIPT = 'for one in sbatch scontrol sinfo squeue srun; do [ -x "$1/$one" ] && exit; done; exit 1'
_CLUSTER = re.compile(r"^\s*ClusterName\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


class SiteFinding(Record, frozen=True, kw_only=True, tag="pit.site-finding/1"):
    """One thing that is wrong with a site file. key: where in the file, as far as it is known."""

    site: str
    key: str
    problem: str
    hint: str = ""


def check_site(name: str, *, live: bool = False) -> Iterator[SiteFinding]:
    """What is wrong with the site of this name; with `live`, also where it differs from the running cluster.

    Raises UsageError for an unknown site, Unreachable for a cluster that does not answer.
    """
    try:
        # The files alone: a variable of this shell is no fault of theirs.
        site = load_site(name, variables=False)
    except ConfigError as error:
        yield SiteFinding(site=name, key="", problem=str(error), hint=error.hint)
        return
    yield from _find_placeholders(site)
    yield from _paths(site, live)
    yield from _scripts(site)
    if live and site.scheduler == "slurm":
        yield from _check_live(site)
    if live:
        yield from _python(site)


def _find_placeholders(site: Site) -> Iterator[SiteFinding]:
    """What somebody was to say, and has not."""
    for path in site_files(site.name):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _PLACEHOLDER in line:
                problem = f'"{_PLACEHOLDER}" is left: {line.strip()}'
                hint = f"say it, and take the {_PLACEHOLDER} away"
                yield SiteFinding(site=site.name, key=f"{path}:{number}", problem=problem, hint=hint)


def _paths(site: Site, live: bool) -> Iterator[SiteFinding]:
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
            there = next(part for part in (path, *path.parents) if os.access(part, os.F_OK))
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                yield SiteFinding(
                    site=site.name, key="paths.runs", problem=f"{there} is no folder that you can write to"
                )
                continue
            try:
                run_folder.require_safe_runs_dir(there, group=site.paths.runs_access == "group")
            except ConfigError as error:
                yield SiteFinding(site=site.name, key="paths.runs", problem=str(error), hint=error.hint)
    if site.scheduler == "slurm" and not site.partitions:
        yield SiteFinding(site=site.name, key="partitions", problem="none", hint=f"pit site probe {site.name}")
    if site.connection.kind == "local":
        yield from _check_local_files(site, live)


def _check_local_files(site: Site, live: bool) -> Iterator[SiteFinding]:
    """What is to be on this machine, or on storage that it shares with the nodes; `live` tries the python itself."""
    python, conf = site.paths.python, site.slurm.conf
    if python and not live and not (Path(python).is_file() and os.access(python, os.X_OK)):
        yield SiteFinding(site=site.name, key="paths.python", problem=f"no such program: {python}")
    if not conf:
        return
    try:
        said = _CLUSTER.search(Path(conf).read_text(errors="replace"))
    except OSError as error:
        yield SiteFinding(site=site.name, key="slurm.conf", problem=f"{conf}: {error.strerror}")
        return
    if said and site.slurm.cluster:
        yield from _check_cluster_name(site, said[1], f"{conf} is of")


def _check_cluster_name(site: Site, name: str, who: str) -> Iterator[SiteFinding]:
    if name.lower() != site.slurm.cluster.lower():  # ClusterName is kept in lower case, however it is written
        problem = f'cluster = "{site.slurm.cluster}", but {who} cluster "{name}"'
        yield SiteFinding(site=site.name, key="slurm.cluster", problem=problem, hint=f'cluster = "{name}"')


def _scripts(site: Site) -> Iterator[SiteFinding]:
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


def _python(site: Site) -> Iterator[SiteFinding]:
    """Whether the interpreter of the site's jobs has pitools, as far as the login side can tell."""
    if site.modules:
        return  # they may be what it needs, and are the job's to load
    python = site.paths.python or sys.executable
    transport = client(site).transport if site.scheduler == "slurm" else Transport()
    try:
        # -P: not whatever lies in the folder that this is called from.
        done = run_command(transport, [python, "-P", "-c", "import pitools.launch.job"], env={"LC_ALL": "C"})
    except ToolMissing as error:
        yield SiteFinding(site=site.name, key="paths.python", problem=error.message, hint=_PYTHON_HINT)
        return
    if done.code:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
        yield SiteFinding(site=site.name, key="paths.python", problem=f"{python}: {said}", hint=_PYTHON_HINT)


def _check_live(site: Site) -> Iterator[SiteFinding]:
    slurm = client(site)
    if site.connection.kind == "ssh" and (open_there := list(_open_there(site, slurm))):
        yield from open_there  # nothing else is asked: what others can change would run as this user
        return
    yield from _check_versions(site, slurm)
    if (
        site.slurm.bin
        and run_command(slurm.transport, ["sh", "-c", _COMMANDS_SCRIPT, "pit", site.slurm.bin], env=QUERY_ENV).code
    ):
        problem = f"{site.slurm.bin} holds no command of Slurm: those that a PATH leads to answer"
        yield SiteFinding(site=site.name, key="slurm.bin", problem=problem, hint='bin = "…"; pit site probe finds it')
    partitions = {partition.partition: partition for partition in slurm.partitions()}
    for name, said in site.partitions.items():
        if name not in partitions:
            hint = suggest(name, partitions)
            yield SiteFinding(
                site=site.name, key=f"partitions.{name}", problem="the cluster has none of that name", hint=hint
            )
        elif said.nodes and said.nodes != partitions[name].nodes:
            problem = f"nodes = {said.nodes}, but the cluster has {partitions[name].nodes}"
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


def _open_there(site: Site, slurm: Client) -> Iterator[SiteFinding]:
    """What others can write of the far side's slurm.conf and commands, as far as a few tools there can tell."""
    bare = msgspec.structs.replace(slurm.transport, env={}, bin="")
    for key, paths in (("slurm.conf", [site.slurm.conf]), ("slurm.bin", called(site.slurm.bin))):
        found = (
            run_command(bare, ["sh", "-c", OPEN, "pit", *paths], env=QUERY_ENV).stdout.splitlines()
            if any(paths)
            else []
        )
        for one in dict.fromkeys(found):
            problem = f"{site.connection.host}:{one} {IS_OPEN}"
            yield SiteFinding(site=site.name, key=key, problem=problem, hint=f"there: chmod go-w {one}")


def _check_versions(site: Site, slurm: Client) -> Iterator[SiteFinding]:
    """Whether it is this cluster that answers, to commands of its own version."""
    config, commands = slurm.config(), slurm.version()
    if site.slurm.cluster and config.cluster:
        yield from _check_cluster_name(site, config.cluster, "what answers is")
    if commands[:2] != config.version[:2]:
        mine, theirs = (".".join(f"{part:02d}" for part in version[:2]) for version in (commands, config.version))
        problem = f"the commands are of Slurm {mine}, the controller is of {theirs}"
        yield SiteFinding(site=site.name, key="slurm.bin", problem=problem, hint='bin = "…"; pit site probe finds it')
