"""A version in an object store: found, its manifest read, its objects read by ranges, each pinned to one ETag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pitools.core.errors import DataError, UsageError
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.sources.base import Dataset, all_folders, make_dataset
from pitools.stage.sources.object_store.client import ObjectUrl, cached_store, call_store, changed_error, parse_url
from pitools.stage.sources.object_store.isolated import run_isolated as run_isolated
from pitools.store import manifest as manifests
from pitools.store.manifest import FILE_NAME

if TYPE_CHECKING:
    from obstore.store import ObjectStore

READ_BYTES = 8 << 20
# A manifest of a million files is about this large; what is larger is none.
MANIFEST_BYTES = 256 << 20
_MAX_OBJECTS = 2_000_000
_PAGE_SIZE = 1000
_MAX_VERSIONS = 1000


class ListedObject(NamedTuple):
    """One object of a store without a manifest. path: below the listed URL. etag: what it is pinned to when read."""

    path: str
    bytes: int
    etag: str


class ObjectStoreSource(msgspec.Struct, frozen=True):
    """The objects below a URL. known: size and ETag ("" where not yet known) by path, so that they need no asking."""

    url: str
    known: Mapping[str, tuple[int, str]] = {}

    def __post_init__(self) -> None:
        parse_url(self.url)

    def __repr__(self) -> str:
        return f"RemoteSource({self.url!r})"

    @property
    def label(self) -> str:
        """The URL; it never holds a secret."""
        return self.url

    @property
    def block(self) -> int:
        """Bytes to ask for in one request: enough that the wait for its first byte does not count."""
        return READ_BYTES

    def connect(self) -> ObjectStoreReader:
        """A reader, for one thread of a process that will not fork. Raises as `objectstore.open_store`."""
        return ObjectStoreReader(parse_url(self.url), self.known)


class ObjectStoreReader:
    """Opens objects. Threads of a process share the store's connections; each has its own reader."""

    def __init__(self, url: ObjectUrl, known_objects: Mapping[str, tuple[int, str]]) -> None:
        self._url, self._known_objects, self._store = url, known_objects, cached_store(url)

    def open(self, path: str) -> ObjectFile:
        """An object by its path below the URL; no request where its size is known. Raises as `objectstore.ask`."""
        import obstore

        size, etag = self._known_objects.get(path, (0, ""))
        if not size:  # not known, or empty: then no read would notice that it is missing
            meta = call_store(lambda: obstore.head(self._store, self._url.key(path)), self._url, path)
            if path in self._known_objects and meta["size"]:
                raise _size_error(0, meta["size"], f"{self._url.url}/{path}")
            size, etag = meta["size"], etag or _etag_of(meta)
        return ObjectFile(self._store, self._url, path, size, etag)

    def close(self) -> None:
        """Connections stay with the process, for its other readers."""


class ObjectFile:
    """One object. size: bytes, as known beforehand or when it was opened."""

    def __init__(self, store: ObjectStore, url: ObjectUrl, path: str, size: int, etag: str) -> None:
        self.size, self._store, self._url, self._path, self._etag = size, store, url, path, etag

    def read_into(self, view: memoryview, offset: int) -> int:
        """Get the range at `offset` into `view`; the count, 0 at the end.

        Raises DataError when the object has another size than was known or was replaced, else as `objectstore.ask`.
        """
        want = min(len(view), self.size - offset)
        if want <= 0:
            return 0
        size, identity, data = call_store(partial(self._get, offset, offset + want), self._url, self._path)
        if size != self.size:
            raise _size_error(self.size, size, f"{self._url.url}/{self._path}")
        # Not every server heeds If-Match; what it sends back says which object it read.
        self._etag = self._etag or identity
        if identity != self._etag or len(data) != want:
            raise changed_error(f"{self._url.url}/{self._path}")
        view[:want] = data
        return want

    def close(self) -> None:
        """Nothing is open between requests."""

    def _get(self, start: int, end: int) -> tuple[int, str, memoryview]:
        import obstore

        # A whole object is asked for as such: that is understood also where requests for parts are not.
        options: dict[str, Any] = {"range": (start, end)} if start or end < self.size else {}
        if self._etag and not self._etag.startswith(("W/", "@")):  # weak ones never match
            options["if_match"] = f'"{self._etag}"'
        result = obstore.get(self._store, self._url.key(self._path), options=options)  # type: ignore[arg-type]
        meta = result.meta  # made anew whenever it is asked for
        return meta["size"], _etag_of(meta), memoryview(result.bytes() if meta["size"] == self.size else b"")


def load_remote_version(url: str) -> Dataset:
    """Read and check the manifest of a version's URL. Raises DataError when there is none, else as `objectstore.ask`.

    Safe before a fork: see `apart`.
    """
    place = parse_url(url)
    data = run_isolated(lambda _: _get_manifest(place))
    manifest = manifests.decode_manifest(data, f"{place.url}/{FILE_NAME}")
    source = ObjectStoreSource(place.url, {entry.path: (entry.bytes, "") for entry in manifest.files})
    return make_dataset(source, manifest, data, name=place.prefix.rpartition("/")[2])


def find_remote_version(url: str) -> str:
    """The version's URL that `url` means: itself, or the only version below `<root>/<name>`.

    Raises UsageError when it holds several versions, DataError when it holds none, else as `objectstore.ask`.
    """
    place = parse_url(url)
    inside = run_isolated(partial(_versions, place))
    if inside is None:
        return place.url
    if not inside:
        raise _no_manifest(place)
    if len(inside) > 1:
        names = ", ".join(name.rpartition("/")[2] for name in inside)
        raise UsageError(f"there are {len(inside)} versions: {names}", where=place.url, hint="name one of them")
    return place._replace(prefix=inside[0]).url


def list_datasets(url: str, wants: Callable[[str], bool]) -> dict[str, list[tuple[str, int]]]:
    """Datasets right below a URL; of wanted ones each version's URL and its upload time in ns. Raises as `find`."""
    return run_isolated(partial(_list_datasets, parse_url(url), wants))


def list_objects(url: str) -> list[ListedObject]:
    """All objects below a URL, sorted by path: for a store that has no manifest. Raises as `objectstore.ask`."""
    place = parse_url(url)
    found = run_isolated(partial(_list, place))
    # An empty object of a folder's name is how some tools draw folders.
    folders = all_folders(tuple(manifests.FileEntry(path=entry.path, bytes=0, digest="") for entry in found))
    if both := [entry.path for entry in found if entry.bytes and entry.path in folders]:
        message = f"{min(both)!r} is an object, and others are below it: on a disk that cannot be"
        raise DataError(message, where=place.url, hint="rename the object, or those below it")
    return sorted(entry for entry in found if entry.path and (entry.bytes or entry.path not in folders))


def listed_source(url: str, listed: Iterable[ListedObject]) -> ObjectStoreSource:
    """The source of what was listed there: whatever is replaced after the listing is refused."""
    return ObjectStoreSource(parse_url(url).url, {entry.path: (entry.bytes, entry.etag) for entry in listed})


def _get_manifest(place: ObjectUrl) -> bytes:
    store = cached_store(place)
    import obstore

    def get() -> tuple[int, bytes]:
        result = obstore.get(store, place.key(FILE_NAME))
        size = result.meta["size"]
        return size, bytes(result.bytes()) if size <= MANIFEST_BYTES else b""

    try:
        size, data = call_store(get, place, FILE_NAME)
    except DataError:
        raise _no_manifest(place) from None
    if size > MANIFEST_BYTES:
        raise DataError(f"not a manifest: it has {size} bytes", where=f"{place.url}/{FILE_NAME}")
    return data


def _no_manifest(place: ObjectUrl) -> DataError:
    message, hint = f"not a dataset: it has no {FILE_NAME}", "give one version's URL: s3://BUCKET/<name>/<version>"
    return DataError(message, where=place.url, hint=hint)


def _versions(place: ObjectUrl, slot: WorkerSlot) -> list[str] | None:
    """Prefixes of the versions right below, sorted; None where this is one itself."""
    if _modified_ns(place):
        return None
    return [prefix for prefix in _folders(place, slot) if _modified_ns(place._replace(prefix=prefix))]


def _list_datasets(
    place: ObjectUrl, wants: Callable[[str], bool], slot: WorkerSlot
) -> dict[str, list[tuple[str, int]]]:
    def versions(prefix: str) -> list[tuple[str, int]]:
        found = (place._replace(prefix=each) for each in _folders(place._replace(prefix=prefix), slot))
        return [(version.url, ns) for version in found if (ns := _modified_ns(version))]

    prefixes = {prefix.rpartition("/")[2]: prefix for prefix in _folders(place, slot)}
    return {name: versions(prefix) if wants(name) else [] for name, prefix in prefixes.items()}


def _folders(place: ObjectUrl, slot: WorkerSlot) -> list[str]:
    """Prefixes right below, sorted."""
    store = cached_store(place)
    import obstore

    slot.add_bytes(1)
    below = call_store(lambda: obstore.list_with_delimiter(store, place.prefix or None), place)["common_prefixes"]
    if len(below) > _MAX_VERSIONS:
        raise UsageError("too many folders to look for versions in", where=place.url, hint="name the version")
    return sorted(below)


def _modified_ns(place: ObjectUrl) -> int:
    """When the manifest of a version was uploaded; 0 where there is none."""
    store = cached_store(place)
    import obstore

    with suppress(DataError):
        meta = call_store(lambda: obstore.head(store, place.key(FILE_NAME)), place, FILE_NAME)
        return int(meta["last_modified"].timestamp() * 1e9)
    return 0


def _list(place: ObjectUrl, slot: WorkerSlot) -> list[ListedObject]:
    store = cached_store(place)
    import obstore

    def pages() -> Iterator[Any]:
        return iter(obstore.list(store, f"{place.prefix}/" if place.prefix else None, chunk_size=_PAGE_SIZE))

    found: list[ListedObject] = []
    stream = call_store(pages, place)
    cut = len(place.key(""))
    while page := call_store(lambda: next(stream, None), place):
        slot.add_bytes(len(page))  # a long listing is not a stalled one
        if not all(f"{meta['path']}/".startswith(place.key("")) for meta in page):
            raise DataError("the store lists objects that were not asked for", where=place.url)
        found += [ListedObject(meta["path"][cut:], meta["size"], _etag_of(meta)) for meta in page]
        if len(found) > _MAX_OBJECTS:
            raise UsageError(f"more than {_MAX_OBJECTS:,} objects", where=place.url, hint="name one store in it")
    return found


def _etag_of(meta: Mapping[str, Any]) -> str:
    """What tells this object from its successor: its ETag (not every listing has it in quotes), else its time."""
    if etag := meta["e_tag"]:
        return str(etag).strip('"')
    when: datetime = meta["last_modified"]
    return f"@{when.timestamp():.0f}"


def _size_error(known: int, size: int, where: str) -> DataError:
    message = f"the manifest says {known} bytes, the object has {size}"
    return DataError(message, where=where, hint="it was changed or cut short: upload it again")
