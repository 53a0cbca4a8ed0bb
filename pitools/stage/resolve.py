"""Resolve SOURCE and a selection of arrays and steps to a version, a part of one, or a store without a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from pitools.core.errors import DataError, UsageError
from pitools.stage.sources.base import DatasetVersion, Source
from pitools.stage.sources.find import find_source, is_url, is_zarr_store, load_version
from pitools.stage.sources.local import LocalSource, translate_errors
from pitools.store import manifest as manifests
from pitools.store.manifest import MANIFEST_FILE, Manifest
from pitools.store.resolve import warning_for

if TYPE_CHECKING:
    from pitools.stage.sources.store_listing import StoreListing

T = TypeVar("T")


class Selection(NamedTuple):
    """The requested part of a dataset; empty fields select all of it."""

    arrays: tuple[str, ...] = ()
    steps: str = ""
    episodes: str = ""


SELECT_ALL = Selection()


def parse_selection(arrays: Iterable[str], steps: str, episodes: str) -> Selection:
    """Parse the options of a selection; comma-separated names are sorted, so that equal parts get equal versions.

    Raises UsageError for an empty name list.
    """
    names = {name.strip().strip("/") for text in arrays for name in text.split(",")} - {""}
    if any(arrays) and not names:
        raise UsageError("no array is named", where="--arrays", hint="such as action,obs/state or 'obs/*_image'")
    return Selection(tuple(sorted(names)), steps, episodes)


class PlainStore(msgspec.Struct, frozen=True, kw_only=True):
    """A Zarr store without a manifest of ours, to be staged. manifest: its files, without digests.

    key: 32 hex digits over source, listing and selection; in place of a version until that is known.
    """

    source: Source
    listing: StoreListing
    manifest: Manifest
    key: str


def resolve_source(
    location: str | Path, selection: Selection = SELECT_ALL, warn: Callable[[str], None] = lambda _: None
) -> DatasetVersion | PlainStore:
    """Resolve a location. warn: called with notes for the user.

    Raises UsageError, DataError, and as the source does.
    """
    if store := _list_plain_store(location):
        return _make_plain_store(selection, store, warn)
    dataset = load_version(find_source(location))
    if isinstance(dataset.source, LocalSource) and (warning := warning_for(dataset.source.folder)):
        warn(warning)
    if selection == SELECT_ALL:
        return dataset
    from pitools.stage import subset

    subset_manifest = _read_isolated(
        dataset.source, lambda read: subset.make_subset(dataset.manifest, dataset.version, read, **selection._asdict())
    )
    if subset_manifest == dataset.manifest:
        warn("this selection needs every file: the whole version is staged")
        return dataset
    data = manifests.encode_manifest(subset_manifest)
    return structs.replace(dataset, manifest=subset_manifest, data=data, version=manifests.version_of(data))


def relist(store: PlainStore) -> StoreListing:
    """List the store again. Raises DataError when there is no store any more."""
    from pitools.stage.sources import store_listing

    source_listing = _list_plain_store(store.source.label)
    if source_listing is None:
        raise store_listing.changed_error(store.source.label)
    return source_listing[1]


def _list_plain_store(location: str | Path) -> tuple[Source, StoreListing] | None:
    """List a store without a manifest; None for one that has a manifest, or for no store."""
    if is_url(location):
        return _list_url(str(location))
    folder = Path(location).absolute()
    with translate_errors(folder):
        # `lexists`: any entry named manifest.json makes it a version, perhaps a broken one.
        if os.path.lexists(folder / MANIFEST_FILE) or not is_zarr_store(folder):
            return None
    from pitools.stage.sources import store_listing

    return LocalSource(folder=folder), store_listing.list_store(folder)


def _list_url(url: str) -> tuple[Source, StoreListing] | None:
    from pitools.stage.sources import store_listing
    from pitools.stage.sources.object_store import remote

    with contextlib.suppress(DataError):
        remote.find_remote_version(url)  # before listing, which is slow for a large version
        return None
    objects = remote.list_objects(url)
    if not store_listing.is_plain_store({entry.path for entry in objects if "/" not in entry.path}):
        return None
    source = remote.pinned_source(url, objects)
    return source, store_listing.make_listing(source.url.rpartition("/")[2], objects, source.url)


def _make_plain_store(
    selection: Selection, source_listing: tuple[Source, StoreListing], warn: Callable[[str], None]
) -> PlainStore:
    from pitools.stage.sources import store_listing

    source, listing = source_listing
    manifest = _read_isolated(source, lambda read: store_listing.make_manifest(listing, read))
    for path in listing.left_out:
        warn(f"{path} is left out: an unfinished write")
    if selection != SELECT_ALL:
        from pitools.stage import subset

        manifest = _read_isolated(source, lambda read: subset.make_subset(manifest, "", read, **selection._asdict()))
    # A rewritten store gets another key: nothing copied before can be reused.
    key = hashlib.sha256(msgspec.json.encode([source.label, listing.signature, *selection])).hexdigest()[:32]
    return PlainStore(source=source, listing=listing, manifest=manifest, key=key)


def _read_isolated(source: Source, work: Callable[[Callable[[str], bytes]], T]) -> T:
    """Call `work` with a reader of a source's files; in a child process where the source's library forbids a fork."""

    from pitools.stage.sources import store_listing

    def read() -> T:
        reader = source.connect()
        try:
            return work(lambda path: store_listing.read_file(reader, path))
        except DataError as error:  # of a file, by its path in the manifest
            if not error.where or is_url(error.where) or Path(error.where).is_absolute():
                raise
            raise DataError(error.message, where=f"{source.label}/{error.where}", hint=error.hint) from error
        finally:
            reader.close()

    if isinstance(source, LocalSource):
        return read()
    from pitools.stage.sources.object_store import remote

    return remote.run_isolated(lambda _: read())
