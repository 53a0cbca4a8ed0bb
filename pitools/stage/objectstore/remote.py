"""A version in an object store: found, its manifest read, its objects read by ranges, each pinned to one ETag."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from pitools.core.errors import DataError, UsageError
from pitools.stage.engine import pool
from pitools.stage.objectstore.client import Place, ask, changed, open_store, parse
from pitools.stage.source import Dataset, checked, folders_of
from pitools.store import manifest as manifests
from pitools.store.manifest import FILE_NAME

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
BLOCK = 8 << 20
# A manifest of a million files is about this large; what is larger is none.
MANIFEST_BYTES = 256 << 20
_OBJECTS = 2_000_000
_PAGE = 1000
_VERSIONS = 1000


class Listed(NamedTuple):
    """One object of a store without a manifest. path: below the listed URL. etag: what it is pinned to when read."""

    path: str
    bytes: int
    etag: str


class RemoteSource(msgspec.Struct, frozen=True):
    """The objects below a URL. known: size and ETag ("" where not yet known) by path, so that they need no asking."""

    url: str
    known: Mapping[str, tuple[int, str]] = {}

    def __post_init__(self) -> None:
        parse(self.url)

    def __repr__(self) -> str:
        return f"RemoteSource({self.url!r})"

    @property
    def label(self) -> str:
        """The URL; it never holds a secret."""
        return self.url

    @property
    def block(self) -> int:
        """Bytes to ask for in one request: enough that the wait for its first byte does not count."""
        return BLOCK

    def connect(self) -> RemoteReader:
        """A reader, for one thread of a process that will not fork. Raises as `objectstore.open_store`."""
        return RemoteReader(parse(self.url), self.known)


class RemoteReader:
    """Opens objects. Threads of a process share the store's connections; each has its own reader."""

    def __init__(self, place: Place, known: Mapping[str, tuple[int, str]]) -> None:
        self._place, self._known, self._store = place, known, _store_of(place)

    def open(self, path: str) -> RemoteFile:
        """An object by its path below the URL; no request where its size is known. Raises as `objectstore.ask`."""
        import obstore

        size, etag = self._known.get(path, (0, ""))
        if not size:  # not known, or empty: then no read would notice that it is missing
            meta = ask(lambda: obstore.head(self._store, self._place.key(path)), self._place, path)
            if path in self._known and meta["size"]:
                raise _other_size(0, meta["size"], f"{self._place.url}/{path}")
            size, etag = meta["size"], etag or _identity(meta)
        return RemoteFile(self._store, self._place, path, size, etag)

    def close(self) -> None:
        """Connections stay with the process, for its other readers."""


class RemoteFile:
    """One object. size: bytes, as known beforehand or when it was opened."""

    def __init__(self, store: ObjectStore, place: Place, path: str, size: int, etag: str) -> None:
        self.size, self._store, self._place, self._path, self._etag = size, store, place, path, etag

    def read_into(self, view: memoryview, offset: int) -> int:
        """Get the range at `offset` into `view`; the count, 0 at the end.

        Raises DataError when the object has another size than was known or was replaced, else as `objectstore.ask`.
        """
        want = min(len(view), self.size - offset)
        if want <= 0:
            return 0
        meta, data = ask(partial(self._get, offset, offset + want), self._place, self._path)
        where = f"{self._place.url}/{self._path}"
        if meta["size"] != self.size:
            raise _other_size(self.size, meta["size"], where)
        # Not every server heeds If-Match; what it sends back says which object it read.
        self._etag = self._etag or _identity(meta)
        if _identity(meta) != self._etag or len(data) != want:
            raise changed(where)
        view[:want] = data
        return want

    def close(self) -> None:
        """Nothing is open between requests."""

    def _get(self, start: int, end: int) -> tuple[Any, memoryview]:
        import obstore

        # A whole object is asked for as such: that is understood also where requests for parts are not.
        options: dict[str, Any] = {"range": (start, end)} if start or end < self.size else {}
        if self._etag and not self._etag.startswith(("W/", "@")):  # weak ones never match
            options["if_match"] = f'"{self._etag}"'
        result = obstore.get(self._store, self._place.key(self._path), options=options)  # type: ignore[arg-type]
        return result.meta, memoryview(result.bytes() if result.meta["size"] == self.size else b"")


def load(url: str) -> Dataset:
    """Read and check the manifest of a version's URL. Raises DataError when there is none, else as `objectstore.ask`.

    Safe before a fork: see `apart`.
    """
    place = parse(url)
    data = apart(lambda _: _get_manifest(place))
    manifest = manifests.decode(data, f"{place.url}/{FILE_NAME}")
    source = RemoteSource(place.url, {entry.path: (entry.bytes, "") for entry in manifest.files})
    return checked(source, manifest, data, name=place.prefix.rpartition("/")[2])


def find(url: str) -> str:
    """The version's URL that `url` means: itself, or the only version below `<root>/<name>`.

    Raises UsageError when it holds several versions, DataError when it holds none, else as `objectstore.ask`.
    """
    place = parse(url)
    inside = apart(lambda _: _versions(place))
    if inside is None:
        return place.url
    if not inside:
        raise _no_manifest(place)
    if len(inside) > 1:
        names = ", ".join(name.rpartition("/")[2] for name in inside)
        raise UsageError(f"there are {len(inside)} versions: {names}", where=place.url, hint="name one of them")
    return f"{place.scheme}://{place.bucket}/{inside[0]}"


def listing(url: str) -> list[Listed]:
    """All objects below a URL, sorted by path: for a store that has no manifest. Raises as `objectstore.ask`."""
    place = parse(url)
    found = apart(partial(_list, place))
    # An empty object of a folder's name is how some tools draw folders.
    folders = folders_of(tuple(manifests.FileEntry(path=entry.path, bytes=0, digest="") for entry in found))
    return sorted(entry for entry in found if entry.path and (entry.bytes or entry.path not in folders))


def listed_source(url: str, listed: Iterable[Listed]) -> RemoteSource:
    """The source of what was listed there: whatever is replaced after the listing is refused."""
    return RemoteSource(parse(url).url, {entry.path: (entry.bytes, entry.etag) for entry in listed})


def apart(work: Callable[[pool.Seat], T]) -> T:
    """Do this in a forked process and return its result: the library's threads must not be there when workers are
    forked from this one. Raises what `work` raises, and Unreachable when nothing moves for minutes.
    """
    found: list[T] = []
    pool.run([None], lambda seat: _Errand(work, seat), found.append, readers=1, advance=lambda _: None)
    return found[0]


class _Errand(Generic[T]):
    """The one task of a process that was forked for it."""

    def __init__(self, work: Callable[[pool.Seat], T], seat: pool.Seat) -> None:
        self._work, self._seat = work, seat

    def __call__(self, task: None) -> T:
        return self._work(self._seat)

    def close(self) -> None:
        """Nothing stays open."""


_stores: dict[tuple[int, Place], ObjectStore] = {}


def _store_of(place: Place) -> ObjectStore:
    """This process's store for a bucket; two threads that come first at once make two, and one is forgotten."""
    key = (os.getpid(), place._replace(prefix=""))
    if key not in _stores:
        _stores[key] = open_store(place)
    return _stores[key]


def _get_manifest(place: Place) -> bytes:
    store = _store_of(place)
    import obstore

    def get() -> tuple[int, bytes]:
        result = obstore.get(store, place.key(FILE_NAME))
        size = result.meta["size"]
        return size, bytes(result.bytes()) if size <= MANIFEST_BYTES else b""

    try:
        size, data = ask(get, place, FILE_NAME)
    except DataError:
        raise _no_manifest(place) from None
    if size > MANIFEST_BYTES:
        raise DataError(f"not a manifest: it has {size} bytes", where=f"{place.url}/{FILE_NAME}")
    return data


def _no_manifest(place: Place) -> DataError:
    hint = "give the URL of one version, such as s3://BUCKET/<name>/<version>"
    return DataError(f"not a dataset: it has no {FILE_NAME}", where=place.url, hint=hint)


def _versions(place: Place) -> list[str] | None:
    """Prefixes of the versions right below, sorted; None where this is one itself."""
    store = _store_of(place)
    import obstore

    def has_manifest(prefix: str) -> bool:
        try:
            ask(lambda: obstore.head(store, f"{prefix}/{FILE_NAME}".lstrip("/")), place, FILE_NAME)
        except DataError:
            return False
        return True

    if has_manifest(place.prefix):
        return None
    below = ask(lambda: obstore.list_with_delimiter(store, place.prefix or None), place)["common_prefixes"]
    if len(below) > _VERSIONS:
        raise UsageError("too many folders to look for versions in", where=place.url, hint="name the version")
    return [prefix for prefix in sorted(below) if has_manifest(prefix)]


def _list(place: Place, seat: pool.Seat) -> list[Listed]:
    store = _store_of(place)
    import obstore

    def pages() -> Iterator[Any]:
        return iter(obstore.list(store, f"{place.prefix}/" if place.prefix else None, chunk_size=_PAGE))

    found: list[Listed] = []
    stream = ask(pages, place)
    cut = len(place.key(""))
    while page := ask(lambda: next(stream, None), place):
        seat.moved(len(page))  # a long listing is not a stalled one
        found += [Listed(meta["path"][cut:], meta["size"], _identity(meta)) for meta in page]
        if len(found) > _OBJECTS:
            raise UsageError(f"more than {_OBJECTS:,} objects", where=place.url, hint="name one store in it")
    return found


def _identity(meta: Mapping[str, Any]) -> str:
    """What tells this object from its successor: its ETag (not every listing has it in quotes), else its time."""
    if etag := meta["e_tag"]:
        return str(etag).strip('"')
    when: datetime = meta["last_modified"]
    return f"@{when.timestamp():.0f}"


def _other_size(known: int, size: int, where: str) -> DataError:
    what = f"the manifest says {known} bytes, the object has {size}"
    return DataError(what, where=where, hint="it was changed or cut short: upload it again")
