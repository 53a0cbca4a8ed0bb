"""List the content of a checkpoint folder for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pitools.checkpoint.store import layout, lookup, owner, quarantine, unreadable
from pitools.checkpoint.store.manifest import is_read_error, load_manifest
from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.run.run_folder import read_record

State = Literal["complete", "damaged", "foreign", "unreadable", "quarantined", "unfinished"]


class CheckpointListing(Record, frozen=True, kw_only=True, tag="pit.checkpoint-listing/1"):
    """One checkpoint. step: null for a leftover. state: by names, sizes and the manifest. resumable: the one that a run
    would resume from if its bytes are good.
    """

    step: int | None
    state: State
    path: str
    t: str = ""
    format: str = ""
    world_size: int | None = None
    files: int | None = None
    bytes: int | None = None
    resumable: bool = False
    reason: str = ""


def list_checkpoints(folder: Path) -> Iterator[CheckpointListing]:
    """Yield the checkpoints, newest first, then quarantine, then leftovers of killed saves. Raises ClusterError."""
    folder_owner, is_open = owner.read_owner(folder), True
    for step in layout.listed_steps(folder):
        record = _describe(layout.step_path(folder, step), step, folder_owner)
        yield msgspec.structs.replace(record, resumable=is_open and record.state == "complete")
        # Damaged and unreadable ones are skipped by a restore; it refuses a foreign one.
        is_open = is_open and record.state not in ("complete", "foreign")
    for path in sorted((folder / layout.QUARANTINE).glob("step_*")):
        yield CheckpointListing(step=None, state="quarantined", path=str(path), reason=_reason(path))
    for path in (path for path in layout.leftovers(folder) if not path.is_symlink()):
        yield CheckpointListing(
            step=None, state="unfinished", path=str(path), reason="being saved, or left by a killed save"
        )


def _describe(path: Path, step: int, folder_owner: owner.FolderOwner | None) -> CheckpointListing:
    try:
        manifest = load_manifest(path)
    except DataError as error:
        missed = unreadable.unreadable_reason(path)
        state: State = "unreadable" if missed or is_read_error(error) else "damaged"
        return CheckpointListing(step=step, state=state, path=str(path), reason=missed or error.message)
    state = "complete"
    reason = ""
    if unreadable.is_marked_unreadable(path):
        state, reason = "unreadable", unreadable.unreadable_reason(path)
    elif lookup.read_if_complete(path) is None:
        state, reason = "damaged", "a file is missing or has another size: see `pit checkpoint check`"
    elif folder_owner and not owner.is_owned_by(folder_owner, manifest):
        state, reason = "foreign", f"of run {manifest.run}, state {manifest.state_fingerprint}"
    return CheckpointListing(
        step=step,
        state=state,
        path=str(path),
        t=manifest.t,
        format=manifest.format,
        world_size=manifest.world_size,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        reason=reason,
    )


def _reason(path: Path) -> str:
    try:
        reason = read_record(path / quarantine.REASON_FILE, quarantine.QuarantineReason)
    except (DataError, OSError):
        reason = None
    return reason.reason if reason else "no reason was left"
