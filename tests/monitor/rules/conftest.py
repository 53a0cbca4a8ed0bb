"""A real Prometheus on loopback, with the history that a test gives it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

Series = dict[str, Callable[[float], float | None]]


@pytest.fixture(scope="session")
def start_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Start a Prometheus: `start(series, days)` returns its address. Skips without the programs.

    series: name with labels → value at a time, in seconds, of these days, from 0 to now; promtool makes blocks of them.
    rules: text of a file of rules, which are evaluated each second. scrape: HOST:PORT of an exporter.
    """
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install prometheus")
    processes = []

    def start(series: Series, days: float = 0, *, rules: str = "", scrape: str = "") -> str:
        folder = tmp_path_factory.mktemp("prometheus")
        (folder / "rules.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
            + (f"- {{job_name: pit, static_configs: [{{targets: ['{scrape}']}}]}}\n" if scrape else "")
        )
        if series:
            (folder / "history.txt").write_text(_openmetrics(series, days * 86400, 240))
            argv = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=1000h"]
            subprocess.run([*argv, folder / "history.txt", folder / "data"], check=True, capture_output=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # a killed pytest takes it along
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--storage.tsdb.retention.time=100d",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        processes.append(process)
        while True:  # the test's own time-out ends it
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                    return f"http://{address}"
            except OSError:
                time.sleep(0.05)

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def _openmetrics(series: Series, ago_s: float, step_s: float) -> str:
    now = time.time()
    steps = [index * step_s for index in range(int(ago_s / step_s) + 1)]
    points = [(name, at, value(at)) for name, value in series.items() for at in steps]
    lines = [f"{name} {value} {now - ago_s + at}" for name, at, value in points if value is not None]
    return "\n".join([*lines, "# EOF", ""])
