"""Make a plan from a request and a site: pure data that determines the script, the run and its records."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pitools.core import hostlist, strict_toml, trust, units, user_dirs
from pitools.core.errors import ConfigError, DataError, UsageError
from pitools.core.record import Record
from pitools.launch import time_limit_signal
from pitools.launch.request import Request, check_env
from pitools.run import run_folder
from pitools.site import dialect
from pitools.site.schema import Container, Hook, PreflightMode, Site, SitePartition
from pitools.site.template import TemplateDataset, expand_placeholders, rank_command, render_template
from pitools.stage.sources.find import find_version_dir
from pitools.store import manifest
from pitools.store.resolve import exists

# Flags of sbatch that say when a run begins. Repeated for a job that continues the run, they would delay or prevent it.
_FIRST_JOB_FLAGS = {"begin", "deadline", "dependency", "hold"}


class StagedDataset(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset of the plan. source: the folder of the version to copy. bytes: its size on each node."""

    name: str
    source: str
    version: str
    bytes: int


class UserHooks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a user's file of hooks."""

    hooks: tuple[Hook, ...] = ()


class Plan(Record, frozen=True, kw_only=True, tag="pit.plan/1"):
    """A request resolved for a site. `pit launch run -` reads it from stdin.

    runs_dir: the folder of runs. node_config: the site's file of node checks, for the preflight. first_job_flags:
    sbatch flags of the run's first job alone; a job that continues the run is submitted without them. hooks: of the
    site, the user and the request.
    """

    name: str
    site: str
    request: Request
    job: dialect.JobSpec
    data: tuple[StagedDataset, ...]
    runs_dir: str
    nvme: str
    python: str
    modules: tuple[str, ...] = ()
    container: Container = Container()
    preflight: PreflightMode = "none"
    node_config: str = ""
    first_job_flags: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()
    request_text: str = ""

    @property
    def nodes(self) -> int:
        """The job's number of nodes."""
        return self.job.nodes

    @property
    def ranks(self) -> int:
        """The job's number of ranks, on all nodes."""
        return self.job.nodes * self.job.tasks_per_node

    @property
    def partition(self) -> str:
        """The job's partition."""
        return self.job.partition

    @property
    def time(self) -> str:
        """The job's time limit, in Slurm's format."""
        return units.to_slurm_time(self.job.time_s)

    @property
    def bytes_per_node(self) -> int:
        """The staged data of each node, in bytes."""
        return sum(data.bytes for data in self.data)


def make_plan(request: Request, site: Site, where: str, *, request_text: str = "") -> Plan:
    """Resolve a request for a site. Reads the manifests of its datasets and the user's hooks, and nothing else.

    where: the name of the request in errors. Raises ConfigError for a partition, tier, account or size that the site
    does not have, DataError for a folder that is no dataset.
    """
    partition = request.partition or site.defaults.partition
    time_s = _time_limit_s(request, site, where)
    if partition or site.partitions:
        _require_fits(request, site, partition, time_s, where)
    if request.nodelist and (named := len(hostlist.expand(request.nodelist))) > request.nodes:
        message = f"nodelist: {named} nodes (expected at most {request.nodes}, from nodes = {request.nodes})"
        raise ConfigError(message, where=where, hint=f"nodes = {named}, or a shorter nodelist")
    if request.data and not site.paths.nvme:
        raise ConfigError(f'site "{site.name}" has no paths.nvme to stage to', where=where, hint="set it in its file")
    flags = _sbatch_flags(request, site, where)
    job = dialect.JobSpec(
        name=request.name,
        nodes=request.nodes,
        tasks_per_node=request.tasks_per_node,
        cpus_per_task=request.cpus_per_task,
        gpus_per_node=request.gpus_per_node,
        segment=request.segment,
        memory=request.memory,
        time_s=time_s,
        partition=partition,
        account=dialect.require_account(site, request.account or site.defaults.account, where),
        qos=str(request.sbatch.get("qos", "")) or dialect.qos_for_tier(site, request.tier or site.defaults.tier, where),
        constraint=request.constraint,
        nodelist=request.nodelist,
        exclude=request.exclude,
        signal=_time_limit_signal(request, site, time_s),
        requeue=site.recovery.chain != "none",
        extra=tuple(flag for name, flag in flags.items() if name not in _FIRST_JOB_FLAGS),
    )
    dialect.sbatch_flags(site, job)  # raises here, not later in the script, for an option without a flag at this site
    return Plan(
        name=request.name,
        site=site.name,
        request=request,
        job=job,
        data=tuple(_stage_dataset(name, source, site, where) for name, source in request.data.items()),
        runs_dir=str(Path(expand_placeholders(site.paths.runs)).absolute()),
        nvme=site.paths.nvme,
        python=request.python or site.paths.python or sys.executable,
        modules=(*site.modules, *request.modules),
        container=_container(request, site, where),
        preflight=request.preflight or site.defaults.preflight,
        node_config=site.node.config,
        first_job_flags=tuple(flag for name, flag in flags.items() if name in _FIRST_JOB_FLAGS),
        hooks=(*site.hooks, *user_hooks(), *request.hooks),
        request_text=request_text,
    )


def user_hooks() -> tuple[Hook, ...]:
    """Return the hooks of ~/.config/pitools/hooks.toml. Raises ConfigError, also if others could have written it."""
    path = user_dirs.xdg_dir("XDG_CONFIG_HOME", ".config") / "pitools" / "hooks.toml"
    if not path.exists():
        return ()
    trust.require_trusted(path, "file of hooks")
    return strict_toml.convert_tables(strict_toml.read_toml(path), UserHooks, str(path)).hooks


def _sbatch_flags(request: Request, site: Site, where: str) -> dict[str, str]:
    """Return the flags of the table [sbatch], by name, without the QOS. Raises ConfigError for a refused one."""
    for name in request.sbatch:
        if name in site.dialect.refuse:
            hint = "leave it out, or ask this site's administrators: refuse under [dialect] of the site file"
            raise ConfigError(f'site "{site.name}" refuses --{name}', where=where, hint=hint)
    if request.sbatch.get("qos") and request.tier:
        raise ConfigError("tier and sbatch.qos are both given", where=where, hint="leave one of them out")
    pairs = {name: value for name, value in request.sbatch.items() if value is not False and name != "qos"}
    return {name: f"--{name}" if value is True else f"--{name}={value}" for name, value in pairs.items()}


def _container(request: Request, site: Site, where: str) -> Container:
    """Return the container of the ranks. Raises ConfigError for an image or mounts without a runtime."""
    own = request.container
    container = Container(
        runtime=own.runtime or site.container.runtime,
        image=own.image or site.container.image,
        mounts=own.mounts or site.container.mounts,
    )
    if container.runtime == "none":
        if own.image or own.mounts:
            hint = 'runtime = "pyxis" or "apptainer" under [container]'
            raise ConfigError(f'site "{site.name}" has no container runtime', where=where, hint=hint)
        return Container()
    if not container.image:
        raise ConfigError("container: no image", where=where, hint='image = "…" under [container]')
    return container


def site_of_plan(plan: Plan, site: Site) -> Site:
    """Return the site with the plan's modules and container in place of its own."""
    return msgspec.structs.replace(site, modules=plan.modules, container=plan.container)


def plan_of_ticket(plan: Plan) -> Plan:
    """Return the plan of a job that never submits another: its script has the flags of the first job, too.

    It has no preflight: a queue would send the next ticket to the same node.
    """
    extra = (*plan.job.extra, *plan.first_job_flags)
    return msgspec.structs.replace(plan, preflight="none", job=msgspec.structs.replace(plan.job, extra=extra))


def load_plan(run_dir: Path) -> Plan:
    """Return the plan of a run. Raises DataError, also for a plan that sets a variable which no request can set."""
    plan = run_folder.read_record(run_dir / "plan.json", Plan)
    if plan is None:
        raise DataError("not a run: it has no plan.json", where=str(run_dir))
    try:
        check_env(plan.request, str(run_dir / "plan.json"))
    except ConfigError as error:
        hint = "somebody changed this file: leave this run alone, and start another"
        raise DataError(error.message, where=error.where, hint=hint) from error
    return plan


def require_workdir(plan: Plan, site: Site) -> None:
    """Raise ConfigError if the plan's workdir is no folder here. A site over ssh may have it only there: unchecked."""
    if site.connection.kind == "local" and not Path(plan.request.workdir).is_dir():
        raise ConfigError(f'workdir = "{plan.request.workdir}" is no folder', where=plan.name)


def _time_limit_s(request: Request, site: Site, where: str) -> int:
    time = request.time or site.defaults.time
    time_s = units.parse_duration(time)
    if time_s < 60:
        # For Slurm, --time=0 means no limit.
        raise ConfigError(f'time = "{time}" is less than a minute', where=where, hint='write minutes, or "2h"')
    return time_s


def _time_limit_signal(request: Request, site: Site, time_s: int) -> str:
    """Return the signal sent to ranks before the time limit, by the request, else by the framework: `USR2@120`."""
    if request.signal:
        return "" if request.signal == "none" else request.signal
    if request.command or request.framework == "none":
        return ""  # a signal ends a command that has no handler for it
    name, _, before_s = time_limit_signal.default_signal(request.framework, site.recovery.grace_s).partition("@")
    # A short job would otherwise get its signal near its start.
    return f"{name}@{min(int(before_s), time_s // 4)}"


def _require_fits(request: Request, site: Site, name: str, time_s: int, where: str) -> None:
    """Raise ConfigError if the request needs more than the partition has."""
    partition = dialect.require_partition(site, name, where)
    if site.scheduler == "slurm" and partition.nodes and request.nodes > partition.nodes:
        message = f'nodes = {request.nodes}, but partition "{name}" of "{site.name}" has {partition.nodes}'
        raise ConfigError(message, where=where, hint=f"nodes = {partition.nodes} or fewer")
    if request.gpus_per_node > partition.gpus_per_node:
        message = f'gpus_per_node = {request.gpus_per_node}, but partition "{name}" has {partition.gpus_per_node}'
        raise ConfigError(message, where=where, hint=f"{partition.gpus_per_node} or fewer, or another partition")
    _require_gpu_fits(request, partition, name, where)
    limit_s = dialect.time_limit_s(partition)
    if limit_s is not None and time_s > limit_s:
        message = f'time = {units.to_slurm_time(time_s)} is over the limit of partition "{name}", {partition.max_time}'
        raise ConfigError(message, where=where, hint=f'time = "{partition.max_time}" or less')


def _require_gpu_fits(request: Request, partition: SitePartition, name: str, where: str) -> None:
    """Raise ConfigError if the partition's GPUs are of another type than requested, or have less memory."""
    kinds = {kind.strip().lower() for kind in request.gpu.split(",") if kind.strip()}
    if kinds and partition.gpu.lower() not in kinds:
        message = f'gpu = "{request.gpu}", but partition "{name}" has {partition.gpu or "no type in the site file"}'
        raise ConfigError(message, where=where, hint="choose another partition, or set its gpu in the site file")
    if request.gpu_memory_gib > partition.gpu_memory_gib:
        size = f"{partition.gpu_memory_gib} GiB" if partition.gpu_memory_gib else "no size in the site file"
        message = f'gpu_memory_gib = {request.gpu_memory_gib}, but a GPU of partition "{name}" has {size}'
        raise ConfigError(message, where=where, hint="choose another partition")


def _stage_dataset(name: str, source: str, site: Site, where: str) -> StagedDataset:
    """Return the dataset version of a request's `data.NAME`. Raises ConfigError if there is none, DataError, and the
    errors of its file system."""
    path = Path(source)
    if not exists(path) and site.paths.data and not path.is_absolute():
        path = Path(expand_placeholders(site.paths.data)) / source
    try:
        folder = find_version_dir(path)
    except UsageError as error:  # the path comes from a file here, not from the command line
        raise ConfigError(f'data.{name} = "{source}": {error}', where=where, hint=error.hint) from error
    version_manifest, raw = manifest.load_manifest(folder)
    return StagedDataset(
        name=name, source=str(folder), version=manifest.version_of(raw), bytes=version_manifest.total_bytes
    )


def render_script(plan: Plan, site: Site, *, run_dir: str, payload: str = "", array: str = "") -> str:
    """Return the sbatch script of a plan. payload: the shell command of every rank; "" for the plan's own."""
    site = site_of_plan(plan, site)
    payload = payload or rank_command(site, "plan", f"{run_dir}/plan.json")
    logs = f"{run_dir}/slurm-%A_%a.out" if array else f"{run_dir}/slurm-%j.out"
    job = msgspec.structs.replace(plan.job, name=Path(run_dir).name, output=logs, array=array)
    datasets = [TemplateDataset(name=data.name, source=data.source) for data in plan.data]
    return render_template(
        site,
        "train",
        job,
        payload=payload,
        datasets=datasets,
        environment=plan.request.env,
        run_dir=run_dir,
        python=plan.python,
        preflight=plan.preflight != "none" and not array,
    )
