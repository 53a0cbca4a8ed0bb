"""What a Slurm command's failure means: its exit code and its words on stderr → one of our errors."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal, NamedTuple

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, PitError, ToolMissing, TryLater, Unreachable

# ssh keeps 255 for its own failures; the remote wrapper in transport.py keeps Slurm's commands from using it.
SSH_FAILED = 255
NOT_FOUND = 127
_SIGNAL_BASE = 128  # above it a shell tells of the signal that ended its command

# It never left, it may have arrived, or the failure is the answer to it.
Delivery = Literal["not-sent", "maybe-sent", "answered"]


class SlurmReason(StrEnum):
    """Why a command failed, as far as callers treat the cases differently."""

    ACCOUNTING_DISABLED = "accounting-disabled"
    BUSY = "busy"
    CONTROLLER_DOWN = "controller-down"
    CREDENTIAL_FAILED = "credential-failed"
    INVALID_NODE_NAME = "invalid-node-name"
    LOGIN_DROPPED = "login-dropped"
    LOGIN_FAILED = "login-failed"
    NO_ANSWER = "no-answer"
    NO_TOPOLOGY = "no-topology"
    OTHER = "other"
    PERMISSION_DENIED = "permission-denied"
    RESERVATION_IN_USE = "reservation-in-use"
    RESERVATION_NOT_FOUND = "reservation-not-found"


class SlurmError(PitError):
    """A command of Slurm's, or the ssh that carries it, failed. Raised as one of the three classes below.

    reason: as this module's tables recognise its stderr. delivery: what that says of the request.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        reason: SlurmReason = SlurmReason.OTHER,
        delivery: Delivery = "answered",
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.reason = reason
        self.delivery = delivery


class SlurmRefused(SlurmError, ClusterError):
    """Slurm does not carry the request out, or the command cannot make it."""


class SlurmBusy(SlurmError, TryLater):
    """Slurm does not carry the request out now."""


class SlurmUnreachable(SlurmError, Unreachable):
    """Slurm gave no answer."""


class OutcomeUnknown(Unreachable):
    """A request that changes something was sent and no answer came: it may have been carried out."""


class _Rule(NamedTuple):
    """What stderr means where the pattern is found in it."""

    reason: SlurmReason
    delivery: Delivery
    pattern: str


_UNKNOWN = _Rule(SlurmReason.OTHER, "answered", "")

# The first rule that fits holds. What may have been sent comes first: of several lines one may tell of a first try that
# never came in, and another of a second that did.
_SLURM = (
    _Rule(
        SlurmReason.NO_ANSWER,
        "maybe-sent",
        r"(?:send|receive|shutdown) failure|timed out on send/recv|Connection reset by peer|Zero Bytes|Broken pipe"
        r"|Unexpected message received|Insane message length|Header lengths are longer|Failed to send all data",
    ),
    _Rule(
        SlurmReason.CONTROLLER_DOWN,
        "not-sent",
        "connect failure|Connection refused|standby mode|No route to host|Unable to establish controller",
    ),
    _Rule(SlurmReason.CREDENTIAL_FAILED, "not-sent", "Munge encode failed"),
    _Rule(
        SlurmReason.NO_ANSWER,
        "maybe-sent",
        r"Unable to contact slurm controller|onnection timed out|Socket timed out|[Cc]ommunication connection failure"
        r"|talking to the database|PersistInit|persist\w* conn|Transport endpoint|missing socket error"
        r"|Protocol authentication error|Software caused connection abort"
        # What the library says when nothing more is known of an answer that it could not read.
        r"|: (?:No error|Success|Unspecified error|Operation now in progress|Interrupted system call)\s*$",
    ),
    _Rule(
        SlurmReason.BUSY,
        "answered",
        "temporarily unable|temporarily unavailable|[Rr]ate limit|try again|[Jj]ob queue full|Slurm is busy"
        "|temporarily disabled|not available right now",
    ),
    # What slurmctld does not let this user do, and will not the next time.
    _Rule(
        SlurmReason.PERMISSION_DENIED,
        "answered",
        "(?i:Access/permission denied|Invalid user id|Operation not permitted)",
    ),
    _Rule(SlurmReason.INVALID_NODE_NAME, "answered", "Invalid node name"),
    _Rule(SlurmReason.ACCOUNTING_DISABLED, "answered", "accounting storage is disabled"),
    _Rule(SlurmReason.RESERVATION_IN_USE, "answered", "reservation is in use"),
    _Rule(SlurmReason.RESERVATION_NOT_FOUND, "answered", "reservation is invalid"),
    _Rule(SlurmReason.NO_TOPOLOGY, "answered", "No topology information|topology configuration is not available"),
)
# What ssh says of itself, once it has failed. What a login prints may say `refused` too, and means something else.
_SSH = (
    _Rule(SlurmReason.NO_ANSWER, "maybe-sent", "from master failed|Broken pipe"),
    # A login that lets nobody in: whether that will change is for a person to say.
    _Rule(
        SlurmReason.LOGIN_FAILED,
        "not-sent",
        r"ssh: connect to host|ssh: Could not resolve|Permission denied \(|Host key verification failed"
        r"|Unable to negotiate|during banner exchange",
    ),
    # As a login does that has too many of them at once.
    _Rule(SlurmReason.LOGIN_DROPPED, "not-sent", "kex_exchange_identification"),
    _Rule(SlurmReason.NO_ANSWER, "maybe-sent", ""),
)
# Nothing was carried out, and the same request may be later.
_PASSING = frozenset({SlurmReason.BUSY, SlurmReason.CONTROLLER_DOWN, SlurmReason.LOGIN_DROPPED})
_JOB_NOT_FOUND = re.compile(
    r"Invalid job id specified|already completing or completed|Job has already finished", re.IGNORECASE
)
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


def has_failed(done: subprocesses.Completed) -> bool:
    """Whether a command failed; some of scontrol's exit with 0 though the controller did not answer."""
    return done.code != 0 or (not done.stdout and _first(_SLURM, done.stderr).delivery != "answered")


def error_for(command: str, host: str, code: int, stderr: str) -> PitError:
    """The error that a failed command stands for. host: "" for this machine."""
    where = f"{command} on {host}" if host else command
    if host and code == SSH_FAILED:
        hint = f"try: ssh -o BatchMode=yes {host} true"
        # ssh says why last: before that stand banners, and the screenful about a changed key.
        last = "\n".join(stderr.rstrip().split("\n")[-2:])
        what = f'ssh to "{host}" failed: {error_text(last) or "no reason given"}'
        reason, delivery, _ = _first(_SSH, last)
        return SlurmUnreachable(what, where=where, hint=hint, reason=reason, delivery=delivery)
    if host and code == NOT_FOUND:
        hint = "name its folder in the site file: [slurm] bin; pit site probe finds it"
        return ToolMissing(f'"{command}" is not on the PATH of {host}', where=where, hint=hint)
    said = error_text(stderr)
    reason, delivery, _ = _first(_SLURM, stderr)
    if delivery != "answered":
        hint = "wait for the controller or the database to come back, or try later"
        if _OTHER_VERSION.search(stderr):
            hint = (
                "another Slurm's commands may be asking: pit site check --live; their folder is [slurm] bin of a site"
            )
        return SlurmUnreachable(said, where=where, hint=hint, reason=reason, delivery=delivery)
    if reason is SlurmReason.BUSY:
        return SlurmBusy(said, where=where, hint="run the same command again later", reason=reason)
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, said)), "")
    return SlurmRefused(said or f"exit code {code} and no reason given", where=where, hint=hint, reason=reason)


def _first(rules: tuple[_Rule, ...], stderr: str) -> _Rule:
    return next((rule for rule in rules if re.search(rule.pattern, stderr, re.MULTILINE)), _UNKNOWN)


def reason_of(stderr: str) -> SlurmReason:
    """Why one of Slurm's commands failed."""
    return _first(_SLURM, stderr).reason


def error_text(stderr: str) -> str:
    """What the lines of stderr say, each once, without the names of the programs and functions that said it."""
    said = [_PREFIX.sub("", line.strip()) for line in stderr.split("\n")]
    return "; ".join(dict.fromkeys(line for line in said[-8:] if line))


def was_not_sent(error: PitError) -> bool:
    """Whether it is certain that the request did not reach slurmctld."""
    return isinstance(error, SlurmError) and error.delivery == "not-sent"


def is_denied(error: PitError) -> bool:
    """Whether the cluster refused this user the request, and did not merely fail to take it."""
    return isinstance(error, SlurmError) and error.reason is SlurmReason.PERMISSION_DENIED


def is_busy(error: PitError) -> bool:
    """Whether a request was certainly not carried out, and may well be when it is made again as it is."""
    return isinstance(error, SlurmError) and error.reason in _PASSING


def died_without_message(done: subprocesses.Completed) -> bool:
    """Whether a failed command was ended before it could say what became of its request."""
    is_signal = done.code < 0 or _SIGNAL_BASE < done.code < SSH_FAILED - 1
    return is_signal or (done.code != 0 and not done.stderr.strip())


def job_not_found(stderr: str) -> bool:
    """Whether every line only says that a job is not there, or not there any more."""
    lines = [line for line in stderr.split("\n") if line.strip()]
    return bool(lines) and all(_JOB_NOT_FOUND.search(line) for line in lines)
