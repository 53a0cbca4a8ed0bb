"""A checkpoint that is taken to another run: every byte as it was saved, and with that run's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, manifest, owner, verify
from pitools.core.errors import DataError
from pitools.core.fs import os_error, plain_file, sync_file_system, write_atomic
from pitools.core.progress import bar
from pitools.launch.move import program_checkpoints
from pitools.launch.plan import Plan
from pitools.launch.submission import exactly_once
from pitools.launch.tickets import remote
from pitools.launch.tickets.remote import paths
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.tar_stream import Entry
from pitools.slurm.errors import sentence

_BLOCK = 1 << 20
_READ = 20 << 20  # bytes a second that even a slow file system reads back
_CHECK = '"$1" -m pitools checkpoint check "$2" >&2'
_SUMS = 'cd -- "$1" && sha256sum --check --quiet --strict - >&2'


def copy(run_dir: Path, step: int | None, to: Path, run: str) -> None:
    """Copy a run's checkpoint into the folder of the run `run`, and what its program keeps there besides.

    step: of the checkpoint, None for none. Raises DataError where what arrived is not what was saved; NoSpace,
    ClusterError.
    """
    if step is not None:
        _copy(run_dir, step, to, run)
    if own := program_checkpoints.entries(run_dir):
        program_checkpoints.copy(own, to)


def _copy(run_dir: Path, step: int, to: Path, run: str) -> None:
    source, made = layout.step_path(run_dir / "checkpoints", step), layout.step_path(to / "checkpoints", step)
    texts = _renamed(source, run)
    held = manifest.load(source)
    try:
        made.mkdir(parents=True)
        write_atomic(made.parent / owner.FILE_NAME, texts[owner.FILE_NAME], durable=False)
        with bar(made.name, held.total_bytes) as advance:
            for entry in held.files:
                (made / entry.path).parent.mkdir(parents=True, exist_ok=True)
                with plain_file(source / entry.path) as file, (made / entry.path).open("xb") as out:
                    while block := file.read(_BLOCK):
                        out.write(block)
                        advance(len(block))
        write_atomic(made / manifest.FILE_NAME, texts[manifest.FILE_NAME], durable=False)
        sync_file_system(made)
    except OSError as error:
        raise os_error(error, made) from error
    if problems := verify.check(made):
        what = f"{problems[0].path}: {problems[0].problem}, {problems[0].got} and not {problems[0].expected}"
        raise DataError(f"the checkpoint did not arrive as it was: {what}", where=str(made), hint="try again")


def send(
    run_dir: Path, plan: Plan, site: Site, name: str, step: int | None, *, before: Callable[[], None]
) -> tuple[str, str]:
    """Queue a plan at a site that shares no files, with a run's checkpoints; (job id, folder there). Safe to repeat.

    before: called when all is there, just before it is submitted; what it raises keeps it from being submitted.

    Raises DataError where the checkpoint did not arrive as it was, with nothing left there; what `far.submit` raises.
    """
    exactly_once.require_cluster(site, client(site))
    at = paths.run_dir(site, name)
    own = program_checkpoints.entries(run_dir)
    also = [*(_entries(run_dir, step, name) if step is not None else ()), *own]
    if not also:
        return remote.submit(plan, site, name=name, ready=before).job_id, at

    def arrived() -> None:
        if step is not None:
            n_bytes = manifest.load(layout.step_path(run_dir / "checkpoints", step)).total_bytes
            below = f"{at}/checkpoints/step_{step}"
            _checked(site, n_bytes, below, _CHECK, paths.python(site), below)
        if text := program_checkpoints.sums(own):
            n_bytes = sum(entry.path.stat().st_size for entry in own if entry.path)
            _checked(site, n_bytes, at, _SUMS, at, stdin=text)
        before()

    there_now = remote_files.exists(site, [at, f"{at}/submitting"])
    if there_now == {at}:
        # Sent before, by somebody who was cut off: perhaps before it was looked at.
        try:
            arrived()
        except DataError:
            remote_files.remove(site, at)
    return remote.submit(plan, site, name=name, also=also, ready=arrived).job_id, at


def _entries(run_dir: Path, step: int, name: str) -> list[Entry]:
    """What a checkpoint is made of, as the run `name`'s."""
    source, below = layout.step_path(run_dir / "checkpoints", step), f"checkpoints/step_{step}"
    texts = _renamed(source, name)
    return [
        Entry(name=f"checkpoints/{owner.FILE_NAME}", data=texts[owner.FILE_NAME]),
        *(Entry(name=f"{below}/{one.path}", path=source / one.path) for one in manifest.load(source).files),
        Entry(name=f"{below}/{manifest.FILE_NAME}", data=texts[manifest.FILE_NAME]),
    ]


def _checked(site: Site, n_bytes: int, where: str, script: str, *words: str, stdin: str | None = None) -> None:
    """Have the far side read what arrived. Raises DataError where that is not what was sent."""
    done = remote_files.shell(site, script, *words, stdin=stdin, timeout_s=60 + n_bytes / _READ)
    if done.code:
        said = sentence(done.stderr) or f"exit code {done.code}"
        raise DataError(f"the checkpoint did not arrive as it was: {said}", where=f"{site.name}:{where}")


def _renamed(source: Path, run: str) -> dict[str, bytes]:
    """The files that say whose checkpoint it is, saying that it is `run`'s."""
    held = manifest.load(source)
    mine = msgspec.structs.replace(held, run=run)
    whose = owner.Owner(run=run, model=held.model)
    return {manifest.FILE_NAME: manifest.encode(mine), owner.FILE_NAME: msgspec.json.encode(whose)}
