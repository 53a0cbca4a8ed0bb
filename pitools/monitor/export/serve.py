"""Serve metrics over HTTP, or write them as a textfile: prometheus_client makes the text and negotiates its format."""

from __future__ import annotations

import base64
import binascii
import hmac
import io
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from pitools.core import trust
from pitools.core.errors import ClusterError, ConfigError
from pitools.core.fs import write_atomic

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_CLIENT_TIMEOUT_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, *args: object) -> None:
        """Log no requests."""

    def get_stderr(self) -> TextIO:
        """Log no client that hangs up, which TLS reports as an error: anybody could fill the log."""
        return io.StringIO()


def write_textfile(path: Path, collector: Collector) -> None:
    """Write all metrics for node_exporter's textfile collector: at once, by a name that does not end in .prom before.

    Raises NoSpace, ClusterError.
    """
    write_atomic(path, generate_latest(_registry(collector)), durable=False)


def serve(collector: Collector, host: str, port: int, tls: ssl.SSLContext | None, password: bytes = b"") -> int:
    """Serve in threads from now on; return the port, which is another one for port 0.

    tls: of `tls_context`; None for HTTP. password: `USER:PASSWORD` of basic authentication; b"" for none.
    Raises ClusterError if the address cannot be used.
    """
    app: App = make_wsgi_app(_registry(collector))

    class Server(ThreadingWSGIServer):
        address_family = 10 if ":" in host else 2

        def get_request(self) -> tuple[Any, Any]:
            """Accept a connection; its handshake is left to its thread, so that a silent client delays nobody."""
            connection, address = super().get_request()
            if tls:
                connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            return connection, address

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that go away or speak no TLS."""

    try:
        server = make_server(host, port, _with_password(app, password) if password else app, Server, _Handler)
    except OSError as error:
        raise ClusterError(f"cannot listen: {error.strerror}", where=f"{host}:{port}", hint="choose another") from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_port)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a server. Raises ConfigError, also for a key that others may read."""
    trust.require_private(key, "TLS key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"not a certificate with its key: {error}", where=f"{certificate}, {key}") from error
    return context


def read_password(path: Path) -> bytes:
    """Return the line `USER:PASSWORD` of a file. Raises ConfigError, also if others may read it."""
    trust.require_private(path, "password file")
    lines = path.read_bytes().splitlines()
    if len(lines) != 1 or not lines[0].partition(b":")[0] or not lines[0].partition(b":")[2]:
        raise ConfigError(f"{len(lines)} lines, or no USER:PASSWORD in it (expected one such line)", where=str(path))
    return lines[0]


def _with_password(app: App, password: bytes) -> App:
    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, text = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        try:
            given = base64.b64decode(text, validate=True) if scheme.lower() == "basic" else b""
        except (binascii.Error, ValueError):
            given = b""
        if hmac.compare_digest(given, password):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="pit monitor export"')])
        return [b"401 Unauthorized\n"]

    return checked


def _registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
