"""Copy a checkpoint, unchanged but for its owner, into another run's folder, here or at a remote site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, manifest, owner, verify
from pitools.core.errors import DataError
from pitools.core.fs import from_os_error, open_regular, sync_fs, write_atomic
from pitools.core.progress import progress_bar
from pitools.launch.move import program_checkpoints
from pitools.launch.plan import Plan
from pitools.launch.submission import exactly_once
from pitools.launch.tickets import remote
from pitools.launch.tickets.remote import paths
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.tar_stream import TarEntry
from pitools.slurm.errors import error_text

_BLOCK_BYTES = 1 << 20
_READ_BYTES_PER_S = 20 << 20  # a slow file system, in bytes per second; it bounds the time of a verification
_CHECK_SCRIPT = '"$1" -m pitools checkpoint check "$2" >&2'
_SHA256_SCRIPT = 'cd -- "$1" && sha256sum --check --quiet --strict - >&2'


def copy_checkpoint_for_run(run_dir: Path, step: int | None, to: Path, run: str) -> None:
    """Copy a run's checkpoint, and its program's own files beside it, into the folder `to` of the run `run`.

    step: of the checkpoint, None for none. Raises DataError for a copy that differs; NoSpace, ClusterError.
    """
    if step is not None:
        _copy_step(run_dir, step, to, run)
    if program_files := program_checkpoints.program_entries(run_dir):
        program_checkpoints.copy_entries(program_files, run_dir, to)


def _copy_step(run_dir: Path, step: int, to: Path, run: str) -> None:
    source, target = layout.step_path(run_dir / "checkpoints", step), layout.step_path(to / "checkpoints", step)
    texts = _owner_files_for(source, run)
    checkpoint = manifest.load_manifest(source)
    try:
        target.mkdir(parents=True)
        write_atomic(target.parent / owner.OWNER_FILE, texts[owner.OWNER_FILE], durable=False)
        with progress_bar(target.name, checkpoint.total_bytes) as advance:
            for entry in checkpoint.files:
                (target / entry.path).parent.mkdir(parents=True, exist_ok=True)
                with open_regular(source / entry.path) as file, (target / entry.path).open("xb") as out:
                    while block := file.read(_BLOCK_BYTES):
                        out.write(block)
                        advance(len(block))
        write_atomic(target / manifest.MANIFEST_FILE, texts[manifest.MANIFEST_FILE], durable=False)
        sync_fs(target)
    except OSError as error:
        raise from_os_error(error, target) from error
    if problems := verify.verify_checkpoint(target):
        first = problems[0]
        details = f"{first.path}: {first.problem} (expected {first.expected}, got {first.got})"
        raise DataError(f"copied checkpoint differs: {details}", where=str(target), hint="try again")


def submit_with_checkpoint(
    run_dir: Path, plan: Plan, site: Site, name: str, step: int | None, *, before_submit: Callable[[], None]
) -> remote.RemoteJobRef:
    """Queue a plan, with a run's checkpoints, at a remote site, and return its job. Safe to repeat.

    before_submit: called after the upload, just before the submission; an exception from it prevents the submission.
    Raises DataError for a copy that differs, after its removal; and the errors of `remote.submit_ticket`.
    """
    exactly_once.require_cluster(site, client(site))
    remote_dir = paths.ticket_dir(site, name)
    program_files = program_checkpoints.program_entries(run_dir)
    entries = [*(_checkpoint_entries(run_dir, step, name) if step is not None else ()), *program_files]
    if not entries:
        return remote.submit_ticket(plan, site, name=name, on_uploaded=before_submit)

    def verify_upload() -> None:
        if step is not None:
            n_bytes = manifest.load_manifest(layout.step_path(run_dir / "checkpoints", step)).total_bytes
            step_dir = f"{remote_dir}/checkpoints/step_{step}"
            _verify_remote(site, n_bytes, step_dir, _CHECK_SCRIPT, paths.remote_python(site), step_dir)
        if text := program_checkpoints.sha256_lines(program_files):
            n_bytes = sum(entry.path.stat().st_size for entry in program_files if entry.path)
            _verify_remote(site, n_bytes, remote_dir, _SHA256_SCRIPT, remote_dir, stdin=text)
        before_submit()

    if remote_files.existing(site, [remote_dir, f"{remote_dir}/submitting"]) == {remote_dir}:
        # Uploaded by an interrupted call, which may not have verified it.
        try:
            verify_upload()
        except DataError:
            remote_files.remove_paths(site, remote_dir)
    return remote.submit_ticket(plan, site, name=name, extra_entries=entries, on_uploaded=verify_upload)


def _checkpoint_entries(run_dir: Path, step: int, name: str) -> list[TarEntry]:
    """Return the files of a checkpoint, with the run `name` as the owner."""
    source, step_dir = layout.step_path(run_dir / "checkpoints", step), f"checkpoints/step_{step}"
    texts = _owner_files_for(source, name)
    return [
        TarEntry(name=f"checkpoints/{owner.OWNER_FILE}", data=texts[owner.OWNER_FILE]),
        *(
            TarEntry(name=f"{step_dir}/{file.path}", path=source / file.path)
            for file in manifest.load_manifest(source).files
        ),
        TarEntry(name=f"{step_dir}/{manifest.MANIFEST_FILE}", data=texts[manifest.MANIFEST_FILE]),
    ]


def _verify_remote(site: Site, n_bytes: int, where: str, script: str, *args: str, stdin: str | None = None) -> None:
    """Verify the uploaded files by a script at the site. Raises DataError where they differ."""
    done = remote_files.run_shell(site, script, *args, stdin=stdin, timeout_s=60 + n_bytes / _READ_BYTES_PER_S)
    if done.code:
        reason = error_text(done.stderr) or f"exit code {done.code}"
        raise DataError(f"uploaded checkpoint differs: {reason}", where=f"{site.name}:{where}")


def _owner_files_for(source: Path, run: str) -> dict[str, bytes]:
    """Return the contents of a checkpoint's files that name its owner, with `run` as the owner."""
    saved = manifest.load_manifest(source)
    renamed = msgspec.structs.replace(saved, run=run)
    folder_owner = owner.FolderOwner(run=run, state_fingerprint=saved.state_fingerprint)
    return {
        manifest.MANIFEST_FILE: manifest.encode_manifest(renamed),
        owner.OWNER_FILE: msgspec.json.encode(folder_owner),
    }
