"""Adding a site's defaults to an sbatch command line that somebody else wrote.

sbatch takes a setting from its command line, then SBATCH_* variables, then the script; so a default of ours, which goes
on the command line, is added only where none of the three says anything.
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

# sbatch's options that take no value; every other one takes one, joined by "=" or as the next word.
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
# Names that are whole, though longer ones begin with them; any other unique beginning of a name is as good as the name.
_UNABBREVIATED = {"export", "gpus", "gres", "mem", "ntasks", "time", "wait"}
_SHORT_BARE = set("HIksOQvVWhu")
_SHORT = {"p": "partition", "A": "account", "q": "qos", "t": "time", "J": "job-name"}
# Options and the variables by which sbatch takes them too.
SBATCH_VARIABLES = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "time": "SBATCH_TIMELIMIT",
    "mem": "SBATCH_MEM_PER_NODE",
    "exclusive": "SBATCH_EXCLUSIVE",
}
# Any one of a group settles the others.
_EXCLUSIVE_GROUPS = [{"mem", "mem-per-cpu", "mem-per-gpu"}, {"exclusive", "oversubscribe", "share"}]


class SbatchCall(NamedTuple):
    """An sbatch call: argv, variables to add, script text for its stdin (None: its own), and how it reads.

    remote_client: the Slurm behind ssh, where argv is an ssh command line.
    """

    argv: list[str]
    env: dict[str, str]
    stdin: str | None
    command_text: str
    remote_client: Client | None = None


def parse_own_options(args: Sequence[str]) -> tuple[str, bool, list[str]]:
    """(site, dry run, the rest): our two options, which stand before sbatch's own."""
    rest, site, dry_run = list(args), os.environ.get("PIT_SITE", "local"), False
    while rest and (rest[0] == "--dry-run" or rest[0].split("=")[0] == "--site"):
        word = rest.pop(0)
        if word == "--dry-run":
            dry_run = True
        elif "=" in word:
            site = word.split("=", 1)[1]
        elif rest:
            site = rest.pop(0)
        else:
            raise UsageError("--site needs a name", hint="psbatch --site NAME script.sh")
    return site, dry_run, rest


def parse_options(args: Sequence[str]) -> tuple[set[str], int]:
    """(long names of the options given, index of the script): how sbatch itself reads its command line.

    Long names as they are written, so maybe shortened; a short option that has no name here stays `-x`.
    """
    given: set[str] = set()
    at = 0
    while at < len(args):
        word = args[at]
        if word == "--":
            return given, at + 1
        if word.startswith("--"):
            name, joined, _ = word[2:].partition("=")
            given.add(name)
            at += 1 if joined or any(option.startswith(name) for option in _FLAG_OPTIONS) else 2
        elif word.startswith("-") and len(word) > 1:
            letters = word[1:]
            while letters and letters[0] in _SHORT_BARE:
                letters = letters[1:]
            given.add(_SHORT.get(letters[:1], f"-{letters[:1]}"))
            at += 2 if len(letters) == 1 else 1
        else:
            return given, at
    return given, at


def directives(script: str) -> set[str]:
    """Long names of the options that a script's own #SBATCH lines give; they end at the first command."""
    given: set[str] = set()
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            with suppress(ValueError):  # an open quote: sbatch will say so better than we can
                given |= parse_options(shlex.split(line[len("#SBATCH") :], comments=True))[0]
        elif line.strip() and not line.startswith("#"):
            break
    return given


def is_given(given: set[str], name: str) -> bool:
    """Whether one of the names given is this option's, whole or shortened as sbatch allows."""
    return any(name == said or (name.startswith(said) and said not in _UNABBREVIATED) for said in given)


def missing_defaults(site: Site, given: set[str]) -> list[str]:
    """The flags of the site's defaults that nobody gave. Raises ConfigError for a default the site does not have."""
    known = {name for name, variable in SBATCH_VARIABLES.items() if variable in os.environ}
    known |= given
    for group in _EXCLUSIVE_GROUPS:
        known |= group if any(is_given(known, name) for name in group) else set()
    where, default = f"site {site.name}", site.defaults
    if default.partition and not is_given(known, "partition"):
        dialect.require_partition(site, default.partition, where)
    bare = dialect.JobSpec(
        name="",
        nodes=0,
        tasks_per_node=0,
        cpus_per_task=0,
        requeue=None,
        time_s=units.parse_duration(default.time),
        partition=default.partition,
        account="" if is_given(known, "account") else dialect.require_account(site, default.account, where),
        qos="" if is_given(known, "qos") else dialect.qos_for_tier(site, default.tier, where),
    )
    return [flag for flag in dialect.sbatch_flags(site, bare) if not is_given(known, flag[2:].split("=")[0])]


def prepare_call(site: Site, args: Sequence[str], stdin: IO[str] | None) -> SbatchCall:
    """The sbatch call for these arguments. Raises UsageError for a site without Slurm or a script that is not there."""
    if site.scheduler != "slurm":
        raise UsageError(f'site "{site.name}" has no Slurm', hint="psbatch --site NAME …; see: pit site list")
    given, at = parse_options(args)
    script: str | None = None
    if at < len(args):
        try:
            script = Path(args[at]).read_text(errors="surrogateescape")
        except OSError as error:
            raise UsageError(f'cannot read script "{args[at]}": {error.strerror}', where="psbatch") from error
    elif not is_given(given, "wrap"):
        if stdin is None:
            raise UsageError("no script", hint="psbatch script.sh, --wrap=COMMAND, or a script on stdin")
        script = stdin.read()
    given |= directives(script or "")
    added = missing_defaults(site, given)
    sbatch = f"{site.slurm.bin}/sbatch" if site.slurm.bin else "sbatch"
    if site.connection.kind == "ssh":
        if at + 1 < len(args):
            raise UsageError("a script's own arguments cannot travel over ssh", hint="put them into the script")
        if at < len(args) and not is_given(given, "job-name") and "SBATCH_JOB_NAME" not in os.environ:
            added.append(f"--job-name={Path(args[at]).name}")
        return _remote_call(site, [sbatch, *added, *args[:at]], script or "")
    transport.path_env(client(site).transport)  # refuses a folder of commands that others can write to
    argv, env = [sbatch, *added, *args], {"SLURM_CONF": site.slurm.conf} if site.slurm.conf else {}
    return SbatchCall(argv, env, script if at >= len(args) else None, _command_text(env, argv))


def _remote_call(site: Site, argv: list[str], script: str) -> SbatchCall:
    """The same through ssh: the script travels on stdin, and the SBATCH_* variables from here in its command line."""
    slurm = client(site)
    env = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    shown = shlex.join(["ssh", site.connection.host, _command_text({**slurm.transport.env, **env}, argv)])
    return SbatchCall(transport.ssh_argv(slurm.transport, argv, env), {}, script, shown, slurm)


def _command_text(env: Mapping[str, str], argv: Sequence[str]) -> str:
    # shlex.join would quote the whole of an assignment, and a shell would not take it for one.
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(argv)])


def execute_call(call: SbatchCall) -> int:
    """Become sbatch; or, over ssh, run it and return its exit code. Raises ToolMissing, Unreachable, ConfigError."""
    if call.stdin is not None:
        # The script came by stdin and has been read: hand it on the same way.
        memory = os.memfd_create("script")
        os.write(memory, call.stdin.encode(errors="surrogateescape"))
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, 0)
    if call.remote_client:
        code = subprocesses.run_foreground(call.argv, env=os.environ)
        if code == SSH_FAILED:
            host, hint = call.remote_client.transport.host, "look with squeue whether the job was queued all the same"
            raise Unreachable(f'ssh to "{host}" failed', where=f"sbatch on {host}", hint=hint)
        if code == NOT_FOUND:  # a job's own 127, which --wait returns, looks the same
            call.remote_client.version()
        return code
    transport.slurm_conf_env(transport.Transport(env=call.env))  # whose plugins sbatch would load
    try:
        os.execvpe(call.argv[0], call.argv, {**os.environ, **call.env})
    except FileNotFoundError as error:
        raise ToolMissing(
            f'"{call.argv[0]}" is not on the PATH', hint="run psbatch where Slurm is installed"
        ) from error
