"""Instant queries of a Prometheus, by its HTTP API."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any, Literal

import msgspec

from pitools.core.errors import ClusterError, DataError, PitError, Unreachable, UsageError
from pitools.core.record import decode_json
from pitools.place.clusters.parallel import SitePoller

TIMEOUT_S = 10.0
_MAX_BYTES = 16 << 20
_HINT = "curl -sS {url}/-/ready; or judge by the runs' records: pit monitor check --site NAME"


class Sample(msgspec.Struct, frozen=True):
    """One series now. value: NaN is left as it is."""

    labels: dict[str, str]
    value: float


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: Any


class _Answer(msgspec.Struct):
    status: Literal["success", "error"]
    error: str = ""
    data: Any = None


def check_url(url: str) -> str:
    """Return the address of a Prometheus without its last slash. Raises UsageError for others, and for a password."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        hint = "such as http://127.0.0.1:9090"
        raise UsageError(f'"{url}" (expected an address of HTTP)', where="--prometheus", hint=hint)
    if "@" in parts.netloc:
        hint = "a proxy or a tunnel on this machine can add it"
        raise UsageError(
            "a password in an address is seen by all users of this machine", where="--prometheus", hint=hint
        )
    return url.rstrip("/")


def query(url: str, expression: str, *, timeout_s: float = TIMEOUT_S) -> list[Sample]:
    """Evaluate an expression now. timeout_s: of the whole answer, however slowly its bytes come.

    Raises Unreachable, ClusterError for a refusal, DataError for another server.
    """
    poller: SitePoller[list[Sample]] = SitePoller(_HINT.format(url=url))
    answer = poller.query({url: lambda left_s: _post(url, expression, left_s)}, timeout_s)[url].value
    if isinstance(answer, PitError):
        raise answer
    return answer


def _post(url: str, expression: str, timeout_s: float) -> list[Sample]:
    form = urllib.parse.urlencode({"query": expression, "timeout": f"{timeout_s * 1000:.0f}ms"}).encode()
    try:
        request = urllib.request.Request(f"{url}/api/v1/query", form)  # noqa: S310 - check_url
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
            body, status = response.read(_MAX_BYTES + 1), response.status
    except urllib.error.HTTPError as error:
        with error:
            body, status = error.read(_MAX_BYTES + 1), error.code
    except (OSError, HTTPException) as error:
        text = str(getattr(error, "reason", error)) or type(error).__name__
        raise Unreachable(f"Prometheus: no answer: {text}", where=url, hint=_HINT.format(url=url)) from error
    return _read(body, status, url)


def _read(body: bytes, status: int, url: str) -> list[Sample]:
    if status in (502, 503, 504):  # it starts, or a proxy does not reach it
        raise Unreachable(f"Prometheus: HTTP {status}", where=url, hint=f"curl -sS {url}/-/ready")
    try:
        answer = decode_json(body, _Answer)
        if answer.status == "error":
            raise ClusterError(f"Prometheus: HTTP {status}: {answer.error}", where=url)
        data = msgspec.convert(answer.data, _Data)
        return [Sample(one.metric, float(one.value[1])) for one in msgspec.convert(data.result, list[_Series])]
    except (msgspec.DecodeError, ValueError) as error:
        hint = f"its address, without a path of the API: curl -sS {url}/api/v1/query?query=1"
        raise DataError(f"not Prometheus: HTTP {status}", where=url, hint=hint) from error
