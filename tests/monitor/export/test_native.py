"""Slurm's own endpoint, as its documentation and its plugin's table of names have it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from test_board import cycle

from pitools.core.errors import ClusterError, ConfigError, PitError, Unreachable
from pitools.monitor.export.metrics import LABEL_LIMITS
from pitools.monitor.export.native import query_native
from pitools.site.schema import Monitor, Site

PARTITIONS = """\
# HELP slurm_partitions Total number of partitions
# TYPE slurm_partitions gauge
slurm_partitions 2
# HELP slurm_partition_jobs_pending Number of jobs in Pending state
# TYPE slurm_partition_jobs_pending gauge
slurm_partition_jobs_pending{partition="gpu"} 27
slurm_partition_jobs_pending{partition="cpu"} 3
# HELP slurm_node_cpus Total number of cpus in the node
# TYPE slurm_node_cpus gauge
slurm_node_cpus{node="n01"} 64
"""
SCHEDULER = """\
# HELP slurm_bf_active Backfill scheduler currently running
# TYPE slurm_bf_active gauge
slurm_bf_active 0
"""


class Endpoint(HTTPServer):
    """Answers of a slurmctld. status: of each answer. asked: paths and tokens."""

    status = 200
    partitions = PARTITIONS
    to = ""  # the controller to which it answers 303
    pause_s = 0.0  # before each byte of a body

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("X-SLURM-USER-TOKEN")))
        self.send_response(303 if self.server.to else self.server.status)
        if self.server.to:
            self.send_header("Location", self.server.to + self.path)
        self.end_headers()
        texts = {"/metrics/partitions": self.server.partitions, "/metrics/scheduler": SCHEDULER}
        text = b"" if self.server.to else texts[self.path].encode()
        pieces = [text[at : at + 1] for at in range(len(text))] if self.server.pause_s else [text]
        with contextlib.suppress(OSError):  # the client has gone
            for piece in pieces:
                self.wfile.write(piece)
                time.sleep(self.server.pause_s)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A slurmctld with metrics, until the end of the test."""
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_what_slurm_exports_itself_is_added(make_site: Callable[..., Site], endpoint: Endpoint) -> None:
    """Its families get the label of the cluster, ours stay, for panels and rules, and no node has a series."""
    site = make_site(url=endpoint.url)
    found = cycle(site, times=5)  # jobs, nodes, its own, the fabric, jobs
    assert found["slurm_partition_jobs_pending", "alpha", "gpu"] == 27
    assert found["slurm_bf_active", "alpha"] == 0
    names = {key[0] for key in found}
    assert "slurm_node_cpus" not in names
    assert {"pit_jobs", "pit_partition_nodes", "pit_partition_gpus", "pit_job_leaf_spread_ratio"} <= names
    assert [path for path, _ in endpoint.asked] == ["/metrics/partitions", "/metrics/scheduler"]


def test_without_its_answer_ours_stay(make_site: Callable[..., Site], endpoint: Endpoint) -> None:
    """A standby controller that answers 503 is a failure of this collector alone."""
    endpoint.status = 503
    found = cycle(make_site(url=endpoint.url), times=4)
    assert found["pit_collector_success", "alpha", "native"] == 0
    assert found["pit_jobs", "alpha", "gpu", "running"] == 1


def test_its_partitions_are_bounded(endpoint: Endpoint) -> None:
    """Of more partitions than the limit the largest are kept."""
    rows = "".join(f'slurm_partition_nodes{{partition="p{number}"}} {number}\n' for number in range(99))
    endpoint.partitions = f"# TYPE slurm_partition_nodes gauge\n{rows}"
    found, _ = query_native(Monitor(slurm_metrics_url=endpoint.url), 5)
    values = [values[0] for name, _, values in found if name == "slurm_partition_nodes"]
    assert (len(values), max(values)) == (LABEL_LIMITS["partition"], 98)


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [(401, PARTITIONS, ClusterError), (503, PARTITIONS, Unreachable), (200, "slurm_x{ 1 2 3", ClusterError)],
)
def test_another_answer_is_an_error(endpoint: Endpoint, status: int, text: str, error: type[PitError]) -> None:
    """A refusal, a standby controller, a text that is none."""
    endpoint.status, endpoint.partitions = status, text
    with pytest.raises(error):
        query_native(Monitor(slurm_metrics_url=endpoint.url), 5)


def test_the_token_is_private(endpoint: Endpoint, tmp_path: Path) -> None:
    """It is sent as Slurm wants it; a file that others may read is refused, and a URL that is none."""
    token = tmp_path / "token"
    token.write_text("abc\n")
    token.chmod(0o600)
    monitor = Monitor(slurm_metrics_url=endpoint.url, slurm_metrics_token=str(token))
    query_native(monitor, 5)
    assert {one for _, one in endpoint.asked} == {"abc"}
    token.chmod(0o644)
    for wrong in (monitor, Monitor(slurm_metrics_url="file:///etc/passwd")):
        with pytest.raises(ConfigError):
            query_native(wrong, 5)


def test_a_standby_controller_is_followed_without_the_token(endpoint: Endpoint, tmp_path: Path) -> None:
    """The one to which it sends is asked, and never gets the token, which is for the host of the site file."""
    token = tmp_path / "token"
    token.write_text("abc\n")
    token.chmod(0o600)
    with Endpoint() as standby:
        threading.Thread(target=standby.serve_forever, daemon=True).start()
        standby.to = endpoint.url
        rows, _ = query_native(Monitor(slurm_metrics_url=standby.url, slurm_metrics_token=str(token)), 5)
        standby.shutdown()
    assert ("slurm_partitions", (), (2.0,)) in rows
    assert {one for _, one in standby.asked} == {"abc"}
    assert {one for _, one in endpoint.asked} == {None}


def test_an_answer_that_does_not_end_is_given_up(endpoint: Endpoint) -> None:
    """One byte at a time, each within the time-out of a read: the time is of the whole answer."""
    endpoint.pause_s = 0.02
    with pytest.raises(Unreachable):
        query_native(Monitor(slurm_metrics_url=endpoint.url), 0.1)
