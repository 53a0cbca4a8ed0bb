"""Questions to many sites at once: one round of them, and rounds that repeat."""

from __future__ import annotations

import threading
import time

import pytest

from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.place.clusters.parallel import SitePoller, query_all


def test_all_are_asked_at_once_and_the_late_left_behind() -> None:
    """The answers are in the order of the questions; who is silent at the deadline holds nobody up."""

    def raises(left_s: float) -> float:
        raise ClusterError("no")

    output = query_all(
        {
            "a": lambda _: time.sleep(60) or 9.0,
            "b": lambda left_s: left_s,
            "c": raises,
            "d": lambda _: time.sleep(0.1) or 7.0,
        },
        2.0,
    )
    assert list(output) == ["a", "b", "c", "d"]
    assert isinstance(output["a"], Unreachable)
    assert isinstance(output["c"], ClusterError)
    assert output["d"] == 7.0
    assert 0 <= output["b"] <= 2.0


@pytest.mark.parametrize("error", [ValueError("int too long"), OSError(5, "input/output error"), RecursionError()])
def test_what_goes_wrong_with_one_is_its_answer(error: Exception) -> None:
    """Whatever it is, at once: the others' answers are there, and nobody waits for the deadline."""

    def raises(left_s: float) -> str:
        raise error

    output: dict[str, object] = {}
    asking = threading.Thread(
        target=lambda: output.update(query_all({"a": raises, "b": lambda _: "b"}, 3600)), daemon=True
    )
    asking.start()
    asking.join(60)
    assert isinstance(output["a"], ClusterError)
    assert output["a"].where == "a"
    assert output["b"] == "b"


def test_an_impatient_round_leaves_a_silent_site_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are served at once; its late answer counts in a later round, and it is not asked twice meanwhile."""
    monkeypatch.setattr(SitePoller, "straggler_s", 0.0)
    wake, event = threading.Event(), list[threading.Thread]()

    def slow(left_s: float) -> str:
        event.append(threading.current_thread())
        wake.wait(50)  # whoever waits for it to the deadline has its answer
        return "late"

    def refuses(left_s: float) -> str:
        raise Unreachable("connection refused")

    asking: SitePoller[str] = SitePoller()
    questions = {"fast": lambda _: "at once", "slow": slow, "dark": refuses}
    for _ in range(3):
        output = {name: answer.value for name, answer in asking.query(questions, 60.0, {"slow"}).items()}
        assert output["fast"] == "at once"
        assert isinstance(output["dark"], Unreachable)
        assert "slow" not in output
    wake.set()
    event[0].join(60)
    assert asking.query(questions, 60.0, {"slow"})["slow"].value == "late"
    assert len(event) == 1


def test_a_site_silent_to_its_deadline_is_unreachable_until_it_answers() -> None:
    """In the round of its deadline, and in each that follows; none of them waits for it again."""
    wake = threading.Event()
    asking: SitePoller[bool] = SitePoller()
    questions = {"fast": lambda _: True, "slow": lambda _: wake.wait(60)}
    for timeout_s in (0.3, 60.0, 60.0):
        assert isinstance(asking.query(questions, timeout_s, {"slow"} if timeout_s > 1 else ())["slow"].value, PitError)
    wake.set()


def test_a_slow_site_answers_in_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asks once, as a tick of cron, has the answers of all sites that answer before the deadline."""
    monkeypatch.setattr(SitePoller, "straggler_s", 0.0)
    output = SitePoller[str]().query({"fast": lambda _: "now", "slow": lambda _: time.sleep(0.3) or "late"}, 60.0)
    assert [answer.value for answer in output.values()] == ["now", "late"]


def test_a_lone_silent_site_is_waited_for_to_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is made to wait by it; and no longer."""
    monkeypatch.setattr(SitePoller, "straggler_s", 0.0)
    asking: SitePoller[bool] = SitePoller()
    assert asking.query({"slow": lambda _: time.sleep(0.3) is None}, 60.0)["slow"].value is True
    wake = threading.Event()
    assert isinstance(asking.query({"slow": lambda _: wake.wait(60)}, 0.3)["slow"].value, Unreachable)
    wake.set()


def test_a_question_that_breaks_is_asked_again() -> None:
    """What nobody thought of is the site's fault for this round, and not for ever."""
    asking: SitePoller[str] = SitePoller()
    output: list[str] = []

    def breaks(left_s: float) -> str:
        output.append(f"{left_s:.0f}")
        return str(["well"][1 if len(output) == 1 else 0])

    assert isinstance(asking.query({"odd": breaks}, 5.0)["odd"].value, ClusterError)
    assert asking.query({"odd": breaks}, 7.0)["odd"].value == "well"
    assert output == ["5", "7"]
