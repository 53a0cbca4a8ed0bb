"""scripts/hooks/mail and webhook against real servers on loopback: SMTP with and without TLS, and sendmail."""

from __future__ import annotations

import base64
import email
import email.policy
import json
import os
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RETRY = {
    "schema": "pit.hook-input/1",
    "event": "retry",
    "run_id": "t-1",
    "site": "alpha",
    "action": "retry",
    "reason": "n1 is down\nBcc: everybody@b.example",
}
SLO = {
    "schema": "pit.slo-notice/1",
    "event": "slo",
    "site": "alpha",
    "slo": "goodput",
    "severity": "page",
    "reason": "90 % lost",
    "hint": "pit launch list --site alpha",
}


class Smtp(socketserver.StreamRequestHandler):
    """As much of RFC 5321 as a mail needs, with STARTTLS and AUTH PLAIN where the server has a certificate."""

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # the one with TLS, too

    def handle(self) -> None:
        server = self.server
        tls: ssl.SSLContext | None = server.tls  # type: ignore[attr-defined]
        got: list[str] = server.got  # type: ignore[attr-defined]
        secure = isinstance(self.connection, ssl.SSLSocket)
        self.wfile.write(b"220 loopback\r\n")
        while line := self.rfile.readline().decode().rstrip("\r\n"):
            verb = line.split()[0].upper()
            got.append(line)
            if verb == "EHLO":
                features = ["AUTH PLAIN"] if secure else ["STARTTLS"] if tls else []
                lines = ["loopback", *features, "8BITMIME"]
                text = "".join(f"250{'-' if i < len(lines) - 1 else ' '}{one}\r\n" for i, one in enumerate(lines))
                self.wfile.write(text.encode())
            elif verb == "STARTTLS" and tls:
                self.wfile.write(b"220 go\r\n")
                try:
                    self.connection = tls.wrap_socket(self.connection, server_side=True)
                except ssl.SSLError:
                    return
                self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
                secure = True
            elif verb == "AUTH":
                right = base64.b64decode(line.split()[2]) == b"\0me\0hunter2"
                self.wfile.write(b"235 ok\r\n" if right else b"535 no, not hunter1\r\n")
            elif verb == "DATA":
                self.wfile.write(b"354 go\r\n")
                body = []
                while (part := self.rfile.readline()) != b".\r\n":
                    body.append(part)
                server.mails.append(b"".join(body))  # type: ignore[attr-defined]
                self.wfile.write(b"250 ok\r\n")
            elif verb == "QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 ok\r\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    tls: ssl.SSLContext | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Smtp)
        self.mails: list[bytes] = []
        self.got: list[str] = []


@pytest.fixture
def smtp() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of localhost, in one file."""
    path = tmp_path_factory.mktemp("tls") / "tls.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run(argv, check=True, capture_output=True)
    path.write_text(Path(f"{path}.key").read_text() + Path(f"{path}.crt").read_text())
    return path


Mail = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mail(repo: Path, tmp_path: Path) -> Mail:
    """Run scripts/hooks/mail with a file of these lines."""

    def call(record: dict[str, object], *lines: str, mode: int = 0o600, **env: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "smtp"
        path.write_text("\n".join(("[smtp]", *lines, "")))
        path.chmod(mode)
        argv = [repo / "scripts" / "hooks" / "mail", "a@b.example", *([path] if lines else [])]
        text, env = json.dumps(record), {**os.environ, **env}
        return subprocess.run(argv, input=text, env=env, text=True, capture_output=True, timeout=60, check=False)

    return call


@pytest.mark.parametrize(
    ("record", "subject", "more"),
    [
        (RETRY, "retry of t-1: retry", "More: pit launch why t-1"),
        (SLO, "slo of goodput at alpha: page", "More: pit launch list --site alpha"),
        (SLO | {"severity": "over", "hint": ""}, "slo of goodput at alpha: over", ""),
    ],
)
def test_a_mail_by_smtp(smtp: Server, mail: Mail, record: dict[str, object], subject: str, more: str) -> None:
    """A server on this machine gets one mail: its reason is in the text and in no header."""
    done = mail(record, "host = 127.0.0.1", f"port = {smtp.server_address[1]}", "tls = none", "from = pit@b.example")
    assert done.returncode == 0, done.stderr
    (data,) = smtp.mails
    parsed = email.message_from_bytes(data, policy=email.policy.default)
    assert (parsed["To"], parsed["From"], parsed["Subject"]) == ("a@b.example", "pit@b.example", subject)
    assert parsed["Date"].datetime.utcoffset() is not None
    assert "rcpt TO:<a@b.example>" in smtp.got
    assert not [line for line in smtp.got if "everybody" in line]
    text = parsed.get_content()
    assert more in text
    assert ("More:" in text) == bool(more)
    assert str(record["reason"]).splitlines()[0] in text


def test_a_password_goes_through_tls_alone(smtp: Server, mail: Mail, certificate: Path) -> None:
    """STARTTLS with a certificate that is checked; without it, or with another's, the password is not sent."""
    port = f"port = {smtp.server_address[1]}"
    login = ("user = me", "password = hunter2")
    for lines in (("host = localhost", port, *login), ("host = localhost", port, "tls = none", *login)):
        plain = mail(SLO, *lines)
        assert plain.returncode == 1, plain.stderr
        assert not [line for line in smtp.got if line.upper().startswith("AUTH")]
    smtp.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    smtp.tls.load_cert_chain(certificate)
    untrusted = mail(SLO, "host = localhost", port, *login)
    assert (untrusted.returncode, "certificate" in untrusted.stderr.lower()) == (1, True)
    assert not [line for line in smtp.got if line.upper().startswith("AUTH")]
    done = mail(SLO, "host = localhost", port, *login, SSL_CERT_FILE=f"{certificate}.crt")
    assert (done.returncode, len(smtp.mails)) == (0, 1), done.stderr
    other = mail(SLO, "host = localhost", port, "user = me", "password = hünter")
    assert (other.returncode, "ASCII" in other.stderr, "nter" in other.stderr) == (1, True, False)
    wrong = mail(SLO, "host = localhost", port, "user = me", "password = hunter1", SSL_CERT_FILE=f"{certificate}.crt")
    assert (wrong.returncode, "535" in wrong.stderr, "hunter" in wrong.stderr) == (1, True, False)


@pytest.mark.parametrize(
    "lines",
    [
        ("host = 127.0.0.1", "port = x hunter2"),
        ("host = 127.0.0.1", "pasword = hunter2"),
        ("hunter2",),
        ("host = 127.0.0.1", "tls = ssl"),
        ("host = 127.0.0.1", "port = 1", "tls = none"),
    ],
)
def test_a_wrong_file_of_smtp(mail: Mail, lines: tuple[str, ...]) -> None:
    """Exit 1, and a message without the values of the file."""
    done = mail(SLO, *lines)
    assert (done.returncode, "hunter2" in done.stderr, "Traceback" in done.stderr) == (1, False, False), done.stderr


def test_a_file_that_others_can_read_is_refused(mail: Mail, smtp: Server) -> None:
    """It may have a password: exit 1 with what to type, and no connection."""
    done = mail(SLO, "host = 127.0.0.1", f"port = {smtp.server_address[1]}", mode=0o644)
    assert (done.returncode, "chmod 600" in done.stderr, smtp.got) == (1, True, [])


def test_a_mail_by_sendmail(mail: Mail, tmp_path: Path) -> None:
    """Without a file, sendmail gets the recipient, the subject and the record; its failure is the hook's."""
    sendmail = tmp_path / "sendmail"
    sendmail.write_text(f"#!/bin/sh\necho $* > {tmp_path}/words\ncat > {tmp_path}/mail\nexit ${{CODE:-0}}\n")
    sendmail.chmod(0o755)
    assert mail(RETRY, SENDMAIL=str(sendmail)).returncode == 0
    assert (tmp_path / "words").read_text() == "-i -t\n"  # -i: a line of one dot does not end the mail
    parsed = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    assert (parsed["To"], parsed["Subject"]) == ("a@b.example", "retry of t-1: retry")
    assert parsed["Bcc"] is None
    assert '"run_id": "t-1"' in parsed.get_content()
    assert mail(RETRY, SENDMAIL=str(sendmail), CODE="75").returncode == 75
    missing = mail(RETRY, SENDMAIL="/nonexistent")
    assert (missing.returncode, "Traceback" in missing.stderr) == (1, False)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://b.example/hunter2", "b.example/hunter2", "", None])
def test_a_webhook_that_is_no_address(repo: Path, tmp_path: Path, url: str | None) -> None:
    """Exit 1 with its file's name and without its content; also where there is no file."""
    path = tmp_path / "webhook"
    if url is not None:
        path.write_text(url)
        path.chmod(0o600)
    argv = [repo / "scripts" / "hooks" / "webhook", path]
    done = subprocess.run(argv, input=json.dumps(SLO), text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, str(path) in done.stderr) == (1, True), done.stderr
    assert not [word for word in ("Traceback", "hunter2") if word in done.stderr]
