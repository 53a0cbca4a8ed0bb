"""Read and check a request: a TOML file that describes one training job, for any site."""

from __future__ import annotations

import copy
import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pitools.core import hostlist, strict_toml, units
from pitools.core.errors import ConfigError, PitError, most_similar, suggest
from pitools.site import dialect
from pitools.site.schema import Hook, PreflightMode
from pitools.store.resolve import exists

Framework = Literal["jax", "torch", "none"]
Topology = Literal["none", "exclude", "nodelist", "reservation"]
Parameter = str | int | float | bool

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
_SIGNAL = re.compile(r"(TERM|INT|HUP|USR1|USR2)@\d{1,5}|none")
# Each of these starts a separate process group on every rank, and so trains N independent models.
_LAUNCHER = re.compile(
    r"(?:^|&&|\|\||[;\n])\s*(?:(?:[A-Za-z_]\w*=\S*|env|exec)\s+)*(?:\S*/)?"
    r"(torchrun|accelerate|deepspeed|srun|mpirun|mpiexec"
    r"|python[\d.]*\s+(?:-\w+\s+)*-m\s+torch\.distributed\.(?:run|launch))(?!\S)"
)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_DATA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9-]+")
_SBATCH_TABLE = '{} = "…" under [sbatch], whose keys are long flags of sbatch'
_SBATCH_FLAGS = ["reservation", "mail_type", "mail_user", "dependency", "licenses", "wckey", "comment", "begin", "nice"]
# Options of sbatch that a request spells otherwise, or that belong elsewhere: key → what to write instead.
_KEYS_ELSEWHERE = {
    "qos": 'tier = …, which the site file maps to a QOS under [tiers]; or qos = "…" under [sbatch]',
    "job_name": "name = …",
    "mem": 'memory = "64G"',
    **dict.fromkeys(("ntasks", "tasks"), "nodes = … and tasks_per_node = …"),
    "ntasks_per_node": "tasks_per_node = …",
    **dict.fromkeys(("gres", "gpus", "gpus_per_task"), 'gpus_per_node = …, and gpu = "h100" for the type'),
    **dict.fromkeys(("time_limit", "timelimit"), 'time = "2h"'),
    "chdir": "workdir = …",
    **dict.fromkeys(("export", "environment"), "a table [env]"),
    **dict.fromkeys(("output", "error"), "no key: the run keeps each rank's output, see: pit launch logs"),
    "requeue": "a table [retry]; for Slurm's own requeue: requeue under [dialect] of the site file",
    "exclusive": "exclusive = true under [sbatch]",
    "gpu_type": "under [dialect] of the site file",
    "module": "modules = […]",
    "array": "pit launch run REQUEST --set KEY=VALUE,VALUE for a sweep; pitools.Executor for many callables",
    **{name: _SBATCH_TABLE.format(name.replace("_", "-")) for name in _SBATCH_FLAGS},
    "mail": _SBATCH_TABLE.format("mail-type"),
    **dict.fromkeys(("slurm", "sbatch_args"), "a table [sbatch]: long flags of sbatch without their dashes"),
}

# Long flags of sbatch that a table [sbatch] may not contain: flag → what to write instead.
_SBATCH_ELSEWHERE = {
    "job-name": "name = …",
    **dict.fromkeys(("output", "error", "input", "open-mode"), "the run keeps each rank's output: pit launch logs"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "cpus-per-task"), "nodes, tasks_per_node, cpus_per_task"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task", "ntasks-per-gpu"), "gpus_per_node = …"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), 'memory = "64G", of each node'),
    "time": 'time = "2h"',
    "signal": 'signal = "USR2@90"',
    "segment": "segment = …",
    "chdir": "workdir = …",
    **dict.fromkeys(("export", "export-file", "get-user-env"), "a table [env]"),
    **dict.fromkeys(("partition", "account", "constraint", "nodelist", "exclude"), "the request's key of this name"),
    **dict.fromkeys(("nodefile", "distribution", "wait-all-nodes", "no-kill"), "leave it out"),
    **dict.fromkeys(("requeue", "no-requeue"), "a table [retry], and chain under [recovery] of the site file"),
    "array": "pit launch run REQUEST --set KEY=VALUE,VALUE",
    "wait": "pit launch run REQUEST --wait",
    **dict.fromkeys(("clusters", "cluster"), "pit launch run REQUEST --site NAME"),
    **dict.fromkeys(("wrap", "parsable", "test-only", "quiet", "verbose", "help", "usage", "version"), "leave it out"),
    **dict.fromkeys(("uid", "gid", "container"), "leave it out"),
}


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of retries in a row for each cause. A newer complete checkpoint resets all counts.

    max: for all causes together, preemptions too; those have no other limit.
    """

    node: int = 5
    gpu: int = 5
    network: int = 3
    hang: int = 2
    storage: int = 5
    unknown: int = 2
    memory: int = 0
    program: int = 0
    max: int = 100


class HangWatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time without a new step after which the ranks count as hung.

    hang_factor: multiple of the usual step time, but min_stall at least. first_step: for the first step of an
    attempt. min_stall, first_step: durations such as `2m`; min_stall = "0" turns the hang watch off.
    """

    hang_factor: float = 10.0
    min_stall: str = "2m"
    first_step: str = "30m"


class RequestContainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The container of the ranks, in place of the site's. runtime: "" is the site's, `none` runs on the host."""

    runtime: Literal["", "none", "pyxis", "apptainer"] = ""
    image: str = ""
    mounts: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training job, for any site. Give either entry or command.

    entry: `package.module:function`, called on every rank with `args` as keywords. command: shell command of every
    rank. data: name → dataset (a folder, ROOT/NAME, ROOT/NAME@TAG or six digits of a version, see
    `pitools.store.resolve`), here or below the site's `paths.data`; ranks read it at `PIT_DATA_<NAME>`. time: at least
    a minute, as `sbatch --time`, or `2h`. tier: a key of the site's tiers. partition, account, tier, preflight: "" is
    the site's default. preflight: `quick` tests the nodes of each attempt before its ranks start, see
    `launch/job/preflight.py`. gpu: accepted types, as in site files, separated by commas. gpu_memory_gib: least memory
    of each GPU. segment: nodes that must share a block, where the site's topology has blocks; 0 leaves it to Slurm.
    topology: how Slurm is restricted to the best free nodes; "none" for no restriction. signal: sent to every rank
    before the time limit, as `USR2@90` (seconds); "" is the framework's default, "none" for no signal. workdir: the
    ranks' working directory, relative to the request file. snapshot: run in a copy of the workdir, made at submission
    and kept with the run. memory: of each node, as `sbatch --mem`. params: name → value, which a command gets as
    `{name}` and every rank as `PIT_PARAM_<NAME>`; an entry gets them as keywords, or as one mapping if it has an
    argument `params`. sbatch: long flag of sbatch without its dashes → value; true for a flag without a value. modules:
    loaded after the site's. python: interpreter with pitools on the nodes, in place of the site's. retry, watch: see
    RetryBudget, HangWatch. hooks: started for this run's events, after the site's and the user's.
    """

    name: str
    entry: str = ""
    command: str = ""
    framework: Framework = "none"
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpu: str = ""
    gpu_memory_gib: int = 0
    segment: int = 0
    memory: str = ""
    time: str = ""
    tier: str = ""
    partition: str = ""
    account: str = ""
    topology: Topology = "none"
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    preflight: PreflightMode | Literal[""] = ""
    signal: str = ""
    workdir: str = "."
    snapshot: bool = True
    data: dict[str, str] = {}
    args: dict[str, Any] = {}
    params: dict[str, Parameter] = {}
    env: dict[str, str] = {}
    sbatch: dict[str, str | int | bool] = {}
    modules: tuple[str, ...] = ()
    python: str = ""
    container: RequestContainer = RequestContainer()
    retry: RetryBudget = RetryBudget()
    watch: HangWatch = HangWatch()
    hooks: tuple[Hook, ...] = ()


def load_request(path: Path, values: Mapping[str, str] = {}) -> Request:
    """Read and check a request file. Raises ConfigError with the key, and the nearest known one.

    values: texts by key or parameter, which replace those of the file: see `set_values`.
    """
    tables = strict_toml.read_toml(path)
    return request_of_tables(set_values(tables, values, str(path)) if values else tables, path)


def request_of_tables(tables: dict[str, Any], path: Path) -> Request:
    """Return the checked request of some tables. path: of its file; paths in the request are relative to its folder.

    Raises ConfigError with the key, and the nearest known one.
    """
    request = strict_toml.convert_tables(tables, Request, str(path), elsewhere=_KEYS_ELSEWHERE)
    check_request(request, str(path))
    workdir = (path.parent / request.workdir).resolve()
    data = {name: _resolve_dataset(source, path.parent) for name, source in request.data.items()}
    return msgspec.structs.replace(request, workdir=str(workdir), data=data)


def _resolve_dataset(source: str, folder: Path) -> str:
    """Return the absolute path of a dataset in `folder`; if there is none, `source` unchanged, for the site."""
    return str((folder / source).resolve()) if source and exists(folder / source) else source


def check_request(request: Request, where: str) -> None:
    """Check what the types of a request do not. where: its name in errors. Raises ConfigError with the key."""

    def require(condition: bool, message: str, hint: str = "") -> None:
        if not condition:
            raise ConfigError(message, where=where, hint=hint)

    require(bool(_NAME.fullmatch(request.name)), f"name = {request.name!r}", "lower case, digits, - and _; at most 48")
    require(not (request.entry and request.command), "entry and command are both given", "leave one of them out")
    require(bool(request.entry or request.command), "give either entry or command", 'entry = "module:function"')
    is_entry = bool(_ENTRY.fullmatch(request.entry)) and ".py:" not in request.entry
    require(not request.entry or is_entry, f"entry = {request.entry!r}", "module:function, without .py")
    launcher = _LAUNCHER.search(_QUOTED.sub("''", request.command))
    hint = "pitools starts the ranks: name the program itself, and set tasks_per_node"
    named = launcher.group(1) if launcher else ""
    require(not launcher, f'command: runs "{named}", which starts more ranks', hint)
    require(bool(request.entry) or not request.args, "args go with entry; a command has its own arguments")
    for key in ("nodes", "tasks_per_node", "cpus_per_task"):
        require(getattr(request, key) >= 1, f"{key} = {getattr(request, key)} must be 1 or more")
    require(not request.signal or bool(_SIGNAL.fullmatch(request.signal)), f"signal = {request.signal!r}", "USR2@90")
    for key in ("gpus_per_node", "gpu_memory_gib", "segment"):
        require(getattr(request, key) >= 0, f"{key} = {getattr(request, key)} must be 0 or more")
    needs_gpu = bool(request.gpu or request.gpu_memory_gib)
    require(
        bool(request.gpus_per_node) or not needs_gpu, "gpu or gpu_memory_gib without gpus_per_node", "set gpus_per_node"
    )
    require(not request.memory or bool(_MEMORY.fullmatch(request.memory)), f"memory = {request.memory!r}", '"64G"')
    for key in ("nodelist", "exclude"):
        try:
            if node_list := getattr(request, key):  # import ClusterShell only if needed
                hostlist.expand(node_list)
        except PitError as error:
            raise ConfigError(f"{key}: {error.message}", where=where, hint=error.hint) from error
    has_both = bool(request.nodelist) and request.topology != "none"
    require(not has_both, "nodelist and topology both choose nodes", "leave one of them out")
    for name in request.data:
        require(bool(_DATA_NAME.fullmatch(name)), f"data.{name} is not a name", "letters, digits and _")
    _check_params(request, require)
    for flag, value in request.sbatch.items():
        reason = _SBATCH_ELSEWHERE.get(flag, "")
        require(bool(_FLAG.fullmatch(flag)), f"sbatch.{flag} is not a long flag", 'mail-user = "…", without dashes')
        require(not reason, f"sbatch.{flag}: pitools sets this flag itself", reason)
        require(value != "", f"sbatch.{flag} is empty", f"{flag} = true for a flag without a value")
    check_env(request, where)
    for key, value in _texts(request):
        # A command may hold newlines: plan.json carries it, not a script.
        text = value.replace("\n", "") if key == "command" else value
        require(text.isprintable(), f"{key} holds a newline, NUL or other control character")
    for key in RetryBudget.__struct_fields__:
        count, least = getattr(request.retry, key), int(key == "max")
        require(count >= least, f"retry.{key} = {count} must be {least} or more")
    require(request.watch.hang_factor >= 1, f"watch.hang_factor = {request.watch.hang_factor}", "1 or more")
    times = {"time": request.time or "1h", "watch.min_stall": request.watch.min_stall}
    for key, value in {**times, "watch.first_step": request.watch.first_step}.items():
        try:
            units.parse_duration(value)
        except PitError as error:
            raise ConfigError(f"{key}: {error.message}", where=where, hint=error.hint) from error


def check_env(request: Request, where: str) -> None:
    """Check the names of a request's variables, of which shells make assignments. Raises ConfigError."""
    for name in request.env:
        try:
            dialect.require_settable(dialect.require_variable(name))
        except PitError as error:
            raise ConfigError(f"env: {error.message}", where=where, hint=error.hint) from error


def _check_params(request: Request, require: Callable[..., None]) -> None:
    """Check the parameters' names: each is a variable, a placeholder and a keyword. require: see `check_request`."""
    for name in request.params:
        require(bool(_DATA_NAME.fullmatch(name)), f"params.{name} is not a name", "letters, digits and _")
        require(name not in request.__struct_fields__, f"params.{name} is also a key of a request", "another name")
        require(name not in request.args, f"params.{name} is also an argument", "leave it out of [args]")
    variables = [name.upper() for name in request.params]
    twice = next((name for name in request.params if variables.count(name.upper()) > 1), "")
    require(not twice, f"params.{twice}: two names make the variable PIT_PARAM_{twice.upper()}", "another name")
    for name in set(re.findall(r"(?<!\$)\{(\w+)\}", request.command)) - request.params.keys():
        similar = most_similar(name, request.params, 0.8)  # braces of the shell and of other programs are usual
        require(not similar, f"command: {{{name}}} is no parameter", f"{{{similar}}}, or add {name} to [params]")


def _texts(request: Request) -> list[tuple[str, str]]:
    pairs = [(key, value) for key in request.__struct_fields__ if isinstance(value := getattr(request, key), str)]
    tables: list[tuple[str, Mapping[str, Any]]]
    tables = [("env", request.env), ("params", request.params), ("sbatch", request.sbatch)]
    named = [(f"{table}.{name}", str(value)) for table, values in tables for name, value in values.items()]
    lists = [("modules", request.modules), ("container.mounts", request.container.mounts)]
    listed = [(key, value) for key, values in lists for value in values]
    return [*pairs, *request.data.items(), *named, *listed, ("container.image", request.container.image)]


def command_text(request: Request) -> str:
    """Return the command with each parameter's value, quoted for the shell, in place of `{name}`.

    Other braces, such as `${name}`, stay: only names of `request.params` are replaced.
    """
    names = "|".join(sorted(map(re.escape, request.params), key=len, reverse=True))
    if not names:
        return request.command
    return re.sub(
        rf"(?<![$\\])\{{({names})\}}", lambda m: shlex.quote(param_text(request.params[m[1]])), request.command
    )


def param_variables(request: Request) -> dict[str, str]:
    """Return the variables of a request's parameters: `PIT_PARAM_<NAME>`."""
    return {f"PIT_PARAM_{name.upper()}": param_text(value) for name, value in request.params.items()}


def param_text(value: Parameter) -> str:
    """Return a parameter as text for a variable or a command: `true`, `false`, or Python's text of the value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fill_datasets(request: Request, pairs: dict[str, str]) -> Request:
    """Return the request with `--data NAME=PATH` filled in. Raises ConfigError for an unknown name or an empty path."""
    for name in pairs:
        if name not in request.data:
            hint = suggest(name, request.data) or f'add `{name} = ""` under [data]'
            raise ConfigError(f'the request has no dataset "{name}"', where=f"--data {name}", hint=hint)
    data = {**request.data, **{name: _resolve_dataset(source, Path()) for name, source in pairs.items()}}
    missing = [name for name, source in data.items() if not source]
    if missing:
        raise ConfigError(f'dataset "{missing[0]}" has no path', where="[data]", hint=f"--data {missing[0]}=PATH")
    return msgspec.structs.replace(request, data=data)


def set_values(tables: dict[str, Any], values: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return a request's tables with other values. values: text by parameter, key, or key in a table (`retry.node`).

    A text becomes a number or a truth value where the key takes one, and stays a text where it takes a text. Raises
    ConfigError for a name that is neither, and for a value of the wrong type.
    """
    tables = copy.deepcopy(tables)
    for name, text in values.items():
        params = tables.get("params", {})
        if isinstance(params, dict) and name.removeprefix("params.") in params:
            key = name.removeprefix("params.")
            params[key] = _as_type_of(params[key], text, f"params.{key}", where)
            continue
        head, _, rest = name.partition(".")
        if head not in Request.__struct_fields__ or head == "params":
            own = list(params) if isinstance(params, dict) else []
            names = own if head == "params" else [*Request.__struct_fields__, *own]
            tables_with_it = [table for table, keys in tables.items() if isinstance(keys, dict) and name in keys]
            hint = (
                f"{tables_with_it[0]}.{name}=…"
                if tables_with_it
                else suggest(name.removeprefix("params."), names) or f"add it under [params] of the request: {name} = …"
            )
            raise ConfigError(f'no key or parameter "{name}"', where=where, hint=hint, key=name)
        parent, last = (tables.setdefault(head, {}), rest) if rest else (tables, head)
        if not isinstance(parent, dict):
            raise ConfigError(f'"{head}" is no table', where=where, key=name)
        parent[last] = _typed_for(head, last if rest else "", text)
    return tables


def _as_type_of(value: object, text: str, name: str, where: str) -> Parameter:
    """Return a text as a value of the same type as `value`, the request's own. Raises ConfigError."""
    typed = typed_value(text)
    if isinstance(value, str):
        return text
    if isinstance(value, bool) != isinstance(typed, bool) or isinstance(typed, str):
        message = f"{name} = {text} (expected {type(value).__name__}, as {value!r} in the request)"
        raise ConfigError(message, where=where, key=name)
    return float(typed) if isinstance(value, float) else typed


def _typed_for(key: str, name: str, text: str) -> Parameter:
    """Return a text typed, if the request's key takes that, else the text."""
    typed = typed_value(text)
    field = next(field for field in msgspec.structs.fields(Request) if field.name == key)
    try:
        msgspec.convert({name: typed} if name else typed, field.type)
    except msgspec.ValidationError:
        return text
    return typed


def typed_value(text: str) -> Parameter:
    """Return a number or a truth value, as TOML writes it, or else the text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?(0|[1-9]\d*)", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text
