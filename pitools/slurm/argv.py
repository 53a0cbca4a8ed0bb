"""Requests as command lines. Pure: nothing runs here, and what a caller names cannot become an option."""

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
_MAX_ARGV_BYTES = 130_000  # Linux takes 128 KiB in one argument

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
    """Every node, or those of a folded host list. `-d` adds the GPUs in use."""
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
    """Jobs that have not ended, narrowed by ids, user and name.

    all_states: also those that ended minutes ago. each_task: a line for every task of a pending array.
    """
    narrow = ["--jobs=" + ",".join(_ids(ids))] if ids else []
    narrow += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    narrow += [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    narrow += ["--states=all"] if all_states else []
    narrow += ["--array"] if each_task else []
    return ["squeue", "-h", "--noconvert", *narrow, "-o", sep.join(JOB_FORMAT.values())]


def my_jobs(sep: str = "|") -> list[str]:
    """Every job of whoever asks, also those that ended minutes ago, a line for every task of a pending array."""
    return ["squeue", "-h", "--all", "--me", "--states=all", "--array", "-o", sep.join(MY_JOBS_FORMAT)]


def show_job(job_id: str) -> list[str]:
    """One job in detail; every task or component of an array or het job."""
    return ["scontrol", "-o", "show", "job", *_ids([job_id])]


def sacct(
    ids: Sequence[str] = (),
    user: str = "",
    name: str = "",
    since: datetime | None = None,
    *,
    attempts: bool = True,
    sep: str = "|",
) -> list[str]:
    """What accounting keeps of these jobs, or of those that were in any state since an aware moment.

    attempts: every attempt of a requeued job; else the last.
    """
    if not ids and since is None:
        raise UsageError("accounting needs job ids, or a time to look back to")
    narrow = ["--jobs=" + ",".join(_ids(ids))] if ids else []
    narrow += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    narrow += [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    if since:
        # Left to itself sacct leaves out what was never eligible to start: held, dependent or begun later.
        narrow += [f"--starttime={since.astimezone(UTC):%Y-%m-%dT%H:%M:%S}", "--endtime=now+52weeks", _ANY_STATE]
    narrow += ["-D"] if attempts else []
    form = ["-P", f"--delimiter={sep}", "-o", ",".join(ACCOUNTING_FORMAT)]
    return ["sacct", "-X", "--noconvert", *narrow, *form]


def associations(user: str = "") -> list[str]:
    """The associations of one user, or all of them."""
    only = [f"user={_require_match(user, _NAME, 'user')}"] if user else []
    return ["sacctmgr", "-n", "-P", "show", "assoc", *only, f"format={','.join(ASSOCIATION_FORMAT)}"]


def default_accounts(user: str) -> list[str]:
    """The account that a user's jobs are charged to when they name none, one line a cluster and association."""
    who = _require_match(user, _NAME, "user")
    return ["sacctmgr", "-n", "-P", "show", "user", who, "withassoc", "format=cluster,defaultaccount"]


def submit(args: Sequence[str] = (), path: str = "") -> list[str]:
    """Queue a script: the file at `path`, or stdin."""
    return ["sbatch", "--parsable", *args, *(["--", path] if path else [])]


def test_only(args: Sequence[str]) -> list[str]:
    """Ask when the script on stdin would start, without queueing it."""
    return ["sbatch", "--test-only", *args]


def cancel(ids: Sequence[str], name: str = "", user: str = "") -> list[str]:
    """End these jobs, or those of them of a name, a user; scancel says nothing of an id that it does not know."""
    only = [f"--name={_require_match(name, _NAME, 'job name')}"] if name else []
    only += [f"--user={_require_match(user, _NAME, 'user')}"] if user else []
    return ["scancel", *only, *_ids(ids)]


def requeue(ids: Sequence[str]) -> list[str]:
    """Put these batch jobs back in the queue under their own ids."""
    return ["scontrol", "requeue", ",".join(_ids(ids))]


def update_job(
    job_id: str,
    *,
    exclude: str | None = None,
    nodelist: str | None = None,
    reservation: str | None = None,
    start_now: bool = False,
) -> list[str]:
    """Change a job that waits: host lists and reservation, of which "" is none and None is left as it is."""
    said = [("excnodelist", exclude, _HOSTS), ("reqnodelist", nodelist, _HOSTS)]
    said += [("reservationname", reservation, _RESERVATION)]
    words = [
        f"{key}={_require_match(value, form, key) if value else ''}" for key, value, form in said if value is not None
    ]
    words += ["starttime=now"] if start_now else []
    if longest := max((word for word in words if len(word) > _MAX_ARGV_BYTES), key=len, default=""):
        hint = "name the nodes instead (nodelist, reservation)"
        raise ClusterError(f"{longest[:40]}… is longer than a command line can be", where="scontrol", hint=hint)
    return ["scontrol", "update", f"jobid={_ids([job_id])[0]}", *words]


def create_reservation(name: str, nodes: str, user: str, minutes: int) -> list[str]:
    """Keep nodes for a user's jobs from now on.

    FLEX: a job that has started stays when the reservation ends. NO_HOLD_JOBS_AFTER: one that has not goes on waiting
    without it. PURGE_COMP: it ends a minute after the last of its jobs; so nothing is left of it, whoever forgets it.
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
    """Remove a reservation that no job uses."""
    return ["scontrol", "delete", f"reservationname={_require_match(name, _RESERVATION, 'reservation')}"]


def end_reservation(name: str) -> list[str]:
    """Let a reservation end in two seconds; what runs in it goes on, where it is FLEX."""
    checked = _require_match(name, _RESERVATION, "reservation")
    return ["scontrol", "update", f"reservationname={checked}", "endtime=now+2"]


def is_job_id(text: str) -> bool:
    """Whether a text is a job's id, a task's, a component's."""
    return bool(_JOB_ID.fullmatch(text))


def _ids(ids: Sequence[str]) -> list[str]:
    if not ids:
        raise UsageError("no job id given")
    return [_require_match(job_id, _JOB_ID, "job id") for job_id in ids]


def _require_match(text: str, form: re.Pattern[str], what: str) -> str:
    if not form.fullmatch(text):
        raise UsageError(f'"{text}" is not a {what}')
    return text
