"""The cache of what sites said: one asks for many, nothing is too old, nobody else writes there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, ConfigError, PitError, Unreachable
from pitools.core.record import Record
from pitools.place.clusters import cache


class Said(Record, frozen=True, kw_only=True, tag="test.said/1"):
    """An answer."""

    n: int


# Asks as a command of ours would: an x in `asked` for each time; the answer so long after so many have begun to ask.
ASK = """
import os, sys, time
from pathlib import Path
from pitools.core.errors import PitError, Unreachable
from pitools.core.record import Record
from pitools.place.clusters import cache

class Said(Record, frozen=True, kw_only=True, tag="test.said/1"):
    n: int

def ask(left_s):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    while len(list(Path(sys.argv[1]).parent.glob("begun.*"))) < int(sys.argv[4]):
        time.sleep(0.01)
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "fails":
        raise Unreachable("dark", hint="wait")
    return Said(n=7)

Path(sys.argv[1]).with_name(f"begun.{os.getpid()}").touch()
try:
    print(cache.get_or_query("a", Said, ask, max_age_s=60, timeout_s=60).n)
except PitError as error:
    print(error.message)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def ask_from_another(home: Path, seconds: float, how: str = "works", askers: int = 1) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", ASK, str(home / "asked"), str(seconds), how, str(askers)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("how", "said"), [("works", "7"), ("fails", "dark")])
def test_of_many_processes_one_asks(home: Path, how: str, said: str) -> None:
    """Six at once: the site hears one question, also when it gives no answer, and all get what came of it."""
    asking = [ask_from_another(home, 1, how, askers=6) for _ in range(6)]
    assert [process.communicate(timeout=60)[0].strip() for process in asking] == [said] * 6
    assert (home / "asked").read_text() == "x"


def test_who_dies_while_asking_harms_nobody(home: Path) -> None:
    """Its lock is free at once, and what was there before is still there."""
    cache.get_or_query("a", Said, lambda _: Said(n=1), max_age_s=60, timeout_s=1)
    path = cache.cache_dir() / "a.json"
    os.rename(path, home / "kept")
    killed = ask_from_another(home, 60)
    wait_for(home / "asked")
    os.rename(home / "kept", path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert cache.get_or_query("a", Said, lambda _: Said(n=2), max_age_s=60, timeout_s=1).n == 1
    assert cache.get_or_query("a", Said, lambda _: Said(n=3), max_age_s=0, timeout_s=1).n == 3


def test_a_deadline_also_ends_waiting_for_another(home: Path) -> None:
    """Who cannot have the lock in time says so, and does not ask a second time."""
    other = ask_from_another(home, 60)
    wait_for(home / "asked")
    with pytest.raises(Unreachable, match="another process"):  # whoever waits to its end has its answer
        cache.get_or_query("a", Said, lambda _: pytest.fail("asked"), max_age_s=60, timeout_s=0.3)
    other.kill()
    other.communicate()


def test_nothing_is_older_than_allowed() -> None:
    """The age counts from when it was begun to ask; an answer from the future is none."""
    cache.get_or_query("a", Said, lambda _: time.sleep(0.2) or Said(n=1), max_age_s=60, timeout_s=1)
    assert cache.get_or_query("a", Said, lambda _: Said(n=2), max_age_s=60, timeout_s=1).n == 1
    assert cache.get_or_query("a", Said, lambda _: Said(n=3), max_age_s=0.1, timeout_s=1).n == 3
    path = cache.cache_dir() / "a.json"
    path.write_text('{"schema":"pit.cache-entry/1","began_s":9e12,"value":{"schema":"test.said/1","n":9}}')
    assert cache.get_or_query("a", Said, lambda _: Said(n=4), max_age_s=60, timeout_s=1).n == 4


@pytest.mark.parametrize(
    "text", ["", "{", "null", "\0" * 99, '{"schema":"pit.cache-entry/1","began_s":1,"value":{}}', "\xff"]
)
def test_what_is_no_answer_is_asked_for_again(text: str) -> None:
    """Whatever stands in the file, it is the site that answers."""
    (cache.cache_dir() / "a.json").write_text(text)
    assert cache.get_or_query("a", Said, lambda _: Said(n=5), max_age_s=1e12, timeout_s=1).n == 5


def test_a_link_is_not_followed(home: Path) -> None:
    """Neither read through nor written through."""
    folder = home / "other"
    folder.write_text('{"schema":"pit.cache-entry/1","began_s":1,"value":{"schema":"test.said/1","n":9}}')
    (cache.cache_dir() / "a.json").symlink_to(folder)
    assert cache.get_or_query("a", Said, lambda _: Said(n=1), max_age_s=1e12, timeout_s=1).n == 1
    assert '"n":9' in folder.read_text()


def test_who_fails_again_and_again_is_left_alone_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long after each failure, and no longer than an answer is kept; an answer ends it."""
    asked_s, now_s, is_dark = list[float](), time.time(), True

    def ask(_: float) -> Said:
        asked_s.append(time.time())
        if is_dark:
            raise Unreachable("dark")
        return Said(n=1)

    def look(minutes: int) -> list[float]:
        """The minutes, counted from the first call, in which it was asked."""
        asked_s.clear()
        for _ in range(minutes):
            clock_s[0] += 60
            with contextlib.suppress(Unreachable):
                cache.get_or_query("a", Said, ask, max_age_s=1000.5, timeout_s=1, failure_s=119.5)
        return [round((at_s - asked_s[0]) / 60) for at_s in asked_s]

    clock_s = [now_s]
    monkeypatch.setattr(time, "time", lambda: clock_s[0])
    assert look(60) == [0, 2, 6, 14, 30, 47]
    is_dark = False
    assert look(60)[:2] == [0, 17]
    is_dark = True
    clock_s[0] += 2000
    assert look(10) == [0, 2, 6]


@pytest.mark.parametrize("kind", [Unreachable, ClusterError, ConfigError])
def test_a_failure_is_remembered_for_as_long_as_is_asked(kind: type[PitError]) -> None:
    """It is of the same class each time; it hides no answer that is young enough, and is never taken for one."""

    def dark(left_s: float) -> Said:
        raise kind("dark", where="x", hint="wait")

    for query in (dark, lambda _: pytest.fail("asked")):
        with pytest.raises(PitError) as caught:
            cache.get_or_query("a", Said, query, max_age_s=60, timeout_s=1, failure_s=60)
        assert type(caught.value) is kind
        assert (caught.value.message, caught.value.where, caught.value.hint) == ("dark", "x", "wait")
    assert cache.get_or_query("a", Said, lambda _: Said(n=1), max_age_s=60, timeout_s=1).n == 1
    assert cache.get_or_query("a", Said, lambda _: pytest.fail("asked"), max_age_s=60, timeout_s=1, failure_s=60).n == 1


@pytest.mark.parametrize("part", ["pitools", "pitools/place"])
@pytest.mark.parametrize("harm", ["writable", "link", "file"])
def test_a_folder_that_others_can_write_is_refused(home: Path, part: str, harm: str) -> None:
    """What is kept there decides where jobs go; the error says what to type."""
    assert cache.cache_dir().stat().st_mode & 0o777 == 0o700
    path = home / "cache" / part
    if harm == "writable":
        path.chmod(0o777)
    else:
        os.rename(path, home / "moved")
        path.symlink_to(home / "moved") if harm == "link" else path.write_text("")
    with pytest.raises(PitError) as caught:
        cache.get_or_query("a", Said, lambda _: Said(n=1), max_age_s=60, timeout_s=1)
    assert str(path) in caught.value.where
    assert isinstance(caught.value, ClusterError)


def test_where_nothing_can_be_kept_each_asks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is read-only makes no site silent; /sys takes nobody's folders, not even root's."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/sys/pitools-test")
    for n in (1, 2):
        assert cache.get_or_query("a", Said, lambda _, n=n: Said(n=n), max_age_s=60, timeout_s=5) == Said(n=n)
    assert (cache.failure_count("a"), cache.peek("a", Said, max_age_s=60)) == (0, None)


def test_what_is_kept_is_had_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before it was asked for, nor after its age; as long as it does not change it is read once."""
    assert cache.peek("a", Said, max_age_s=60) is None
    for n in (1, 2):
        cache.get_or_query("a", Said, lambda _, n=n: Said(n=n), max_age_s=0, timeout_s=5)
        assert cache.peek("a", Said, max_age_s=60) == Said(n=n)
    first = cache.peek("a", Said, max_age_s=60)
    assert cache.peek("a", Said, max_age_s=60) is first
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert cache.peek("a", Said, max_age_s=60) is None
