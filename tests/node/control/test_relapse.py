"""What an open incident asks for when more fails: the severest action, of the boot and the parts of then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.node import spool
from pitools.node.types import NodeReport
from tests.node.control.world import Clock, World

CHECKS = {"a": ("gpus", "0"), "b": ("gpus", "1"), "c": ("block_devices", "sda")}


@pytest.mark.parametrize(
    ("story", "acts"),
    [
        ("a=drain a=drain,b=reboot - - -", "drain relapse recover escalate"),
        ("a=drain b=repair - - -", "drain relapse recover escalate"),
        ("a=drain a=drain,b=reboot boot - -", "drain relapse recover return"),
        ("a=drain b=repair gpu - -", "drain relapse recover return"),
        ("a=drain c=repair gpu - -", "drain relapse recover escalate"),
        ("a=drain boot,b=reboot - - -", "drain relapse recover escalate"),
        ("a=drain - b=reboot - - -", "drain recover relapse recover escalate"),
        ("a=reboot b=drain boot - -", "drain recover return"),
        ("a=reboot boot,a=reboot - - -", "drain relapse recover escalate"),
        ("a=reboot boot,a=drain - - -", "drain relapse recover | return"),
        ("a=repair gpu,b=reboot - - -", "drain relapse recover escalate"),
        ("a=repair b=reboot boot - -", "drain recover escalate"),
        ("a=drain boot,a=drain a=drain - - -", "drain relapse recover | return"),
        ("a=drain boot - -", "drain recover return"),
        ("a=drain a=drain,b=drain* - - -", "drain relapse recover escalate"),  # an event
    ],
)
def test_an_incident_asks_for_what_its_failures_ask(tmp_path: Path, clock: Clock, story: str, acts: str) -> None:
    """A report each 10 min; a return at once, in the tick of the recovery, only if none failed since the boot."""
    world, seen, returned_after = World(tmp_path, clock, stable_for="9m"), list[str](), 0
    for step in story.split():
        events = step.split(",")
        world.boots["n03"] += "boot" in events
        world.serials["n03"] += "gpu" in events
        failed: list[Any] = [one.split("=") for one in events if "=" in one]
        clock.pass_minutes(10)
        report(world, dict(failed))
        rows = world.tick()
        returned_after += [row.act for row in rows] == ["return"]
        seen += [row.act for row in rows]
    assert seen == acts.replace("| ", "").split()
    assert world.ours() == (set() if "return" in acts else {"n03"})
    assert returned_after == ("|" in acts)


def report(world: World, failed: dict[str, str]) -> None:
    findings = [
        msgspec.structs.replace(
            world.finding("n03", name, action.rstrip("*")),  # type: ignore[arg-type]
            table=CHECKS[name][0],
            subject=CHECKS[name][1],
            is_event=action.endswith("*"),
        )
        for name, action in failed.items()
    ]
    serial = f"serial{world.serials['n03']}"
    own = NodeReport(
        node="n03",
        boot_id=f"boot{world.boots['n03']}",
        checked_at=timestamps.now_rfc3339(),
        hardware={"gpus 0000:01:00.0 serial": serial, "block_devices sda serial": "disk"},
        findings=tuple(findings),
        passed=tuple(CHECKS.keys() - failed.keys()),
    )
    spool.write_report(Path(world.config.spool), own)
