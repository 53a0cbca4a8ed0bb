"""A version in an object store: find it, read its manifest, read objects by ranges, each pinned to one ETag."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.core.record import decode_json
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.sources.base import DatasetVersion, all_folders, make_version
from pitools.stage.sources.object_store.client import ObjectUrl, cached_store, call_store, changed_error, parse_url
from pitools.stage.sources.object_store.isolated import run_isolated as run_isolated
from pitools.store import manifest as manifests
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.version_state import CATALOG, Quarantine

if TYPE_CHECKING:
    from obstore.store import ObjectStore

READ_BYTES = 8 << 20
_PREFIX = re.compile(r"[0-9a-f]{6,31}")
# A manifest of a million files is about this large; a larger object is none.
MANIFEST_BYTES = 256 << 20
_MAX_OBJECTS = 2_000_000
_PAGE_SIZE = 1000
_MAX_VERSIONS = 1000


class ListedObject(NamedTuple):
    """One object of a store without a manifest. path: below the listed URL. etag: required when it is read."""

    path: str
    bytes: int
    etag: str


class ObjectStoreSource(msgspec.Struct, frozen=True):
    """The objects below a URL. known_objects: size and ETag ("" when unknown) by path, which saves a request each."""

    url: str
    known_objects: Mapping[str, tuple[int, str]] = {}

    def __post_init__(self) -> None:
        parse_url(self.url)

    def __repr__(self) -> str:
        return f"ObjectStoreSource({self.url!r})"

    @property
    def label(self) -> str:
        """Return the URL; it never holds a secret."""
        return self.url

    @property
    def block(self) -> int:
        """Return the bytes of one request: enough that its latency does not count."""
        return READ_BYTES

    def connect(self) -> ObjectStoreReader:
        """Open a reader, for one thread of a process that will not fork. Raises as `client.open_store`."""
        return ObjectStoreReader(parse_url(self.url), self.known_objects)


class ObjectStoreReader:
    """Opens objects. Threads of a process share the store's connections; each has its own reader."""

    def __init__(self, url: ObjectUrl, known_objects: Mapping[str, tuple[int, str]]) -> None:
        self._url, self._known_objects, self._store = url, known_objects, cached_store(url)

    def open(self, path: str) -> ObjectFile:
        """Open an object by its path below the URL; no request if its size is known. Raises as `client.call_store`."""
        import obstore

        size, etag = self._known_objects.get(path, (0, ""))
        if not size:  # unknown, or empty: then no read would detect a missing object
            meta = call_store(lambda: obstore.head(self._store, self._url.key(path)), self._url, path)
            if path in self._known_objects and meta["size"]:
                raise _size_error(0, meta["size"], f"{self._url.url}/{path}")
            size, etag = meta["size"], etag or _etag_of(meta)
        return ObjectFile(self._store, self._url, path, size, etag)

    def close(self) -> None:
        """Nothing to close: connections stay open for the process's other readers."""


class ObjectFile:
    """One object. size: bytes, as known before or when it was opened."""

    def __init__(self, store: ObjectStore, url: ObjectUrl, path: str, size: int, etag: str) -> None:
        self.size, self._store, self._url, self._path, self._etag = size, store, url, path, etag

    def read_into(self, view: memoryview, offset: int) -> int:
        """Get the range at `offset` into `view`; return the count, 0 at the end.

        Raises DataError when the object was replaced or has another size, else as `client.call_store`.
        """
        n_bytes = min(len(view), self.size - offset)
        if n_bytes <= 0:
            return 0
        size, etag, data = call_store(partial(self._get, offset, offset + n_bytes), self._url, self._path)
        if size != self.size:
            raise _size_error(self.size, size, f"{self._url.url}/{self._path}")
        # Not every server honours If-Match: compare the ETag of the response.
        self._etag = self._etag or etag
        if etag != self._etag or len(data) != n_bytes:
            raise changed_error(f"{self._url.url}/{self._path}")
        view[:n_bytes] = data
        return n_bytes

    def close(self) -> None:
        """Nothing to close between requests."""

    def _get(self, start: int, end: int) -> tuple[int, str, memoryview]:
        import obstore

        # No range for a whole object: some servers do not support ranges.
        options: dict[str, Any] = {"range": (start, end)} if start or end < self.size else {}
        if self._etag and not self._etag.startswith(("W/", "@")):  # weak ETags never match
            options["if_match"] = f'"{self._etag}"'
        result = obstore.get(self._store, self._url.key(self._path), options=options)  # type: ignore[arg-type]
        meta = result.meta  # computed at every access
        return meta["size"], _etag_of(meta), memoryview(result.bytes() if meta["size"] == self.size else b"")


def load_remote_version(url: str) -> DatasetVersion:
    """Read and check the manifest of a version's URL. Raises DataError when there is none, else as `client.call_store`.

    Safe before a fork: see `run_isolated`.
    """
    object_url = parse_url(url)
    data = run_isolated(lambda _: _get_manifest(object_url))
    manifest = manifests.decode_manifest(data, f"{object_url.url}/{MANIFEST_FILE}")
    source = ObjectStoreSource(object_url.url, {entry.path: (entry.bytes, "") for entry in manifest.files})
    return make_version(source, manifest, data, name=object_url.prefix.rpartition("/")[2])


def find_remote_version(url: str) -> str:
    """Return the URL of a version: `url` itself, or the only version below `<root>/<name>`.

    Raises UsageError for several versions, DataError for none, else as `client.call_store`.
    """
    object_url = parse_url(url)
    prefixes = run_isolated(partial(_version_prefixes, object_url))
    if prefixes is None:
        return object_url.url
    if not prefixes:
        raise _no_manifest(object_url)
    if len(prefixes) > 1:
        names = ", ".join(name.rpartition("/")[2] for name in prefixes)
        hint = f"name one of them: {object_url.url}/VERSION"
        raise UsageError(f"there are {len(prefixes)} versions: {names}", where=object_url.url, hint=hint)
    return object_url._replace(prefix=prefixes[0]).url


def read_remote_quarantine(url: str) -> Quarantine | None:
    """Return the quarantine of a version's URL, by the catalog uploaded with its dataset; None if there is none.

    Raises DataError for a record that is damaged, else as `client.call_store`. Safe before a fork: see `run_isolated`.
    """
    home, _, version = parse_url(url).prefix.rpartition("/")
    catalog = parse_url(url)._replace(prefix=f"{home}/{CATALOG}".lstrip("/"))
    return run_isolated(lambda _: _get_quarantine(catalog, f"quarantine/{version}.json"))


def list_datasets(url: str, is_wanted: Callable[[str], bool]) -> dict[str, list[tuple[str, int]]]:
    """Return the datasets directly below a URL; of wanted ones the URL and upload time in ns of each version that
    is neither retired nor in quarantine.

    Raises as `find_remote_version`.
    """
    return run_isolated(partial(_list_datasets, parse_url(url), is_wanted))


def list_objects(url: str) -> list[ListedObject]:
    """List all objects below a URL, sorted by path: for a store without a manifest. Raises as `client.call_store`."""
    object_url = parse_url(url)
    objects = run_isolated(partial(_list_objects, object_url))
    # Some tools represent a folder by an empty object of its name.
    folders = all_folders(tuple(manifests.FileEntry(path=entry.path, bytes=0, digest="") for entry in objects))
    if conflicts := [entry.path for entry in objects if entry.bytes and entry.path in folders]:
        message = f"{min(conflicts)!r} is both an object and a folder of others, which no disk can hold"
        raise DataError(message, where=object_url.url, hint="rename the object, or those below it")
    return sorted(entry for entry in objects if entry.path and (entry.bytes or entry.path not in folders))


def pinned_source(url: str, objects: Iterable[ListedObject]) -> ObjectStoreSource:
    """Return the source of listed objects; an object replaced after the listing is refused."""
    return ObjectStoreSource(parse_url(url).url, {entry.path: (entry.bytes, entry.etag) for entry in objects})


def _get_manifest(url: ObjectUrl) -> bytes:
    store = cached_store(url)
    import obstore

    def get() -> tuple[int, bytes]:
        result = obstore.get(store, url.key(MANIFEST_FILE))
        size = result.meta["size"]
        return size, bytes(result.bytes()) if size <= MANIFEST_BYTES else b""

    try:
        size, data = call_store(get, url, MANIFEST_FILE)
    except DataError:
        raise _no_manifest(url) from None
    if size > MANIFEST_BYTES:
        raise DataError(f"not a manifest: it has {size} bytes", where=f"{url.url}/{MANIFEST_FILE}")
    return data


def _no_manifest(url: ObjectUrl) -> DataError:
    name = url.prefix.rpartition("/")[2]
    if "@" in name or _PREFIX.fullmatch(name):
        problem = f"not a dataset: {name!r} is a tag or a version's first digits (expected a whole version)"
        return DataError(problem, where=url.url, hint="`pit dataset show` of the dataset's folder prints the version")
    message, hint = f"not a dataset: no {MANIFEST_FILE}", "give one version's URL: s3://BUCKET/<name>/<version>"
    return DataError(message, where=url.url, hint=hint)


def _version_prefixes(url: ObjectUrl, slot: WorkerSlot) -> list[str] | None:
    """Return the prefixes of the versions directly below, sorted; None when this is a version itself."""
    if _modified_ns(url):
        return None
    return [prefix for prefix in _subfolders(url, slot) if _modified_ns(url._replace(prefix=prefix))]


def _list_datasets(
    url: ObjectUrl, is_wanted: Callable[[str], bool], slot: WorkerSlot
) -> dict[str, list[tuple[str, int]]]:
    def versions(prefix: str) -> list[tuple[str, int]]:
        prefixes = {path.rpartition("/")[2]: path for path in _subfolders(url._replace(prefix=prefix), slot)}
        catalog = prefixes.pop(CATALOG, "")
        unusable = _unusable_versions(url._replace(prefix=catalog), slot) if catalog else set()
        version_urls = [url._replace(prefix=path) for name, path in prefixes.items() if name not in unusable]
        return [(version.url, ns) for version in version_urls if (ns := _modified_ns(version))]

    prefixes = {prefix.rpartition("/")[2]: prefix for prefix in _subfolders(url, slot)}
    return {name: versions(prefix) if is_wanted(name) else [] for name, prefix in prefixes.items()}


def _unusable_versions(url: ObjectUrl, slot: WorkerSlot) -> set[str]:
    """Return the versions that are retired or in quarantine as a whole, by the catalog uploaded with the dataset."""
    unusable = set()
    for entry in _list_objects(url, slot):
        kind, _, name = entry.path.partition("/")
        if kind == "quarantine":
            quarantine = _get_quarantine(url, entry.path)
            if not (quarantine and quarantine.whole_version):
                continue
        if kind in ("quarantine", "retired"):
            unusable.add(name.removesuffix(".json"))
    return unusable


def _get_quarantine(url: ObjectUrl, path: str) -> Quarantine | None:
    store = cached_store(url)
    import obstore

    try:
        data = call_store(lambda: bytes(obstore.get(store, url.key(path)).bytes()), url, path)
    except DataError:  # missing
        return None
    except ClusterError as error:  # without permission to list a bucket, a missing object is a denied one
        print(f"pit-stage: note: quarantine unknown: {error}", file=sys.stderr, flush=True)
        return None
    try:
        return decode_json(data, Quarantine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not a record of a quarantine: {error}", where=f"{url.url}/{path}") from error


def _subfolders(url: ObjectUrl, slot: WorkerSlot) -> list[str]:
    """Return the prefixes directly below, sorted."""
    store = cached_store(url)
    import obstore

    slot.add_bytes(1)
    prefixes = call_store(lambda: obstore.list_with_delimiter(store, url.prefix or None), url)["common_prefixes"]
    if len(prefixes) > _MAX_VERSIONS:
        raise UsageError(f"more than {_MAX_VERSIONS:,} folders", where=url.url, hint="name the version")
    return sorted(prefixes)


def _modified_ns(url: ObjectUrl) -> int:
    """Return the upload time of a version's manifest, in ns; 0 when there is none."""
    store = cached_store(url)
    import obstore

    with suppress(DataError):
        meta = call_store(lambda: obstore.head(store, url.key(MANIFEST_FILE)), url, MANIFEST_FILE)
        return int(meta["last_modified"].timestamp() * 1e9)
    return 0


def _list_objects(url: ObjectUrl, slot: WorkerSlot) -> list[ListedObject]:
    store = cached_store(url)
    import obstore

    def pages() -> Iterator[Any]:
        return iter(obstore.list(store, f"{url.prefix}/" if url.prefix else None, chunk_size=_PAGE_SIZE))

    objects: list[ListedObject] = []
    stream = call_store(pages, url)
    prefix_length = len(url.key(""))
    while page := call_store(lambda: next(stream, None), url):
        slot.add_bytes(len(page))  # progress: a long listing is not stalled
        if not all(f"{meta['path']}/".startswith(url.key("")) for meta in page):
            raise DataError(f"the listing contains objects outside of {url.key('')!r}", where=url.url)
        objects += [ListedObject(meta["path"][prefix_length:], meta["size"], _etag_of(meta)) for meta in page]
        if len(objects) > _MAX_OBJECTS:
            raise UsageError(f"more than {_MAX_OBJECTS:,} objects", where=url.url, hint="name one store in it")
    return objects


def _etag_of(meta: Mapping[str, Any]) -> str:
    """Return an object's ETag (some listings have it without quotes), else its time of upload."""
    if etag := meta["e_tag"]:
        return str(etag).strip('"')
    modified: datetime = meta["last_modified"]
    return f"@{modified.timestamp():.0f}"


def _size_error(expected: int, size: int, where: str) -> DataError:
    message = f"{size} bytes (expected {expected}, as in the manifest)"
    return DataError(message, where=where, hint="the object was changed or cut short: upload it again")
