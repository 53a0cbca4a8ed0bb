"""Render scripts for users to submit by hand, and check them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pitools.core import subprocesses, units
from pitools.core.errors import ClusterError, UsageError
from pitools.core.record import Record
from pitools.site import dialect
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.template import TemplateDataset, find_template, rank_command, render_template

# Scripts that start no ranks: no command, and by default no GPUs.
_SCRIPTS_WITHOUT_RANKS = {"stage"}
_PYTHON = re.compile(r"python[\d.]*")


class ScriptCheck(Record, frozen=True, kw_only=True, tag="pit.script-check/1"):
    """Result of a check of a script. check: `bash` or `sbatch`."""

    check: str
    ok: bool
    detail: str


def render_for_user(
    site: Site,
    script: str,
    command: Sequence[str],
    *,
    nodes: int,
    tasks_per_node: int,
    gpus_per_node: int | None,
    time: str,
    framework: str,
    data: Mapping[str, str],
) -> str:
    """Render a script with the site's defaults.

    gpus_per_node: None means all GPUs of a node; none for a script without ranks.

    Raises UsageError for an unknown script or a missing command, ConfigError for an invalid default of the site.
    """
    find_template(site, script)
    if not command and script not in _SCRIPTS_WITHOUT_RANKS:
        raise UsageError(f"{script} needs a command", hint=f"pit script render {script} -- python train.py")
    where = f"site {site.name}"
    name = site.defaults.partition
    node_gpus = dialect.require_partition(site, name, where).gpus_per_node if name else 0
    if script in _SCRIPTS_WITHOUT_RANKS:
        node_gpus = 0
    job = dialect.JobSpec(
        name=_job_name(command, script),
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=node_gpus if gpus_per_node is None else gpus_per_node,
        time_s=units.parse_duration(time or site.defaults.time),
        partition=name,
        account=dialect.require_account(site, site.defaults.account, where),
        qos=dialect.qos_for_tier(site, site.defaults.tier, where),
    )
    payload = rank_command(site, framework, "--", *command)
    datasets = [TemplateDataset(name=key, source=source) for key, source in data.items()]
    return render_template(site, script, job, payload=payload, datasets=datasets)


def _job_name(command: Sequence[str], script: str) -> str:
    """Return the stem of the first argument that looks like a file: `train` for `python -u train.py --lr 0.1`."""
    for argument in command:
        path = Path(argument)
        is_file_like = "/" in argument or path.suffix[1:2].isalpha()
        if is_file_like and not re.search(r"^-|\s", argument) and not _PYTHON.fullmatch(path.name):
            script = path.stem or script
            break
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", script)


def check_script(site: Site, script: str) -> Iterator[ScriptCheck]:
    """Check a script's syntax, and by `sbatch --test-only` whether the site's Slurm accepts it."""
    done = subprocesses.run(["bash", "-n"], timeout_s=20, stdin=script)
    yield ScriptCheck(check="bash", ok=done.code == 0, detail=done.stderr.strip() or "syntax ok")
    if site.scheduler != "slurm":
        return
    try:
        estimate = client(site).test_only(script)
    except ClusterError as error:
        yield ScriptCheck(check="sbatch", ok=False, detail=error.message)
    else:
        yield ScriptCheck(check="sbatch", ok=True, detail=f"would start {estimate.start} on {estimate.node_list}")
