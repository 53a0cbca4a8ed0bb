"""Run a cluster's commands on this machine or over ssh, in a controlled environment."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from pitools.core import subprocesses, trust
from pitools.core.errors import ConfigError, ToolMissing, Unreachable
from pitools.slurm import ssh_mux
from pitools.slurm.errors import BIN_HINT

RunFunction = Callable[..., subprocesses.Completed]

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONNECT_S = 10
_SERVICE_ACCOUNT = "slurm"  # owns Slurm's files in some cloud images; it controls what runs on nodes anyway

# All programs that pitools calls on a cluster, also within shell scripts: a site's `bin` is first on their PATH.
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
    "awk",
    "base64",
    "cat",
    "cut",
    "find",
    "ln",
    "mkdir",
    "mv",
    "readlink",
    "rm",
    "sha256sum",
    "tar",
    "timeout",
    "wc",
)

# Variables with these prefixes change the commands' output (SQUEUE_FORMAT, SLURM_TIME_FORMAT), their cluster
# (SLURM_CLUSTERS) or their submissions (SBATCH_*), and a shell inside a job has many of them. The second line is the
# rank of a shell inside a step: a job that inherits it binds its ranks to that step's cores (SLURM_CPU_BIND), or lets
# them connect to that step's ranks (PMI_RANK, PMIX_NAMESPACE).
_SCRUBBED_PREFIXES = (
    "SLURM|SLURMD|SLURMSTEPD|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SCONTROL|SCANCEL|SACCT|SACCTMGR|SPRIO|SDIAG"
    "|PMI|PMI2|PMIX|OMPI|PRTE|ORTE|PALS|HYDI|MV2_COMM_WORLD"
)
# MPI settings of users, which are kept, and those of mpirun, which are removed.
_SETTING, _OF_MPIRUN = "PMIX_MCA_|OMPI_MCA_|PRTE_MCA_", "OMPI_MCA_orte_|OMPI_MCA_ess_|PRTE_MCA_ess_"
_SCRUB = re.compile(rf"(?:{_OF_MPIRUN})\w*|(?!{_SETTING})(?:{_SCRUBBED_PREFIXES})_\w*", re.ASCII)


def _globs(prefixes: str) -> str:
    return "|".join(f"{prefix}*" for prefix in prefixes.split("|"))


# The same on the cluster, in the remote shell. Exit code 255 is reserved for ssh, so a command's 255 becomes 254.
_REMOTE = (
    f"for v in $(env | grep -oE '^({_SCRUBBED_PREFIXES})_[A-Za-z0-9_]*='); do v=${{v%=}}; "
    f'case "$v" in {_globs(_OF_MPIRUN)}) unset "$v";; SLURM_CONF|{_globs(_SETTING)}) ;; *) unset "$v";; esac; done; '
    'env "$@"; rc=$?; [ "$rc" = 255 ] && rc=254; exit "$rc"'
)
# Print those of the given paths, and of all folders and links on the way to them, that are neither this user's nor
# root's, or that others can write to. A sticky folder protects its existing entries, but others can add commands.
# A link is followed only after all folders and links before it were found safe: another user's link could make the path
# longer than `find`'s command line. At most 40 links are followed, as in the kernel. A path below the previous folder
# starts at that folder's resolved path. The script is one line, because csh as login shell accepts no other.
LIST_INSECURE = (
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
IS_INSECURE = "can be written by others, is another user's (expected you or root), or is a loop of links"
_INSECURE_CODE = 78
# A login prints text before the command's output: banners, errors of start-up files, locale warnings. This line ends
# that text on both streams.
LOGIN_OUTPUT_END = "\x1e\n"
_MARKED_REMOTE = f"printf '\\036\\n'; printf '\\036\\n' >&2; {_REMOTE}"

# TZ: Slurm prints local times without a zone. SLURM_BITSTR_LEN=0: array indices are never truncated.
QUERY_ENV = {"TZ": "UTC0", "LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a cluster's commands. Raises ConfigError for an invalid host or variable name.

    host: an ssh destination, or "" for this machine. env: variables of every command, such as SLURM_CONF. bin: folder
    of commands that precedes the PATH. timeout_s: time limit of one command.
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
    """Run a command on the cluster, with `env`, and without variables that change Slurm's behaviour.

    All commands to a host share one connection: see ssh_mux.py. stdin: text, or a file or pipe to read. stdout: a file
    for the output; over ssh it starts with the login's text, up to LOGIN_OUTPUT_END. Raises ToolMissing, Unreachable on
    time-out, and ConfigError if SLURM_CONF or the commands are missing or can be written by others.
    """
    where = f"{argv[0]} on {transport.host}" if transport.host else argv[0]
    output_file = {"stdout": stdout} if stdout else {}
    try:
        if transport.host:
            command = ssh_argv(transport, argv, env, marked=True, options=ssh_mux.mux_options(transport.host))
            with ssh_mux.connect_once(transport.host):
                done = run(command, timeout_s=transport.timeout_s, stdin=stdin, **output_file)
            done = done._replace(stdout=_after_mark(done.stdout), stderr=_after_mark(done.stderr))
            last_line = done.stderr.strip().rpartition("\n")[2]
            if done.code == _INSECURE_CODE and last_line.endswith(IS_INSECURE):
                hint = f"its commands would run as you; there: chmod go-w {last_line.removesuffix(IS_INSECURE).strip()}"
                raise ConfigError(last_line, where=where, hint=hint)
            return done
        variables = {**slurm_conf_env(transport), **path_env(transport), **transport.env, **env}
        scrubbed = [name for name in os.environ if _SCRUB.fullmatch(name)]
        return run(argv, timeout_s=transport.timeout_s, env=variables, unset=scrubbed, stdin=stdin, **output_file)
    except ToolMissing as error:
        if "PATH" in error.message and argv[0] in _COMMANDS:
            raise ToolMissing(error.message, where=where, hint=BIN_HINT) from error
        raise
    except Unreachable as error:
        if transport.host:
            ssh_mux.drop(transport.host)  # the next command must not wait for a hanging connection
        raise Unreachable(error.message, where=where, hint=error.hint) from error


def ssh_argv(
    transport: Transport,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    marked: bool = False,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the ssh command line for a Slurm command; its last argument is the whole quoted remote command.

    marked: print LOGIN_OUTPUT_END before the command's output, on stdout and stderr. options: more options of ssh.
    """
    settings = [f"{name}={value}" for name, value in {**transport.env, **env}.items()]
    script = _MARKED_REMOTE if marked else _REMOTE
    if transport.bin:
        script = f"PATH={shlex.quote(transport.bin)}:$PATH; export PATH; {script}"
    if files := [file for file in (transport.env.get("SLURM_CONF", ""), *command_paths(transport.bin)) if file]:
        # The site's plugins and commands would run as this user, so their files are checked first.
        check = f'w=$(o {shlex.join(files)} 2> /dev/null); [ -z "$w" ] || {{ echo "$w {IS_INSECURE}" >&2; '
        script = f"o() {{ {LIST_INSECURE}; }}; {check}exit {_INSECURE_CODE}; }}; {script}"
    remote = shlex.join(["sh", "-c", script, "sh", *settings, *argv])
    # Less than the total time-out, so that ssh times out first and reports that nothing was sent.
    connect_s = max(1, min(_CONNECT_S, int(transport.timeout_s / 2)))
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}", *options, "--", transport.host, remote]


def _after_mark(text: str) -> str:
    """Return the text after the mark; all of it if there is no mark, as when ssh failed."""
    _, mark, output = text.partition(LOGIN_OUTPUT_END)
    return output if mark else text


def command_paths(folder: str) -> list[str]:
    """Return the folder and the paths of its possible commands; [] for ""."""
    return [folder, *(f"{folder}/{name}" for name in _COMMANDS)] if folder else []


def path_env(transport: Transport) -> dict[str, str]:
    """Return PATH with the transport's `bin` first. Raises ConfigError if others can write to `bin` or its commands."""
    if not transport.bin:
        return {}
    folder, *commands = map(Path, command_paths(transport.bin))
    trust.require_trusted(folder, "folder of Slurm's commands", trusted_user=_SERVICE_ACCOUNT)
    for command in commands:
        if command.exists():
            trust.require_trusted(command, "command", trusted_user=_SERVICE_ACCOUNT)
    return {"PATH": os.pathsep.join([transport.bin, os.environ.get("PATH", os.defpath)])}


def slurm_conf_env(transport: Transport) -> dict[str, str]:
    """Return SLURM_CONF, the only variable of Slurm that is kept.

    Raises ConfigError if others can write its file, or it is missing: every command would retry for a minute.
    """
    file = transport.env.get("SLURM_CONF", os.environ.get("SLURM_CONF", ""))
    if file and not Path(file).is_file():
        raise ConfigError("no such file", where=f"SLURM_CONF={file}", hint="set it to the cluster's slurm.conf")
    if file:
        # Each command loads plugins from its PluginDir.
        trust.require_trusted(Path(file), "slurm.conf", trusted_user=_SERVICE_ACCOUNT)
    return {"SLURM_CONF": file} if file else {}
