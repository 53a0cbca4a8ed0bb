"""Stage one version onto this node: found there, or copied and verified in one pass and published by a rename."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from pitools.core.errors import DataError, NoSpace, PitError, TryLater
from pitools.core.fs import os_error, sync_dir
from pitools.core.lock import Holder, Tell
from pitools.core.progress import Advance
from pitools.core.record import Record
from pitools.stage.cache import records
from pitools.stage.cache.disk_quota import Limits
from pitools.stage.cache.inventory import looks_whole
from pitools.stage.cache.layout import (
    journal_path,
    locked,
    move_aside,
    object_path,
    partial_path,
    prepare,
    replace_set,
    require_safe,
    touch_lease,
)
from pitools.stage.copy.copy import Orders, is_durable, readers_for
from pitools.stage.copy.resume import Moved, discard, fill, seal
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.local import LocalSource
from pitools.stage.verify import is_whole
from pitools.store.publish import publish, sync_names

if TYPE_CHECKING:
    from pitools.stage.fanout.group import Group
    from pitools.stage.fanout.session import Fan

State = Literal["staged", "present", "repaired"]


class Stage(Record, frozen=True, kw_only=True, tag="pit.stage/1"):
    """What staging one version did.

    state: `staged` (it was absent), `present` (nothing was copied), `repaired` (a damaged copy was replaced).
    path: the folder to train from. bytes: of all files. copied_bytes: read from the source by this call;
    peer_bytes: read from other nodes; linked_bytes: shared with versions staged before; resumed_bytes: done by an
    interrupted call before this one. verified_bytes: read and compared by this call, with the manifest's digests, or
    where there are none yet, of a plain store, with the checksums that the store itself holds.
    """

    dataset: str
    version: str
    source: str
    path: str
    state: State
    files: int
    bytes: int
    copied_bytes: int
    verified_bytes: int
    wall_s: float
    node: str
    linked_bytes: int = 0
    resumed_bytes: int = 0
    peer_bytes: int = 0


def stage(
    dataset: Dataset,
    root: Path,
    *,
    verify: bool = False,
    readers: int = 0,
    bytes_per_s: float = 0,
    timeout_s: float = 3600,
    limits: Limits | None = None,
    shared: bool = False,
    group: Group | None = None,
    advance: Advance = lambda _: None,
    finished: Callable[[int], None] = lambda _: None,
    waiting: Callable[[Holder], None] = lambda _: None,
) -> Stage:
    """Make `<root>/objects/<version>/` hold this version, whole, whatever was there; safe to repeat and to race.

    A copy that stands is believed by names and sizes, or with `verify` by content. readers: threads, 0 for the
    default. bytes_per_s: the most to read from the source, 0 for no limit. timeout_s: how long to wait for another
    process that stages the same version; `waiting` is called with who that is once a second. limits: of the root.
    shared: open the root to all users' reading. group: the nodes that stage this together; each must call this.
    advance, finished: called with bytes, and with the place in the manifest of each file that is done.

    Forks; from a process with threads of its own, run the command instead. Raises DataError (the source is not what
    it claims), NoSpace, ClusterError (the root is refused), TryLater.
    """
    started = time.monotonic()
    root = root.absolute()
    readers = readers or readers_for(dataset)
    final = object_path(root, dataset.version)

    def whole() -> bool:
        if verify:
            return is_whole(final, dataset, readers=readers, advance=advance)
        return looks_whole(final, dataset)

    require_safe(root, reading=True)
    if os.path.lexists(final):  # before it is looked at, so that what is found is not evicted the next moment
        with contextlib.suppress(OSError, PitError):  # who may only read the root cannot say that it is used
            touch_lease(root, dataset.version)
    state: State = "present"
    moved = None
    with _fanned(dataset, root, group) as fan:
        if not whole():  # without the lock, so that a root that can only be read serves what it has
            prepare(root, shared=shared)
            with locked(root, dataset.version, timeout_s=timeout_s, waiting=waiting) as tell:
                if not whole():
                    state = "repaired" if os.path.lexists(final) else "staged"
                    orders = _orders(fan, Orders(readers=readers, bytes_per_s=bytes_per_s, finished=finished))
                    source = fan.source if fan else dataset.source
                    moved = _replace(
                        structs.replace(dataset, source=source),
                        final,
                        root,
                        orders,
                        limits or Limits(),
                        advance=telling(tell, dataset.manifest.total_bytes, advance),
                        link=not verify,
                    )
        if fan:
            fan.all_done()
            fan.linger()
        return record_of(dataset, final, state, moved, started, fan=fan, verified=verify)


def record_of(
    dataset: Dataset,
    final: Path,
    state: State,
    moved: Moved | None,
    started: float,
    *,
    fan: Fan | None = None,
    verified: bool = False,
) -> Stage:
    """What staging did. started: on the monotonic clock. verified: whether a set that stood was read."""
    total = dataset.manifest.total_bytes
    copied = moved.copied if moved else 0
    from_peers = fan.received().peer_bytes if fan else 0
    return Stage(
        dataset=dataset.manifest.name,
        version=dataset.version,
        source=dataset.source.label,
        path=str(final),
        state=state,
        files=len(dataset.manifest.files),
        bytes=total,
        copied_bytes=fan.received().source_bytes if fan else copied,
        verified_bytes=copied if moved else total if verified else 0,
        wall_s=time.monotonic() - started,
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        linked_bytes=moved.linked if moved else 0,
        resumed_bytes=moved.resumed if moved else 0,
        peer_bytes=from_peers,
    )


def _replace(
    dataset: Dataset, final: Path, root: Path, orders: Orders, limits: Limits, *, advance: Advance, link: bool = True
) -> Moved:
    """Bring the version into its unfinished folder, going on where an interrupted call stopped, and publish it."""
    try:
        moved = fill(dataset, root, orders, limits, advance=advance, link=link)
        new = seal(partial_path(root, dataset.version), dataset)
        # First, because a set without a record is one of unknown source, which is never evicted.
        records.write(
            root,
            dataset.version,
            source=dataset.source.label,
            n_bytes=dataset.manifest.total_bytes,
            signature=records.read(root, dataset.version).signature,
        )
        publish_new(new, final, root, synced=not is_durable(dataset.manifest.files))
        journal_path(root, dataset.version).unlink(missing_ok=True)
    except (DataError, NoSpace):
        # This version cannot come from this source, or not to this disk: nothing is worth keeping room for.
        discard(root, dataset.version)
        raise
    except PitError:
        if not journal_path(root, dataset.version).exists():  # nothing was begun
            discard(root, dataset.version)
        raise
    except OSError as error:
        raise os_error(error, partial_path(root, dataset.version)) from error
    return moved


def publish_new(new: Path, final: Path, root: Path, *, synced: bool = False) -> None:
    """Rename a sealed folder to its version's place, with the version's lock held; a damaged set there gives way.

    Readers see one of the two at any moment, where the file system can exchange names; and who leases the damaged set
    keeps it. synced: the names in the folders below it are on the disk already. Raises NoSpace, TryLater, ClusterError.
    """
    if os.path.lexists(final):
        try:
            sync_names(new, below=not synced)
            if replace_set(new, final, root):
                sync_dir(final.parent)
                return
        except OSError as error:
            raise os_error(error, final) from error
        move_aside(final, root)
    if not publish(new, final, synced=synced):
        raise TryLater("something else took the set's place meanwhile", where=str(final), hint="run this again")


def telling(tell: Tell, total: int, advance: Advance) -> Advance:
    """An `advance` that also says to those who wait for this version how far it is."""
    moved = 0

    def both(count: int) -> None:
        nonlocal moved
        moved += count
        tell(moved, total)
        advance(count)

    return both


@contextmanager
def _fanned(dataset: Dataset, root: Path, group: Group | None) -> Iterator[Fan | None]:
    if group is None:
        yield None
        return
    from pitools.stage.fanout.session import joined

    folders = [partial_path(root, dataset.version), object_path(root, dataset.version)]
    source = dataset.source
    if isinstance(source, LocalSource):
        source = structs.replace(source, once=True)
    with joined(source, dataset.manifest.files, dataset.version, folders, group) as fan:
        try:
            yield fan
        finally:
            if names := fan.received().distrusted:
                what = "gave wrong bytes, which were read again from the source: run `pit-stage check` there"
                print(f"pit-stage: note: {', '.join(names)} {what}", file=sys.stderr, flush=True)


def _orders(fan: Fan | None, orders: Orders) -> Orders:
    """With a fan: its order, and each file that is done is told to the other nodes."""
    if fan is None:
        return orders

    def finished(index: int) -> None:
        fan.done(index)
        orders.finished(index)

    return orders._replace(first=fan.groups(), finished=finished)
