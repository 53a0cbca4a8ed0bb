"""Submit a plan as a job of a given name at a remote site: exactly once, also after lost connections."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
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
from pitools.launch.tickets import ticket_state
from pitools.launch.tickets.remote import datasets, paths
from pitools.run import run_folder
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.tar_stream import TarEntry
from pitools.slurm.errors import OutcomeUnknown, error_for, was_not_sent

_SBATCH_TIMEOUT_S = 60
_EXIT_ALREADY_SUBMITTED, _EXIT_NO_RUN_DIR, _EXIT_REVOKED, _EXIT_OUTCOME_UNKNOWN = 65, 66, 68, 69
_TIMED_OUT = (124, 137)
_FIND_TRIES, _FIND_PAUSE_S = 4, 0.5
_ACCOUNTING_WINDOW = timedelta(days=30)

# Exactly once, by two links that only one process can make: `submitting`, and in the job itself `grant`. The answer of
# sbatch is written at the site before it is returned, so that a lost connection loses nothing. Arguments after the
# fifth are sbatch's own.
_SUBMIT = (
    "trap '' HUP PIPE; cd -- \"$1\" 2>/dev/null || exit 66; "
    # The script runs as this user: a folder that another user made first, or can write to, is refused.
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
    """A remote job. data_bytes, data_s: bytes of missing datasets that were uploaded, and the seconds this took."""

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
    """Upload a plan's run folder and datasets, and submit it under this name; or find its job of an earlier call.

    extra_entries: more files for the run's folder. on_uploaded: called after the upload; an exception from it removes
    the folder. Chooses the nodes, if the request asks for that, among the nodes free at submission. A name is submitted
    at most once. Raises ConfigError for an unsuitable workdir or site; ClusterError for a refused or revoked ticket;
    FolderNotCreated; Unreachable; OutcomeUnknown if the site may have the job: repeat the call later.
    """
    slurm = client(site)
    fabric = node_choice.load_fabric(plan, site, slurm)
    job, is_new = _upload_and_queue(
        plan, site, name, extra_entries, on_uploaded, node_choice.DELAYED_START_ARGS if fabric else ()
    )
    if fabric and is_new:  # a job of an earlier call may have run since
        try:
            node_choice.acquire_nodes(plan, site, fabric, slurm, job.job_id, follow_s=node_choice.TICKET_FOLLOW_S)
        except PitError:
            with contextlib.suppress(PitError):  # its job was cancelled, and cannot run without its folder
                remote_files.remove_paths(site, paths.ticket_dir(site, name))
            raise
    return job


def _upload_and_queue(
    plan: Plan,
    site: Site,
    name: str,
    extra_entries: Sequence[TarEntry],
    on_uploaded: Callable[[], None],
    args: Sequence[str],
) -> tuple[RemoteJobRef, bool]:
    """Return the job, and whether this call certainly submitted it."""
    run_dir = paths.ticket_dir(site, name)
    if submitted := _run_sbatch_script(site, name, run_dir, args):
        return submitted
    began, sent_bytes = time.monotonic(), 0
    with ticket_state.before_submission():
        found = datasets.find_datasets(site, plan.data)
        for staged in plan.data:
            if staged.name not in found:
                sent_bytes += datasets.send_dataset(staged, site).bytes
        wall_s = time.monotonic() - began if sent_bytes else 0.0
        extra_bytes = sum(entry.path.stat().st_size for entry in extra_entries if entry.path)
        entries = [*run_dir_entries(plan, site, name=name, data_dirs=found), *extra_entries]
        mode = run_folder.MODES[site.paths.runs_access]
        remote_files.put_tree(site, entries, run_dir, limit=2 * workdir_walk.MAX_UPLOAD_BYTES + extra_bytes, mode=mode)
    try:
        on_uploaded()
    except BaseException:
        with contextlib.suppress(PitError):
            remote_files.remove_paths(site, run_dir)
        raise
    queued = _run_sbatch_script(site, name, run_dir, args)
    if queued is None:
        raise TryLater("the run's folder was removed during the submission", where=run_dir, hint="repeat the command")
    job, is_new = queued
    return msgspec.structs.replace(job, data_bytes=sent_bytes, data_s=wall_s), is_new


def run_dir_entries(plan: Plan, site: Site, *, name: str, data_dirs: Mapping[str, str]) -> list[TarEntry]:
    """Return the files of the remote run folder; nothing executed in it contains a path that is only valid here.

    data_dirs: as for `plan_with_remote_paths`.
    """
    run_dir = paths.ticket_dir(site, name)
    remote_plan = plan_with_remote_paths(plan, site, run_dir, data_dirs)
    script = planning.render_script(planning.plan_of_ticket(remote_plan), site, run_dir=run_dir)
    texts = {
        "request.toml": plan.request_text.encode(),
        "plan.json": msgspec.json.format(msgspec.json.encode(remote_plan), indent=1),
        "script.sbatch": grant.add_grant_check(script, run_dir).encode(),
    }
    return [
        *(TarEntry(name=key, data=text) for key, text in texts.items()),
        *(TarEntry(name=key) for key in ("checkpoints", "attempts")),
        *_code_entries(Path(plan.request.workdir)),
    ]


def _code_entries(workdir: Path) -> list[TarEntry]:
    """Return the files of the workdir; for another run's `code/`, those that were copied for that run."""
    if provenance.provenance_of_code(workdir):
        return code_copy.code_entries(workdir.parent)
    ignored, tracked = git_state.ignored_paths(workdir), git_state.tracked_files(workdir)
    return workdir_walk.workdir_entries(workdir, ignored=ignored, tracked=tracked)


def plan_with_remote_paths(plan: Plan, site: Site, remote_run_dir: str, data_dirs: Mapping[str, str]) -> Plan:
    """Return the plan with the remote paths of the run, its code, its datasets and its interpreter.

    data_dirs: dataset → its folder there, for those that are there already; the others are where they were copied to.
    """
    if site.name != plan.site:
        hint = f"pit launch plan --site {site.name}"
        raise ConfigError(f'the plan is for site "{plan.site}"', where=f"site {site.name}", hint=hint)
    remote_data = tuple(
        msgspec.structs.replace(dataset, source=data_dirs.get(dataset.name) or datasets.dataset_dir(site, dataset))
        for dataset in plan.data
    )
    request = msgspec.structs.replace(
        plan.request, workdir=f"{remote_run_dir}/code", data={dataset.name: dataset.source for dataset in remote_data}
    )
    return msgspec.structs.replace(
        plan,
        request=request,
        data=remote_data,
        runs_dir=paths.remote_runs_dir(site),
        python=paths.remote_python(site),
        request_text="",
    )


def _run_sbatch_script(site: Site, name: str, run_dir: str, args: Sequence[str]) -> tuple[RemoteJobRef, bool] | None:
    """Return the run's job, and whether it was certainly submitted now; None without the remote run folder."""
    for attempt in range(_FIND_TRIES):
        try:
            done = _call_sbatch_script(site, run_dir, args)
        except Unreachable as error:
            if attempt == 0 and was_not_sent(error):
                raise
            if attempt > 0:
                raise _outcome_unknown(error) from error
            continue  # the connection was lost: the next call reads the outcome from the remote records
        if done.code == _EXIT_NO_RUN_DIR:
            return None
        if done.code in (0, _EXIT_ALREADY_SUBMITTED):
            return _parse_job_ref(done.stdout, run_dir), done.code == 0
        if done.code == _EXIT_REVOKED:
            raise ClusterError("ticket was revoked before its submission", where=run_dir, hint="submit a new ticket")
        if done.code != _EXIT_OUTCOME_UNKNOWN and done.code not in _TIMED_OUT:
            _raise_sbatch_error(site, run_dir, done)
        try:
            job = _find_by_name(site, name, run_dir)
        except TryLater as error:
            raise _outcome_unknown(error) from error
        if job:
            return job, False
        time.sleep(_FIND_PAUSE_S)  # another process may be about to record its id
    raise OutcomeUnknown("ticket was submitted, but has no job of its name", where=run_dir, hint="revoke the ticket")


def _outcome_unknown(error: PitError) -> OutcomeUnknown:
    return OutcomeUnknown(error.message, where=error.where, hint="the job may be queued: repeat the command")


def _call_sbatch_script(site: Site, run_dir: str, args: Sequence[str]) -> subprocesses.Completed:
    json_start, _, json_end = msgspec.json.encode(_job_ref(site, "\0")).decode().partition("\\u0000")
    # No variable of this process: sbatch exports its environment to the job.
    timeout_s = _SBATCH_TIMEOUT_S + 10
    token = secrets.token_hex(8)
    return remote_files.run_shell(
        site, _SUBMIT, run_dir, token, str(_SBATCH_TIMEOUT_S), json_start, json_end, *args, env={}, timeout_s=timeout_s
    )


def _job_ref(site: Site, job_id: str) -> run_folder.JobRef:
    return run_folder.JobRef(job_id=job_id, site=site.name, submitted=timestamps.now_rfc3339())


def _parse_job_ref(text: str, run_dir: str) -> RemoteJobRef:
    try:
        ref = decode_json(text, run_folder.JobRef)
        if not (ref.job_id.isascii() and ref.job_id.isdecimal()):
            raise msgspec.ValidationError(f"job id {ref.job_id!r}")
    except msgspec.DecodeError as error:
        raise OutcomeUnknown(f"incomplete answer: {error}", where=run_dir, hint="repeat the command") from error
    return RemoteJobRef(job_id=ref.job_id, site=ref.site, submitted=ref.submitted)


def _raise_sbatch_error(site: Site, run_dir: str, done: subprocesses.Completed) -> None:
    """Raise the error for sbatch's failure, unless the outcome is unknown."""
    error = error_for("sbatch", site.connection.host, done.code, done.stderr)
    if isinstance(error, Unreachable) and not was_not_sent(error):
        return
    # Nothing was queued: a temporary failure leaves the folder for the next call, any other one leaves nothing.
    remote_files.remove_paths(site, f"{run_dir}/submitting" if isinstance(error, TryLater) else run_dir)
    raise error


def _find_by_name(site: Site, name: str, run_dir: str) -> RemoteJobRef | None:
    """Find the job of this name in slurmctld or accounting, and record its id; None if neither has it."""
    slurm, user = client(site), paths.remote_user(site)
    ids = [job.raw_id for job in slurm.jobs(user=user, name=name, all_states=True)]
    if not ids:
        try:
            since = datetime.now(UTC) - _ACCOUNTING_WINDOW
            ids = [job.raw_id for job in slurm.accounting(user=user, name=name, since=since, all_starts=False)]
        except TryLater:
            raise
        except PitError:  # no accounting there
            return None
    if not ids:
        return None
    job = _job_ref(site, min(ids, key=int))
    remote_files.write_file(site, f"{run_dir}/job.json", msgspec.json.encode(job) + b"\n")
    return RemoteJobRef(job_id=job.job_id, site=job.site, submitted=job.submitted)
