"""What a job asks for, in a site's own spelling: the one place that writes sbatch flags.

The template, the submitit executor and `psbatch` all get their flags here, so they cannot disagree.
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
# Whole words, and some only as the last: MAX_TOKENS, TOKENIZERS_PARALLELISM and KEYBOARD are no secrets.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|(?:API|ACCESS|PRIVATE)_?KEY)(?:_|$)"
    r"|_KEYS?$|(?:^|_)(?:PASS|PAT|PWD|AUTH|JWT)$|(?:PASSWORD|PASSWD|APIKEY)$",
    re.IGNORECASE,
)
# What our own programs are told by; and what decides which programs and
# libraries run, ours and Slurm's too, before the job's own command does.
_PIT_VARIABLES = re.compile(r"PIT_\w*")
# What Slurm says of a job, and what bash lets nobody set: one breaks the job's script, the other is lost in silence.
_SLURM_VARIABLES = re.compile(
    r"SLURM_(JOB|STEP|ARRAY|SUBMIT|NODE|TASK|RESTART)\w*|SLURM_(NNODES|NPROCS|NTASKS|PROCID|LOCALID|GTIDS)|SLURMD_\w*"
    r"|BASHOPTS|SHELLOPTS|EUID|PPID|UID"
)
_LOADER_VARIABLES = re.compile(r"PATH|LD_\w+|SLURM_CONF|BASH_ENV")
_NO_LIMIT = {"", "UNLIMITED", "INFINITE"}  # the words are Slurm's own


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Resources and limits of one job, before any site's spelling. "", 0 and None mean: not asked for."""

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


def sbatch_flags(site: Site, job: JobSpec) -> tuple[str, ...]:
    """The job's sbatch flags, `--name=value` each, in a fixed order.

    Raises UsageError for a value with a newline, ConfigError for segments on a site that has none.
    """
    dialect = site.dialect
    if job.segment and not dialect.segment:
        # A job spread over more blocks than it counts on would run, only slower: nobody would notice.
        hint = "leave segment out, or set dialect.segment = true in the site file"
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
    return tuple(require_printable(flag, flag.split("=")[0]) for flag in (*written, *dialect.extra))


def _gpus(site: Site, job: JobSpec) -> list[tuple[str, object, bool]]:
    if not job.gpus_per_node:
        return []
    kind = site.partitions[job.partition].gpu if job.partition in site.partitions else ""
    count = f"{kind}:{job.gpus_per_node}" if site.dialect.gpu_type and kind else str(job.gpus_per_node)
    if site.dialect.gpus == "gres":
        return [("gres", f"gpu:{count}", True)]
    return [("gpus-per-node", count, site.dialect.gpus == "gpus-per-node")]


def require_printable(text: str, description: str) -> str:
    """The text, if it is one printable line. Raises UsageError: a newline in a script would be a new command."""
    if not text.isprintable():
        raise UsageError(f"{description}: {text!r} holds a newline, NUL or other control character", hint="remove it")
    return text


def require_variable(name: str) -> str:
    """A variable's name, if a script may hold its value. Raises UsageError for one that is no name, or a secret's."""
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is not a variable name", hint="letters, digits and _")
    if _SECRET_NAME.search(name):
        what = f"{name} looks like a secret, and scripts, plans and accounting databases are read by many"
        raise UsageError(what, hint=f"export {name} in your shell: Slurm passes your environment on to the job")
    return name


def require_settable(name: str, *, by_site: bool = False) -> str:
    """A variable's name, if a request, or a site, may set it. Raises UsageError.

    A site may set what programs are loaded by, too: who writes its file knows what is installed there.
    """
    if _PIT_VARIABLES.fullmatch(name):
        raise UsageError(f"{name} is set by pitools itself", hint=f"leave {name} out")
    if _SLURM_VARIABLES.fullmatch(name):
        raise UsageError(f"{name} is set by Slurm or bash itself", hint=f"leave {name} out")
    if _LOADER_VARIABLES.fullmatch(name) and not by_site:
        what = f"{name} would decide which programs and libraries run the job, Slurm's and pitools' own too"
        raise UsageError(what, hint=f'set it for your program alone: command = "{name}=… python train.py"')
    return name


def sbatch_directive(flag: str) -> str:
    """A flag as a line of an sbatch script, quoted the way sbatch reads it."""
    name, equals, value = flag.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"


def require_partition(site: Site, name: str, where: str) -> SitePartition:
    """The partition of this name. Raises ConfigError naming the nearest."""
    if name not in site.partitions:
        what, hint = f'site "{site.name}" has no partition "{name}"', suggest(name, site.partitions)
        if not name:
            what = f'no partition is asked for, and site "{site.name}" has no default'
            hint = f'partition = "…", in the request or in [defaults] of the site file; {hint}'
        raise ConfigError(what, where=variable_origin("PIT_PARTITION", name) or where, hint=hint)
    return site.partitions[name]


def time_limit_s(partition: SitePartition) -> int | None:
    """The longest job of a partition in seconds; None: no limit. Raises UsageError for what is no duration."""
    return None if partition.max_time.upper() in _NO_LIMIT else units.parse_duration(partition.max_time)


def require_account(site: Site, name: str, where: str) -> str:
    """The account, if the site lets you charge it. Raises ConfigError naming the nearest."""
    if name and site.dialect.account and site.accounts and name not in site.accounts:
        what, hint = f'site "{site.name}" has no account "{name}"', suggest(name, site.accounts)
        raise ConfigError(what, where=variable_origin("PIT_ACCOUNT", name) or where, hint=hint)
    return name


def qos_for_tier(site: Site, tier: str, where: str) -> str:
    """The site's QOS for a tier; "" where the site has no tiers. Raises ConfigError naming the nearest."""
    if not site.tiers:
        return ""
    if tier not in site.tiers:
        what, hint = f'site "{site.name}" has no tier "{tier}"', suggest(tier, site.tiers)
        raise ConfigError(what, where=variable_origin("PIT_TIER", tier) or where, hint=hint)
    return site.tiers[tier]


def variable_origin(variable: str, value: str) -> str:
    """The variable as an error's `where`, if the value is its own; else ""."""
    return f"env {variable}" if os.environ.get(variable) == value else ""
