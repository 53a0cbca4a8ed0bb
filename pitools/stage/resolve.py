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
from pitools.stage.sources.local import LocalSource, reading
from pitools.stage.sources.open import find, is_store, is_url, load
from pitools.store import manifest as manifests
from pitools.store.manifest import FILE_NAME, Manifest
from pitools.store.resolve import caution

if TYPE_CHECKING:
    from pitools.stage.sources.store_listing import Survey

T = TypeVar("T")


class Choice(NamedTuple):
    """A part of a dataset, as it was asked for; all of it when nothing is said."""

    arrays: tuple[str, ...] = ()
    steps: str = ""
    episodes: str = ""


EVERYTHING = Choice()


def chosen(arrays: Iterable[str], steps: str, episodes: str) -> Choice:
    """The choice of what a user wrote, names apart by commas: in one order, so that one part has one name.

    Raises UsageError for names that are none.
    """
    names = {name.strip().strip("/") for text in arrays for name in text.split(",")} - {""}
    if any(arrays) and not names:
        raise UsageError("it names no array", where="--arrays", hint="such as action,obs/state or 'obs/*_image'")
    return Choice(tuple(sorted(names)), steps, episodes)


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """A Zarr store without a manifest, to be staged. manifest: its files, without digests.

    key: 32 hex digits of the source, what it looks like, and the choice; in place of a version until that is known.
    """

    source: Source
    survey: Survey
    manifest: Manifest
    key: str


def resolve(
    place: str | Path, choice: Choice = EVERYTHING, note: Callable[[str], None] = lambda _: None
) -> Dataset | Store:
    """What is to be staged. note: is called with what a user should know. Raises UsageError, DataError, and as the
    source does.
    """
    if store := _survey(place):
        return _store(choice, store, note)
    dataset = load(find(place))
    if isinstance(dataset.source, LocalSource) and (text := caution(dataset.source.folder)):
        note(text)
    if choice == EVERYTHING:
        return dataset
    from pitools.stage import subset

    found = _apart(
        dataset.source, lambda read: subset.subset(dataset.manifest, dataset.version, read, **choice._asdict())
    )
    if found == dataset.manifest:
        note("every file is needed for this choice: the whole version is meant")
        return dataset
    data = manifests.encode(found)
    return structs.replace(dataset, manifest=found, data=data, version=manifests.version(data))


def survey_again(store: Store) -> Survey:
    """The store as it is now. Raises DataError when it is none any more."""
    from pitools.stage.sources import store_listing

    found = _survey(store.source.label)
    if found is None:
        raise store_listing.changed(store.source.label)
    return found[1]


def _survey(place: str | Path) -> tuple[Source, Survey] | None:
    """A store without a manifest; None for what has one, or is no store at all."""
    if is_url(place):
        return _survey_url(str(place))
    folder = Path(place).absolute()
    with reading(folder):
        # `lexists`: whatever is called manifest.json makes it a version, though perhaps a broken one.
        if os.path.lexists(folder / FILE_NAME) or not is_store(folder):
            return None
    from pitools.stage.sources import store_listing

    return LocalSource(folder=folder), store_listing.survey(folder)


def _survey_url(url: str) -> tuple[Source, Survey] | None:
    from pitools.stage.sources import store_listing
    from pitools.stage.sources.object_store import remote

    with contextlib.suppress(DataError):
        remote.find(url)  # which is quick, and a listing of a large version is not
        return None
    listed = remote.listing(url)
    if not store_listing.is_store({entry.path for entry in listed if "/" not in entry.path}):
        return None
    source = remote.listed_source(url, listed)
    return source, store_listing.survey_listing(source.url.rpartition("/")[2], listed, source.url)


def _store(choice: Choice, found: tuple[Source, Survey], note: Callable[[str], None]) -> Store:
    from pitools.stage.sources import store_listing

    source, survey = found
    manifest = _apart(source, lambda read: store_listing.describe(survey, read))
    for path in survey.left_out:
        note(f"{path} is left out: it was being written")
    if choice != EVERYTHING:
        from pitools.stage import subset

        manifest = _apart(source, lambda read: subset.subset(manifest, "", read, **choice._asdict()))
    # Written again, it is another one, of which nothing that was copied before is any use.
    key = hashlib.sha256(msgspec.json.encode([source.label, survey.signature, *choice])).hexdigest()[:32]
    return Store(source=source, survey=survey, manifest=manifest, key=key)


def _apart(source: Source, work: Callable[[Callable[[str], bytes]], T]) -> T:
    """Do work that reads files of a source; in a process of its own where the source's library forbids a fork later."""

    from pitools.stage.sources import store_listing

    def here() -> T:
        reader = source.connect()
        try:
            return work(lambda path: store_listing.read_whole(reader, path))
        except DataError as error:  # of a file, as the manifest names it
            if not error.where or is_url(error.where) or Path(error.where).is_absolute():
                raise
            raise DataError(error.what, where=f"{source.label}/{error.where}", hint=error.hint) from error
        finally:
            reader.close()

    if isinstance(source, LocalSource):
        return here()
    from pitools.stage.sources.object_store import remote

    return remote.apart(lambda _: here())
