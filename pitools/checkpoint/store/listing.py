"""List the content of a checkpoint folder for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pitools.checkpoint.store import layout, lookup, owner, quarantine, unreadable
from pitools.checkpoint.store.manifest import load_manifest
from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.run.run_folder import read_record

State = Literal["whole", "damaged", "foreign", "unreadable", "quarantined", "unfinished"]


class CheckpointListing(Record, frozen=True, kw_only=True, tag="pit.checkpoint-listing/1"):
    """One checkpoint. step: null for a leftover. newest: the one that a run would resume from."""

    step: int | None
    state: State
    path: str
    t: str = ""
    format: str = ""
    world_size: int | None = None
    files: int | None = None
    bytes: int | None = None
    newest: bool = False
    reason: str = ""


def list_checkpoints(folder: Path) -> Iterator[CheckpointListing]:
    """Yield the checkpoints, newest first, then quarantine, then leftovers of killed saves. Raises ClusterError."""
    folder_owner, newest = owner.read_owner(folder), True
    for step in layout.listed_steps(folder):
        record = _describe(layout.step_path(folder, step), step, folder_owner, newest=newest)
        newest = newest and not record.newest
        yield record
    for path in sorted((folder / layout.QUARANTINE).glob("step_*")):
        yield CheckpointListing(step=None, state="quarantined", path=str(path), reason=_reason(path))
    for path in (path for path in layout.leftovers(folder) if not path.is_symlink()):
        yield CheckpointListing(
            step=None, state="unfinished", path=str(path), reason="being saved, or left by a killed save"
        )


def _describe(path: Path, step: int, folder_owner: owner.FolderOwner | None, *, newest: bool) -> CheckpointListing:
    try:
        manifest = load_manifest(path)
    except DataError as error:
        missed = unreadable.unreadable_reason(path)
        return CheckpointListing(
            step=step, state="unreadable" if missed else "damaged", path=str(path), reason=missed or error.message
        )
    state: State = "whole"
    reason = ""
    if unreadable.is_marked_unreadable(path):
        state, reason = "unreadable", unreadable.unreadable_reason(path)
    elif lookup.read_if_complete(path) is None:
        state, reason = "damaged", "a file is missing or has another size: see `pit checkpoint check`"
    elif folder_owner and not owner.is_owned_by(folder_owner, manifest):
        state, reason = "foreign", f"of run {manifest.run}, model {manifest.model}"
    return CheckpointListing(
        step=step,
        state=state,
        path=str(path),
        t=manifest.t,
        format=manifest.format,
        world_size=manifest.world_size,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        newest=newest and state == "whole",
        reason=reason,
    )


def _reason(path: Path) -> str:
    try:
        reason = read_record(path / quarantine.REASON_FILE, quarantine.QuarantineReason)
    except (DataError, OSError):
        reason = None
    return reason.reason if reason else "no reason was left"
