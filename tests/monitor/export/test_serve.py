"""HTTP, TLS, basic authentication and the textfile."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pitools.core.errors import ConfigError
from pitools.monitor.export.board import Board
from pitools.monitor.export.serve import read_password, serve, tls_context, write_textfile
from pitools.site.schema import Site


@pytest.fixture
def board(make_site: Callable[..., Site]) -> Board:
    """One site, once queried."""
    board = Board([make_site()])
    board.run_once(lambda: None, lambda _: None)
    return board


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    names = tmp_path / "cert.pem", tmp_path / "key.pem"
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    argv += [
        "-subj",
        "/CN=127.0.0.1",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        str(names[0]),
        "-keyout",
        str(names[1]),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return names


def get(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[str, str]:
    """The type of the answer and its text."""
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_the_format_is_negotiated(board: Board) -> None:
    """Prometheus text, or OpenMetrics for a client that asks for it."""
    url = f"http://127.0.0.1:{serve(board, '127.0.0.1', 0, None)}/metrics"
    kind, text = get(url)
    assert kind.startswith("text/plain")
    assert 'pit_jobs{cluster="alpha",partition="gpu",state="running"} 1.0' in text
    kind, text = get(url, Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_tls_and_password(board: Board, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """Who has the password gets the metrics, verified by the certificate; a silent client delays nobody."""
    secret = tmp_path / "password"
    secret.write_text("prometheus:s3cret\n")
    secret.chmod(0o600)
    port = serve(board, "127.0.0.1", 0, tls_context(*certificate), read_password(secret))
    context = ssl.create_default_context(cafile=str(certificate[0]))
    silent = socket.create_connection(("127.0.0.1", port))
    url = f"https://127.0.0.1:{port}/metrics"
    token = base64.b64encode(b"prometheus:s3cret").decode()
    assert "pit_jobs" in get(url, context, Authorization=f"Basic {token}")[1]
    for headers in ({}, {"Authorization": "Basic %%%"}, {"Authorization": f"Bearer {token}"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(url, context, **headers)
        assert refused.value.code == 401
        refused.value.close()
    silent.close()


def test_a_client_that_hangs_up_is_no_news(
    board: Board, certificate: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stderr of one that goes away before its answer, which TLS makes an error of; the next gets its own."""
    has_asked, has_gone = threading.Event(), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            has_asked.set()
            assert has_gone.wait(10)
            yield from board.collect()

    port = serve(Slow(), "127.0.0.1", 0, tls_context(*certificate))
    context = ssl.create_default_context(cafile=str(certificate[0]))
    client = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert has_asked.wait(10)
    client.close()
    has_gone.set()
    assert "pit_jobs" in get(f"https://127.0.0.1:{port}/metrics", context)[1]
    while threads := [one for one in threading.enumerate() if "process_request" in one.name]:
        threads[0].join(10)
    assert capfd.readouterr().err == ""


def test_secrets_that_others_may_read_are_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """Of a key or a password; and a file without a password."""
    secret = tmp_path / "password"
    secret.write_text("prometheus:s3cret\n")
    secret.chmod(0o640)
    with pytest.raises(ConfigError):
        read_password(secret)
    secret.write_text("prometheus")
    secret.chmod(0o600)
    with pytest.raises(ConfigError):
        read_password(secret)
    certificate[1].chmod(0o644)
    with pytest.raises(ConfigError):
        tls_context(*certificate)


def test_the_textfile_is_for_node_exporter(board: Board, tmp_path: Path) -> None:
    """Complete, readable by all, without timestamps, and no other file there ends in .prom."""
    path = tmp_path / "textfiles" / "pit.prom"
    path.parent.mkdir()
    os.umask(0o022)
    write_textfile(path, board)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(len(line.rsplit("} ", 1)[1].split()) == 1 for line in lines)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["pit.prom"]
