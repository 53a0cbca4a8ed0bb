from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "stage/sources/object_store"))
import s3_server
from s3_server import BUCKET, KEY_ID, SECRET, Exchange, Server, proxied

from pitools.core.errors import ClusterError, DataError, NoSpace, PitError, Unreachable, UsageError
from pitools.loader.loader import Loader
from pitools.loader.open import open_version
from pitools.loader.sampling.episode_filter import filter_episodes
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.stage.cache.evict import KeptReason, evict_item, eviction_order
from pitools.stage.cache.inventory import list_sets
from pitools.stage.cache.layout import journal_path, partial_path, staged_path
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import FileFinding, check_versions
from pitools.store import digest, manifest, version_state
from pitools.store.manifest import ArraySchema, FileEntry, Manifest
from pitools.store.reader.read_stats import thread_stats
from pitools.store.reader.version_reader import VersionReader

STEPS, SHARD = 400, 40
LARGE = ("obs/image", "obs/gzip")
# Small enough that `action` is held in memory and the images are not.
RESIDENT = 100_000


def build(root: Path) -> Path:
    """A version: images in ten shards of a MiB and a half, an array that only zarr-python reads, actions."""
    folder, random = root / "new", np.random.default_rng(0)
    store = zarr.create_group(folder, attributes={"splits": {}})
    crc = [BloscCodec(cname="lz4"), Crc32cCodec()]
    created: dict[str, tuple[Any, int, int, Any]] = {
        "obs/image": (random.integers(0, 255, (STEPS, 64, 200, 3), np.uint8), 8, SHARD, [Crc32cCodec()]),
        "obs/gzip": (random.normal(size=(STEPS, 100)), 40, 200, [GzipCodec()]),
        "action": (random.normal(size=(STEPS, 7)), 100, STEPS, crc),
        "episode_offsets": (np.array([0, 150, STEPS]), 3, 3, crc),
    }
    for name, (data, chunk, shard, codecs) in created.items():
        store.create_array(
            name,
            shape=data.shape,
            dtype=data.dtype,
            chunks=(chunk, *data.shape[1:]),
            compressors=codecs,
            shards=(shard, *data.shape[1:]),
            filters=None,
            fill_value=0,
        )[:] = data
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size, text = digest.digest_file(path)
        files.append(FileEntry(path=path.relative_to(folder).as_posix(), bytes=size, digest=text))
    data = manifest.encode_manifest(
        Manifest(
            name="pick",
            episodes=2,
            steps=STEPS,
            files=tuple(files),
            arrays={
                name: ArraySchema(shape=created[name][0].shape, dtype=created[name][0].dtype.name) for name in created
            },
        )
    )
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    return folder.rename(root / manifest.version_of(data))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One S3 server for all tests."""
    with s3_server.serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def version(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version on disk, whose copy is at s3://lab/data/pick/<version>."""
    folder = build(tmp_path_factory.mktemp("pick"))
    s3_server.put_tree(server.port, folder, f"data/pick/{folder.name}")
    return folder


@pytest.fixture
def url(version: Path) -> str:
    """Where its copy is."""
    return f"s3://{BUCKET}/data/pick/{version.name}"


class Switch:
    """What the proxy does to answers for one object: nothing, `flip` a bit of it, `hold` it, or `drop` it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, what: str, path: str = "") -> None:
        """To answers for objects whose key ends so."""
        (self._folder / "fault.new").write_text(json.dumps([what, path]))
        (self._folder / "fault.new").rename(self._folder / "fault")

    def __call__(self, exchange: Exchange) -> tuple[bytes, bytes] | None:
        """In the proxy's process."""
        record, path = json.loads((self._folder / "fault").read_text())
        if exchange.path.endswith(path):
            if record == "drop":
                return None
            if record == "hold":
                time.sleep(30)
            if record == "flip" and exchange.body:
                return exchange.head, exchange.body[:-1] + bytes([exchange.body[-1] ^ 1])
        with (self._folder / "log").open("a") as log:
            if "/.catalog/" not in exchange.path:
                log.write(f"{exchange.path.rpartition('/pick/')[2][33:]}\n")
        return exchange.head, exchange.body


@pytest.fixture
def switch(tmp_path: Path, server: Server, version: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """The server behind a proxy that logs what is asked for, in a user's environment that names it."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "PIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    created = Switch(tmp_path)
    created.set("nothing")
    with proxied(server.port, created) as proxy:
        for name, value in s3_server.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield created


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The node's cache; no process that fetches outlives the test."""
    root = tmp_path / "nvme"
    yield root
    gone(root)


def asked(tmp_path: Path) -> list[str]:
    """The paths that were asked for, as often as they were."""
    return (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def fetchers(root: Path) -> list[int]:
    """The processes that fetch into a cache."""
    actual = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"pitools.loader.on_demand.fetcher" in words and f'"root":"{root}"'.encode() in words:
                actual.append(int(entry.name))
    return actual


def gone(root: Path) -> None:
    """Wait until nobody fetches any more, for nobody reads."""
    thread_stats().path = None  # what this thread read last
    gc.collect()  # a reader of an array and its cache of files refer to each other
    wait_for(lambda: not fetchers(root))


def wait_for(happened: Callable[[], bool]) -> None:
    """Look until it has happened."""
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def images(arrays: VersionReader, *, start: int = 0, stop: int = STEPS) -> np.ndarray:
    return arrays.read("obs/image", start, stop)


def open_remote(url: str, root: Path, **more: Any) -> VersionReader:
    return open_version(url, cache=root, resident_bytes=RESIDENT, **more)


def test_a_quarantine_reaches_loaders_of_a_version_that_is_not_staged(
    version: Path, root: Path, switch: Switch, server: Server
):
    """By the catalog uploaded beside it, while its shards are still missing here."""
    prefix = "data/bad"
    s3_server.put_tree(server.port, version, f"{prefix}/{version.name}")
    record = version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={0: ("black",)})
    s3_server.put(server.port, {f"{prefix}/.catalog/quarantine/{version.name}.json": msgspec.json.encode(record)})
    remote = open_remote(f"s3://{BUCKET}/{prefix}/{version.name}", root)
    assert not remote.path.exists()
    assert filter_episodes(remote).tolist() == [1]
    del remote


def test_it_reads_what_a_local_version_holds_and_the_second_time_from_the_cache(
    version: Path, url: str, root: Path, switch: Switch, tmp_path: Path
):
    """All arrays by many threads, each object asked for once; then it is a staged version, and the store can go."""
    local, remote = VersionReader(version), open_remote(url, root)
    assert "obstore" not in sys.modules
    assert sorted(set(asked(tmp_path)) & {"action/c/0/0", "obs/image/zarr.json"}) == [
        "action/c/0/0",
        "obs/image/zarr.json",
    ]
    assert not [path for path in asked(tmp_path) if path.startswith("obs/image/c")]
    wrong: list[object] = []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, STEPS - 50, 20).tolist():
            for name in ("obs/image", "obs/gzip", "action"):
                actual, expected = (arrays.read(name, start, start + 50) for arrays in (remote, local))
                wrong.extend([] if np.array_equal(actual, expected) else [(name, start)])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert np.array_equal(images(remote), images(local))
    once = [path for path in asked(tmp_path) if path != "manifest.json"]
    assert sorted(once) == sorted(entry.path for entry in local.manifest.files)
    gone(root)  # by itself, since all is there
    assert [(actual.state, actual.source) for actual in list_sets(root)] == [("present", url)]
    assert not [
        actual
        for actual in check_versions(staged_path(root, version.name), readers=1)
        if isinstance(actual, FileFinding)
    ]
    assert sorted(path.name for path in (root / ".tmp").iterdir()) == []
    before = len(asked(tmp_path))
    switch.set("drop")
    assert np.array_equal(images(remote), images(local))
    assert np.array_equal(images(open_remote(url, root)), images(local))
    assert (len(asked(tmp_path)), fetchers(root)) == (before, [])


def test_batches_are_those_of_the_local_version(version: Path, url: str, root: Path, switch: Switch, tmp_path: Path):
    """Over three epochs, with the store gone for a while in the first, when the same batch is asked for again."""
    batches = []
    for arrays in (VersionReader(version), open_remote(url, root)):
        windows = Windows(
            arrays.offsets, np.arange(2), {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8)}, stride=10
        )
        batches.append(Loader(WindowSamples(arrays, windows, seed=3), global_batch_size=8))
    local, remote = batches
    switch.set("drop")
    for _ in range(2):
        with pytest.raises(Unreachable):
            next(remote)
    switch.set("nothing")
    epoch, counts = len(windows), []
    for _ in range(3 * epoch // 8 + 1):
        expected, actual = next(local), next(remote)
        assert np.array_equal(actual.sample_indices, expected.sample_indices)
        for name in ("obs/image", "action"):
            assert np.array_equal(actual.arrays[name], expected.arrays[name])
        counts.append(len(asked(tmp_path)))
    assert counts[epoch // 8 + 1] == counts[-1]
    for each in batches:
        each.close()


def _read_all(url: str, root: Path, barrier: Any, queue: Any) -> None:
    barrier.wait()
    actual = images(open_remote(url, root))
    queue.put(digest.digest_bytes(actual.tobytes()))


def test_ranks_of_a_node_fetch_each_object_once(version: Path, url: str, root: Path, switch: Switch, tmp_path: Path):
    """Processes that begin at once, with the URL of the dataset of one version, and no byte of the store's twice."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    place = url.rpartition("/")[0]
    ranks = [context.Process(target=_read_all, args=(place, root, barrier, queue)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    actual = {queue.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join()
    assert actual == {digest.digest_bytes(images(VersionReader(version)).tobytes())}
    content = [path for path in asked(tmp_path) if path.startswith("obs/image/c/")]
    assert len(content) == len(set(content)) == STEPS // SHARD


def test_whoever_fetches_may_be_killed(version: Path, url: str, root: Path, switch: Switch, tmp_path: Path):
    """In the middle of a shard: the reader does not notice, and what was there is not asked for again."""
    local, remote = VersionReader(version), open_remote(url, root)
    assert np.array_equal(images(remote, stop=100), images(local, stop=100))
    switch.set("hold", "obs/image/c/5/0/0/0")
    actual: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: actual.append(images(remote, start=190, stop=300)))
    reader.start()
    wait_for(lambda: (partial_path(root, version.name) / "obs/image/c/5/0/0/0").exists())
    # What is on the disk is written down a moment after it can be read.
    brought = {path for path in asked(tmp_path) if path != "manifest.json"} | {"obs/image/c/4/0/0/0"}
    wait_for(lambda: journal_path(root, version.name).read_text().count("\nf ") >= len(brought))
    (fetcher,) = fetchers(root)
    os.kill(fetcher, signal.SIGKILL)
    switch.set("nothing")
    reader.join(30)
    assert np.array_equal(actual[0], images(local, start=190, stop=300))
    content = [path for path in asked(tmp_path) if path not in ("manifest.json", "obs/image/c/5/0/0/0")]
    assert sorted(content) == sorted(set(content))


def _read_some(url: str, root: Path, stop: int) -> None:
    remote = open_remote(url, root)
    images(remote, stop=stop)
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_reader(url: str, root: Path, stop: int) -> None:
    reader = multiprocessing.get_context("spawn").Process(target=_read_some, args=(url, root, stop))
    reader.start()
    reader.join()
    assert reader.exitcode == -signal.SIGKILL
    gone(root)


def test_a_stager_goes_on_where_a_killed_reader_was(
    version: Path, url: str, root: Path, switch: Switch, tmp_path: Path
):
    """What was brought counts as done, also for `pit-stage run`; nothing else is asked for again."""
    _killed_reader(url, root, 200)
    assert [actual.state for actual in list_sets(root)] == ["partial"]
    before = asked(tmp_path)
    record = stage_version(load_version(url), root)
    assert record.state == "staged"
    paths = [path for path in before if path != "manifest.json"]
    assert len(paths) == len(set(paths))
    sizes = {entry.path: entry.bytes for entry in VersionReader(version).manifest.files}
    assert record.resumed_bytes == sum(sizes[path] for path in paths)
    assert record.copied_bytes == sum(sizes.values()) - record.resumed_bytes
    assert not set(asked(tmp_path)[len(before) :]) & set(paths)
    assert not [
        actual
        for actual in check_versions(staged_path(root, version.name), readers=1)
        if isinstance(actual, FileFinding)
    ]


def test_a_reader_goes_on_where_a_stager_was(version: Path, url: str, root: Path, switch: Switch, tmp_path: Path):
    """An interrupted `pit-stage run` left whole files and begun ones: the former are believed, the latter are not."""
    done: list[int] = []

    def finished(index: int) -> None:
        done.append(index)
        if len(done) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage_version(load_version(url), root, readers=1, on_file=finished)
    torn = partial_path(root, version.name) / "obs/image/c/9/0/0/0"
    torn.parent.mkdir(parents=True, exist_ok=True)  # folders come with their first file
    torn.unlink(missing_ok=True)
    torn.write_bytes(b"torn")
    reader = {VersionReader(version).manifest.files[index].path for index in done[:5]} - {"obs/image/c/9/0/0/0"}
    before = len(asked(tmp_path))
    assert np.array_equal(images(open_remote(url, root)), images(VersionReader(version)))
    assert not set(asked(tmp_path)[before:]) & reader


def test_a_store_that_does_not_answer_is_for_later(version: Path, url: str, root: Path, switch: Switch):
    """75, naming what was asked for and no secret; the same arrays read on when it is back."""
    remote = open_remote(url, root)
    switch.set("drop")
    with pytest.raises(Unreachable, match=url) as caught:
        images(remote, stop=10)
    assert caught.value.exit_code == 75
    with pytest.raises(Unreachable):
        open_remote(url, root.with_name("other"))
    switch.set("nothing")
    assert np.array_equal(images(remote), images(VersionReader(version)))


@pytest.mark.parametrize("fault", ["flip", "missing"])
def test_what_is_not_as_the_manifest_says_is_never_read(
    version: Path, url: str, root: Path, switch: Switch, server: Server, fault: str, tmp_path: Path
):
    """A flipped bit on the way, an object that is not there: an error that names it, each time, and no file of it."""
    shard = "obs/image/c/3/0/0/0"
    if fault == "missing":
        content = {path.relative_to(version).as_posix(): path for path in version.rglob("*") if path.is_file()}
        del content[shard]
        place = f"less/pick/{version.name}"
        s3_server.put(server.port, {f"{place}/{path}": file for path, file in content.items()})
        url = f"s3://{BUCKET}/{place}"
    remote = open_remote(url, root)
    switch.set("flip" if fault == "flip" else "nothing", shard)
    for _ in range(2):
        with pytest.raises(DataError, match=shard):
            images(remote, start=110, stop=130)
        assert not (partial_path(root, version.name) / shard).exists()
    assert np.array_equal(images(remote, stop=120), images(VersionReader(version), stop=120))
    if fault == "flip":
        switch.set("nothing")
        assert np.array_equal(images(remote), images(VersionReader(version)))


def test_no_room_is_said_with_what_to_do(url: str, root: Path, switch: Switch, monkeypatch: pytest.MonkeyPatch):
    """A disk that must stay free, by argument or by the environment: nothing is kept that nobody can finish."""
    with pytest.raises(NoSpace, match=r"1024\.0 PiB must") as caught:
        open_remote(url, root, limits=RootLimits(min_free_bytes=1 << 60))
    assert "free space there" in caught.value.hint
    monkeypatch.setenv("PIT_STAGE_QUOTA", "1MiB")
    with pytest.raises(PitError, match=r"quota of 1\.0 MiB"):
        open_remote(url, root)


def test_nobody_evicts_what_is_read_and_anybody_what_was(version: Path, url: str, root: Path, switch: Switch):
    """Unfinished it is locked while a loader has it open, and then the first to go; whole it is leased."""
    remote = open_remote(url, root)
    images(remote, stop=40)
    (item,) = eviction_order(root)
    assert evict_item(root, item) == KeptReason.LOCKED
    assert [actual.locked for actual in list_sets(root)] == [True]
    del remote
    gone(root)
    assert evict_item(root, item) is None
    remote = open_remote(url, root)
    images(remote)
    remote.read("obs/gzip", 0, STEPS)
    gone(root)
    remote = open_remote(url, root)
    assert [(actual.state, actual.leased) for actual in list_sets(root)] == [("present", True)]
    (item,) = eviction_order(root)
    assert evict_item(root, item, grace_s=0) == KeptReason.LEASED
    del remote
    gone(root)
    assert evict_item(root, item, grace_s=0) is None


def test_a_forked_child_reads_on(version: Path, url: str, root: Path, switch: Switch):
    """After its parent has fetched, and while a thread of the parent fetches: a child gets shards of its own."""
    remote, expected = open_remote(url, root), images(VersionReader(version))
    images(remote, stop=40)
    reader = threading.Thread(target=images, args=(remote,))
    reader.start()
    for start in (100, 200, 300):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if np.array_equal(images(remote, start=start), expected[start:]) else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    reader.join()
    assert np.array_equal(images(remote), expected)


@pytest.mark.usefixtures("as_root")
def test_nobody_else_is_believed(version: Path, url: str, root: Path, switch: Switch):
    """A socket of another user at the fetcher's address is refused, since that user could send any bytes."""
    (root / ".locks").mkdir(parents=True)
    for folder in (root, root / ".locks"):
        folder.chmod(0o777)
    ready, reported = os.pipe()
    place, other = root / ".locks" / f"{version.name}.socket", os.open(root / ".locks", os.O_PATH)
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(f"/proc/self/fd/{other}/{place.name}")
            listener.listen()
            os.write(reported, b"!")
            talk, _ = listener.accept()
            talk.recv(100)
            socket.send_fds(talk, [b"{}"], [os.open("/dev/null", os.O_RDONLY)])
            time.sleep(20)
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"!"
        with pytest.raises(ClusterError, match="uid 0, got "):
            open_remote(url, root)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for descriptor in (ready, reported, other):
            os.close(descriptor)


def test_another_version_is_never_taken_for_this_one(version: Path, url: str, root: Path, switch: Switch):
    """What stands under a version's name in the cache, but has another's manifest, is fetched anew."""
    place = staged_path(root, version.name)
    stage_version(load_version(url), root)
    reader = msgspec.structs.replace(VersionReader(version).manifest, name="other")
    (place / manifest.MANIFEST_FILE).chmod(0o600)
    (place / manifest.MANIFEST_FILE).write_bytes(manifest.encode_manifest(reader))
    remote = open_remote(url, root)
    assert remote.version == version.name
    assert np.array_equal(images(remote), images(VersionReader(version)))


def test_no_secret_is_in_what_others_may_see(url: str, root: Path, switch: Switch):
    """Neither the command line of the process that fetches nor any file of the cache holds a key."""
    remote = open_remote(url, root)
    images(remote, stop=40)
    observed = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in fetchers(root))
    assert b"on_demand.fetcher" in observed
    observed += b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    assert SECRET.encode() not in observed
    assert KEY_ID.encode() not in observed


@pytest.mark.parametrize(
    ("location", "cache", "pattern"),
    [("s3://lab/data/pick", None, "cache: "), ("ftp://lab/data", Path("/x"), "ftp://")],
)
def test_invalid_locations_are_refused(location: str, cache: Path | None, pattern: str):
    """A URL without a cache, and a URL of no object store."""
    with pytest.raises(UsageError, match=pattern):
        open_version(location, cache=cache)


def test_a_folder_is_opened_as_ever(version: Path):
    """By its path or its text, with nothing between."""
    for place in (version, str(version)):
        assert np.array_equal(images(open_version(place), stop=5), images(VersionReader(version), stop=5))
