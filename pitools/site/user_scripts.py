"""Scripts for people: rendered to be read and submitted by hand, and judged before they are."""

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

# Scripts that start no ranks: no command, and no GPUs unless they are asked for.
_SCRIPTS_WITHOUT_RANKS = {"stage"}
_PYTHON = re.compile(r"python[\d.]*")


class ScriptCheck(Record, frozen=True, kw_only=True, tag="pit.script-check/1"):
    """What one check says of a script. check: `bash` or `sbatch`."""

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
    """A script's text with the site's defaults. `gpus_per_node=None`: all that the partition has; without ranks, none.

    Raises UsageError for an unknown script or one that lacks its command, ConfigError for a default the site has not.
    """
    find_template(site, script)
    if not command and script not in _SCRIPTS_WITHOUT_RANKS:
        raise UsageError(f"{script} needs a command", hint=f"pit script render {script} -- python train.py")
    where = f"site {site.name}"
    name = site.defaults.partition
    has = dialect.require_partition(site, name, where).gpus_per_node if name else 0
    if script in _SCRIPTS_WITHOUT_RANKS:
        has = 0
    job = dialect.JobSpec(
        name=_job_name(command, script),
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=has if gpus_per_node is None else gpus_per_node,
        time_s=units.parse_duration(time or site.defaults.time),
        partition=name,
        account=dialect.require_account(site, site.defaults.account, where),
        qos=dialect.qos_for_tier(site, site.defaults.tier, where),
    )
    payload = rank_command(site, framework, "--", *command)
    datasets = [TemplateDataset(name=key, source=source) for key, source in data.items()]
    return render_template(site, script, job, payload=payload, datasets=datasets)


def _job_name(command: Sequence[str], script: str) -> str:
    """The first word that looks like a file, without folder and suffix: `python -u train.py --lr 0.1` is `train`."""
    for word in command:
        path = Path(word)
        looks = "/" in word or path.suffix[1:2].isalpha()
        if looks and not re.search(r"^-|\s", word) and not _PYTHON.fullmatch(path.name):
            script = path.stem or script
            break
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", script)


def check_script(site: Site, script: str) -> Iterator[ScriptCheck]:
    """Judge a script: is it bash, and would the site's Slurm take it."""
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
