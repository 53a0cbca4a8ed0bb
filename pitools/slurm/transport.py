"""How a cluster's commands are reached: on this machine, or through ssh; and in which environment they run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from pitools.core import subprocesses, trust
from pitools.core.errors import ConfigError, Unreachable
from pitools.slurm import ssh_mux

RunFunction = Callable[..., subprocesses.Completed]

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONNECT_S = 10
_SERVICE_ACCOUNT = "slurm"  # some clouds' images give Slurm's files to it; what runs on the nodes is its to say anyway

# What we call, and what stands in our lines for a shell: whatever of it is in a site's own folder is what runs.
_COMMANDS = (
    "sbatch",
    "scancel",
    "scontrol",
    "squeue",
    "sinfo",
    "sacct",
    "sacctmgr",
    "srun",
    "sh",
    "date",
    "id",
    "env",
    "grep",
)

# Variables of these families change what the commands print (SQUEUE_FORMAT, SLURM_TIME_FORMAT), whom they ask
# (SLURM_CLUSTERS) or what they submit (SBATCH_*), and a shell inside a job is full of them. The second line is what a
# shell born in a step knows of the rank that it is: a job that inherits it binds its ranks to that step's cores
# (SLURM_CPU_BIND), or has them look for that step's neighbours (PMI_RANK, PMIX_NAMESPACE).
_SCRUBBED_PREFIXES = (
    "SLURM|SLURMD|SLURMSTEPD|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SCONTROL|SCANCEL|SACCT|SACCTMGR|SPRIO|SDIAG"
    "|PMI|PMI2|PMIX|OMPI|PRTE|ORTE|PALS|HYDI|MV2_COMM_WORLD"
)
# Settings of MPI's that a user makes, and those of them that mpirun makes itself.
_SETTING, _OF_MPIRUN = "PMIX_MCA_|OMPI_MCA_|PRTE_MCA_", "OMPI_MCA_orte_|OMPI_MCA_ess_|PRTE_MCA_ess_"
_SCRUB = re.compile(rf"(?:{_OF_MPIRUN})\w*|(?!{_SETTING})(?:{_SCRUBBED_PREFIXES})_\w*", re.ASCII)


def _globs(prefixes: str) -> str:
    return "|".join(f"{prefix}*" for prefix in prefixes.split("|"))


# The same on the far side, where only its shell knows the variables. 255 is given back to ssh as its own.
_REMOTE = (
    f"for v in $(env | grep -oE '^({_SCRUBBED_PREFIXES})_[A-Za-z0-9_]*='); do v=${{v%=}}; "
    f'case "$v" in {_globs(_OF_MPIRUN)}) unset "$v";; SLURM_CONF|{_globs(_SETTING)}) ;; *) unset "$v";; esac; done; '
    'env "$@"; rc=$?; [ "$rc" = 255 ] && rc=254; exit "$rc"'
)
# Of some files and folders, and of every folder and link that leads to them, those that are neither this user's nor
# root's, or that others can write to, as far as the system's own tools there can tell: a sticky folder keeps what is
# below it to its owner, but takes new commands from anybody. A link is followed only after every folder and link before
# it was found safe: another user's could make the path longer than `find`'s command line may be. At most 40 links are
# followed, as by the kernel. A path below the last folder named starts from the folder that one was resolved to. One
# line: csh, where it is the login shell, takes no other.
OPEN = (
    "PATH=/usr/bin:/bin:$PATH; i=$(id); u=${i#uid=}; u=${u%%[!0-9]*}; g=${i#*gid=}; g=${g%%[!0-9]*}; "
    's=$(id -u slurm 2> /dev/null || echo 0); c() { find "$@" -maxdepth 0 '
    "'(' ! -user 0 ! -user \"$u\" ! -user \"$s\" -o ! -type l $k '(' -perm -002 -o -perm -020 ! -group 0 "
    "! -group \"$g\" ')' ')' -print; }; "
    'n=$#; d=; e=; k="! -perm -1000"; for f do shift $n; n=0; l=0; '
    'case $f in "$d"/*) a=$e; r=${f#"$d"};; /*) a=; r=$f;; *) a=; r=$PWD/$f;; esac; '
    'while [ "$r" ]; do p=${r%%/*}; r=${r#"$p"}; r=${r#/}; case $p in ""|.) continue;; ..) a=${a%/*}; continue;; esac; '
    'p=$a/$p; set -- "$@" "$p"; [ -L "$p" ] || { a=$p; continue; }; [ -z "$(c "$@")" ] || { a=; break; }; set --; '
    'l=$((l + 1)); [ $l -le 40 ] && p=$(readlink "$p") || { echo "$f"; a=; break; }; r=$p/$r; '
    'case $p in /*) a=;; esac; done; [ ! -d "$a" ] || { d=$f; e=$a; }; [ ! -k "$a" ] || (k=; c "$a"); done; c / "$@"'
)
IS_OPEN, _OPEN_CODE = "can be written by others, is another user's (expected you or root), or is a loop of links", 78
# A login says things of its own before the command does: a banner, a start-up file's complaint, a warning about a
# locale. On both streams this line ends them.
LOGIN_OUTPUT_END = "\x1e\n"
_MARKED_REMOTE = f"printf '\\036\\n'; printf '\\036\\n' >&2; {_REMOTE}"

# Slurm prints local times without a zone: the zone is fixed where it is read. Array indices are never shortened.
QUERY_ENV = {"TZ": "UTC0", "LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a cluster's commands. Raises ConfigError for a host or variable that ssh or env could misread.

    host: an ssh destination, or "" for this machine. env: set for every command, such as SLURM_CONF. bin: a folder
    where commands are looked for before the PATH. timeout_s: for one command, its answer included.
    """

    host: str = ""
    env: Mapping[str, str] = {}
    bin: str = ""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.host and not _HOST.fullmatch(self.host):
            raise ConfigError(f'"{self.host}" is not an ssh destination', hint="write host or user@host")
        for name in self.env:
            if not _NAME.fullmatch(name):
                raise ConfigError(f'"{name}" is not the name of an environment variable')


def run_command(
    transport: Transport,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: str | BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    run: RunFunction = subprocesses.run,
) -> subprocesses.Completed:
    """Run a command where it is reached, with `env` on top, and without the variables that would bend Slurm's.

    All commands to a host share one connection: see ssh_mux.py. stdin: text, or a file or pipe to read. stdout: where
    the output goes instead of into the answer; over ssh what the login says comes first there, and ends with MARK.
    Raises ToolMissing, Unreachable on time-out, and ConfigError where SLURM_CONF names no file, or one of others; over
    ssh as far as a few tools there can tell.
    """
    where = f"{argv[0]} on {transport.host}" if transport.host else argv[0]
    elsewhere = {"stdout": stdout} if stdout else {}
    try:
        if transport.host:
            given_argv = ssh_argv(transport, argv, env, marked=True, options=ssh_mux.mux_options(transport.host))
            with ssh_mux.connect_once(transport.host):
                done = run(given_argv, timeout_s=transport.timeout_s, stdin=stdin, **elsewhere)
            done = done._replace(stdout=_after_mark(done.stdout), stderr=_after_mark(done.stderr))
            said = done.stderr.strip().rpartition("\n")[2]
            if done.code == _OPEN_CODE and said.endswith(IS_OPEN):
                hint = f"it would decide what runs as you; there: chmod go-w {said.removesuffix(IS_OPEN).strip()}"
                raise ConfigError(said, where=where, hint=hint)
            return done
        given = {**slurm_conf_env(transport), **path_env(transport), **transport.env, **env}
        bent = [name for name in os.environ if _SCRUB.fullmatch(name)]
        return run(argv, timeout_s=transport.timeout_s, env=given, unset=bent, stdin=stdin, **elsewhere)
    except Unreachable as error:
        if transport.host:
            ssh_mux.drop(transport.host)  # whatever hangs there, the next command does not wait behind it
        raise Unreachable(error.message, where=where, hint=error.hint) from error


def ssh_argv(
    transport: Transport,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    marked: bool = False,
    options: Sequence[str] = (),
) -> list[str]:
    """The ssh command line for a Slurm command: one argument holds the whole remote command, quoted for its shell.

    marked: a line with nothing but \\x1e stands before the command's own words, on stdout and on stderr. options: more
    of ssh's own.
    """
    settings = [f"{name}={value}" for name, value in {**transport.env, **env}.items()]
    script = _MARKED_REMOTE if marked else _REMOTE
    if transport.bin:
        script = f"PATH={shlex.quote(transport.bin)}:$PATH; export PATH; {script}"
    if files := [file for file in (transport.env.get("SLURM_CONF", ""), *called(transport.bin)) if file]:
        # What the site file names, as here: its plugins and commands would run as this user. None of them is yet.
        said = f'w=$(o {shlex.join(files)} 2> /dev/null); [ -z "$w" ] || {{ echo "$w {IS_OPEN}" >&2; '
        script = f"o() {{ {OPEN}; }}; {said}exit {_OPEN_CODE}; }}; {script}"
    remote = shlex.join(["sh", "-c", script, "sh", *settings, *argv])
    # Less than the whole, so that it is ssh that gives up, and says that nothing was sent.
    connect_s = max(1, min(_CONNECT_S, int(transport.timeout_s / 2)))
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}", *options, "--", transport.host, remote]


def _after_mark(text: str) -> str:
    """What follows the mark; all of it where ssh never got that far."""
    _, mark, said = text.partition(LOGIN_OUTPUT_END)
    return said if mark else text


def called(folder: str) -> list[str]:
    """A folder of commands, and what there may be in it that we call; [] for ""."""
    return [folder, *(f"{folder}/{name}" for name in _COMMANDS)] if folder else []


def path_env(transport: Transport) -> dict[str, str]:
    """PATH with the transport's `bin` first. Raises ConfigError where others can write there, or to what we call."""
    if not transport.bin:
        return {}
    folder, *commands = map(Path, called(transport.bin))
    trust.require_trusted(folder, "folder of Slurm's commands", trusted_user=_SERVICE_ACCOUNT)
    for command in commands:
        if command.exists():
            trust.require_trusted(command, "command", trusted_user=_SERVICE_ACCOUNT)
    return {"PATH": os.pathsep.join([transport.bin, os.environ.get("PATH", os.defpath)])}


def slurm_conf_env(transport: Transport) -> dict[str, str]:
    """SLURM_CONF, the one variable of Slurm's that stays. Without its file every command would retry for a minute.

    Raises ConfigError where there is no file, or where others can write it.
    """
    file = transport.env.get("SLURM_CONF", os.environ.get("SLURM_CONF", ""))
    if file and not Path(file).is_file():
        raise ConfigError("no such file", where=f"SLURM_CONF={file}", hint="name the cluster's slurm.conf")
    if file:
        # Its PluginDir is loaded by each command.
        trust.require_trusted(Path(file), "slurm.conf", trusted_user=_SERVICE_ACCOUNT)
    return {"SLURM_CONF": file} if file else {}
