"""`pit monitor export` as it is typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from pitools.commands.monitor_export import export
from pitools.core.errors import UsageError
from pitools.monitor.export import serve
from pitools.place.clusters import snapshot
from pitools.site.schema import Site


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--textfile pit.prom --listen 127.0.0.1:9341",
        "--textfile pit.txt",
        "--textfile pit.prom --basic-auth password",
        "--listen 127.0.0.1:9341 --tls-cert cert.pem",
        "--listen 9341 --site alpha",
        "--listen 127.0.0.1:9341 --site alpha --every 0s",
        "--listen 127.0.0.1:99999 --site alpha",
        "--listen 0.0.0.0:9341 --site alpha --basic-auth password",
        "--textfile pit.prom --site nowhere",
        "--textfile nowhere/pit.prom --site alpha",
    ],
)
def test_wrong_words_are_refused(words: str) -> None:
    """No or two outputs, a file that node_exporter does not read, no port, a password in clear text over a network."""
    assert isinstance(CliRunner().invoke(export, words.split()).exception, UsageError)


@pytest.mark.parametrize(("host", "notes"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_metrics_for_everybody_are_said_to_be(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, host: str, notes: int
) -> None:
    """On an address of the network without a password; on loopback it is usual."""
    monkeypatch.setattr(snapshot, "load_sites", lambda _names: ([make_site()], []))
    monkeypatch.setattr(serve, "serve", lambda *_: sys.exit(9))
    done = CliRunner().invoke(export, ["--listen", f"{host}:9341"])
    assert (done.exit_code, done.stderr.count("whoever reaches 0.0.0.0 reads")) == (9, notes)


@pytest.mark.parametrize(("every", "problem"), [("4s", "5s to 60s"), ("15m", "5s to 60s"), ("60s", "9")])
def test_cycles_are_too_short_for_the_alert_of_a_dead_exporter(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, every: str, problem: str
) -> None:
    """At most a minute, far below its ten; 9 is the exit of the server that is not started."""
    monkeypatch.setattr(snapshot, "load_sites", lambda _names: ([make_site()], []))
    monkeypatch.setattr(serve, "serve", lambda *_: sys.exit(9))
    done = CliRunner().invoke(export, ["--listen", "127.0.0.1:9341", "--every", every])
    assert problem in str(done.exception)


def test_a_site_without_slurms_commands_is_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 75, said once, and a file that says so for both collectors, once each was asked."""
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "gone.toml").write_text(f'name = "gone"\n[slurm]\nbin = "{tmp_path}/none"\n')
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path / "sites"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PIT_SITES", "gone")
    before, lines = os.umask(0o077), []
    for _ in range(4):
        done = CliRunner().invoke(export, ["--textfile", str(tmp_path / "pit.prom")])
        assert done.exit_code == 75
        lines += done.stderr.splitlines()
    os.umask(before)
    assert [line.split(": ")[:3] for line in lines] == [
        ["pit", "site gone", name] for name in ("jobs", "nodes", "topology")
    ]
    text = (tmp_path / "pit.prom").read_text()
    assert (tmp_path / "pit.prom").stat().st_mode & 0o777 == 0o644
    success = [line for line in text.splitlines() if line.startswith("pit_collector_success")]
    assert {line.split()[-1] for line in success if '"state"' not in line} == {"0.0"}
    assert "pit_jobs" not in text
