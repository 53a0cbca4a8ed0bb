"""Add a site's defaults to a user's sbatch call.

sbatch reads a setting from its command line, then SBATCH_* variables, then the script. The site's defaults go on the
command line, so a default is added only if none of the three has the setting.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from pitools.core import subprocesses, units
from pitools.core.errors import ToolMissing, Unreachable, UsageError
from pitools.site import dialect
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import transport
from pitools.slurm.client import Client
from pitools.slurm.errors import NOT_FOUND, SSH_FAILED

# sbatch's options without a value; all others have one, after "=" or as the next argument.
_FLAG_OPTIONS = {
    "contiguous",
    "disable-stdout-job-summary",
    "exclusive",
    "get-user-env",
    "help",
    "hold",
    "ignore-pbs",
    "no-bell",
    "no-kill",
    "no-requeue",
    "nice",
    "overcommit",
    "oversubscribe",
    "parsable",
    "propagate",
    "quiet",
    "reboot",
    "requeue",
    "share",
    "spread-job",
    "stepmgr",
    "test-only",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "wait",
}
# Options that are prefixes of longer ones, but not abbreviations; other unique prefixes are abbreviations.
_UNABBREVIATED = {"export", "gpus", "gres", "mem", "ntasks", "time", "wait"}
_SHORT_BARE = set("HIksOQvVWhu")
_SHORT = {"p": "partition", "A": "account", "q": "qos", "t": "time", "J": "job-name"}
# sbatch's variables that are not named like their option.
_VARIABLE_OPTIONS = {"SBATCH_TIMELIMIT": "time", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_ARRAY_INX": "array"}
# One option of a group excludes defaults for the others.
_EXCLUSIVE_GROUPS = [{"mem", "mem-per-cpu", "mem-per-gpu"}, {"exclusive", "oversubscribe", "share"}]


class SbatchCall(NamedTuple):
    """An sbatch call. env: variables to add. stdin: the script's text; None keeps this process's stdin.

    command_text: the call for `--dry-run`. remote_client: for an ssh command line, the client of the site.
    """

    argv: list[str]
    env: dict[str, str]
    stdin: str | None
    command_text: str
    remote_client: Client | None = None


def parse_own_options(args: Sequence[str]) -> tuple[str, bool, list[str]]:
    """Return site, dry run and the remaining arguments. psbatch's two options precede sbatch's."""
    rest, site, dry_run = list(args), os.environ.get("PIT_SITE", "local"), False
    while rest and (rest[0] == "--dry-run" or rest[0].split("=")[0] == "--site"):
        option = rest.pop(0)
        if option == "--dry-run":
            dry_run = True
        elif "=" in option:
            site = option.split("=", 1)[1]
        elif rest:
            site = rest.pop(0)
        else:
            raise UsageError("--site needs a name", hint="psbatch --site NAME script.sh")
    return site, dry_run, rest


def parse_options(args: Sequence[str]) -> tuple[set[str], int]:
    """Parse a command line as sbatch does. Returns the names of its options and the index of the script.

    Long names may be abbreviated, as written; short options without an entry in _SHORT stay `-x`.
    """
    given: set[str] = set()
    position = 0
    while position < len(args):
        argument = args[position]
        if argument == "--":
            return given, position + 1
        if argument.startswith("--"):
            name, joined, _ = argument[2:].partition("=")
            given.add(name)
            position += 1 if joined or any(option.startswith(name) for option in _FLAG_OPTIONS) else 2
        elif argument.startswith("-") and len(argument) > 1:
            letters = argument[1:]
            while letters and letters[0] in _SHORT_BARE:
                letters = letters[1:]
            given.add(_SHORT.get(letters[:1], f"-{letters[:1]}"))
            position += 2 if len(letters) == 1 else 1
        else:
            return given, position
    return given, position


def directives(script: str) -> set[str]:
    """Return the names of the options in a script's #SBATCH lines, up to its first command."""
    given: set[str] = set()
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            with suppress(ValueError):  # an unclosed quote: sbatch reports it
                given |= parse_options(shlex.split(line[len("#SBATCH") :], comments=True))[0]
        elif line.strip() and not line.startswith("#"):
            break
    return given


def is_given(given: set[str], name: str) -> bool:
    """Return whether an option is among the given names, in full or abbreviated as sbatch permits."""
    return any(name == text or (name.startswith(text) and text not in _UNABBREVIATED) for text in given)


def variable_options() -> dict[str, str]:
    """Return option → value of the SBATCH_* variables."""
    return {
        _VARIABLE_OPTIONS.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-")): value
        for name, value in os.environ.items()
        if name.startswith("SBATCH_")
    }


def missing_defaults(site: Site, given: set[str]) -> list[str]:
    """Return the site's default flags that are not given. Raises ConfigError for an invalid default."""
    present = given | variable_options().keys()
    for group in _EXCLUSIVE_GROUPS:
        present |= group if any(is_given(present, name) for name in group) else set()
    where, default = f"site {site.name}", site.defaults
    if default.partition and not is_given(present, "partition"):
        dialect.require_partition(site, default.partition, where)
    bare = dialect.JobSpec(
        name="",
        nodes=0,
        tasks_per_node=0,
        cpus_per_task=0,
        requeue=None,
        time_s=units.parse_duration(default.time),
        partition=default.partition,
        account="" if is_given(present, "account") else dialect.require_account(site, default.account, where),
        qos="" if is_given(present, "qos") else dialect.qos_for_tier(site, default.tier, where),
    )
    return [flag for flag in dialect.sbatch_flags(site, bare) if not is_given(present, flag[2:].split("=")[0])]


def prepare_call(site: Site, args: Sequence[str], stdin: IO[str] | None) -> SbatchCall:
    """Return the sbatch call for these arguments. Raises UsageError for a site without Slurm or a missing script."""
    if site.scheduler != "slurm":
        raise UsageError(f'site "{site.name}" has no Slurm', hint="psbatch --site NAME …; see: pit site list")
    given, script_index = parse_options(args)
    script: str | None = None
    if script_index < len(args):
        try:
            script = Path(args[script_index]).read_text(errors="surrogateescape")
        except OSError as error:
            raise UsageError(f'cannot read script "{args[script_index]}": {error.strerror}', where="psbatch") from error
    elif not is_given(given, "wrap"):
        script = stdin.read() if stdin else ""
        if not script:
            raise UsageError("no script", hint="psbatch script.sh, --wrap=COMMAND, or a script on stdin")
    given |= directives(script or "")
    added = missing_defaults(site, given)
    sbatch = f"{site.slurm.bin}/sbatch" if site.slurm.bin else "sbatch"
    if site.connection.kind == "ssh":
        if script_index + 1 < len(args):
            raise UsageError("arguments of the script are not supported over ssh", hint="put them into the script")
        if script_index < len(args) and not is_given(given, "job-name") and "SBATCH_JOB_NAME" not in os.environ:
            added.append(f"--job-name={Path(args[script_index]).name}")
        return _remote_call(site, [sbatch, *added, *args[:script_index]], script or "")
    transport.path_env(client(site).transport)  # refuses a folder of commands that others can write to
    argv, env = [sbatch, *added, *args], {"SLURM_CONF": site.slurm.conf} if site.slurm.conf else {}
    return SbatchCall(argv, env, script if script_index >= len(args) else None, _command_text(env, argv))


def _remote_call(site: Site, argv: list[str], script: str) -> SbatchCall:
    """Return the call over ssh: the script is sent on stdin, the SBATCH_* variables on the command line."""
    slurm = client(site)
    env = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    shown = shlex.join(["ssh", site.connection.host, _command_text({**slurm.transport.env, **env}, argv)])
    return SbatchCall(transport.ssh_argv(slurm.transport, argv, env), {}, script, shown, slurm)


def _command_text(env: Mapping[str, str], argv: Sequence[str]) -> str:
    # shlex.join would quote a whole assignment, so that a shell does not accept it.
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(argv)])


def execute_call(call: SbatchCall) -> int:
    """Replace this process by sbatch; over ssh, run it and return its exit code.

    Raises ToolMissing, Unreachable and ConfigError."""
    if call.stdin is not None:
        # The script was read from stdin: pass it on in a file as stdin.
        memory = os.memfd_create("script")
        os.write(memory, call.stdin.encode(errors="surrogateescape"))
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, 0)
    if call.remote_client:
        code = subprocesses.run_foreground(call.argv, env=os.environ)
        if code == SSH_FAILED:
            host, hint = call.remote_client.transport.host, "check with squeue whether the job was queued"
            raise Unreachable(f'ssh to "{host}" failed', where=f"sbatch on {host}", hint=hint)
        if code == NOT_FOUND:  # a job's own 127, which --wait returns, looks the same
            call.remote_client.version()
        return code
    transport.slurm_conf_env(transport.Transport(env=call.env))  # sbatch loads its plugins
    try:
        os.execvpe(call.argv[0], call.argv, {**os.environ, **call.env})
    except FileNotFoundError as error:
        raise ToolMissing(
            f'"{call.argv[0]}" is not on the PATH', hint="run psbatch where Slurm is installed"
        ) from error
