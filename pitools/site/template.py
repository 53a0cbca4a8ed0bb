"""Jinja templates → sbatch text. Templates are dumb: what differs between sites arrives as values."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.core.record import Record
from pitools.site import dialect
from pitools.site.load import bundled_dir
from pitools.site.schema import Site

SUFFIX = ".sbatch.j2"

# Where a script that was rendered for a person keeps its attempts: beside where they submit it.
SUBMIT_RUN_DIR = '"$SLURM_SUBMIT_DIR/runs/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"'
SUBMIT_PYTHON = '"${PIT_PYTHON:-python3}"'


class Template(Record, frozen=True, kw_only=True, tag="pit.template/1"):
    """A line of `pit script list`."""

    script: str
    path: str
    origin: str


class TemplateDataset(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset a job stages: the name ranks know it by, and the folder it is copied from."""

    name: str
    source: str


def list_templates(site: Site) -> list[Template]:
    """The scripts a site can render: the shipped ones, and those its file names."""
    found = {
        path.name.removesuffix(SUFFIX): Template(
            script=path.name.removesuffix(SUFFIX), path=str(path), origin="shipped"
        )
        for path in sorted(bundled_dir("sbatch_templates").glob(f"*{SUFFIX}"))
    }
    for name, path in site.templates.items():
        found[name] = Template(script=name, path=path, origin=f"site {site.name}")
    return [found[name] for name in sorted(found)]


def find_template(site: Site, script: str) -> Template:
    """The script of this name. Raises UsageError naming the nearest."""
    known = {template.script: template for template in list_templates(site)}
    if script not in known:
        raise UsageError(f'no script "{script}"', where=f"site {site.name}", hint=suggest(script, known))
    return known[script]


def render_template(
    site: Site,
    script: str,
    job: dialect.JobSpec,
    *,
    payload: Sequence[str] | str,
    datasets: Sequence[TemplateDataset] = (),
    environment: Mapping[str, str] | None = None,
    run_dir: str = "",
    python: str = "",
) -> str:
    """The sbatch text of one job on one site.

    Args:
        script: template name, as `templates` lists it.
        payload: what every rank runs: an argv, or shell text that is already quoted.
        environment: variables of the job, over the site's own.
        run_dir: the run's folder; "" lets the submitter's folder decide.
        python: interpreter on the nodes; "" takes the site's, or what PIT_PYTHON says when the script runs.

    Raises:
        UsageError: unknown script, or a value with a newline or NUL in it.
        ConfigError: a template that uses a value we do not give, or that cannot be read.
    """
    merged = {**_staging_variables(site), **site.environment, **site.network.env, **(environment or {})}
    for name, value in merged.items():
        dialect.require_variable(name)
        dialect.require_printable(value, name)
    line = payload if isinstance(payload, str) else shlex.join(payload)
    for what, text in (("command", line), ("run folder", run_dir), *(("dataset", d.source) for d in datasets)):
        dialect.require_printable(text, what)
    interpreter = python or site.paths.python
    values = {
        "directives": [dialect.sbatch_directive(flag) for flag in dialect.sbatch_flags(site, job)],
        "modules": site.modules,
        "slurm_bin": site.slurm.bin,
        "environment": sorted(merged.items()),
        "python": shlex.quote(interpreter) if interpreter else SUBMIT_PYTHON,
        "run_dir": shlex.quote(run_dir) if run_dir else SUBMIT_RUN_DIR,
        "ports": "{}-{}".format(*site.network.ports),
        "host_suffix": site.network.host_suffix,
        "tasks_per_node": job.tasks_per_node,
        "gpus_per_node": job.gpus_per_node,
        "ntasks": job.nodes * job.tasks_per_node,
        "cpus_per_task": job.cpus_per_task,
        "datasets": datasets,
        "nvme": site.paths.nvme,
        "fanout": site.stage.fanout,
        "container": _container_flags(site),
        "payload": line,
    }
    return _render(site, script, values)


def _staging_variables(site: Site) -> dict[str, str]:
    """What pit-stage reads of the site's limits."""
    limits = {"PIT_STAGE_QUOTA": site.stage.quota, "PIT_STAGE_MIN_FREE": site.stage.min_free}
    return {name: text for name, text in limits.items() if text}


def _render(site: Site, script: str, values: Mapping[str, object]) -> str:
    import jinja2
    import jinja2.sandbox

    path = Path(find_template(site, script).path)
    # A template lays values out: it has no business with the objects and modules behind them.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=jinja2.FunctionLoader(lambda name: _source(path.parent, name)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    try:
        return environment.get_template(path.name).render(values)
    except jinja2.UndefinedError as error:
        raise ConfigError(f"the template needs a value that does not exist: {error}", where=str(path)) from error
    except (jinja2.TemplateError, UnicodeError, OSError) as error:
        raise ConfigError(f"the template cannot be used: {error}", where=str(path)) from error


def _source(folder: Path, name: str) -> tuple[str, str, None] | None:
    """A template's text, from its own folder or the shipped ones; None where there is none. Raises ConfigError."""
    if not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
        return None
    for parent in dict.fromkeys((folder, bundled_dir("sbatch_templates"))):
        path = parent / name
        if not path.exists():
            continue
        if parent != bundled_dir("sbatch_templates"):
            trust.require_trusted(path, "template")
        return path.read_text(), str(path), None
    return None


def _container_flags(site: Site) -> list[str]:
    """srun's flags for the site's container, for the ranks' step only."""
    if site.container.runtime != "pyxis":
        return []
    flags = [f"--container-image={site.container.image}"]
    if site.container.mounts:
        flags.append(f"--container-mounts={','.join(site.container.mounts)}")
    return flags


def rank_command(site: Site, *words: str) -> str:
    """Return what each rank runs, as shell text: our entry with these words, in the site's container if it has one."""
    # PIT_PYTHON is set in the script itself, so it must reach the shell unquoted.
    python = '"$PIT_PYTHON"' if site.container.runtime == "none" else "python3"
    command = f"{python} -u -m pitools.launch.rank.main {shlex.join(words)}"
    if site.container.runtime != "apptainer":
        return command
    binds = [f"--bind={mount}" for mount in site.container.mounts]
    return f"{shlex.join(['apptainer', 'exec', '--nv', *binds, site.container.image])} {command}"


def expand_placeholders(path: str, *, node: str = "", job: str = "") -> str:
    """A path with `{node}`, `{user}` and `{job}` filled in, from Slurm's variables where not given.

    Raises UsageError for any other placeholder.
    """
    values: dict[str, Callable[[], str]] = {
        "node": lambda: node or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "job": lambda: job or os.environ.get("SLURM_JOB_ID", ""),
        "user": _user,
    }

    def value(match: re.Match[str]) -> str:
        if match.group(1) not in values:
            raise UsageError(
                f'"{match.group(0)}" cannot be filled in', where=path, hint=suggest(match.group(1), values)
            )
        return values[match.group(1)]()

    return re.sub(r"\{(\w+)\}", value, path)


def _user() -> str:
    """The user's name, or their number where no name is known, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
