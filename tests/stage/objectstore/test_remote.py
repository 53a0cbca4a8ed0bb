from __future__ import annotations

import os
import re
import ssl
import string
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, ToolMissing, Unreachable, UsageError
from pitools.stage.objectstore import client as objectstore
from pitools.stage.objectstore import credentials, remote
from pitools.stage.objectstore.remote import RemoteSource
from pitools.stage.run import stage
from pitools.store.manifest import FILE_NAME

sys.path.insert(0, str(Path(__file__).resolve().parent))
import s3_server
from s3_server import BUCKET, KEY_ID, PUBLIC, SECRET, Exchange, Server, proxied

MiB = 1 << 20
OBJECT = os.urandom(300_000)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One S3 server for all tests; each puts what it needs below a prefix of its own."""
    with s3_server.serving(tmp_path_factory.mktemp("s3")) as running:
        s3_server.put(running.port, {"objects/o": OBJECT, "objects/deep/a b#c~é%20+=&.bin": b"odd"})
        s3_server.put(running.port, {"objects/o": OBJECT}, PUBLIC)
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server) -> Callable[[int], None]:
    """A user's environment that names the server, and a home without files; call it to name another port."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def use(port: int) -> None:
        for name, value in s3_server.environment(port).items():
            monkeypatch.setenv(name, value)

    use(server.port)
    return use


@pytest.fixture(scope="session")
def uploaded(server: Server, tmp_path_factory: pytest.TempPathFactory, build) -> Path:
    """A dataset on disk, whose copy is at s3://lab/data/pick/<version>."""
    files = {
        "zarr.json": b"{}",
        "actions/c/0": os.urandom(1000),
        "actions/c/1": b"",
        "images/c/0/0": os.urandom(9 * MiB + 17),
        "images/c/1/0": os.urandom(100_000),
    }
    folder = build(tmp_path_factory.mktemp("uploaded"), files)
    s3_server.put_tree(server.port, folder, f"data/pick/{folder.name}")
    return folder


def read(url: str, path: str, *, known: dict[str, tuple[int, str]] | None = None, then: Callable = lambda: None):
    """The whole object, read 100,000 bytes at a time in a forked process; `then` is called after the first read."""

    def work(_: object) -> bytes:
        reader = RemoteSource(url, known or {}).connect()
        file = reader.open(path)
        found, view = b"", memoryview(bytearray(100_000))
        while count := file.read_into(view, len(found)):
            found += view[:count]
            if len(found) == count:
                then()
        return found

    return remote.apart(work)


def refused(error: PitError) -> str:
    """Everything an error says, also where it is printed with its causes; no secret is in it."""
    text = "".join(traceback.format_exception(error)) + repr(error) + error.hint
    for secret in (SECRET, KEY_ID, "hunter2", "Signature=", "X-Amz", "authorization:", "Debug source"):
        assert secret not in text
    assert re.search("Traceback", text)
    return f"{error}; {error.hint}"


# --- staging ---


def test_a_version_is_staged_from_a_store(uploaded: Path, root: Path):
    """Workers forked after the parent read the manifest bring every byte, and nothing of theirs is in the parent."""
    dataset = remote.load(f"s3://{BUCKET}/data/pick/{uploaded.name}/")
    assert "obstore" not in sys.modules
    record = stage(dataset, root)
    assert (record.state, record.source) == ("staged", f"s3://{BUCKET}/data/pick/{uploaded.name}")
    for path in (path for path in uploaded.rglob("*") if path.is_file()):
        assert (Path(record.path) / path.relative_to(uploaded)).read_bytes() == path.read_bytes()
    kept = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file()) + msgspec.json.encode(record)
    assert SECRET.encode() not in kept
    assert KEY_ID.encode() not in kept


def test_a_process_forked_after_use_is_told_and_does_not_hang():
    """The library's threads die in a fork: our guard says so, where the library would wait for ever."""

    def use_and_fork(_: object) -> None:
        source = RemoteSource(f"s3://{BUCKET}/objects")
        source.connect()
        remote.apart(lambda _: source.connect().close())

    with pytest.raises(AssertionError, match="obstore was used before this process was forked"):
        remote.apart(use_and_fork)


def test_a_damaged_byte_on_the_way_is_found(
    uploaded: Path, root: Path, server: Server, environment: Callable[[int], None], residue
):
    """A flipped bit in an answer is no published version, and names its file."""

    def flip(exchange: Exchange) -> tuple[bytes, bytes]:
        body = exchange.body
        if exchange.path.endswith("images/c/1/0"):
            body = body[:77] + bytes([body[77] ^ 4]) + body[78:]
        return exchange.head, body

    with proxied(server.port, flip) as proxy:
        environment(proxy.port)
        dataset = remote.load(f"s3://{BUCKET}/data/pick/{uploaded.name}")
        with pytest.raises(DataError, match="images/c/1/0") as caught:
            stage(dataset, root)
    refused(caught.value)
    assert residue(root) == []
    assert not list(root.glob("objects/*"))


def test_a_small_file_costs_one_request(uploaded: Path, server: Server, environment: Callable[[int], None], root: Path):
    """What the manifest knows is not asked for again: a request a block, and one for an empty file."""
    with proxied(server.port) as proxy:
        environment(proxy.port)
        dataset = remote.load(f"s3://{BUCKET}/data/pick/{uploaded.name}")
        before = proxy.asked.value
        stage(dataset, root)
        assert (before, proxy.asked.value - before) == (1, 1 + 1 + 1 + 2 + 1)


# --- reading ---


def test_ranges_are_the_objects_bytes():
    """Any length at any offset, at the end and past it."""
    cuts = [(0, 1), (299_999, 10), (300_000, 10), (400_000, 1), (123_456, 77_777), (0, 300_001)]

    def work(_: object) -> list[bytes]:
        file = RemoteSource(f"s3://{BUCKET}/objects").connect().open("o")
        view = memoryview(bytearray(300_001))
        return [bytes(view[: file.read_into(view[:length], start)]) for start, length in cuts]

    assert remote.apart(work) == [OBJECT[start : start + length] for start, length in cuts]


def test_names_go_through_unchanged():
    """Spaces, marks that URLs use, and letters beyond ASCII."""
    assert read(f"s3://{BUCKET}/objects", "deep/a b#c~é%20+=&.bin") == b"odd"


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds If-Match", "ignores If-Match"])
def test_an_object_replaced_meanwhile_is_refused(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, heeds: bool
):  # fmt: skip
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
        with pytest.raises(DataError, match="not the object it was when this copy began"):
            read(f"s3://{PUBLIC}/replaced", str(heeds))
        assert proxy.asked.value == 3


def test_an_object_replaced_after_the_listing_is_refused(server: Server):
    """A store without a manifest is read as it was listed."""
    s3_server.put(server.port, {"relisted/zarr.json": b"{}", "relisted/c/0": b"one"})
    url = f"s3://{BUCKET}/relisted"
    source = remote.listed_source(url, remote.listing(url))
    s3_server.put(server.port, {"relisted/c/0": b"two"})
    assert read(url, "zarr.json", known=dict(source.known)) == b"{}"
    with pytest.raises(DataError, match="not the object it was"):
        read(url, "c/0", known=dict(source.known))


@pytest.mark.parametrize(("path", "size", "word"), [
    ("o", 299_999, "the manifest says 299999 bytes, the object has 300000"),
    ("o", 300_001, "the manifest says 300001 bytes, the object has 300000"),
    ("o", 0, "the manifest says 0 bytes, the object has 300000"),
    ("gone", 5, "missing"),
    ("gone", 0, "missing"),
])  # fmt: skip
def test_an_object_that_is_not_as_known_is_refused(path: str, size: int, word: str):
    """Missing, too long and too short objects are data errors that name the object, empty ones too."""
    with pytest.raises(DataError, match=word) as caught:
        read(f"s3://{BUCKET}/objects", path, known={path: (size, "")})
    assert caught.value.where == f"s3://{BUCKET}/objects/{path}"


# --- faults ---


def answer(status: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close" % (status, len(body)), body


def short(exchange: Exchange) -> tuple[bytes, bytes]:
    return exchange.head, exchange.body[:1000]


PAGE = b"<Error><Code>Denied</Code><Message>authorization: AWS4-HMAC Signature=hunter2</Message></Error>"


@pytest.mark.parametrize(
    "fault",
    [short, lambda exchange: answer(b"500 Oops", PAGE), lambda exchange: answer(b"429 Slow"), lambda exchange: None],
    ids=["short", "500", "429", "closed"],
)
def test_a_passing_fault_is_got_over(server: Server, environment: Callable[[int], None], fault: s3_server.Fault):
    """Two bad answers and then good ones are no error."""
    with proxied(server.port, lambda e: fault(e) if e.number in (2, 3) else (e.head, e.body)) as proxy:
        environment(proxy.port)
        assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        (short, Unreachable, "the answer broke off"),
        (lambda e: None, Unreachable, "the answer broke off"),
        (lambda e: answer(b"503 SlowDown", PAGE), Unreachable, "the store is busy: 503 Denied"),
        (lambda e: time.sleep(3), Unreachable, "no answer in time"),
        (lambda e: answer(b"403 Forbidden", PAGE), ClusterError, "refused: 403 Denied; looked in AWS_ACCESS_KEY_ID"),
        (lambda e: answer(b"401 Unauthorized"), ClusterError, "refused: 401.*profile 'default'"),
        (lambda e: answer(b"404 Not Found"), DataError, "missing"),
        (lambda e: answer(b"301 Moved"), ClusterError, "another region; export AWS_REGION"),
        (lambda e: (e.head.replace(b"206 Partial Content", b"200 OK"), e.body), ClusterError, "a part of an object"),
        (lambda e: answer(b"200 OK", b"<html>a page of a portal</html>"), ClusterError, "part of an object|understood"),
    ],
    ids=["short", "closed", "503", "slow", "403", "401", "404", "301", "whole", "portal"],
)
def test_a_lasting_fault_is_an_error_that_says_what_to_do(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, fault: s3_server.Fault,
    kind: type[PitError], word: str,
):  # fmt: skip
    """Each with its exit code, after few requests, and without a word of the server's or the request's."""
    monkeypatch.setattr(objectstore, "READ_S", 0.3)
    with proxied(server.port, fault) as proxy:
        environment(proxy.port)
        with pytest.raises(PitError) as caught:
            read(f"s3://{BUCKET}/objects", "o", known={"o": (len(OBJECT), "")})
        assert type(caught.value) is kind
        assert re.search(word, refused(caught.value))
        assert proxy.asked.value <= 1 + objectstore.RETRIES


def test_a_server_that_vanishes_is_for_later(server: Server, environment: Callable[[int], None]):
    """Gone between two reads, it is Unreachable, within seconds."""
    with proxied(server.port) as proxy:
        environment(proxy.port)
        with pytest.raises(Unreachable, match="the connection was refused") as caught:
            read(f"s3://{BUCKET}/objects", "o", then=lambda: os.kill(proxy.process.pid, 9))
    assert caught.value.exit_code == 75


def test_https_to_a_server_without_it_is_no_puzzle(monkeypatch: pytest.MonkeyPatch, server: Server):
    """An endpoint without its http:// is not silently downgraded."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.port}")
    with pytest.raises(Unreachable, match="does not speak TLS"):
        read(f"s3://{BUCKET}/objects", "o")


def test_a_private_authority_is_trusted_where_the_user_names_it(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):  # fmt: skip
    """Over TLS, AWS_CA_BUNDLE decides; without it the error says where the certificate goes."""
    key, certificate = tmp_path / "key", tmp_path / "crt"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=pit"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(["openssl", "req", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with proxied(server.port, tls=context) as proxy:
        environment(proxy.port)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{proxy.port}")
        with pytest.raises(ClusterError, match="certificate is not trusted") as caught:
            read(f"s3://{BUCKET}/objects", "o")
        assert "AWS_CA_BUNDLE" in refused(caught.value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_a_server_that_knows_no_ranges_still_gives_whole_objects(server: Server, environment: Callable[[int], None]):
    """What fits one request is asked for without a range: there are servers whose answer to one is not understood."""

    def whole(exchange: Exchange) -> tuple[bytes, bytes]:
        return exchange.head.replace(b"206 Partial Content", b"200 OK"), exchange.body

    def work(_: object) -> bytes:
        view = memoryview(bytearray(MiB))
        return bytes(view[: RemoteSource(f"s3://{BUCKET}/objects").connect().open("o").read_into(view, 0)])

    with proxied(server.port, whole) as proxy:
        environment(proxy.port)
        assert remote.apart(work) == OBJECT


# --- finding ---


def test_the_only_version_is_found(uploaded: Path):
    """`<root>/<name>` means its version; a version means itself."""
    version = f"s3://{BUCKET}/data/pick/{uploaded.name}"
    assert remote.find(f"s3://{BUCKET}/data/pick") == version
    assert remote.find(f"{version}/") == version


def test_several_versions_have_to_be_named(server: Server):
    """Their names are in the error."""
    s3_server.put(server.port, {f"several/{name}/{FILE_NAME}": b"{}" for name in ("v1", "v2")} | {"several/x/y": b""})
    with pytest.raises(UsageError, match="there are 2 versions: v1, v2"):
        remote.find(f"s3://{BUCKET}/several")


@pytest.mark.parametrize("ask", [remote.load, remote.find], ids=["load", "find"])
def test_what_is_no_dataset_says_so(ask: Callable[[str], object]):
    """A prefix without a manifest, and a bucket that is not there."""
    with pytest.raises(DataError, match=r"not a dataset: it has no manifest\.json"):
        ask(f"s3://{BUCKET}/objects")
    with pytest.raises(UsageError, match="there is no bucket 'no-such'"):
        ask("s3://no-such/data")


def test_a_manifest_is_not_believed_before_it_is_checked(
    server: Server, uploaded: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of another version, not JSON, and too large to be one."""
    data, other = (uploaded / FILE_NAME).read_bytes(), "0" * 32
    s3_server.put(server.port, {f"bad/{other}/{FILE_NAME}": data, f"bad/text/{FILE_NAME}": b"hello"})
    with pytest.raises(DataError, match="belongs to version"):
        remote.load(f"s3://{BUCKET}/bad/{other}")
    with pytest.raises(DataError, match="not a manifest"):
        remote.load(f"s3://{BUCKET}/bad/text")
    monkeypatch.setattr(remote, "MANIFEST_BYTES", 100)
    with pytest.raises(DataError, match=f"not a manifest: it has {len(data)} bytes"):
        remote.load(f"s3://{BUCKET}/bad/{other}")


def test_a_listing_has_every_object_over_pages(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Sorted, with sizes and ETags; what stands for a folder is none of them."""
    files = {f"listed/c/{number}": bytes(number) for number in range(7)}
    s3_server.put(server.port, files | {"listed/zarr.json": b"{}", "listed/c": b"", "listed-not/x": b"x"})
    monkeypatch.setattr(remote, "_PAGE", 2)
    found = remote.listing(f"s3://{BUCKET}/listed/")
    assert [(path, size) for path, size, _ in found] == [*((f"c/{n}", n) for n in range(7)), ("zarr.json", 2)]
    assert all(etag and '"' not in etag for *_, etag in found)
    assert remote.listing(f"s3://{BUCKET}/nothing") == []


# --- credentials ---


def without_keys(monkeypatch: pytest.MonkeyPatch, home: Path, **files: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (home / ".aws").mkdir(parents=True)
    for name, text in files.items():
        (home / ".aws" / name).write_text(text)


@pytest.mark.parametrize("profile", ["default", "team%lab"])
def test_keys_of_a_profile_are_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str
):  # fmt: skip
    """Keys from ~/.aws/credentials; region and endpoint from ~/.aws/config; a stranger's profile beside them."""
    section = profile if profile == "default" else f"profile {profile}"
    without_keys(
        monkeypatch, tmp_path / "home",
        credentials=f"[other]\naws_access_key_id = no\naws_secret_access_key = no%no\n\n"
                    f"[{profile}]\naws_access_key_id={KEY_ID}\naws_secret_access_key = {SECRET}\n",
        config=f"[{section}]\nregion = eu-south-2\nendpoint_url = http://127.0.0.1:{server.port}\ns3 =\n  a = b\n",
    )  # fmt: skip
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert credentials.access("s3").options["region"] == "eu-south-2"
    assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_the_environment_comes_before_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """Keys, region and endpoint of the environment win, the endpoint for S3 alone before the general one."""
    without_keys(monkeypatch, tmp_path / "home", config="[default]\nregion=x\nendpoint_url=http://x\n",
                 credentials="[default]\naws_access_key_id=x\naws_secret_access_key=x\n")  # fmt: skip
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://y")
    assert credentials.access("s3").options == {"region": "us-east-1", "endpoint": server.env["AWS_ENDPOINT_URL"]}
    assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_wrong_keys_are_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch):
    """The hint names every place that was looked in."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(ClusterError) as caught:
        remote.load(f"s3://{BUCKET}/objects")
    said = refused(caught.value)
    assert "403" in said
    for place in ("AWS_ACCESS_KEY_ID", ".aws/credentials", ".aws/config", "AWS_WEB_IDENTITY_TOKEN_FILE", "metadata"):
        assert place in said


def test_a_public_bucket_needs_no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """AWS_NO_SIGN_REQUEST reads what everybody may read, and nothing else."""
    without_keys(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    assert read(f"s3://{PUBLIC}/objects", "o") == OBJECT
    with pytest.raises(ClusterError, match="403"):
        read(f"s3://{BUCKET}/objects", "o")


def test_no_keys_at_all_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """Where the instance's metadata is switched off, nobody is asked in vain."""
    without_keys(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ClusterError, match="no credentials for s3"):
        remote.load(f"s3://{BUCKET}/objects")


def test_credentials_from_metadata_that_nobody_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """An instance's metadata that does not answer is a lack of credentials, not a store that is down."""
    without_keys(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{s3_server.free_ports(1)[0]}")
    with pytest.raises(ClusterError, match="no credentials") as caught:
        remote.load(f"s3://{BUCKET}/objects")
    assert "AWS_NO_SIGN_REQUEST" in refused(caught.value)


@pytest.mark.parametrize(("files", "kind", "word"), [
    ({"credentials": "aws_secret_access_key = hunter2\n"}, ConfigError, "credentials:1: this is not"),
    ({"credentials": "[default]\naws_secret_access_key = x\n  \nhunter2 hunter2\n"}, ConfigError, "credentials:4"),
    ({"config": "[profile labs]\nregion=x\n"}, ConfigError, "there is no profile 'lab'; did you mean \"labs\""),
    ({"config": "[profile lab]\ncredential_process = /bin/secret hunter2\n"}, ClusterError, "export-credentials"),
    ({"config": "[profile lab]\nsso_session = my\nregion = x\n"}, ClusterError, "sso_session"),
    ({"config": "[profile lab]\nendpoint_url = http://me:hunter2@store\n"}, ConfigError, "carries a name"),
])  # fmt: skip
def test_a_file_that_does_not_give_keys_is_explained_unquoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], kind: type[PitError], word: str
):  # fmt: skip
    """Where and what, never the line: it may be a secret."""
    without_keys(monkeypatch, tmp_path / "home", **files)
    if "default" not in str(files) and "config" in files:
        monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(kind) as caught:
        credentials.access("s3")
    assert word in refused(caught.value)


def test_access_does_not_show_what_it_holds():
    """Printed or logged by mistake it says nothing."""
    assert f"{credentials.Access({'secret_access_key': SECRET}, {})!r}" == "Access(…)"


def test_plain_http_is_only_where_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch):
    """By an http:// endpoint or AWS_ALLOW_HTTP; else it is TLS."""
    assert credentials.access("s3").client["allow_http"] is True
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    assert credentials.access("s3").client["allow_http"] is False
    monkeypatch.setenv("AWS_ALLOW_HTTP", "1")
    assert credentials.access("s3").client["allow_http"] is True


def test_google_and_azure_go_the_same_way(monkeypatch: pytest.MonkeyPatch, server: Server):
    """Their URLs and variables reach the object; their requests for one are near enough to S3's for its server."""
    endpoint = server.env["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert read(f"gs://{PUBLIC}/objects", "o") == OBJECT
    assert [entry.path for entry in remote.listing(f"gs://{PUBLIC}/objects")] == ["o"]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{endpoint}/{PUBLIC}")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    s3_server.put(server.port, {"container/objects/o": OBJECT}, PUBLIC)
    assert read("az://container/objects", "o") == OBJECT
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(ClusterError, match="no storage account"):
        read("az://container/objects", "o")


def test_google_keys_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A file that is not there is a lack of credentials, and its places are listed."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ClusterError, match="no credentials") as caught:
        remote.load("gs://bucket/data")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint


# --- URLs ---


@pytest.mark.parametrize("url", [
    "s3://id:hunter2@bucket/x", "s3://hunter2@bucket/x", "s3://bucket/x?X-Amz-Signature=hunter2", "s3://b/x#hunter2",
    "s3://", "s3:///x", "s3://bucket/a//b", "s3://bucket/../b", "s3://bucket/./b", "s3://bucket/a\nb", "s3:bucket",
    "http://bucket/hunter2", "ftp://hunter2", "hunter2", "s3://-bucket/x", "S3://bucket/x",
])  # fmt: skip
def test_a_url_that_is_none_of_ours_is_refused_unrepeated(url: str):
    """Names, passwords, signatures and odd paths; the error does not hold what may be a secret."""
    for use in (remote.load, remote.find, remote.listing, RemoteSource):
        with pytest.raises(UsageError) as caught:
            use(url)
        assert "hunter2" not in refused(caught.value)


@settings(max_examples=300)
@given(st.text(string.printable + "é\0", max_size=20), st.sampled_from(["s3", "gs", "az", "https", "s3a"]))
def test_whatever_is_accepted_names_one_place(text: str, scheme: str):
    """A URL that is accepted is its own only spelling, has no empty or climbing part, and carries no secret."""
    try:
        place = objectstore.parse(f"{scheme}://{text}")
    except UsageError:
        return
    assert objectstore.parse(place.url) == place
    assert place.url.rstrip("/") == f"{scheme}://{text}".rstrip("/")
    assert not {"", ".", ".."} & {*place.prefix.split("/")} or not place.prefix
    assert not {*"?#\n\0"} & {*place.url}
    assert not {*"@:"} & {*place.bucket}


def test_a_source_shows_its_url_alone():
    """Its repr, which errors and logs may print, is short."""
    source = RemoteSource("s3://bucket/x", {f"c/{number}": (1, "e") for number in range(1000)})
    assert f"{source!r}" == "RemoteSource('s3://bucket/x')"
    assert source.label == "s3://bucket/x"
    assert source.block == 8 * MiB


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ToolMissing) as caught:
        remote.load(f"s3://{BUCKET}/objects")
    assert caught.value.hint == "pip install 'pitools-hpc[s3]'"


def test_importing_it_costs_nothing():
    """The library is loaded by whoever asks a store, in the process that asks."""
    heavy = "{'obstore', 'numpy'} & sys.modules.keys()"
    code = f"import sys; from pitools.stage.objectstore import remote; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
