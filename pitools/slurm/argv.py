"""Build the command lines of Slurm requests. Pure; a caller's value cannot become an option."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from pitools.core.errors import ClusterError, UsageError
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT, ASSOCIATION_FORMAT, QOS_FORMAT
from pitools.slurm.parse_jobs import JOB_FORMAT

_JOB_ID = re.compile(r"\d+(?:_\d+|_\[[\d,:%-]+\]|\+\d+)?")
_HOSTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*")
_RESERVATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NAME = re.compile(r"[^\s,\x00-\x1f\x7f-][^,\x00-\x1f\x7f]*")
_MAX_ARGV_BYTES = 130_000  # Linux's limit is 128 KiB per argument

_ANY_STATE = "--state=BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RQ,S,TO"

MY_JOBS_FORMAT = ("%i", "%r", "%S", "%A", "%T")
VERSION = ["sinfo", "-V"]
USER = ["id", "-un"]
HOME = ["sh", "-c", 'printf "%s\\n" "$HOME"']
CONFIG = ["scontrol", "show", "config"]
PARTITIONS = ["scontrol", "-o", "show", "partition"]
RESERVATIONS = ["scontrol", "-o", "show", "reservation"]
PING = ["scontrol", "ping"]
TOPOLOGY = ["scontrol", "show", "topology"]
QOS = ["sacctmgr", "-n", "-P", "show", "qos", f"format={','.join(QOS_FORMAT)}"]


def show_nodes(names: str = "") -> list[str]:
    """Show all nodes, or those of a host list. `-d` adds the allocated GPUs."""
    return ["scontrol", "-d", "-o", "show", "node", *([_require_match(names, _HOSTS, "host list")] if names else [])]


def squeue(
    ids: Sequence[str] = (),
    user: str = "",
    name: str = "",
    *,
    all_states: bool = False,
    each_task: bool = False,
    sep: str = "|",
) -> list[str]:
    """List unfinished jobs, filtered by ids, user and name.

    all_states: include jobs that ended minutes ago. each_task: a line for every task of a pending array.
    """
    narrow = ["--jobs=" + ",".join(_ids(ids))] if ids else []
    narrow += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    narrow += [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    narrow += ["--states=all"] if all_states else []
    narrow += ["--array"] if each_task else []
    return ["squeue", "-h", "--noconvert", *narrow, "-o", sep.join(JOB_FORMAT.values())]


def my_jobs(sep: str = "|") -> list[str]:
    """List the calling user's jobs, with those that ended minutes ago; a line for every task of a pending array."""
    return ["squeue", "-h", "--all", "--me", "--states=all", "--array", "-o", sep.join(MY_JOBS_FORMAT)]


def show_job(job_id: str) -> list[str]:
    """Show a job in detail, or every task or component of an array or het job."""
    return ["scontrol", "-o", "show", "job", *_ids([job_id])]


def sacct(
    ids: Sequence[str] = (),
    user: str = "",
    name: str = "",
    since: datetime | None = None,
    *,
    all_starts: bool = True,
    sep: str = "|",
) -> list[str]:
    """List accounting rows of these jobs, or of all jobs since a time.

    since: a time with its zone. all_starts: list every start of a requeued job, else the last. Raises UsageError
    without ids and time.
    """
    if not ids and since is None:
        raise UsageError("accounting needs job ids or a start time")
    narrow = ["--jobs=" + ",".join(_ids(ids))] if ids else []
    narrow += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    narrow += [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    if since:
        # By default sacct omits jobs that were never eligible to start: held, dependent or delayed.
        narrow += [f"--starttime={since.astimezone(UTC):%Y-%m-%dT%H:%M:%S}", "--endtime=now+52weeks", _ANY_STATE]
    narrow += ["-D"] if all_starts else []
    form = ["-P", f"--delimiter={sep}", "-o", ",".join(ACCOUNTING_FORMAT)]
    return ["sacct", "-X", "--noconvert", *narrow, *form]


def admin_comments(ids: Sequence[str]) -> list[str]:
    """List the AdminComment of the last start of these jobs."""
    return ["sacct", "-X", "-P", "-n", "--jobs=" + ",".join(_ids(ids)), "-o", "JobIDRaw,AdminComment"]


def associations(user: str = "") -> list[str]:
    """List the associations of one user, or all."""
    only = [f"user={_require_match(user, _NAME, 'user')}"] if user else []
    return ["sacctmgr", "-n", "-P", "show", "assoc", *only, f"format={','.join(ASSOCIATION_FORMAT)}"]


def assoc_mgr(accounts: Sequence[str], qos: Sequence[str]) -> list[str]:
    """Show what slurmctld counts against the limits of these accounts, their users, and these QOS."""
    names = {"accounts": accounts, "qos": qos}
    only = [f"{key}={','.join(_require_match(name, _NAME, key) for name in given)}" for key, given in names.items()]
    return ["scontrol", "show", "assoc_mgr", *only, "flags=assoc,qos"]


def default_accounts(user: str) -> list[str]:
    """Show a user's default accounts, one line per cluster and association."""
    valid_user = _require_match(user, _NAME, "user")
    return ["sacctmgr", "-n", "-P", "show", "user", valid_user, "withassoc", "format=cluster,defaultaccount"]


def submit(args: Sequence[str] = (), path: str = "") -> list[str]:
    """Queue a script: the file at `path`, or stdin."""
    return ["sbatch", "--parsable", *args, *(["--", path] if path else [])]


def test_only(args: Sequence[str]) -> list[str]:
    """Estimate the start of the script on stdin, without queueing it."""
    return ["sbatch", "--test-only", *args]


def cancel(ids: Sequence[str], name: str = "", user: str = "") -> list[str]:
    """Cancel jobs, only those with this name and user if given. scancel ignores unknown ids."""
    only = [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    only += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    return ["scancel", *only, *_ids(ids)]


def requeue(ids: Sequence[str]) -> list[str]:
    """Requeue batch jobs under their ids."""
    return ["scontrol", "requeue", ",".join(_ids(ids))]


def update_job(
    job_id: str,
    *,
    exclude: str | None = None,
    nodelist: str | None = None,
    reservation: str | None = None,
    start_now: bool = False,
) -> list[str]:
    """Change a pending job. exclude, nodelist, reservation: "" removes the value, None keeps it."""
    changes = [("excnodelist", exclude, _HOSTS), ("reqnodelist", nodelist, _HOSTS)]
    changes += [("reservationname", reservation, _RESERVATION)]
    present = [(key, value, form) for key, value, form in changes if value is not None]
    settings = [f"{key}={_require_match(value, form, key) if value else ''}" for key, value, form in present]
    settings += ["starttime=now"] if start_now else []
    if longest := max((text for text in settings if len(text) > _MAX_ARGV_BYTES), key=len, default=""):
        problem = f"{longest[:40]}… is longer than a command line ({_MAX_ARGV_BYTES} bytes)"
        raise ClusterError(problem, where="scontrol", hint="name the nodes instead (nodelist, reservation)")
    return ["scontrol", "update", f"jobid={_ids([job_id])[0]}", *settings]


def drain_node(node: str, reason: str) -> list[str]:
    """Drain a node: its jobs continue, and no others start. reason: printable text, which Slurm requires."""
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"not a reason of a drain: {reason!r}", hint="printable text, and not empty")
    return ["scontrol", "update", f"nodename={_require_match(node, _HOSTS, 'node')}", "state=drain", f"reason={reason}"]


def resume_node(node: str) -> list[str]:
    """Let a drained or down node run jobs again."""
    return ["scontrol", "update", f"nodename={_require_match(node, _HOSTS, 'node')}", "state=resume"]


def create_reservation(name: str, nodes: str, user: str, minutes: int) -> list[str]:
    """Reserve nodes for a user's jobs from now on.

    FLEX: started jobs survive the end of the reservation. NO_HOLD_JOBS_AFTER: pending jobs then stay queued without
    it. PURGE_COMP: the reservation ends a minute after its last job, even if no process deletes it.
    """
    return [
        "scontrol",
        "create",
        "reservation",
        f"reservationname={_require_match(name, _RESERVATION, 'reservation')}",
        "starttime=now",
        f"duration={minutes}",
        f"nodes={_require_match(nodes, _HOSTS, 'host list')}",
        f"users={_require_match(user, _NAME, 'user')}",
        "flags=FLEX,NO_HOLD_JOBS_AFTER,PURGE_COMP=00:01:00",
    ]


def delete_reservation(name: str) -> list[str]:
    """Delete a reservation that no job uses."""
    return ["scontrol", "delete", f"reservationname={_require_match(name, _RESERVATION, 'reservation')}"]


def end_reservation(name: str) -> list[str]:
    """Let a reservation end in two seconds; with FLEX its jobs continue."""
    checked = _require_match(name, _RESERVATION, "reservation")
    return ["scontrol", "update", f"reservationname={checked}", "endtime=now+2"]


def is_job_id(text: str) -> bool:
    """Return whether a text is the id of a job, task or component."""
    return bool(_JOB_ID.fullmatch(text))


def _ids(ids: Sequence[str]) -> list[str]:
    if not ids:
        raise UsageError("no job id given")
    return [_require_match(job_id, _JOB_ID, "job id") for job_id in ids]


def _require_match(text: str, form: re.Pattern[str], kind: str) -> str:
    if not form.fullmatch(text):
        raise UsageError(f'"{text}" is not a {kind}')
    return text
