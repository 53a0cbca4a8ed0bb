from __future__ import annotations

import os
import re
import ssl
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import s3_server
from s3_reads import OBJECT, read, refused
from s3_server import BUCKET, Exchange, Server, proxied

from pitools.core.errors import ClusterError, DataError, PitError, Unreachable
from pitools.stage.sources.object_store import client, remote
from pitools.stage.sources.object_store.remote import ObjectStoreSource


def answer(status: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close" % (status, len(body)), body


def short(exchange: Exchange) -> tuple[bytes, bytes]:
    return exchange.head, exchange.body[:1000]


def longer(exchange: Exchange) -> tuple[bytes, bytes]:
    """More than its head says, which HTTP allows for."""
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (2 * len(exchange.body), 2 * exchange.body)
    return exchange.head + b"\r\nTransfer-Encoding: chunked", body


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
        (short, Unreachable, "cut short"),
        (lambda e: None, Unreachable, "cut short"),
        (longer, DataError, "replaced"),
        (lambda e: answer(b"503 SlowDown", PAGE), Unreachable, "the store is busy: 503 Denied"),
        (lambda e: answer(b"429 Slow"), Unreachable, "the store is busy: 429"),
        (lambda e: time.sleep(3), Unreachable, "no answer in time"),
        (lambda e: answer(b"403 Forbidden", PAGE), ClusterError, "403 Denied; .*AWS_ACCESS_KEY_ID"),
        (lambda e: answer(b"401 Unauthorized"), ClusterError, "401; .*profile 'default'"),
        (lambda e: answer(b"404 Not Found"), DataError, "missing"),
        (lambda e: answer(b"301 Moved"), ClusterError, "another region; export AWS_REGION"),
        (lambda e: (e.head.replace(b"206 Partial Content", b"200 OK"), e.body), ClusterError, "range requests"),
        (lambda e: answer(b"200 OK", b"<html>a page of a portal</html>"), ClusterError, "range requests"),
    ],
    ids=["short", "closed", "longer", "503", "429", "slow", "403", "401", "404", "301", "whole", "portal"],
)
def test_a_lasting_fault_is_an_error_that_says_what_to_do(
    server: Server,
    environment: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: s3_server.Fault,
    kind: type[PitError],
    word: str,
):
    """Each with its exit code, after few requests, and without a word of the server's or the request's."""
    monkeypatch.setattr(client, "READ_TIMEOUT_S", 0.3)
    with proxied(server.port, fault) as proxy:
        environment(proxy.port)
        with pytest.raises(PitError) as caught:
            read(f"s3://{BUCKET}/objects", "o", known={"o": (len(OBJECT), "")})
        assert type(caught.value) is kind
        assert re.search(word, refused(caught.value))
        assert proxy.asked.value <= 1 + client.RETRIES


def test_what_the_library_says_is_not_chained_to_what_we_say():
    """A traceback, as a bug report holds it, shows no request and no answer, in the process that asked, too."""

    def work(_: object) -> str:
        def fail() -> None:
            raise ValueError("authorization: AWS4-HMAC Signature=hunter2")

        with pytest.raises(PitError) as caught:
            client.call_store(fail, client.parse_url(f"s3://{BUCKET}/objects"))
        return "".join(traceback.format_exception(caught.value))

    assert "hunter2" not in remote.run_isolated(work)


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


def authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate of this host that nobody has signed, and how a server speaks TLS with it."""
    key, certificate = folder / "key", folder / "crt"
    created = [
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=pit",
    ]
    created += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(["openssl", "req", *created, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


def test_a_private_authority_is_trusted_where_the_user_names_it(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Over TLS, AWS_CA_BUNDLE decides; without it the error says where the certificate goes."""
    certificate, context = authority(tmp_path)
    with proxied(server.port, tls=context) as proxy:
        environment(proxy.port)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{proxy.port}")
        with pytest.raises(ClusterError, match="certificate is not trusted") as caught:
            read(f"s3://{BUCKET}/objects", "o")
        assert "AWS_CA_BUNDLE" in refused(caught.value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_nobody_is_taken_from_https_to_http(
    server: Server, environment: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A redirect to a place without TLS is refused, and nothing is asked there."""
    certificate, context = authority(tmp_path)
    with proxied(server.port) as plain:
        head = b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\nConnection: close"
        head += f"\r\nLocation: http://127.0.0.1:{plain.port}/{BUCKET}/objects/o".encode()
        with proxied(server.port, lambda exchange: (head, b""), tls=context) as proxy:
            environment(proxy.port)
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{proxy.port}")
            monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
            with pytest.raises(PitError) as caught:
                read(f"s3://{BUCKET}/objects", "o", known={"o": (len(OBJECT), "")})
        assert plain.asked.value == 0
    assert "redirect" in refused(caught.value) or "region" in refused(caught.value)


def test_a_server_that_knows_no_ranges_still_gives_whole_objects(server: Server, environment: Callable[[int], None]):
    """What fits one request is asked for without a range: there are servers whose answer to one is not understood."""

    def whole(exchange: Exchange) -> tuple[bytes, bytes]:
        return exchange.head.replace(b"206 Partial Content", b"200 OK"), exchange.body

    def work(_: object) -> bytes:
        view = memoryview(bytearray(1 << 20))
        return bytes(view[: ObjectStoreSource(f"s3://{BUCKET}/objects").connect().open("o").read_into(view, 0)])

    with proxied(server.port, whole) as proxy:
        environment(proxy.port)
        assert remote.run_isolated(work) == OBJECT
