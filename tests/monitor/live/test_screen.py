"""The screen, by textual's Pilot: keys, sites that hang, hostile names, a small terminal."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from pitools.core.errors import UsageError
from pitools.launch.recovery import cancel_run
from pitools.monitor.live.app import WatchApp
from pitools.monitor.live.followed_runs import FollowedRuns
from pitools.monitor.live.rows import QUEUE_COLUMNS, RUN_COLUMNS
from pitools.monitor.live.site_feeds import make_feeds
from pitools.monitor.live.table import Column, TableView, fit_columns, fit_text
from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]
HOSTILE = "\x1b[31m\x1b]0;owned\x07[bold red]x[/]\u202e\u200b\n\t" + "é漢" * 300


def lines(app: WatchApp) -> list[str]:
    """What is on the screen."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def use(app: WatchApp, keys: Callable[[Any], Awaitable[None]], size: tuple[int, int] = (120, 30)) -> None:
    """Run the app in a terminal of this size."""

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await keys(pilot)

    asyncio.run(main())


async def until(pilot: Any, condition: Callable[[], object]) -> None:
    """Wait; pytest's time-out is the limit."""
    while not condition():
        await pilot.pause(0.05)


def shows(app: WatchApp, *texts: str) -> Callable[[], bool]:
    return lambda: all(any(text in line for line in lines(app)) for text in texts)


@pytest.fixture
def hung_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that hangs, and writes its process id to this file."""
    pids = tmp_path / "pids"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 200\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return pids


def living(pids: Path) -> list[int]:
    return [int(pid) for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_a_hung_ssh_delays_no_key(make_site: MakeSite, hung_ssh: Path) -> None:
    """Order, filter, why, logs, and the question before a cancel are answered before ssh is; then its site is grey."""
    east = make_site("east")
    run_dir = east.add(state="FAILED")
    make_site("hung", "slurm", '[connection]\nkind = "ssh"\nhost = "hung"\ntimeout_s = 150')
    app = WatchApp(make_feeds(["east", "hung"]))
    pressed: list[tuple[list[str], str]] = [
        (["s"], "by state"),
        (["slash", *"nothing", "enter"], "no run"),
        (["slash", "ctrl+u", "enter"], run_dir.name),
        (["w"], "it raised KeyError"),
        (["escape"], "STEPS"),
        (["l"], "nothing is printed yet"),
        (["escape"], "STEPS"),
        (["c"], "y: yes"),
        (["n"], "by state"),
    ]

    async def keys(pilot: Any) -> None:
        await until(pilot, lambda: hung_ssh.exists() and shows(app, run_dir.name)())
        (hung,) = [site for site in app._sites if site.name == "hung"]
        assert hung.slurm
        for keys, expected in pressed:
            await pilot.press(*keys)
            await until(pilot, shows(app, expected))
            assert (hung.slurm.answer.value, hung.slurm.answer.error) == (None, None)
        while not hung.slurm.answer.error:
            for pid in living(hung_ssh):
                os.kill(pid, signal.SIGKILL)
            await pilot.pause(0.05)
        await until(pilot, shows(app, "hung        error"))

    use(app, keys)
    for pid in living(hung_ssh):
        os.kill(pid, signal.SIGKILL)


def test_a_hung_folder_delays_neither_keys_nor_the_end(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the folder of one site hangs, the other's new runs appear, and q ends the screen."""
    east, west = make_site("east"), make_site("west")
    released, poll = threading.Event(), FollowedRuns.poll
    monkeypatch.setattr(
        FollowedRuns, "poll", lambda self, states: (self._site.name == "west" and released.wait()) or poll(self, states)
    )
    app = WatchApp(make_feeds(["east", "west"]))
    west.add()

    async def keys(pilot: Any) -> None:
        late = east.add("late")
        await until(pilot, shows(app, late.name, "1 runs"))
        await pilot.press("q")

    use(app, keys)
    assert not released.is_set()
    released.set()


def test_hostile_names_are_text(make_site: MakeSite) -> None:
    """Escape sequences, markup, and signs of any width neither colour nor break a line: each has the screen's width."""
    east = make_site("east")
    run_dir = east.add("[red]x[bold]\x1b[2J\u202e", state="FAILED")
    east.end(run_dir, 0, "FAILED", 1, HOSTILE)
    app = WatchApp(make_feeds(["east"]))

    async def keys(pilot: Any) -> None:
        await until(pilot, shows(app, "1 runs"))
        for key, expected in (("s", "[red]x[bold]"), ("w", "[bold red]x[/]")):
            await pilot.press(key)
            await until(pilot, shows(app, expected))
            for line in lines(app):
                assert line.isprintable()
                assert cell_len(line) == 90

    use(app, keys, (90, 30))


@settings(max_examples=60)
@given(st.text(max_size=200), st.integers(2, 60), st.booleans(), st.booleans())
def test_a_cell_has_its_width(text: str, width: int, is_id: bool, is_number: bool) -> None:
    """Any text becomes printable text of just this width."""
    cell = fit_text(text, Column("", width, is_id=is_id, is_number=is_number), width)
    assert cell.isprintable()
    assert cell_len(cell) == width


def test_of_a_long_name_both_ends_are_shown() -> None:
    """The name, and the number that no other has."""
    assert fit_text("bc-jax-20261127-0001", Column("", 10, is_id=True), 10) == "bc-j…-0001"


@given(st.integers(20, 400), st.sampled_from([QUEUE_COLUMNS, RUN_COLUMNS]))
def test_columns_fit(width: int, columns: tuple[Column, ...]) -> None:
    """Those that are shown are no wider than the screen; from 80 characters on, runs have their whole id."""
    shown = fit_columns(columns, width)
    total = sum(size + 2 for _, size in shown) - 2
    assert total <= width or len(shown) == 1
    assert width < 80 or dict(shown)[0] >= (32 if columns is RUN_COLUMNS else 10)


def test_a_small_terminal(make_site: MakeSite) -> None:
    """In 80 columns and 24 lines, each table has lines, a run its whole id, state and steps, and the keys are named."""
    for name in ("east", "west", "north"):
        runs = make_site(name)
        for n in range(9):
            runs.log(runs.add(f"bc-{name}", age_s=60 + n), 0, 7)
        stopped = runs.add(f"bc-{name}", state="FAILED")
    app = WatchApp(make_feeds(["east", "west", "north"]))

    async def keys(pilot: Any) -> None:
        await until(pilot, shows(app, "3 sites", "30 runs, 27 running", stopped.name, "north", "Filter", "Quit"))
        shown = [line for line in lines(app) if " running " in line and "7 " in line]
        assert len(shown) >= 8
        assert len(lines(app)) == 24
        for key in ("G", "g"):
            await pilot.press(key)
            assert app._runs.selected
            assert shows(app, app._runs.selected.record.run_id)()

    use(app, keys, (80, 24))


def test_filter_and_order(make_site: MakeSite) -> None:
    """A condition, a text and a wrong condition; the cursor stays on its run while the order changes."""
    east = make_site("east")
    old, new = east.add("old", age_s=900, state="COMPLETED"), east.add("new", age_s=60)
    east.log(new, 0, 3)
    app = WatchApp(make_feeds(["east"]))

    async def keys(pilot: Any) -> None:
        await until(pilot, shows(app, old.name, new.name))
        await pilot.press("down", "r")
        assert app._runs.selected
        assert app._runs.selected.record.run_id == old.name
        for text, expected, absent in (("steps>2", new.name, old.name), ("COMPL", old.name, new.name)):
            await pilot.press("slash", "ctrl+u", *text, "enter")
            await until(pilot, shows(app, expected))
            assert not any(absent in line for line in lines(app))
        await pilot.press("slash", "ctrl+u", *"stepz>2", "enter")
        await until(pilot, shows(app, 'did you mean "steps"?'))

    use(app, keys)


def test_cancel_asks_and_then_does_what_the_command_does(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """n cancels nothing; y calls the same function, whose error is shown and leaves the screen as it is."""
    east = make_site("east")
    run_dir, called = east.add(), list[tuple[Path, str]]()
    monkeypatch.setattr(cancel_run, "cancel_run", lambda path, site: called.append((path, site.name)))
    app = WatchApp(make_feeds(["east"]))

    async def keys(pilot: Any) -> None:
        await until(pilot, shows(app, run_dir.name))
        await pilot.press("c", "n")
        await pilot.press("c", "enter")
        assert called == []
        await pilot.press("c", "y")
        await until(pilot, shows(app, f"{run_dir.name}: cancelled"))
        assert called == [(run_dir, "east")]

        def refuse(path: Path, site: object) -> None:
            raise UsageError("refused", hint="ask [its] owner")

        monkeypatch.setattr(cancel_run, "cancel_run", refuse)
        await pilot.press("c", "y")
        await until(pilot, shows(app, "refused; ask [its] owner"))

    use(app, keys)


def test_logs_are_followed(make_site: MakeSite) -> None:
    """Those of the rank that failed first, until the cursor leaves the end; the keys of the runs do nothing there."""
    east = make_site("east")
    run_dir = east.add()
    logs = run_dir / "attempts" / "0" / "logs"
    logs.mkdir()
    (logs / "0.out").write_text("of rank 0\n")
    (logs / "3.out").write_text("".join(f"line {number}\n" for number in range(60)))
    (logs.parent / "first_failure").write_text("1 3 n01\n")
    app = WatchApp(make_feeds(["east"]))

    def write(line: str) -> None:
        with (logs / "3.out").open("a") as file:
            file.write(line + "\n")

    async def keys(pilot: Any) -> None:
        await until(pilot, shows(app, run_dir.name))
        await pilot.press("l")
        await until(pilot, shows(app, "line 59"))
        write("sixty")
        await until(pilot, shows(app, "sixty"))
        await pilot.press("c", "s", "k")
        assert len(app.screen_stack) == 2
        write("beyond the end")
        table = app.screen.query_one(TableView)
        await until(pilot, lambda: table._items[-1][1] == "beyond the end")
        assert not shows(app, "beyond the end")()

    use(app, keys)


class Firing(http.server.BaseHTTPRequestHandler):
    """A Prometheus at which one alert fires."""

    def do_POST(self) -> None:
        labels = {
            "alertname": "GoodputLow",
            "cluster": "east",
            "severity": "page",
            "slo": "[red]goodput",
            "alertstate": "firing",
        }
        result = [{"metric": labels, "value": [0, "1"]}]
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_alerts_of_a_prometheus(make_site: MakeSite) -> None:
    """What fires is shown beside the sites' own alerts; one that is away is an alert, and the rest goes on."""
    make_site("east").add(state="FAILED")
    with http.server.HTTPServer(("127.0.0.1", 0), Firing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        app = WatchApp(make_feeds(["east"]), url)
        expected = ("GoodputLow", "fires: page slo=[red]goodput", "it raised KeyError")
        use(app, lambda pilot: until(pilot, shows(app, *expected)))
        server.shutdown()
    away = WatchApp(make_feeds(["east"]), url)
    use(away, lambda pilot: until(pilot, shows(away, "Prometheus: no answer", "it raised KeyError")))
