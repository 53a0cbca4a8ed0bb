"""Checkpoints saved on a node's own disk, copied from there to the shared folder while training goes on.

Every byte is hashed on its way and compared with the local manifest; a file that was copied stays copied when the
copier is killed. What the shared folder shows is published as any other save is: whole, by one rename.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, lookup, publish, unreadable, verify
from pitools.checkpoint.store.hashing import default_threads
from pitools.checkpoint.store.manifest import FileEntry, Manifest, load
from pitools.core.daemon_pool import Threads
from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.core.fs import os_error, plain_file, write_atomic
from pitools.core.progress import Advance
from pitools.store.digest import hasher_for

_BLOCK = 4 << 20
_COPY = "drain-"

Stopped = Callable[[], bool]


class Interrupted(Exception):
    """The caller wanted the copy to end; what was copied stays for the next."""


def drain(
    source: Path, folder: Path, *, threads: int = 0, stopped: Stopped = lambda: False, advance: Advance = lambda _: None
) -> Path:
    """Copy a whole checkpoint into another folder of checkpoints and show it there; returns where it stands.

    Safe to repeat: a copy that was interrupted goes on. Raises DataError when the source is damaged, NoSpace,
    ClusterError, Interrupted.
    """
    manifest = load(source)
    final = layout.step_path(folder, manifest.step)
    if (there := lookup.whole_at(final)) and there.seal == manifest.seal and _reads(final):
        lookup.point(folder)  # the last thing that a copier does, which may have been killed before it
        return final
    place = layout.building(folder, manifest.step, token(manifest))
    try:
        _clear(place, manifest)
        send(source, manifest, place, threads=threads, stopped=stopped, advance=advance)
    except (NoSpace, DataError):
        layout.discard(place)
        raise
    return publish.publish(
        folder,
        place,
        manifest.step,
        format=manifest.format,
        run=manifest.run,
        model=manifest.model,
        world_size=manifest.world_size,
        loader=manifest.loader,
        extra=manifest.extra,
        t=manifest.t,
        shares=1,
    )


def token(manifest: Manifest) -> str:
    """Of a copy's building folder: the same for the same checkpoint, so that the next copier goes on in it."""
    return f"{_COPY}{manifest.seal.rpartition(':')[2][:16]}"


def tokens(local: Path) -> set[str]:
    """Return the tokens of copies that can still go on, for `retain.sweep` to keep; none where the node's disk cannot
    be read.
    """
    with suppress(ClusterError):
        paths = (layout.step_path(local, step) for step in lookup.whole(local))
        return {token(manifest) for path in paths if (manifest := lookup.whole_at(path))}
    return set()


def unfinished(folder: Path) -> dict[str, Path]:
    """Return token → place of the interrupted copies, in a shared folder, of checkpoints newer than the newest there.

    They may go on: whether their sources, on a node's disk, still exist cannot be seen from here. Raises ClusterError.
    """
    newest, found = lookup.newest(folder), {}
    for path in layout.left_over(folder):
        step, copy = layout.building_of(path) or (-1, "")
        if copy.startswith(_COPY) and (newest is None or step > newest):
            found[copy] = path
    return found


def candidates(local: Path | None, folder: Path) -> list[Path]:
    """Checkpoints to restore from, newest first, all to be verified; of one that stands in both the local copy first.

    A local one of the same step but other content is of an attempt that others have not gone on from: it is left out.
    """
    shared = {step: layout.step_path(folder, step) for step in lookup.whole(folder)}
    found = [(step, 0, path) for step, path in shared.items()]
    for step in lookup.whole(local) if local else []:
        path = layout.step_path(local, step)  # type: ignore[arg-type]
        if step not in shared or _seal(path) == _seal(shared[step]):
            found.append((step, 1, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def send(
    source: Path,
    manifest: Manifest,
    place: Path,
    *,
    rank: int = 0,
    threads: int = 0,
    stopped: Stopped = lambda: False,
    advance: Advance = lambda _: None,
) -> None:
    """Copy a checkpoint's files into a building folder, durable and verified, and leave word of them as share `rank`.

    Raises as `drain`.
    """
    copier = _Copier(source, place, stopped, advance)
    try:
        for path in (place / layout.SHARES, *(place / folder for folder in _folders(source, manifest))):
            path.mkdir(parents=True, exist_ok=True)
        with Threads(threads or default_threads(), "drain") as pool:
            todo = [pool.submit(copier, number, rank, entry) for number, entry in enumerate(manifest.files)]
            for future in todo:
                future.result()
        share = publish.Share(rank=rank, files=manifest.files)
        write_atomic(place / layout.SHARES / f"{rank}.json", msgspec.json.encode(share), durable=False)
    except OSError as error:
        raise os_error(error, place) from error


class _Copier:
    """Copies one file: under another name, then renamed, so that a file of the right name is a file that is done."""

    def __init__(self, source: Path, place: Path, stopped: Stopped, advance: Advance) -> None:
        self._source, self._place, self._stopped, self._advance = source, place, stopped, advance

    def __call__(self, number: int, rank: int, entry: FileEntry) -> None:
        target = self._place / entry.path
        if _is_file(target, entry.bytes):
            self._advance(entry.bytes)
            return
        # A name of this process's own: another copier's part may be written to after ours is renamed.
        part = self._place / layout.SHARES / f"{rank}.{number}.{secrets.token_hex(4)}.part"
        self._copy(entry, part)
        os.replace(part, target)

    def _copy(self, entry: FileEntry, part: Path) -> None:
        hasher, left = hasher_for(entry.digest), entry.bytes
        with plain_file(self._source / entry.path) as read, part.open("wb", buffering=0) as write:
            with mmap.mmap(-1, _BLOCK) as buffer, memoryview(buffer) as view:
                while left and (count := os.readv(read.fileno(), [view[: min(left, _BLOCK)]])):
                    if self._stopped():
                        raise Interrupted
                    hasher.update(view[:count])
                    _write_all(write.fileno(), view[:count])
                    left -= count
                    self._advance(count)
            if left or hasher.text() != entry.digest:
                what = "it is not what its manifest says: not copied"
                raise DataError(what, where=str(self._source / entry.path), hint="an older checkpoint may be whole")
            os.fsync(write.fileno())


def _reads(final: Path) -> bool:
    """Whether what stands there can be gone on from: one that a run could not read once is read again."""
    if unreadable.is_marked(final) and verify.check(final):
        return False
    unreadable.clear(final)
    return True


def _clear(place: Path, manifest: Manifest) -> None:
    """Remove what is not of the checkpoint, and parts of files: of copiers that were killed."""
    known = {entry.path for entry in manifest.files}
    try:
        for part in (place / layout.SHARES).glob("*.part"):
            part.unlink(missing_ok=True)
        for path in layout.sizes(place).keys() - known if place.exists() else ():
            (place / path).unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, place) from error


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _folders(source: Path, manifest: Manifest) -> list[str]:
    """All folders, also those without files: a framework may have a use for them."""
    found = {os.path.relpath(folder, source) for folder, _, _ in os.walk(source)}
    # The manifest's own too: where a folder is gone its files are, and it is they that are missed.
    return sorted(found | {entry.path.rpartition("/")[0] for entry in manifest.files} - {"", "."})


def _is_file(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _seal(step_dir: Path) -> str:
    manifest = lookup.whole_at(step_dir)
    return manifest.seal if manifest else ""
