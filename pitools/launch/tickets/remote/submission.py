"""A plan becomes a job of a given name on a site that shares no files: once, however often the connection is lost."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, ConfigError, PitError, TryLater, Unreachable
from pitools.core.record import decode_json
from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.launch.provenance import code_copy, git_state, provenance, workdir_walk
from pitools.launch.submission import grant, node_choice
from pitools.launch.tickets.remote import datasets, paths
from pitools.run import run_folder
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.tar_stream import TarEntry
from pitools.site.template import rank_command
from pitools.slurm.errors import OutcomeUnknown, error_for, was_not_sent

_SBATCH_TIMEOUT_S = 60
_EXIT_ALREADY_SUBMITTED, _EXIT_NO_RUN_DIR, _EXIT_REVOKED, _EXIT_OUTCOME_UNKNOWN = 65, 66, 68, 69
_TIMED_OUT = (124, 137)
_FIND_TRIES, _FIND_PAUSE_S = 4, 0.5
_ACCOUNTING_WINDOW = timedelta(days=30)

# Exactly once, by two names that only one can make: `submitting`, and in the job itself `grant`. What sbatch answers is
# written down there before it is told here, so that a connection that is lost in between loses nothing. Words after
# the fifth are sbatch's own.
_SUBMIT = (
    "trap '' HUP PIPE; cd -- \"$1\" 2>/dev/null || exit 66; "
    # What is queued from here runs as us: a folder that another user made first, or can write to, is no run of ours.
    '[ -O . ] && [ -z "$(find . -maxdepth 0 -perm -002)" ] || '
    '{ echo "run folder: another user can write to it (expected yours alone)" >&2; exit 1; }; '
    "[ -s job.json ] && { cat job.json; exit 65; }; "
    '[ -f script.sbatch ] && [ "$(readlink grant)" != revoked ] || exit 68; '
    'ln -sT "$2" submitting 2>/dev/null || exit 69; '
    "d=$1; t=$3; b=$4; a=$5; shift 5; "
    's=$(timeout -k 5 "$t" sbatch --parsable "$@" -- "$d/script.sbatch" </dev/null); r=$?; [ $r = 0 ] || exit $r; '
    's=${s%%;*}; case $s in ""|*[!0-9]*) exit 124;; esac; '
    'printf \'%s%s%s\\n\' "$b" "$s" "$a" > .job.json && mv -fT .job.json job.json; '
    'printf \'%s%s%s\\n\' "$b" "$s" "$a"'
)


class RemoteJobRef(run_folder.JobRef, frozen=True, kw_only=True, tag="pit.remote-job-ref/1"):
    """A job, and what its data took to travel: bytes that were not there, and seconds."""

    data_bytes: int = 0
    data_s: float = 0.0


def submit_ticket(
    plan: Plan,
    site: Site,
    *,
    name: str,
    extra_entries: Sequence[TarEntry] = (),
    on_uploaded: Callable[[], None] = lambda: None,
) -> RemoteJobRef:
    """Send what the plan needs and queue it under this name; what was sent or queued before is only looked up.

    extra_entries: what else is to be in the run's folder there. on_uploaded: called between sending and queueing; what
    it raises takes the folder back. Where the request wants its nodes chosen, that is done here too, among those that
    are free when the job is queued. Raises ConfigError for a workdir or a site that does not lend itself to it,
    ClusterError when it is refused, NoSpace, Unreachable when the site cannot be asked, Unanswered when it may have the
    job: look again later, by the same call. sbatch never gets a name twice.
    """
    slurm = client(site)
    fabric = node_choice.load_fabric(plan, site, slurm)
    job, is_new = _upload_and_queue(
        plan, site, name, extra_entries, on_uploaded, node_choice.DELAYED_START_ARGS if fabric else ()
    )
    if fabric and is_new:  # one that was there before may have run, and ended, since
        try:
            node_choice.acquire_nodes(plan, fabric, slurm, job.job_id, follow_s=node_choice.TICKET_FOLLOW_S)
        except PitError:
            with contextlib.suppress(PitError):  # its job was cancelled, and does nothing without its folder
                remote_files.remove_paths(site, paths.ticket_dir(site, name))
            raise
    return job


def _upload_and_queue(
    plan: Plan, site: Site, name: str, also: Sequence[TarEntry], ready: Callable[[], None], args: Sequence[str]
) -> tuple[RemoteJobRef, bool]:
    """The job, and whether it was certainly made by this call."""
    at = paths.ticket_dir(site, name)
    if known := _run_sbatch_script(site, name, at, args):
        return known
    began, sent = time.monotonic(), 0
    for staged in datasets.missing_datasets(plan, site):
        sent += datasets.send_dataset(staged, site).bytes
    wall_s = time.monotonic() - began if sent else 0.0
    more = sum(entry.path.stat().st_size for entry in also if entry.path)
    whole = [*run_dir_entries(plan, site, name=name), *also]
    mode = run_folder.MODES[site.paths.runs_access]
    remote_files.put_tree(site, whole, at, limit=2 * workdir_walk.MAX_UPLOAD_BYTES + more, mode=mode)
    try:
        ready()
    except BaseException:
        with contextlib.suppress(PitError):
            remote_files.remove_paths(site, at)
        raise
    queued = _run_sbatch_script(site, name, at, args)
    if queued is None:
        raise TryLater("the run's folder was there and is gone again", where=at, hint="run it again")
    job, is_new = queued
    return msgspec.structs.replace(job, data_bytes=sent, data_s=wall_s), is_new


def run_dir_entries(plan: Plan, site: Site, *, name: str) -> list[TarEntry]:
    """The run's folder as it is to be there: nothing in it that is executed knows of a path here."""
    at = paths.ticket_dir(site, name)
    moved = plan_with_remote_paths(plan, site, at)
    script = planning.render_script(moved, site, run_dir=at, payload=rank_command(site, "plan", f"{at}/plan.json"))
    texts = {
        "request.toml": plan.request_text.encode(),
        "plan.json": msgspec.json.format(msgspec.json.encode(moved), indent=1),
        "script.sbatch": grant.add_grant_check(script, at).encode(),
    }
    return [
        *(TarEntry(name=key, data=text) for key, text in texts.items()),
        *(TarEntry(name=key) for key in ("checkpoints", "attempts")),
        *_code_entries(Path(plan.request.workdir)),
    ]


def _code_entries(workdir: Path) -> list[TarEntry]:
    """A copy of the workdir; of one that is another run's copy already, what that run was made with."""
    if provenance.provenance_of_code(workdir):
        return code_copy.code_entries(workdir.parent)
    return workdir_walk.workdir_entries(workdir, ignored=git_state.ignored_paths(workdir))


def plan_with_remote_paths(plan: Plan, site: Site, remote_run_dir: str) -> Plan:
    """The plan with the far side's paths: of the run at `remote_run_dir`, its code, its data and its interpreter."""
    if site.name != plan.site:
        raise ConfigError(f'the plan is for site "{plan.site}"', where=f"site {site.name}", hint="plan it again")
    placed = tuple(msgspec.structs.replace(one, source=datasets.dataset_dir(site, one)) for one in plan.data)
    request = msgspec.structs.replace(
        plan.request, workdir=f"{remote_run_dir}/code", data={one.name: one.source for one in placed}
    )
    return msgspec.structs.replace(
        plan,
        request=request,
        data=placed,
        runs=paths.remote_runs_dir(site),
        python=paths.remote_python(site),
        request_text="",
    )


def _run_sbatch_script(site: Site, name: str, at: str, args: Sequence[str]) -> tuple[RemoteJobRef, bool] | None:
    """The run's job, and whether it was certainly submitted now; None where the run's folder is not there yet."""
    for look in range(_FIND_TRIES):
        try:
            done = _call_sbatch_script(site, at, args)
        except Unreachable as error:
            if look == 0 and was_not_sent(error):
                raise
            if look > 0:
                raise _outcome_unknown(error) from error
            continue  # the connection was lost: what became of it is known there
        if done.code == _EXIT_NO_RUN_DIR:
            return None
        if done.code in (0, _EXIT_ALREADY_SUBMITTED):
            return _parse_job_ref(done.stdout, at), done.code == 0
        if done.code == _EXIT_REVOKED:
            raise ClusterError("it was taken back before it was submitted", where=at, hint="submit it anew")
        if done.code != _EXIT_OUTCOME_UNKNOWN and done.code not in _TIMED_OUT:
            _raise_sbatch_error(site, at, done)
        try:
            job = _find_by_name(site, name, at)
        except TryLater as error:
            raise _outcome_unknown(error) from error
        if job:
            return job, False
        time.sleep(_FIND_PAUSE_S)  # somebody else may be about to write its id down
    raise OutcomeUnknown("it was submitted before, and no job of its name is there", where=at, hint="take it back")


def _outcome_unknown(error: PitError) -> OutcomeUnknown:
    return OutcomeUnknown(error.message, where=error.where, hint="the job may be queued: run this again")


def _call_sbatch_script(site: Site, at: str, args: Sequence[str]) -> subprocesses.Completed:
    before, _, after = msgspec.json.encode(_job_ref(site, "\0")).decode().partition("\\u0000")
    # No variable of ours: what sbatch runs with is what the job runs with.
    timeout_s = _SBATCH_TIMEOUT_S + 10
    token = secrets.token_hex(8)
    return remote_files.run_shell(
        site, _SUBMIT, at, token, str(_SBATCH_TIMEOUT_S), before, after, *args, env={}, timeout_s=timeout_s
    )


def _job_ref(site: Site, job_id: str) -> run_folder.JobRef:
    return run_folder.JobRef(job_id=job_id, site=site.name, submitted=timestamps.now_rfc3339())


def _parse_job_ref(text: str, at: str) -> RemoteJobRef:
    try:
        found = decode_json(text, run_folder.JobRef)
        if not (found.job_id.isascii() and found.job_id.isdecimal()):
            raise msgspec.ValidationError(f"job id {found.job_id!r}")
    except msgspec.DecodeError as error:
        raise OutcomeUnknown(f"half an answer: {error}", where=at, hint="run this again") from error
    return RemoteJobRef(job_id=found.job_id, site=found.site, submitted=found.submitted)


def _raise_sbatch_error(site: Site, at: str, done: subprocesses.Completed) -> None:
    """Raise what sbatch's refusal means, unless it leaves in doubt whether there is a job."""
    error = error_for("sbatch", site.connection.host, done.code, done.stderr)
    if isinstance(error, Unreachable) and not was_not_sent(error):
        return
    # Nothing was queued: what can be tried again may be, and what cannot leaves nothing behind.
    remote_files.remove_paths(site, f"{at}/submitting" if isinstance(error, TryLater) else at)
    raise error


def _find_by_name(site: Site, name: str, at: str) -> RemoteJobRef | None:
    """The job of this name, if Slurm knows it, or its accounting does; its id is then written down."""
    slurm, user = client(site), paths.remote_user(site)
    found = [job.raw_id for job in slurm.jobs(user=user, name=name, all_states=True)]
    if not found:
        try:
            since = datetime.now(UTC) - _ACCOUNTING_WINDOW
            found = [job.raw_id for job in slurm.accounting(user=user, name=name, since=since, attempts=False)]
        except TryLater:
            raise
        except PitError:  # no accounting there
            return None
    if not found:
        return None
    job = _job_ref(site, min(found, key=int))
    remote_files.write_file(site, f"{at}/job.json", msgspec.json.encode(job) + b"\n")
    return RemoteJobRef(job_id=job.job_id, site=job.site, submitted=job.submitted)
