"""A loop of one's own, whose ranks torch has brought together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed", reason="this framework is not installed")

from pitools.checkpoint.coordination.torch_store import torch_store  # noqa: E402
from pitools.core.errors import ConfigError, Unreachable  # noqa: E402


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone; yields its store."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


class Clock:
    """Time that passes by sleeping alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_process_group_s_store(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank puts another gets, also while a third waits; what does not come is a TimeoutError, quietly."""
    (put, get, delete), (_, theirs, _) = torch_store(), torch_store()
    late: list[str] = []
    waits = threading.Thread(target=lambda: late.append(theirs("late", 10.0)))
    waits.start()
    put("early", "ä")
    assert get("early", 1.0) == "ä"
    put("late", "1")
    waits.join(10)
    assert late == ["1"]
    clock = Clock()
    monkeypatch.setattr("pitools.checkpoint.coordination.torch_store.time", clock)
    with pytest.raises(TimeoutError, match=r"never .* 100 s"):
        get("never", 100.0)
    assert clock.now == pytest.approx(100, abs=0.1)
    for _ in range(2):
        delete("late")
    with pytest.raises(TimeoutError, match="late"):
        get("late", 0.1)


def test_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to call first."""
    with pytest.raises(ConfigError, match="no process group") as caught:
        torch_store()
    assert "init_process_group" in str(caught.value.hint)


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is ours, and names where it was."""

    class Gone:
        host, port = "n04", 29500

        def clone(self) -> Gone:
            return self

        def check(self, _: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer\nand a stack")

        def set(self, _: str, __: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

        def delete_key(self, _: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    put, get, delete = torch_store(Gone())
    with pytest.raises(Unreachable) as caught:
        get("a", 1.0)
    assert caught.value.message.endswith("Connection reset by peer")  # and not the stack
    assert caught.value.where == "n04:29500"
    with pytest.raises(Unreachable, match="Broken pipe"):
        put("a", "b")
    with pytest.raises(Unreachable, match="Broken pipe"):
        delete("a")
