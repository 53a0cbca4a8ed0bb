from __future__ import annotations

import os
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import s3_server
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_reads import OBJECT, read, refused
from s3_server import BUCKET, KEY_ID, PUBLIC, SECRET, Exchange, Server, proxied

from pitools.core.errors import DataError, ToolMissing, UsageError
from pitools.stage.cache import records
from pitools.stage.sources.object_store import client, remote
from pitools.stage.sources.object_store.remote import ObjectStoreSource
from pitools.stage.stage import stage_version
from pitools.store import version_state
from pitools.store.manifest import MANIFEST_FILE

MiB = 1 << 20


# --- staging ---


def test_a_version_is_staged_from_a_store(uploaded: Path, root: Path):
    """Workers forked after the parent read the manifest bring every byte, and nothing of theirs is in the parent."""
    dataset = remote.load_remote_version(f"s3://{BUCKET}/data/pick/{uploaded.name}/")
    assert "obstore" not in sys.modules
    record = stage_version(dataset, root)
    assert (record.state, record.source) == ("staged", f"s3://{BUCKET}/data/pick/{uploaded.name}")
    for path in (path for path in uploaded.rglob("*") if path.is_file()):
        assert (Path(record.path) / path.relative_to(uploaded)).read_bytes() == path.read_bytes()
    retained = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file()) + msgspec.json.encode(record)
    assert SECRET.encode() not in retained
    assert KEY_ID.encode() not in retained


def test_a_quarantine_is_staged_from_a_store(uploaded: Path, root: Path, server: Server):
    """At the first staging, and at each later one; a damaged record is refused."""
    s3_server.put_tree(server.port, uploaded, f"data/bad/{uploaded.name}")
    record = version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("black",)})
    dataset = remote.load_remote_version(f"s3://{BUCKET}/data/bad/{uploaded.name}")
    key = f"data/bad/.catalog/quarantine/{uploaded.name}.json"
    for expected in (record, msgspec.structs.replace(record, whole_version=True)):
        s3_server.put(server.port, {key: msgspec.json.encode(expected)})
        path = Path(stage_version(dataset, root).path)
        assert records.quarantine_of(path) == expected
    s3_server.put(server.port, {key: b"{"})
    with pytest.raises(DataError):
        stage_version(dataset, root)


def test_a_process_forked_after_use_is_told_and_does_not_hang():
    """The library's threads die in a fork: our guard says so, where the library would wait for ever."""

    def use_and_fork(_: object) -> None:
        source = ObjectStoreSource(f"s3://{BUCKET}/objects")
        source.connect()
        remote.run_isolated(lambda _: source.connect().close())

    with pytest.raises(AssertionError, match="obstore was used before this process was forked"):
        remote.run_isolated(use_and_fork)


def test_a_damaged_byte_on_the_way_is_found(
    uploaded: Path, root: Path, server: Server, environment: Callable[[int], None]
):
    """A flipped bit in an answer is no published version, and names its file."""

    def flip(exchange: Exchange) -> tuple[bytes, bytes]:
        body = exchange.body
        if exchange.path.endswith("images/c/1/0"):
            body = body[:77] + bytes([body[77] ^ 4]) + body[78:]
        return exchange.head, body

    with proxied(server.port, flip) as proxy:
        environment(proxy.port)
        dataset = remote.load_remote_version(f"s3://{BUCKET}/data/pick/{uploaded.name}")
        with pytest.raises(DataError, match="images/c/1/0") as caught:
            stage_version(dataset, root)
    refused(caught.value)
    assert os.listdir(root / "objects") == []
    assert not list(root.glob("objects/*"))


def test_a_small_file_costs_one_request(uploaded: Path, server: Server, environment: Callable[[int], None], root: Path):
    """What the manifest knows is not asked for again: a request a block; for an empty file, for a quarantine."""
    with proxied(server.port) as proxy:
        environment(proxy.port)
        dataset = remote.load_remote_version(f"s3://{BUCKET}/data/pick/{uploaded.name}")
        before = proxy.asked.value
        stage_version(dataset, root)
        assert (before, proxy.asked.value - before) == (1, 1 + 1 + 1 + 2 + 1 + 1)


# --- reading ---


def test_ranges_are_the_objects_bytes():
    """Any length at any offset, at the end and past it."""
    cuts = [(0, 1), (299_999, 10), (300_000, 10), (400_000, 1), (123_456, 77_777), (0, 300_001)]

    def work(_: object) -> list[bytes]:
        file = ObjectStoreSource(f"s3://{BUCKET}/objects").connect().open("o")
        view = memoryview(bytearray(300_001))
        return [bytes(view[: file.read_into(view[:length], start)]) for start, length in cuts]

    assert remote.run_isolated(work) == [OBJECT[start : start + length] for start, length in cuts]


def test_names_go_through_unchanged():
    """Spaces, marks that URLs use, and letters beyond ASCII."""
    assert read(f"s3://{BUCKET}/objects", "deep/a b#c~é%20+=&.bin") == b"odd"


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds If-Match", "ignores If-Match"])
def test_an_object_replaced_meanwhile_is_refused(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, heeds: bool
):
    """Two reads never give two objects' bytes, whether the server looks at If-Match or not."""
    key = f"replaced/{heeds}"
    s3_server.put(server.port, {key: OBJECT}, PUBLIC)

    def replace(exchange: Exchange) -> tuple[bytes, bytes]:
        if exchange.number == 2:  # the first read's answer is on its way, the next one is not asked for yet
            s3_server.put(server.port, {key: bytes(len(OBJECT))}, PUBLIC)
        assert exchange.number < 3 or heeds == (b" 412 " in exchange.head)
        return exchange.head, exchange.body

    with proxied(server.port, replace, drop=() if heeds else (b"if-match",)) as proxy:
        environment(proxy.port)
        monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "true")  # a signature would not bear the loss of a header
        with pytest.raises(DataError, match=str(heeds)):
            read(f"s3://{PUBLIC}/replaced", str(heeds))
        assert proxy.asked.value == 3


def test_an_object_replaced_after_the_listing_is_refused(server: Server):
    """A store without a manifest is read as it was listed."""
    s3_server.put(server.port, {"relisted/zarr.json": b"{}", "relisted/c/0": b"one"})
    url = f"s3://{BUCKET}/relisted"
    source = remote.pinned_source(url, remote.list_objects(url))
    s3_server.put(server.port, {"relisted/c/0": b"two"})
    assert read(url, "zarr.json", known=dict(source.known_objects)) == b"{}"
    with pytest.raises(DataError, match="relisted/c/0"):
        read(url, "c/0", known=dict(source.known_objects))


@pytest.mark.parametrize(
    ("path", "size", "word"),
    [
        ("o", 299_999, r"300000 bytes \(expected 299999"),
        ("o", 300_001, r"300000 bytes \(expected 300001"),
        ("o", 0, r"300000 bytes \(expected 0"),
        ("gone", 5, "missing"),
        ("gone", 0, "missing"),
    ],
)
def test_an_object_that_is_not_as_known_is_refused(path: str, size: int, word: str):
    """Missing, too long and too short objects are data errors that name the object, empty ones too."""
    with pytest.raises(DataError, match=word) as caught:
        read(f"s3://{BUCKET}/objects", path, known={path: (size, "")})
    assert caught.value.where == f"s3://{BUCKET}/objects/{path}"


# --- finding ---


def test_the_only_version_is_found(uploaded: Path):
    """`<root>/<name>` means its version; a version means itself."""
    version = f"s3://{BUCKET}/data/pick/{uploaded.name}"
    assert remote.find_remote_version(f"s3://{BUCKET}/data/pick") == version
    assert remote.find_remote_version(f"{version}/") == version


def test_several_versions_have_to_be_named(server: Server):
    """Their names are in the error."""
    s3_server.put(
        server.port, {f"several/{name}/{MANIFEST_FILE}": b"{}" for name in ("v1", "v2")} | {"several/x/y": b""}
    )
    with pytest.raises(UsageError, match="there are 2 versions: v1, v2"):
        remote.find_remote_version(f"s3://{BUCKET}/several")


@pytest.mark.parametrize("ask", [remote.load_remote_version, remote.find_remote_version], ids=["load", "find"])
def test_what_an_object_store_does_not_have(uploaded: Path, ask: Callable[[str], object]):
    """A tag and the first digits of a version are called that."""
    for name in ("pick@train", f"pick/{uploaded.name[:6]}"):
        with pytest.raises(DataError, match="expected a whole version"):
            ask(f"s3://{BUCKET}/data/{name}")


@pytest.mark.parametrize("ask", [remote.load_remote_version, remote.find_remote_version], ids=["load", "find"])
def test_what_is_no_dataset_says_so(ask: Callable[[str], object]):
    """A prefix without a manifest, and a bucket that is not there."""
    with pytest.raises(DataError, match=r"manifest\.json"):
        ask(f"s3://{BUCKET}/objects")
    with pytest.raises(UsageError, match="bucket 'no-such'"):
        ask("s3://no-such/data")


def test_a_manifest_is_not_believed_before_it_is_checked(
    server: Server, uploaded: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of another version, not JSON, and too large to be one."""
    data, other = (uploaded / MANIFEST_FILE).read_bytes(), "0" * 32
    s3_server.put(server.port, {f"bad/{other}/{MANIFEST_FILE}": data, f"bad/text/{MANIFEST_FILE}": b"hello"})
    with pytest.raises(DataError, match=f"{uploaded.name} .expected {other}"):
        remote.load_remote_version(f"s3://{BUCKET}/bad/{other}")
    with pytest.raises(DataError, match="not a manifest"):
        remote.load_remote_version(f"s3://{BUCKET}/bad/text")
    monkeypatch.setattr(remote, "MANIFEST_BYTES", 100)
    with pytest.raises(DataError, match=f"not a manifest: it has {len(data)} bytes"):
        remote.load_remote_version(f"s3://{BUCKET}/bad/{other}")


def test_a_listing_has_every_object_over_pages(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Sorted, with sizes and ETags; what stands for a folder is none of them."""
    files = {f"listed/c/{number}": bytes(number) for number in range(7)}
    s3_server.put(server.port, files | {"listed/zarr.json": b"{}", "listed/c": b"", "listed-not/x": b"x"})
    monkeypatch.setattr(remote, "_PAGE_SIZE", 2)
    objects = remote.list_objects(f"s3://{BUCKET}/listed/")
    assert [(path, size) for path, size, _ in objects] == [*((f"c/{n}", n) for n in range(7)), ("zarr.json", 2)]
    assert all(etag and '"' not in etag for *_, etag in objects)
    assert remote.list_objects(f"s3://{BUCKET}/nothing") == []


def test_a_listing_of_more_than_a_thousand_is_whole(server: Server):
    """A server gives a thousand keys at a time, whatever is asked for; odd names come through, and in order."""
    odd = ("a b#c~é%20+=&.bin", "..a", "a..", "%2e%2e", "'\"<&>", "\u202e")
    files = {f"many/c/{number}": b"" for number in range(1003)} | {f"many/{name}": b"x" for name in odd}
    s3_server.put(server.port, files)
    objects = remote.list_objects(f"s3://{BUCKET}/many")
    assert [f"many/{entry.path}" for entry in objects] == sorted(files)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        (["p/a", "p/../b"], "name"),
        (["p/a//b"], "name"),
        (["p/./b"], "name"),
        (["p/a&#10;b"], "name"),
        (["p/a", "other/x"], "outside of 'p/'"),
        (["pa"], "outside of 'p/'"),
        (["p/a", "p/a/b"], "'a' is both"),
    ],
)
def test_a_listing_of_names_that_cannot_be_is_refused(
    environment: Callable[[int], None], server: Server, keys: list[str], word: str
):
    """Whatever a store says it holds: nothing climbs, and nothing from beside the URL comes in."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified><Size>1</Size></Contents>"
        for key in keys
    )
    body = f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close" % len(body)
    with proxied(server.port, lambda exchange: (head, body)) as proxy:
        environment(proxy.port)
        with pytest.raises(DataError, match=word) as caught:
            remote.list_objects(f"s3://{BUCKET}/p")
    refused(caught.value)


@pytest.mark.parametrize("path", ["../o", "a/../o", "a//o", "/o", "./o", "..", "a\nb"])
def test_an_object_that_climbs_is_not_asked_for(environment: Callable[[int], None], server: Server, path: str):
    """A path with `..` and its like never becomes a request, whatever its manifest was believed to say."""
    with proxied(server.port) as proxy:
        environment(proxy.port)
        with pytest.raises(DataError) as caught:
            read(f"s3://{BUCKET}/objects", path, known={path: (len(OBJECT), "")})
        assert proxy.asked.value == 0
    assert "rename" in refused(caught.value)


# --- URLs ---


@pytest.mark.parametrize(
    "url",
    [
        "s3://id:hunter2@bucket/x",
        "s3://hunter2@bucket/x",
        "s3://bucket/x?X-Amz-Signature=hunter2",
        "s3://b/x#hunter2",
        "s3://",
        "s3:///x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/./b",
        "s3://bucket/a\nb",
        "s3:bucket",
        "http://bucket/hunter2",
        "ftp://hunter2",
        "hunter2",
        "s3://-bucket/x",
        "S3://bucket/x",
    ],
)
def test_a_url_that_is_none_of_ours_is_refused_unrepeated(url: str):
    """Names, passwords, signatures and odd paths; the error does not hold what may be a secret."""
    for use in (remote.load_remote_version, remote.find_remote_version, remote.list_objects, ObjectStoreSource):
        with pytest.raises(UsageError) as caught:
            use(url)
        assert "hunter2" not in refused(caught.value)


@settings(max_examples=300)
@given(st.text(string.printable + "é\0", max_size=20), st.sampled_from(["s3", "gs", "az", "https", "s3a"]))
def test_whatever_is_accepted_names_one_place(text: str, scheme: str):
    """A URL that is accepted is its own only spelling, has no empty or climbing part, and carries no secret."""
    try:
        place = client.parse_url(f"{scheme}://{text}")
    except UsageError:
        return
    assert client.parse_url(place.url) == place
    assert place.url.rstrip("/") == f"{scheme}://{text}".rstrip("/")
    assert not {"", ".", ".."} & {*place.prefix.split("/")} or not place.prefix
    assert not {*"?#\n\0"} & {*place.url}
    assert not {*"@:"} & {*place.bucket}


def test_a_source_shows_its_url_alone():
    """Its repr, which errors and logs may print, is short."""
    source = ObjectStoreSource("s3://bucket/x", {f"c/{number}": (1, "e") for number in range(1000)})
    assert f"{source!r}" == "ObjectStoreSource('s3://bucket/x')"
    assert source.label == "s3://bucket/x"
    assert source.block == 8 * MiB


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ToolMissing) as caught:
        remote.load_remote_version(f"s3://{BUCKET}/objects")
    assert caught.value.hint == "pip install 'pitools-hpc[s3]'"


def test_importing_it_costs_nothing():
    """The library is loaded by whoever asks a store, in the process that asks."""
    heavy = "{'obstore', 'numpy'} & sys.modules.keys()"
    code = f"import sys; from pitools.stage.sources.object_store import remote; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
