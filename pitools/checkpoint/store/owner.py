"""Claim a checkpoint folder for one run and schema of its state: it must not resume from checkpoints of another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout
from pitools.checkpoint.store.manifest import CheckpointManifest, load_manifest
from pitools.core.errors import ConfigError, DataError
from pitools.core.fs import from_os_error, fsync_dir, open_regular, write_atomic
from pitools.core.record import Record, decode_json

OWNER_FILE = "owner.json"
_MAX_BYTES = 1 << 20
_OTHER_FOLDER_HINT = "give another checkpoint folder (PIT_CHECKPOINT_DIR), or move that one away"


class FolderOwner(Record, frozen=True, kw_only=True, tag="pit.checkpoint-owner/1"):
    """The run of a checkpoint folder. state_fingerprint: digest of the names, shapes and dtypes of its state."""

    run: str
    state_fingerprint: str


def claim_folder(folder: Path, run: str, state_fingerprint: str) -> None:
    """Record a run and its state as the owner of a folder, or check that they are; any number of ranks may call it.

    state_fingerprint: another one replaces that of a run that has saved nothing yet. Raises ConfigError if the folder
    has another owner, is a link, or contains foreign files; NoSpace, ClusterError.
    """
    claim = FolderOwner(run=run, state_fingerprint=state_fingerprint)
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(folder.parent)
        _require_regular(folder)
        if (current := read_owner(folder)) is None:
            _require_claimable(folder, claim)
            current = _write(folder, claim)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("not a folder", where=str(folder), hint=_OTHER_FOLDER_HINT) from error
    except OSError as error:
        raise from_os_error(error, folder) from error
    if current.run != run:
        problem = f'checkpoints of another run (expected "{run}", got "{current.run}")'
        raise ConfigError(problem, where=str(folder), hint=_OTHER_FOLDER_HINT)
    if current.state_fingerprint != state_fingerprint and not layout.listed_steps(folder):
        write_atomic(folder / OWNER_FILE, msgspec.json.encode(claim))
    elif current.state_fingerprint != state_fingerprint:
        problem = f"checkpoints of another state (expected {state_fingerprint}, got {current.state_fingerprint})"
        hint = f"{_OTHER_FOLDER_HINT}; or train the model with the optimizer that the run began with"
        raise ConfigError(problem, where=str(folder), hint=hint)


def read_owner(folder: Path) -> FolderOwner | None:
    """Return the owner of a folder; None if it has none. Raises ConfigError for an unreadable record."""
    path = folder / OWNER_FILE
    try:
        with open_regular(path) as file:
            return decode_json(file.read(_MAX_BYTES), FolderOwner)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        hint = "if the checkpoints beside it are this run's, remove the file: the next save writes it again"
        raise ConfigError(f"owner of these checkpoints: cannot be read: {error}", where=str(path), hint=hint) from error


def is_owned_by(owner: FolderOwner, manifest: CheckpointManifest) -> bool:
    """Whether a checkpoint is of the folder's run and state."""
    return (manifest.run, manifest.state_fingerprint) == (owner.run, owner.state_fingerprint)


def _require_regular(folder: Path) -> None:
    if folder.is_symlink():
        problem = f"the checkpoint folder is a symbolic link, to {folder.resolve()}"
        raise ConfigError(problem, where=str(folder), hint="give the folder itself (PIT_CHECKPOINT_DIR)")
    user, me = folder.stat().st_uid, os.geteuid()
    if me != 0 and user not in (me, 0):
        raise ConfigError(
            f"folder of another user (expected uid {me}, got {user})", where=str(folder), hint=_OTHER_FOLDER_HINT
        )


def _require_claimable(folder: Path, owner: FolderOwner) -> None:
    """Accept a folder without an owner only if it is empty, or its checkpoints are all of this run."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (layout.LATEST, layout.QUARANTINE, OWNER_FILE):
            continue
        run = None
        if layout.step_of(path) is not None and stat.S_ISDIR(path.lstat().st_mode):
            try:
                manifest = load_manifest(path)
            except DataError:
                continue  # half deleted: its verification reports it
            if is_owned_by(owner, manifest):
                continue
            run = manifest.run
        problem = f'"{path.name}": ' + (f'of run "{run}"' if run else "not a checkpoint")
        raise ConfigError(
            f'not a folder of checkpoints of run "{owner.run}": {problem}', where=str(folder), hint=_OTHER_FOLDER_HINT
        )


def _write(folder: Path, owner: FolderOwner) -> FolderOwner:
    """Write the owner record by link(2): the first rank's record stays, and the others read it."""
    temporary = folder / f".{OWNER_FILE}.{os.getpid()}.{os.urandom(4).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(owner))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, folder / OWNER_FILE)
        except FileExistsError:
            return read_owner(folder) or owner
        fsync_dir(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return owner
