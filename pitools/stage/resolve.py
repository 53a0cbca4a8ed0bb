"""What a user means by SOURCE and a choice of arrays and steps: a version, a part of one, or a store without one."""

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
from pitools.stage.sources.base import Dataset, Source
from pitools.stage.sources.local import LocalSource, translate_errors
from pitools.stage.sources.open import find_source, is_url, is_zarr_store, load_dataset
from pitools.store import manifest as manifests
from pitools.store.manifest import FILE_NAME, Manifest
from pitools.store.resolve import warning_for

if TYPE_CHECKING:
    from pitools.stage.sources.store_listing import StoreListing

T = TypeVar("T")


class Selection(NamedTuple):
    """A part of a dataset, as it was asked for; all of it when nothing is said."""

    arrays: tuple[str, ...] = ()
    steps: str = ""
    episodes: str = ""


SELECT_ALL = Selection()


def parse_selection(arrays: Iterable[str], steps: str, episodes: str) -> Selection:
    """Parse the options of a selection, comma-separated names sorted: one part has one name.

    Raises UsageError for names that are none.
    """
    names = {name.strip().strip("/") for text in arrays for name in text.split(",")} - {""}
    if any(arrays) and not names:
        raise UsageError("it names no array", where="--arrays", hint="such as action,obs/state or 'obs/*_image'")
    return Selection(tuple(sorted(names)), steps, episodes)


class UnmanagedStore(msgspec.Struct, frozen=True, kw_only=True):
    """A Zarr store without a manifest, to be staged. manifest: its files, without digests.

    key: 32 hex digits of the source, what it looks like, and the choice; in place of a version until that is known.
    """

    source: Source
    survey: StoreListing
    manifest: Manifest
    key: str


def resolve_source(
    location: str | Path, choice: Selection = SELECT_ALL, warn: Callable[[str], None] = lambda _: None
) -> Dataset | UnmanagedStore:
    """Resolve a location. warn: called with notes for the user. Raises UsageError, DataError, and as the
    source does.
    """
    if store := _list_unmanaged(location):
        return _unmanaged_store(choice, store, warn)
    dataset = load_dataset(find_source(location))
    if isinstance(dataset.source, LocalSource) and (warning := warning_for(dataset.source.folder)):
        warn(warning)
    if choice == SELECT_ALL:
        return dataset
    from pitools.stage import subset

    subset_manifest = _read_isolated(
        dataset.source, lambda read: subset.make_subset(dataset.manifest, dataset.version, read, **choice._asdict())
    )
    if subset_manifest == dataset.manifest:
        warn("every file is needed for this choice: the whole version is meant")
        return dataset
    data = manifests.encode_manifest(subset_manifest)
    return structs.replace(dataset, manifest=subset_manifest, data=data, version=manifests.version_of(data))


def list_again(store: UnmanagedStore) -> StoreListing:
    """List the store as it is now. Raises DataError when no store is there any more."""
    from pitools.stage.sources import store_listing

    listed = _list_unmanaged(store.source.label)
    if listed is None:
        raise store_listing.changed_error(store.source.label)
    return listed[1]


def _list_unmanaged(place: str | Path) -> tuple[Source, StoreListing] | None:
    """List a store without a manifest; None for one that has a manifest, or for no store."""
    if is_url(place):
        return _survey_url(str(place))
    folder = Path(place).absolute()
    with translate_errors(folder):
        # `lexists`: whatever is called manifest.json makes it a version, though perhaps a broken one.
        if os.path.lexists(folder / FILE_NAME) or not is_zarr_store(folder):
            return None
    from pitools.stage.sources import store_listing

    return LocalSource(folder=folder), store_listing.list_store(folder)


def _survey_url(url: str) -> tuple[Source, StoreListing] | None:
    from pitools.stage.sources import store_listing
    from pitools.stage.sources.object_store import remote

    with contextlib.suppress(DataError):
        remote.find_remote_version(url)  # which is quick, and a listing of a large version is not
        return None
    listed = remote.list_objects(url)
    if not store_listing.is_store({entry.path for entry in listed if "/" not in entry.path}):
        return None
    source = remote.listed_source(url, listed)
    return source, store_listing.list_remote_store(source.url.rpartition("/")[2], listed, source.url)


def _unmanaged_store(
    choice: Selection, listed: tuple[Source, StoreListing], warn: Callable[[str], None]
) -> UnmanagedStore:
    from pitools.stage.sources import store_listing

    source, survey = listed
    manifest = _read_isolated(source, lambda read: store_listing.make_manifest(survey, read))
    for path in survey.left_out:
        warn(f"{path} is left out: it was being written")
    if choice != SELECT_ALL:
        from pitools.stage import subset

        manifest = _read_isolated(source, lambda read: subset.make_subset(manifest, "", read, **choice._asdict()))
    # Written again, it is another one, of which nothing that was copied before is any use.
    key = hashlib.sha256(msgspec.json.encode([source.label, survey.signature, *choice])).hexdigest()[:32]
    return UnmanagedStore(source=source, survey=survey, manifest=manifest, key=key)


def _read_isolated(source: Source, work: Callable[[Callable[[str], bytes]], T]) -> T:
    """Run `work` with a reader of a source's files; in a child process where its library forbids a fork."""

    from pitools.stage.sources import store_listing

    def read() -> T:
        reader = source.connect()
        try:
            return work(lambda path: store_listing.read_file(reader, path))
        except DataError as error:  # of a file, as the manifest names it
            if not error.where or is_url(error.where) or Path(error.where).is_absolute():
                raise
            raise DataError(error.message, where=f"{source.label}/{error.where}", hint=error.hint) from error
        finally:
            reader.close()

    if isinstance(source, LocalSource):
        return read()
    from pitools.stage.sources.object_store import remote

    return remote.run_isolated(lambda _: read())
