"""The collector of Slurm's own OpenMetrics endpoint (25.11 and later), where a site file names one."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

from pitools.core import trust
from pitools.core.errors import ClusterError, ConfigError, Unreachable
from pitools.monitor.export.metrics import LABEL_LIMITS
from pitools.monitor.export.samples import Row
from pitools.site.schema import Monitor

# Two requests, which slurmctld answers under its locks. `nodes` and `jobs-users-accts` have a series for each node or
# user, and `jobs` the sums of `partitions`.
_PATHS = ("partitions", "scheduler")
_MAX_BYTES = 8 << 20
_MAX_FAMILIES = 200


def query_native(monitor: Monitor, timeout_s: float) -> tuple[tuple[Row, ...], dict[str, str]]:
    """Return the samples of the endpoint by partition, and each family's help.

    Left out: what has another label, and what is beyond 200 families or the limit of partitions. Raises Unreachable,
    ClusterError for another answer, ConfigError for a token that others may read or change.
    """
    from prometheus_client.parser import text_string_to_metric_families

    rows: list[Row] = []
    helps: dict[str, str] = {}
    base = monitor.slurm_metrics_url.rstrip("/")
    for path in _PATHS:
        url = f"{base}/metrics/{path}"
        text = _get(url, monitor.slurm_metrics_token, timeout_s)
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise ClusterError(f"not the text of metrics: {error}", where=url) from error
        for family in families:
            is_known = family.name in helps or len(helps) >= _MAX_FAMILIES
            if family.type != "gauge" or not family.name.startswith("slurm_") or is_known:
                continue
            helps[family.name] = family.documentation
            samples = [one for one in family.samples if set(one.labels) <= {"partition"}]
            largest = sorted(samples, key=lambda one: -one.value)[: LABEL_LIMITS["partition"]]
            rows += [(family.name, tuple(one.labels.values()), (one.value,)) for one in largest]
    return tuple(rows), helps


def _get(url: str, token_file: str, timeout_s: float) -> str:
    """Return the body, `timeout_s` after the request at the latest, but for the longest wait for one packet.

    A standby controller answers 503, or 303 to the one that serves: that is asked too, but it does not get the token,
    which is for the host of the site file alone.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f'"{url}" is no URL (expected http:// or https://)', key="monitor.slurm_metrics_url")
    request = urllib.request.Request(url)  # noqa: S310 - its scheme is checked above
    if token_file:
        trust.require_private(Path(token_file), "token file")
        request.add_unredirected_header("X-SLURM-USER-TOKEN", Path(token_file).read_text().strip())
    body, deadline = b"", time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            while len(body) <= _MAX_BYTES and (part := answer.read1(1 << 16)):
                body += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it goes on after {timeout_s:g} s")
    except urllib.error.HTTPError as error:
        error.close()
        kind = Unreachable if error.code >= 500 else ClusterError
        hint = "see MetricsType and MetricsAuthUsers in slurm.conf" if error.code < 500 else ""
        raise kind(f"HTTP status {error.code}", where=error.url, hint=hint) from error
    except OSError as error:
        raise Unreachable(f"no answer: {getattr(error, 'reason', error)}", where=url) from error
    if len(body) > _MAX_BYTES:
        raise ClusterError(f"larger than {_MAX_BYTES >> 20} MiB", where=url)
    return body.decode(errors="replace")
