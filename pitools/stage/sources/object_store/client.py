"""Open an object store with the user's credentials, call it, and translate its errors.

The library's messages are never passed on: they contain requests, signed URLs and server pages. Error texts are made
from recognized parts of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pitools.core.errors import ClusterError, DataError, PitError, ToolMissing, Unreachable, UsageError
from pitools.stage.sources.object_store import credentials

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 30.0, 300.0
RETRIES, RETRY_FOR_S = 3, 60.0

_URL = re.compile(r"(?P<scheme>[a-z0-9+.-]{1,16})://(?P<bucket>[^/]*)(?:/(?P<prefix>.*))?", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_STATUS = re.compile(r"status code: ([1-5]\d\d)\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
# Requests by which the library gets credentials, in its error messages.
_FOR_CREDENTIALS = re.compile(
    r"performing (POST|PUT) |token (request|file)|service account|application.credentials|AssumeRole|169\.254\."
    r"|login\.microsoftonline"
    r"|://[^/\s]+/(latest/(api/token|meta-data/)|computeMetadata/|metadata/identity)",
    re.IGNORECASE,
)
_CONNECT_ERRORS = (
    (re.compile(r"ConnectionRefused|Connection refused"), "the connection was refused"),
    (re.compile(r"dns error|failed to lookup|Name or service not known", re.IGNORECASE), "its name has no address"),
    (
        re.compile(r"InvalidContentType|InvalidMessage|wrong version number"),
        "the server does not speak TLS, which https:// requires",
    ),
    (re.compile(r"TimedOut|timed out|kind: Timeout", re.IGNORECASE), "no answer in time"),
)
# The process that runs the library's threads. They do not survive a fork, and a child would wait for them for ever: a
# process that forks workers uses `run_isolated`.
_owner_pid = 0
_stores: dict[tuple[int, ObjectUrl], ObjectStore] = {}


class ObjectUrl(NamedTuple):
    """The parts of an object store's URL. prefix: without slashes at its ends, "" for the whole bucket."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The URL, without a slash at its end."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, path: str) -> str:
        """Return the key of a path below the URL."""
        return f"{self.prefix}/{path}" if self.prefix else path


def parse_url(url: str) -> ObjectUrl:
    """Parse a URL. Raises UsageError, which does not repeat a URL that may hold a secret."""
    matched = _URL.fullmatch(url)
    scheme = matched["scheme"] if matched else ""
    where, hint = f"{scheme or '?'}://…", "give s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
    if not matched or scheme not in ("s3", "gs", "az"):
        if scheme in ("http", "https"):
            hint = "give s3://BUCKET/PATH, and the server's address in AWS_ENDPOINT_URL"
        raise UsageError("not the URL of an object store", where=where, hint=hint)
    bucket, prefix = matched["bucket"], (matched["prefix"] or "").strip("/")
    if "@" in bucket or ":" in bucket or "?" in url or "#" in url:
        hint = "put credentials into the environment or a profile, which are not logged"
        raise UsageError("a URL must not contain a user name, a password or a signature", where=where, hint=hint)
    parts = prefix.split("/") if prefix else []
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & {*parts} or not url.isprintable():
        raise UsageError("not a valid bucket and path", where=where, hint=hint)
    return ObjectUrl(scheme, bucket, prefix)


def cached_store(url: ObjectUrl) -> ObjectStore:
    """Return this process's store for a bucket. Two threads that open it at the same time open two; one is dropped."""
    key = (os.getpid(), url._replace(prefix=""))
    if key not in _stores:
        _stores[key] = open_store(url)
    return _stores[key]


def open_store(url: ObjectUrl) -> ObjectStore:
    """Open the library's store for a bucket, with time-outs and limited retries; keys are relative to the bucket.

    Call it in a process that will not fork. Raises ToolMissing, ConfigError, ClusterError.
    """
    global _owner_pid
    assert _owner_pid in (0, os.getpid()), "obstore was used before this process was forked"
    _owner_pid = os.getpid()
    # There is a process per core already, and its threads wait for the library's. One library thread per process was
    # 25 % faster than one per core, which pass every part of every response between them.
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")
    try:
        from obstore import store as stores
    except ImportError as error:
        message = f"{url.scheme}:// needs the package obstore"
        raise ToolMissing(message, where=url.url, hint="pip install 'pitools-hpc[s3]'") from error
    kinds: dict[str, Callable[..., ObjectStore]]
    kinds = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    options, client = credentials.read_access(url.scheme)
    seconds = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S, "timeout": REQUEST_TIMEOUT_S}
    return call_store(
        lambda: kinds[url.scheme](
            url.bucket,
            config=options,
            client_options={**client, **{name: timedelta(seconds=value) for name, value in seconds.items()}},
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_FOR_S),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
            },
        ),
        url,
    )


def call_store(call: Callable[[], T], url: ObjectUrl, path: str = "") -> T:
    """Call the library and return the result. path: of the requested object. Raises PitError for every error of the
    library.
    """
    from obstore.exceptions import BaseError

    try:
        return call()
    except (BaseError, OSError, ValueError) as error:
        pit_error = _translate_error(type(error).__name__, str(error), url, path)
    # Not within `except`: the library's error would be chained to ours and appear in a traceback.
    raise pit_error


def _translate_error(kind: str, text: str, url: ObjectUrl, path: str) -> PitError:
    where = f"{url.url}/{path}" if path else url.url
    status = int(matched[1]) if (matched := _STATUS.search(text)) else 0
    code = matched[1] if (matched := _CODE.search(text)) else ""
    answer = f"{status} {code}".strip() if status else kind
    first_line, _, _ = text.partition("\n")
    if kind == "PreconditionError" or status in (412, 416):
        return changed_error(where)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return UsageError(f"no bucket {url.bucket!r}", where=where, hint="check the endpoint")
    if kind == "FileNotFoundError":
        return DataError("missing", where=where, hint="the manifest names it: ingest or upload again")
    no_credentials = kind == "GenericError" and _FOR_CREDENTIALS.search(first_line)
    if no_credentials or status in (401, 403):
        message = "no credentials found" if no_credentials else f"access denied: {answer}"
        return ClusterError(message, where=where, hint=credentials.search_hint(url.scheme))
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed" or "redirect" in first_line:
        return ClusterError("the bucket is in another region", where=where, hint="export AWS_REGION=REGION")
    if re.search(r"certificate|UnknownIssuer|InvalidCert", text):
        hint = "set AWS_CA_BUNDLE or SSL_CERT_FILE to the certificate of a private authority"
        return ClusterError("the server's certificate is not trusted", where=where, hint=hint)
    if status >= 500 or status in (408, 429):
        return Unreachable(f"the store is busy: {answer}, after {RETRIES} retries", where=where)
    if "non-partial response" in text:
        return ClusterError("the server does not support range requests", where=where)
    if "HTTP error" in text or "HttpError" in text:
        reason = next(
            (reason for pattern, reason in _CONNECT_ERRORS if pattern.search(text)), "the response was cut short"
        )
        return Unreachable(
            f"{reason}, after {RETRIES} retries", where=where, hint="check that the endpoint is right, and up"
        )
    if kind in ("InvalidPathError", "ValueError"):
        hint = "rename the object: no empty part, no . or .., no control character"
        return DataError("not a valid object name", where=where, hint=hint)
    return ClusterError(f"unexpected response of the store: {answer}", where=where)


def changed_error(where: str) -> DataError:
    """Return the error of an object that was replaced since it was first read."""
    return DataError("the object was replaced during the copy", where=where, hint="stage it again")
