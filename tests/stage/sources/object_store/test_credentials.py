from __future__ import annotations

import http.server
import json
import os
import threading
from pathlib import Path

import pytest
import s3_server
from s3_reads import OBJECT, read, refused
from s3_server import BUCKET, KEY_ID, PUBLIC, SECRET, Server

from pitools.core.errors import ClusterError, ConfigError, PitError
from pitools.stage.sources.object_store import credentials, remote


def without_keys(monkeypatch: pytest.MonkeyPatch, home: Path, **files: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (home / ".aws").mkdir(parents=True)
    for name, text in files.items():
        (home / ".aws" / name).write_text(text)


@pytest.mark.parametrize("profile", ["default", "team%lab"])
def test_keys_of_a_profile_are_used(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str):
    """Keys from ~/.aws/credentials; region and endpoint from ~/.aws/config; a stranger's profile beside them."""
    section = profile if profile == "default" else f"profile {profile}"
    without_keys(
        monkeypatch,
        tmp_path / "home",
        credentials=f"[other]\naws_access_key_id = no\naws_secret_access_key = no%no\n\n"
        f"[{profile}]\naws_access_key_id={KEY_ID}\naws_secret_access_key = {SECRET}\n",
        config=f"[{section}]\nregion = eu-south-2\nendpoint_url = http://127.0.0.1:{server.port}\ns3 =\n  a = b\n",
    )
    monkeypatch.setenv("AWS_PROFILE", profile)
    assert credentials.read_access("s3").options["region"] == "eu-south-2"
    assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_the_environment_comes_before_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """Keys, region and endpoint of the environment win, the endpoint for S3 alone before the general one."""
    without_keys(
        monkeypatch,
        tmp_path / "home",
        config="[default]\nregion=x\nendpoint_url=http://x\n",
        credentials="[default]\naws_access_key_id=x\naws_secret_access_key=x\n",
    )
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://y")
    assert credentials.read_access("s3").options == {"region": "us-east-1", "endpoint": server.env["AWS_ENDPOINT_URL"]}
    assert read(f"s3://{BUCKET}/objects", "o") == OBJECT


def test_wrong_keys_are_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch):
    """The hint names every place that was looked in."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(ClusterError) as caught:
        remote.load_remote_version(f"s3://{BUCKET}/objects")
    error = refused(caught.value)
    assert "403" in error
    for place in ("AWS_ACCESS_KEY_ID", ".aws/credentials", ".aws/config", "AWS_WEB_IDENTITY_TOKEN_FILE", "metadata"):
        assert place in error


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
        remote.load_remote_version(f"s3://{BUCKET}/objects")


def test_credentials_from_metadata_that_nobody_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """An instance's metadata that does not answer is a lack of credentials, not a store that is down."""
    without_keys(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{s3_server.free_ports(1)[0]}")
    with pytest.raises(ClusterError, match="no credentials") as caught:
        remote.load_remote_version(f"s3://{BUCKET}/objects")
    assert "AWS_NO_SIGN_REQUEST" in refused(caught.value)


def test_keys_that_a_machine_is_given_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server):
    """An instance's metadata names a role and its keys; they sign what is asked of the store, with their token."""
    requested: list[str] = []

    class Machine(http.server.BaseHTTPRequestHandler):
        """Its metadata, and a store beside it."""

        def do_GET(self) -> None:
            answer = b"role"
            if self.path.endswith("/role"):
                keys = {"AccessKeyId": KEY_ID, "SecretAccessKey": SECRET, "Token": "hunter2"}
                answer = json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}).encode()
            elif self.path == f"/{BUCKET}/objects/o":
                requested.append(f"{self.headers['Authorization']} {self.headers['x-amz-security-token']}")
                answer = b"known"
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    without_keys(monkeypatch, tmp_path / "home")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Machine) as machine:
        threading.Thread(target=machine.serve_forever, args=(0.01,), daemon=True).start()
        for name in ("AWS_METADATA_ENDPOINT", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{machine.server_address[1]}")
        assert read(f"s3://{BUCKET}/objects", "o", known={"o": (5, "")}) == b"known"
        machine.shutdown()
    assert requested
    assert all(f"Credential={KEY_ID}/" in text and text.endswith(" hunter2") for text in requested)


@pytest.mark.parametrize("by", ["environment", "profile"])
def test_a_web_identity_is_the_librarys_to_exchange(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server, by: str
):
    """A token in a file, of the environment or of a profile, is sent to whoever gives keys for it; failing that, it
    is credentials that lack, not the store that is down.
    """
    (tmp_path / "token").write_text("hunter2")
    role = {"role_arn": "arn:aws:iam::1:role/x", "web_identity_token_file": str(tmp_path / "token")}
    lines = "".join(f"{name} = {text}\n" for name, text in role.items())
    without_keys(monkeypatch, tmp_path / "home", config=f"[profile lab]\nregion = x\n{lines}")
    if by == "profile":
        monkeypatch.setenv("AWS_PROFILE", "lab")
        assert credentials.read_access("s3").options == {"region": "x", **role}
    else:
        for name, text in role.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", text)
        assert credentials.read_access("s3").options == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["AWS_ENDPOINT_URL"])
    # Not by TLS, which is refused before anything is sent: a token is worth as much as a key.
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.port}")
    with pytest.raises(ClusterError, match="no credentials") as caught:
        read(f"s3://{BUCKET}/objects", "o")
    assert "AWS_WEB_IDENTITY_TOKEN_FILE" in refused(caught.value)


@pytest.mark.parametrize(
    ("files", "kind", "word"),
    [
        ({"credentials": "aws_secret_access_key = hunter2\n"}, ConfigError, "credentials:1: "),
        ({"credentials": "[default]\naws_secret_access_key = x\n  \nhunter2 hunter2\n"}, ConfigError, "credentials:4"),
        ({"config": "[profile labs]\nregion=x\n"}, ConfigError, "there is no profile 'lab'; did you mean \"labs\""),
        ({"config": "[profile lab]\ncredential_process = /bin/secret hunter2\n"}, ClusterError, "export-credentials"),
        ({"config": "[profile lab]\nsso_session = my\nregion = x\n"}, ClusterError, "sso_session"),
        ({"config": "[profile lab]\nendpoint_url = http://me:hunter2@store\n"}, ConfigError, "carries a name"),
    ],
)
def test_a_file_that_does_not_give_keys_is_explained_unquoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], kind: type[PitError], word: str
):
    """Where and what, never the line: it may be a secret."""
    without_keys(monkeypatch, tmp_path / "home", **files)
    if "default" not in str(files) and "config" in files:
        monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(kind) as caught:
        credentials.read_access("s3")
    assert word in refused(caught.value)


def test_access_does_not_show_what_it_holds():
    """Printed or logged by mistake it says nothing."""
    assert f"{credentials.AccessOptions({'secret_access_key': SECRET}, {})!r}" == "AccessOptions(…)"


def test_plain_http_is_only_where_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch):
    """By an http:// endpoint or AWS_ALLOW_HTTP; else it is TLS."""
    assert credentials.read_access("s3").client["allow_http"] is True
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    assert credentials.read_access("s3").client["allow_http"] is False
    monkeypatch.setenv("AWS_ALLOW_HTTP", "1")
    assert credentials.read_access("s3").client["allow_http"] is True


def test_google_and_azure_go_the_same_way(monkeypatch: pytest.MonkeyPatch, server: Server):
    """Their URLs and variables reach the object; their requests for one are near enough to S3's for its server."""
    endpoint = server.env["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert read(f"gs://{PUBLIC}/objects", "o") == OBJECT
    assert [entry.path for entry in remote.list_objects(f"gs://{PUBLIC}/objects")] == ["o"]
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
        remote.load_remote_version("gs://bucket/data")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
