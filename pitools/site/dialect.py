"""Convert a job's resources to the sbatch flags of a site.

Templates, the submitit executor and `psbatch` all use this module, so their flags are the same.
"""

from __future__ import annotations

import os
import re
import shlex

import msgspec

from pitools.core import units
from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.site.schema import Site, SitePartition

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Whole words, some only at the end: MAX_TOKENS, TOKENIZERS_PARALLELISM and KEYBOARD are no secrets.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|(?:API|ACCESS|PRIVATE)_?KEY)(?:_|$)"
    r"|_KEYS?$|(?:^|_)(?:PASS|PAT|PWD|AUTH|JWT)$|(?:PASSWORD|PASSWD|APIKEY)$",
    re.IGNORECASE,
)
# Variables of pitools' own programs.
_PIT_VARIABLES = re.compile(r"PIT_\w*")
# Variables that Slurm sets for jobs, which break scripts if changed, and read-only ones of bash, which are ignored.
_SLURM_VARIABLES = re.compile(
    r"SLURM_(JOB|STEP|ARRAY|SUBMIT|NODE|TASK|RESTART)\w*|SLURM_(NNODES|NPROCS|NTASKS|PROCID|LOCALID|GTIDS)|SLURMD_\w*"
    r"|BASHOPTS|SHELLOPTS|EUID|PPID|UID"
)
# These change which programs and libraries run, before the job's own command.
_LOADER_VARIABLES = re.compile(r"PATH|LD_\w+|SLURM_CONF|BASH_ENV")
_NO_LIMIT = {"", "UNLIMITED", "INFINITE"}  # Slurm's terms


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Resources and limits of a job, independent of the site. "", 0 and None mean: not requested.

    extra: further sbatch flags, which replace the site's of the same name.
    """

    name: str
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    memory: str = ""
    time_s: int = 3600
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    segment: int = 0
    array: str = ""
    output: str = ""
    signal: str = ""
    requeue: bool | None = True
    extra: tuple[str, ...] = ()


def sbatch_flags(site: Site, job: JobSpec) -> tuple[str, ...]:
    """Return the job's sbatch flags, `--name=value`, in a fixed order.

    Raises UsageError for a value with a newline, ConfigError for segments on a site without them.
    """
    dialect = site.dialect
    if job.segment and not dialect.segment:
        # Without the flag the job might be spread over more blocks, and run slower without notice.
        hint = "omit segment, or set dialect.segment = true in the site file"
        raise ConfigError(f'site "{site.name}" has no --segment', where=f"segment = {job.segment}", hint=hint)
    pairs: list[tuple[str, object, bool]] = [
        ("job-name", job.name, True),
        ("partition", job.partition, True),
        ("account", job.account, dialect.account),
        ("qos", job.qos, dialect.qos),
        ("nodes", job.nodes, True),
        ("ntasks-per-node", job.tasks_per_node, True),
        ("cpus-per-task", job.cpus_per_task, True),
        *_gpus(site, job),
        ("mem", "0" if dialect.memory == "all" else job.memory, dialect.memory != "none"),
        ("time", units.to_slurm_time(job.time_s), True),
        ("constraint", job.constraint, True),
        ("nodelist", job.nodelist, True),
        ("exclude", job.exclude, True),
        ("segment", job.segment, True),
        ("array", job.array, True),
        ("signal", job.signal, dialect.signal),
        ("output", job.output, True),
        ("open-mode", "append" if job.output else "", True),
    ]
    written = [f"--{name}={value}" for name, value, emitted in pairs if emitted and value not in ("", 0)]
    if dialect.exclusive:
        written.append("--exclusive")
    if dialect.requeue and job.requeue is not None:
        written.append("--requeue" if job.requeue else "--no-requeue")
    own = {flag.partition("=")[0] for flag in job.extra}
    written += [flag for flag in dialect.extra if flag.partition("=")[0] not in own]
    if "--exclusive" in own and "--exclusive" in written:
        written.remove("--exclusive")
    return tuple(require_printable(flag, flag.split("=")[0]) for flag in (*written, *job.extra))


def _gpus(site: Site, job: JobSpec) -> list[tuple[str, object, bool]]:
    if not job.gpus_per_node:
        return []
    kind = site.partitions[job.partition].gpu if job.partition in site.partitions else ""
    count = f"{kind}:{job.gpus_per_node}" if site.dialect.gpu_type and kind else str(job.gpus_per_node)
    if site.dialect.gpus == "gres":
        return [("gres", f"gpu:{count}", True)]
    return [("gpus-per-node", count, site.dialect.gpus == "gpus-per-node")]


def require_printable(text: str, description: str) -> str:
    """Return the text, if it is one printable line. Raises UsageError: a newline would start a new command."""
    if not text.isprintable():
        raise UsageError(f"{description}: {text!r} has a newline, NUL or other control character", hint="remove it")
    return text


def require_variable(name: str) -> str:
    """Return the variable's name, if a script may contain it. Raises UsageError for an invalid or secret name."""
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is not a variable name", hint="letters, digits and _")
    if _SECRET_NAME.search(name):
        problem = f"{name} looks like a secret, and scripts, plans and accounting databases are read by many"
        raise UsageError(problem, hint=f"export {name} in your shell: Slurm passes your environment on to the job")
    return name


def require_settable(name: str, *, by_site: bool = False) -> str:
    """Return the variable's name, if a request may set it. Raises UsageError.

    by_site: a site file sets it: permit variables of the program loader too.
    """
    if _PIT_VARIABLES.fullmatch(name):
        raise UsageError(f"{name} is set by pitools itself", hint=f"omit {name}")
    if _SLURM_VARIABLES.fullmatch(name):
        raise UsageError(f"{name} is set by Slurm or bash itself", hint=f"omit {name}")
    if _LOADER_VARIABLES.fullmatch(name) and not by_site:
        problem = f"{name} would change which programs and libraries run, also of Slurm and pitools"
        raise UsageError(problem, hint=f'set it for your program alone: command = "{name}=… python train.py"')
    return name


def sbatch_directive(flag: str) -> str:
    """Return a flag as a line of an sbatch script, quoted for sbatch."""
    name, equals, value = flag.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"


def require_partition(site: Site, name: str, where: str) -> SitePartition:
    """Return the partition of this name. Raises ConfigError with a suggestion."""
    if name not in site.partitions:
        problem, hint = f'site "{site.name}" has no partition "{name}"', suggest(name, site.partitions)
        if not name:
            problem = f'no partition is given, and site "{site.name}" has no default'
            hint = f'partition = "…", in the request or in [defaults] of the site file; {hint}'
        raise ConfigError(problem, where=variable_origin("PIT_PARTITION", name) or where, hint=hint)
    return site.partitions[name]


def time_limit_s(partition: SitePartition) -> int | None:
    """Return the time limit of a partition in seconds; None for no limit. Raises UsageError for an invalid duration."""
    return None if partition.max_time.upper() in _NO_LIMIT else units.parse_duration(partition.max_time)


def require_account(site: Site, name: str, where: str) -> str:
    """Return the account, if the site permits it. Raises ConfigError with a suggestion."""
    if name and site.dialect.account and site.accounts and name not in site.accounts:
        problem, hint = f'site "{site.name}" has no account "{name}"', suggest(name, site.accounts)
        raise ConfigError(problem, where=variable_origin("PIT_ACCOUNT", name) or where, hint=hint)
    return name


def qos_for_tier(site: Site, tier: str, where: str) -> str:
    """Return the site's QOS for a tier; "" if the site has no tiers. Raises ConfigError with a suggestion."""
    if not site.tiers:
        return ""
    if tier not in site.tiers:
        problem, hint = f'site "{site.name}" has no tier "{tier}"', suggest(tier, site.tiers)
        raise ConfigError(problem, where=variable_origin("PIT_TIER", tier) or where, hint=hint)
    return site.tiers[tier]


def variable_origin(variable: str, value: str) -> str:
    """Return `env VARIABLE`, an error's `where`, if the variable has this value; else ""."""
    return f"env {variable}" if os.environ.get(variable) == value else ""
