"""What a Slurm command's failure means: its exit code and its words on stderr → one of our errors."""

from __future__ import annotations

import re

from pitools.core import proc
from pitools.core.errors import ClusterError, PitError, ToolMissing, TryLater, Unreachable

# ssh keeps 255 for its own failures; the remote wrapper in reach.py keeps Slurm's commands from using it.
SSH_FAILED = 255
NOT_FOUND = 127
_SIGNALLED = 128  # above it a shell tells of the signal that ended its command


class Unanswered(Unreachable):
    """A request that changes something was sent and no answer came: it may have been carried out."""


_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Unexpected message received|Connection refused|onnection timed out"
    r"|Connection reset by peer|Socket timed out|[Cc]ommunication connection failure|standby mode"
    r"|talking to the database|PersistInit|persist\w* conn|Zero Bytes|Transport endpoint|No route to host"
    r"|Unable to establish controller|Message (?:send|receive) failure"
    r"|Insane message length|Header lengths are longer|Communication shutdown failure|Failed to send all data"
    r"|missing socket error|Protocol authentication error|Broken pipe|Software caused connection abort"
    # What the library says when nothing more is known of an answer that it could not read.
    r"|: (?:No error|Success|Unspecified error|Operation now in progress|Interrupted system call)\s*$",
    re.MULTILINE,
)
_TRY_LATER = re.compile(
    r"temporarily unable|temporarily unavailable|[Rr]ate limit|try again|[Jj]ob queue full|Slurm is busy"
    r"|temporarily disabled|not available right now"
)
_NEVER_SENT = re.compile(
    r"connect failure|Connection refused|standby mode|No route to host|Could not resolve|Permission denied"
    r"|Host key verification failed|connect to host|kex_exchange_identification|during banner exchange"
    r"|Unable to negotiate|Unable to establish controller"
)
# Of several lines one may tell of a first try that never came in, and another of a second that did.
_SENT = re.compile(
    r"(?:send|receive|shutdown) failure|timed out on send/recv|reset by peer|Zero Bytes|Broken pipe|Unexpected message"
    r"|Insane message|Header lengths|Failed to send all"
)
# A login that lets nobody in: whether that will change is for a person to say.
_NO_ENTRY = re.compile(
    r"Could not resolve|Permission denied|Host key verification failed|Unable to negotiate|connect to host"
    r"|during banner exchange"
)
# What slurmctld does not let this user do, and will not the next time.
_DENIED = re.compile(r"Access/permission denied|Invalid user id|Operation not permitted", re.IGNORECASE)
_GONE = re.compile(r"Invalid job id specified|already completing or completed|Job has already finished", re.IGNORECASE)
_PREFIX = re.compile(
    r"^(?:slurm_\w+(?: error)?: |\w+: (?:error|fatal): |allocation failure: |Batch job submission failed: )+"
)

# What commands and a controller of different versions make of each other's words.
_OTHER_VERSION = re.compile(r"Insane message length|Header lengths are longer|[Pp]rotocol version|Incompatible version")

_HINTS = [
    (r"[Ii]nvalid account", "list your accounts: sacctmgr show assoc user=$USER format=account,partition,qos"),
    (r"[Qq]os specification", "list the QOS of your associations: sacctmgr show assoc user=$USER format=account,qos"),
    (r"[Mm]emory specification|--mem ", "ask for less memory, as 64G: `sinfo -o '%P %m'` lists what nodes have, in MB"),
    (r"feature specification", "see which features there are: sinfo -o '%P %f'"),
    (r"CPU count", "ask for fewer tasks or CPUs on a node: `sinfo -o '%P %c'` lists what nodes have"),
    (r"node configuration is not available", "no node fits: ask for fewer GPUs, CPUs or nodes, or another partition"),
    (r"partition", "list the partitions you may use: sinfo -s"),
    (r"time limit", "ask for less time: `sinfo -o '%P %l'` lists the limit of each partition"),
    (r"policy", "you are at a limit of your account or QOS: end a job, ask for less, or use another QOS"),
    (r"generic resource|gres", "see which GPUs there are: sinfo -o '%P %G'"),
    (r"[Pp]ermission denied|Access/permission", "only the job's owner or an operator may do this"),
    (r"configuration source|configuration file|cannot stat", "give --site NAME or SLURM_CONF; a site's is in its file"),
    (r"accounting.storage", "this cluster keeps no accounting; do without accounts, QOS and sacct"),
    (r"batch script", "the script must begin with a line such as #!/bin/bash"),
    (r"Unable to open file", "the path must exist on the cluster's side"),
    (r"option|argument", "this Slurm's own list of options: sbatch --help"),
]


def is_refused(done: proc.Completed) -> bool:
    """Whether a command failed; some of scontrol's exit with 0 though the controller did not answer."""
    return done.code != 0 or (not done.stdout and bool(_UNREACHABLE.search(done.stderr)))


def refusal(command: str, host: str, code: int, stderr: str) -> PitError:
    """The error that a failed command stands for. host: "" for this machine."""
    said = sentence(stderr)
    where = f"{command} on {host}" if host else command
    if host and code == SSH_FAILED:
        hint = f"try: ssh -o BatchMode=yes {host} true"
        # ssh says why last: before that stand banners, and the screenful about a changed key.
        said = sentence("\n".join(stderr.rstrip().split("\n")[-2:]))
        return Unreachable(f'ssh to "{host}" failed: {said or "no reason given"}', where=where, hint=hint)
    if host and code == NOT_FOUND:
        hint = "name its folder in the site file: [slurm] bin; pit site probe finds it"
        return ToolMissing(f'"{command}" is not on the PATH of {host}', where=where, hint=hint)
    if _UNREACHABLE.search(stderr):
        hint = "wait for the controller or the database to come back, or try later"
        if _OTHER_VERSION.search(stderr):
            hint = (
                "another Slurm's commands may be asking: pit site check --live; their folder is [slurm] bin of a site"
            )
        return Unreachable(said, where=where, hint=hint)
    if _TRY_LATER.search(stderr):
        return TryLater(said, where=where, hint="run the same command again later")
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, said)), "")
    return ClusterError(said or f"exit code {code} and no reason given", where=where, hint=hint)


def sentence(stderr: str) -> str:
    """What the lines of stderr say, each once, without the names of the programs and functions that said it."""
    said = [_PREFIX.sub("", line.strip()) for line in stderr.split("\n")]
    return "; ".join(dict.fromkeys(line for line in said[-8:] if line))


def was_never_sent(error: PitError) -> bool:
    """Whether it is certain that the request did not reach slurmctld."""
    return bool(_NEVER_SENT.search(error.what)) and not _SENT.search(error.what)


def is_denied(error: PitError) -> bool:
    """Whether the cluster refused this user the request, and did not merely fail to take it."""
    return type(error) is ClusterError and bool(_DENIED.search(error.what))


def is_busy(error: PitError) -> bool:
    """Whether a request was certainly not carried out, and may well be when it is made again as it is."""
    if isinstance(error, Unanswered) or not isinstance(error, TryLater):
        return False
    return not isinstance(error, Unreachable) or (was_never_sent(error) and not _NO_ENTRY.search(error.what))


def is_silent(done: proc.Completed) -> bool:
    """Whether a failed command was ended before it could say what became of its request."""
    is_signal = done.code < 0 or _SIGNALLED < done.code < SSH_FAILED - 1
    return is_signal or (done.code != 0 and not done.stderr.strip())


def means_gone(stderr: str) -> bool:
    """Whether every line only says that a job is not there, or not there any more."""
    lines = [line for line in stderr.split("\n") if line.strip()]
    return bool(lines) and all(_GONE.search(line) for line in lines)
