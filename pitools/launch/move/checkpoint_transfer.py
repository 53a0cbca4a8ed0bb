"""A checkpoint that is taken to another run: every byte as it was saved, and with that run's name."""

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
_READ_BYTES_PER_S = 20 << 20  # bytes a second that even a slow file system reads back
_CHECK_SCRIPT = '"$1" -m pitools checkpoint check "$2" >&2'
_SHA256_SCRIPT = 'cd -- "$1" && sha256sum --check --quiet --strict - >&2'


def copy_checkpoint_for_run(run_dir: Path, step: int | None, to: Path, run: str) -> None:
    """Copy a run's checkpoint into the folder of the run `run`, and what its program keeps there besides.

    step: of the checkpoint, None for none. Raises DataError where what arrived is not what was saved; NoSpace,
    ClusterError.
    """
    if step is not None:
        _copy_step(run_dir, step, to, run)
    if own := program_checkpoints.program_entries(run_dir):
        program_checkpoints.copy_entries(own, to)


def _copy_step(run_dir: Path, step: int, to: Path, run: str) -> None:
    source, made = layout.step_path(run_dir / "checkpoints", step), layout.step_path(to / "checkpoints", step)
    texts = _owner_files_for(source, run)
    held = manifest.load_manifest(source)
    try:
        made.mkdir(parents=True)
        write_atomic(made.parent / owner.FILE_NAME, texts[owner.FILE_NAME], durable=False)
        with progress_bar(made.name, held.total_bytes) as advance:
            for entry in held.files:
                (made / entry.path).parent.mkdir(parents=True, exist_ok=True)
                with open_regular(source / entry.path) as file, (made / entry.path).open("xb") as out:
                    while block := file.read(_BLOCK_BYTES):
                        out.write(block)
                        advance(len(block))
        write_atomic(made / manifest.FILE_NAME, texts[manifest.FILE_NAME], durable=False)
        sync_fs(made)
    except OSError as error:
        raise from_os_error(error, made) from error
    if problems := verify.verify_checkpoint(made):
        what = f"{problems[0].path}: {problems[0].problem}, {problems[0].got} and not {problems[0].expected}"
        raise DataError(f"the checkpoint did not arrive as it was: {what}", where=str(made), hint="try again")


def submit_with_checkpoint(
    run_dir: Path, plan: Plan, site: Site, name: str, step: int | None, *, before_submit: Callable[[], None]
) -> tuple[str, str]:
    """Queue a plan at a site that shares no files, with a run's checkpoints; (job id, folder there). Safe to repeat.

    before_submit: called when all is there, just before it is submitted; what it raises keeps it from being submitted.

    Raises DataError where the checkpoint did not arrive as it was, with nothing left there; what `far.submit` raises.
    """
    exactly_once.require_cluster(site, client(site))
    at = paths.ticket_dir(site, name)
    own = program_checkpoints.program_entries(run_dir)
    also = [*(_checkpoint_entries(run_dir, step, name) if step is not None else ()), *own]
    if not also:
        return remote.submit_ticket(plan, site, name=name, on_uploaded=before_submit).job_id, at

    def arrived() -> None:
        if step is not None:
            n_bytes = manifest.load_manifest(layout.step_path(run_dir / "checkpoints", step)).total_bytes
            below = f"{at}/checkpoints/step_{step}"
            _verify_remote(site, n_bytes, below, _CHECK_SCRIPT, paths.remote_python(site), below)
        if text := program_checkpoints.sha256_lines(own):
            n_bytes = sum(entry.path.stat().st_size for entry in own if entry.path)
            _verify_remote(site, n_bytes, at, _SHA256_SCRIPT, at, stdin=text)
        before_submit()

    there_now = remote_files.existing(site, [at, f"{at}/submitting"])
    if there_now == {at}:
        # Sent before, by somebody who was cut off: perhaps before it was looked at.
        try:
            arrived()
        except DataError:
            remote_files.remove_paths(site, at)
    return remote.submit_ticket(plan, site, name=name, extra_entries=also, on_uploaded=arrived).job_id, at


def _checkpoint_entries(run_dir: Path, step: int, name: str) -> list[TarEntry]:
    """What a checkpoint is made of, as the run `name`'s."""
    source, below = layout.step_path(run_dir / "checkpoints", step), f"checkpoints/step_{step}"
    texts = _owner_files_for(source, name)
    return [
        TarEntry(name=f"checkpoints/{owner.FILE_NAME}", data=texts[owner.FILE_NAME]),
        *(TarEntry(name=f"{below}/{one.path}", path=source / one.path) for one in manifest.load_manifest(source).files),
        TarEntry(name=f"{below}/{manifest.FILE_NAME}", data=texts[manifest.FILE_NAME]),
    ]


def _verify_remote(site: Site, n_bytes: int, where: str, script: str, *words: str, stdin: str | None = None) -> None:
    """Have the far side read what arrived. Raises DataError where that is not what was sent."""
    done = remote_files.run_shell(site, script, *words, stdin=stdin, timeout_s=60 + n_bytes / _READ_BYTES_PER_S)
    if done.code:
        said = error_text(done.stderr) or f"exit code {done.code}"
        raise DataError(f"the checkpoint did not arrive as it was: {said}", where=f"{site.name}:{where}")


def _owner_files_for(source: Path, run: str) -> dict[str, bytes]:
    """The files that say whose checkpoint it is, saying that it is `run`'s."""
    held = manifest.load_manifest(source)
    mine = msgspec.structs.replace(held, run=run)
    whose = owner.FolderOwner(run=run, model=held.model)
    return {manifest.FILE_NAME: manifest.encode_manifest(mine), owner.FILE_NAME: msgspec.json.encode(whose)}
