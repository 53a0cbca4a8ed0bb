"""Render Jinja templates to sbatch scripts. Differences between sites are passed as values."""

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

# Run folder of a script rendered for a user: in the folder of its submission.
SUBMIT_RUN_DIR = '"$SLURM_SUBMIT_DIR/runs/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"'
SUBMIT_PYTHON = '"${PIT_PYTHON:-python3}"'


class Template(Record, frozen=True, kw_only=True, tag="pit.template/1"):
    """A line of `pit script list`."""

    script: str
    path: str
    origin: str


class TemplateDataset(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset that a job stages. name: for the ranks. source: the folder to copy from."""

    name: str
    source: str


def list_templates(site: Site) -> list[Template]:
    """Return the script templates of a site: the shipped ones and those of its file."""
    templates = {
        path.name.removesuffix(SUFFIX): Template(
            script=path.name.removesuffix(SUFFIX), path=str(path), origin="shipped"
        )
        for path in sorted(bundled_dir("sbatch_templates").glob(f"*{SUFFIX}"))
    }
    for name, path in site.templates.items():
        templates[name] = Template(script=name, path=path, origin=f"site {site.name}")
    return [templates[name] for name in sorted(templates)]


def find_template(site: Site, script: str) -> Template:
    """Return the template of this name. Raises UsageError with a suggestion."""
    templates = {template.script: template for template in list_templates(site)}
    if script not in templates:
        raise UsageError(f'no script "{script}"', where=f"site {site.name}", hint=suggest(script, templates))
    return templates[script]


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
    preflight: bool = False,
) -> str:
    """Render the sbatch script of a job for a site.

    Args:
        script: template name, as `list_templates` returns it.
        payload: the command of every rank: an argv, or quoted shell text.
        environment: variables of the job, which override the site's.
        run_dir: the run's folder; "" means SUBMIT_RUN_DIR.
        python: interpreter on the nodes; "" means the site's, or PIT_PYTHON when the script runs.
        preflight: whether the nodes are tested before the ranks start.

    Raises:
        UsageError: unknown script, or a value with a newline or NUL in it.
        ConfigError: a template that uses an unknown value, or cannot be read.
    """
    merged = {**_staging_variables(site), **site.environment, **site.network.env, **(environment or {})}
    for name, value in merged.items():
        dialect.require_variable(name)
        dialect.require_printable(value, name)
    line = payload if isinstance(payload, str) else shlex.join(payload)
    for description, text in (("command", line), ("run folder", run_dir), *(("dataset", d.source) for d in datasets)):
        dialect.require_printable(text, description)
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
        # Without a fabric of its own, a site's is Slurm's, which a node can query without the site file.
        "topology_site": f" --site {site.name}" if site.topology.file or site.topology.dims else "",
        "ntasks": job.nodes * job.tasks_per_node,
        "cpus_per_task": job.cpus_per_task,
        "preflight": preflight,
        "datasets": datasets,
        "nvme": site.paths.nvme,
        "fanout": site.stage.fanout,
        "container": _container_flags(site),
        "payload": line,
    }
    return _render(site, script, values)


def _staging_variables(site: Site) -> dict[str, str]:
    """Return the site's limits as variables of pit-stage."""
    limits = {"PIT_STAGE_QUOTA": site.stage.quota, "PIT_STAGE_MIN_FREE": site.stage.min_free}
    return {name: text for name, text in limits.items() if text}


def _render(site: Site, script: str, values: Mapping[str, object]) -> str:
    import jinja2
    import jinja2.sandbox

    path = Path(find_template(site, script).path)
    # Sandboxed: a template only formats values, and must not access objects or modules.
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
    """Return a template's text, from its own folder or the shipped ones; None if missing. Raises ConfigError."""
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
    """Return srun's flags for the site's container, for the step of the ranks only."""
    if site.container.runtime != "pyxis":
        return []
    flags = [f"--container-image={site.container.image}"]
    if site.container.mounts:
        flags.append(f"--container-mounts={','.join(site.container.mounts)}")
    return flags


def rank_command(site: Site, *arguments: str) -> str:
    """Return the command of each rank as shell text, in the site's container if it has one."""
    # PIT_PYTHON is set in the script itself, so it must reach the shell unquoted.
    python = '"$PIT_PYTHON"' if site.container.runtime == "none" else "python3"
    command = f"{python} -u -m pitools.launch.rank.main {shlex.join(arguments)}"
    if site.container.runtime != "apptainer":
        return command
    binds = [f"--bind={mount}" for mount in site.container.mounts]
    return f"{shlex.join(['apptainer', 'exec', '--nv', *binds, site.container.image])} {command}"


def expand_placeholders(path: str, *, node: str = "", job: str = "") -> str:
    """Replace `{node}`, `{user}` and `{job}` in a path, by default from Slurm's variables.

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
                f'"{match.group(0)}" is not a placeholder', where=path, hint=suggest(match.group(1), values)
            )
        return values[match.group(1)]()

    return re.sub(r"\{(\w+)\}", value, path)


def _user() -> str:
    """Return the user's name, or the user id if it has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
