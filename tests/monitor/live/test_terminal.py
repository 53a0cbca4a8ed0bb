"""The screen in a real terminal: tmux, of 80 columns and 24 lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]


class Terminal:
    """A tmux server of its own, with one window."""

    def __init__(self, socket: Path, *words: str, env: str = "") -> None:
        self.socket = socket
        command = f"{env} {sys.executable} -m pitools monitor watch {' '.join(words)}; echo ended with $?; sleep 60"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", command)

    def tmux(self, *words: str) -> str:
        argv = ["tmux", "-S", str(self.socket), *words]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout

    def shown(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, *texts: str) -> str:
        while not all(text in (shown := self.shown()) for text in texts):  # pytest's time-out is the limit
            time.sleep(0.1)
        return shown


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """Starts the watch of some sites."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    monkeypatch.setenv("TERM", "xterm-256color")
    opened: list[Terminal] = []

    def start(*words: str, env: str = "") -> Terminal:
        opened.append(Terminal(tmp_path / "tmux", *words, env=env))
        return opened[0]

    yield start
    for one in opened:
        one.tmux("kill-server")


def test_in_a_terminal(make_site: MakeSite, terminal: Callable[..., Terminal]) -> None:
    """Keys that come at once are all taken; q gives the terminal back; a hostile name has set no title."""
    east = make_site("east")
    failed, running = east.add("bad\x1b]2;owned\x07\x1b[31m", state="FAILED"), east.add("good")
    east.log(running, 0, 12)
    watch = terminal("--site", "east")
    watch.until("2 runs", running.name, "it raised KeyError")
    watch.tmux("send-keys", "/", "g", "o", "o", "d", "Enter")
    assert failed.name[:3] not in watch.until("1 with good").split("ALERT ON")[0].split("RUN ")[1]
    watch.tmux("send-keys", "w")
    watch.until(f"why {running.name}", "not ended yet")
    watch.tmux("send-keys", "Escape")
    watch.until("1 with good")
    assert "owned" not in watch.tmux("display-message", "-p", "#{pane_title}")
    watch.tmux("send-keys", "q")
    watch.until("ended with 0")


def test_ctrl_c_ends_it(make_site: MakeSite, terminal: Callable[..., Terminal]) -> None:
    """As it ends every other command."""
    run_dir = make_site("east").add()
    watch = terminal("--site", "east")
    watch.until(run_dir.name)
    watch.tmux("send-keys", "C-c")
    watch.until("ended with 0")


@pytest.mark.parametrize(("words", "env"), [("2>/dev/null", ""), ("", "TERM=dumb")])
def test_where_nothing_can_be_drawn_it_is_refused(
    make_site: MakeSite, terminal: Callable[..., Terminal], words: str, env: str
) -> None:
    """The screen is drawn on stderr, by codes that a dumb terminal shows as text."""
    make_site("east")
    terminal("--site", "east", words, env=env).until("ended with 2")


@pytest.mark.slurm
def test_of_real_clusters(clusters: Path, terminal: Callable[..., Terminal]) -> None:
    """Both clusters' partitions with their nodes, and a node that is drained, with its reason."""
    alpha = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}

    def update(*words: str) -> None:
        subprocess.run(["scontrol", "update", "nodename=alpha02", *words], env=alpha, check=True, timeout=30)

    update("state=drain", "reason=[bold red]fan")
    try:
        watch = terminal("--site", "alpha", "--site", "beta")
        shown = watch.until("alpha       train", "beta        train", "alpha02", "idle+drain: [bold red]fan")
        assert "/8" in shown
        watch.tmux("send-keys", "q")
        watch.until("ended with 0")
    finally:
        update("state=resume")
