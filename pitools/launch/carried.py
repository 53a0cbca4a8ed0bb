"""A checkpoint that is taken to another run: every byte as it was saved, and with that run's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.checkpoint import layout, manifest, owner, verify
from pitools.core.errors import DataError
from pitools.core.files import os_error, plain_file, sync_file_system, write_atomic
from pitools.core.progress import bar
from pitools.launch import far
from pitools.launch.far import there
from pitools.launch.plan import Plan
from pitools.site import files
from pitools.site.model import Site
from pitools.site.tar import Entry
from pitools.slurm.refusals import sentence

_BLOCK = 1 << 20
_READ = 20 << 20  # bytes a second that even a slow file system reads back
_CHECK = '"$1" -m pitools checkpoint check "$2" >&2'


def copy(run_dir: Path, step: int, to: Path, run: str) -> None:
    """Copy a run's checkpoint into the folder of the run `run`; nothing for step 0.

    Raises DataError where what arrived is not what was saved; NoSpace, ClusterError.
    """
    if not step:
        return
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


def send(run_dir: Path, plan: Plan, site: Site, name: str, step: int, *, before: Callable[[], None]) -> tuple[str, str]:
    """Queue a plan at a site that shares no files, with a run's checkpoint; (job id, folder there). Safe to repeat.

    before: called when all is there, just before it is submitted; what it raises keeps it from being submitted.

    Raises DataError where the checkpoint did not arrive as it was, with nothing left there; what `far.submit` raises.
    """
    at = there.run_dir(site, name)
    if not step:
        return far.submit(plan, site, name=name, ready=before).job_id, at
    source, below = layout.step_path(run_dir / "checkpoints", step), f"checkpoints/step_{step}"
    texts = _renamed(source, name)
    held = manifest.load(source)
    entries = [
        Entry(name=f"checkpoints/{owner.FILE_NAME}", data=texts[owner.FILE_NAME]),
        *(Entry(name=f"{below}/{one.path}", path=source / one.path) for one in held.files),
        Entry(name=f"{below}/{manifest.FILE_NAME}", data=texts[manifest.FILE_NAME]),
    ]

    def arrived() -> None:
        timeout_s = 60 + held.total_bytes / _READ
        done = files.shell(site, _CHECK, there.python(site), f"{at}/{below}", timeout_s=timeout_s)
        if done.code:
            said = sentence(done.stderr) or f"exit code {done.code}"
            raise DataError(f"the checkpoint did not arrive as it was: {said}", where=f"{site.name}:{at}/{below}")
        before()

    there_now = files.exists(site, [at, f"{at}/submitting"])
    if there_now == {at}:
        # Sent before, by somebody who was cut off: perhaps before it was looked at.
        try:
            arrived()
        except DataError:
            files.remove(site, at)
    return far.submit(plan, site, name=name, also=entries, ready=arrived).job_id, at


def _renamed(source: Path, run: str) -> dict[str, bytes]:
    """The files that say whose checkpoint it is, saying that it is `run`'s."""
    held = manifest.load(source)
    mine = msgspec.structs.replace(held, run=run)
    whose = owner.Owner(run=run, model=held.model)
    return {manifest.FILE_NAME: manifest.encode(mine), owner.FILE_NAME: msgspec.json.encode(whose)}
