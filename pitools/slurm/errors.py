"""Map a failed Slurm command, by its exit code and stderr, to an error class."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal, NamedTuple

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, PitError, ToolMissing, TryLater, Unreachable

# ssh keeps 255 for its own failures; the remote wrapper in transport.py keeps Slurm's commands from using it.
SSH_FAILED = 255
NOT_FOUND = 127
BIN_HINT = "set its folder, [slurm] bin, in the site file; pit site probe finds it"
_SIGNAL_BASE = 128  # a shell adds the signal that ended its command

# The request was not sent, it may have arrived, or the failure is its answer.
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
    """A failed Slurm command, or a failed ssh to it. Raised as one of the three classes below.

    reason: the cause, by its stderr. delivery: whether the request reached Slurm.
    """

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        hint: str = "",
        reason: SlurmReason = SlurmReason.OTHER,
        delivery: Delivery = "answered",
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.reason = reason
        self.delivery = delivery


class SlurmRefused(SlurmError, ClusterError):
    """Slurm refused the request, or the command rejected its arguments."""


class SlurmBusy(SlurmError, TryLater):
    """Slurm refused the request for now."""


class SlurmUnreachable(SlurmError, Unreachable):
    """Slurm did not answer."""


class OutcomeUnknown(Unreachable):
    """A changing request was sent and not answered: it may have been carried out."""


class _Rule(NamedTuple):
    """Reason and delivery if the pattern is in stderr."""

    reason: SlurmReason
    delivery: Delivery
    pattern: str


_UNKNOWN = _Rule(SlurmReason.OTHER, "answered", "")

# The first match counts. "maybe-sent" is first: stderr may report a first try that was not sent and a second that was.
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
        # The library's texts for an unreadable answer without a known cause.
        r"|: (?:No error|Success|Unspecified error|Operation now in progress|Interrupted system call)\s*$",
    ),
    _Rule(
        SlurmReason.BUSY,
        "answered",
        "temporarily unable|temporarily unavailable|[Rr]ate limit|try again|[Jj]ob queue full|Slurm is busy"
        "|temporarily disabled|not available right now",
    ),
    # slurmctld denies this to the user; a retry does not help.
    _Rule(
        SlurmReason.PERMISSION_DENIED,
        "answered",
        "(?i:Access/permission denied|Invalid user id|Operation not permitted)",
    ),
    _Rule(SlurmReason.INVALID_NODE_NAME, "answered", r"Invalid node name|^Node \S+ not found"),
    _Rule(SlurmReason.ACCOUNTING_DISABLED, "answered", "accounting storage is disabled"),
    _Rule(SlurmReason.RESERVATION_IN_USE, "answered", "reservation is in use"),
    _Rule(SlurmReason.RESERVATION_NOT_FOUND, "answered", "reservation is invalid"),
    _Rule(SlurmReason.NO_TOPOLOGY, "answered", "No topology information|topology configuration is not available"),
)
# Messages of a failed ssh. Output of the login may contain `refused` with another meaning.
_SSH = (
    _Rule(SlurmReason.NO_ANSWER, "maybe-sent", "from master failed|Broken pipe"),
    # The login rejects this user or host: retries do not help without a person's action.
    _Rule(
        SlurmReason.LOGIN_FAILED,
        "not-sent",
        r"ssh: connect to host|ssh: Could not resolve|Permission denied \(|Host key verification failed"
        r"|Unable to negotiate|during banner exchange",
    ),
    # A login with too many concurrent connections does this.
    _Rule(SlurmReason.LOGIN_DROPPED, "not-sent", "kex_exchange_identification"),
    _Rule(SlurmReason.NO_ANSWER, "maybe-sent", ""),
)
# Nothing was carried out; the same request may succeed later.
_PASSING = frozenset({SlurmReason.BUSY, SlurmReason.CONTROLLER_DOWN, SlurmReason.LOGIN_DROPPED})
_JOB_NOT_FOUND = re.compile(
    r"Invalid job id specified|already completing or completed|Job has already finished", re.IGNORECASE
)
_PREFIX = re.compile(
    r"^(?:slurm_\w+(?: error)?: |\w+: (?:error|fatal): |allocation failure: |Batch job submission failed: )+"
)

# Messages of commands and a controller of different versions.
_OTHER_VERSION = re.compile(r"Insane message length|Header lengths are longer|[Pp]rotocol version|Incompatible version")

# The first match counts. "policy" is first: that message also names limits of jobs, sizes and times.
_HINTS = [
    (r"(?:unrecognized|invalid|ambiguous) option|requires an argument", "list the options: sbatch --help"),
    (r"policy", "your account or QOS is at its limit: cancel a job, request less, or use another QOS"),
    (r"[Ii]nvalid account", "list your accounts: sacctmgr show assoc user=$USER format=account,partition,qos"),
    (r"[Qq]os specification", "list the QOS of your associations: sacctmgr show assoc user=$USER format=account,qos"),
    (
        r"[Mm]emory specification|--mem ",
        "request less memory: `sinfo -o '%P %m'` lists the memory of nodes, in MB",
    ),
    (r"feature specification", "list the features: sinfo -o '%P %f'"),
    (r"CPU count", "request fewer tasks or CPUs per node: `sinfo -o '%P %c'` lists the CPUs of nodes"),
    (r"node configuration is not available", "no node fits: request fewer GPUs, CPUs or nodes, or another partition"),
    (r"partition", "list the partitions you may use: sinfo -s"),
    (r"time limit", "request less time: `sinfo -o '%P %l'` lists the limit of each partition"),
    (r"generic resource|gres", "list the GPUs: sinfo -o '%P %G'"),
    (r"Access/permission denied|Invalid user id", "only the job's owner or an operator may do this"),
    (
        r"configuration source|configuration file|slurm\.conf|cannot stat",
        "give --site NAME (to site probe: --conf FILE), or set SLURM_CONF",
    ),
    (r"accounting.storage", "this cluster has no accounting: omit accounts, QOS and sacct"),
    (r"batch script", "the script must begin with a line such as #!/bin/bash"),
    (r"Unable to open file", "the path must exist on the cluster"),
    (r"option|argument", "list the options: sbatch --help"),
]


def has_failed(done: subprocesses.Completed) -> bool:
    """Return whether a command failed. Some scontrol commands exit with 0 though the controller did not answer."""
    return done.code != 0 or (not done.stdout and _first(_SLURM, done.stderr).delivery != "answered")


def error_for(command: str, host: str, code: int, stderr: str) -> PitError:
    """Return the error for a failed command. host: "" for this machine."""
    where = f"{command} on {host}" if host else command
    if host and code == SSH_FAILED:
        hint = f"try: ssh -o BatchMode=yes {host} true"
        # ssh prints the cause last, after banners and the long warning about a changed key.
        last = "\n".join(stderr.rstrip().split("\n")[-2:])
        message = f'ssh to "{host}" failed: {error_text(last) or "no message"}'
        reason, delivery, _ = _first(_SSH, last)
        return SlurmUnreachable(message, where=where, hint=hint, reason=reason, delivery=delivery)
    if host and code == NOT_FOUND:
        return ToolMissing(f'"{command}" is not on the PATH of {host}', where=where, hint=BIN_HINT)
    message = error_text(stderr)
    reason, delivery, _ = _first(_SLURM, stderr)
    if delivery != "answered":
        hint = "wait until the controller or the database answers, or try later"
        if _OTHER_VERSION.search(stderr):
            hint = (
                "the commands may be of another Slurm version: pit site check --live; set [slurm] bin in the site file"
            )
        return SlurmUnreachable(message, where=where, hint=hint, reason=reason, delivery=delivery)
    if reason is SlurmReason.BUSY:
        return SlurmBusy(message, where=where, hint="run the same command again later", reason=reason)
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, message)), "")
    return SlurmRefused(message or f"exited with code {code} and no message", where=where, hint=hint, reason=reason)


def _first(rules: tuple[_Rule, ...], stderr: str) -> _Rule:
    return next((rule for rule in rules if re.search(rule.pattern, stderr, re.MULTILINE)), _UNKNOWN)


def reason_of(stderr: str) -> SlurmReason:
    """Return the reason for a failed command's stderr."""
    return _first(_SLURM, stderr).reason


def error_text(stderr: str) -> str:
    """Return the last eight lines of stderr, each once, without names of programs and functions."""
    lines = [_PREFIX.sub("", line.strip()) for line in stderr.split("\n")]
    return "; ".join(dict.fromkeys(line for line in lines[-8:] if line))


def was_not_sent(error: PitError) -> bool:
    """Return whether the request certainly did not reach slurmctld."""
    return isinstance(error, SlurmError) and error.delivery == "not-sent"


def is_denied(error: PitError) -> bool:
    """Return whether Slurm denied this user the request."""
    return isinstance(error, SlurmError) and error.reason is SlurmReason.PERMISSION_DENIED


def is_busy(error: PitError) -> bool:
    """Return whether the request was certainly not carried out, and a retry may succeed."""
    return isinstance(error, SlurmError) and error.reason in _PASSING


def died_without_message(done: subprocesses.Completed) -> bool:
    """Return whether a command failed without a message: killed, or nothing printed (sacctmgr refuses on stdout)."""
    is_signal = done.code < 0 or _SIGNAL_BASE < done.code < SSH_FAILED - 1
    return is_signal or (done.code != 0 and not (done.stderr + done.stdout).strip())


def job_not_found(stderr: str) -> bool:
    """Return whether every line of stderr means only that a job is unknown or has ended."""
    lines = [line for line in stderr.split("\n") if line.strip()]
    return bool(lines) and all(_JOB_NOT_FOUND.search(line) for line in lines)
