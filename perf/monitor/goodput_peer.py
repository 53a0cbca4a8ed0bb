"""Ask ml-goodput for the goodput of events, in the environment that has it, with a log in memory for Google Cloud's.

Reads [[event, Unix time, step number]…] from stdin, each event as GoodputRecorder's method for its time: `job_start`,
`tpu_init_end`, `step_start` …; writes {"version", "goodput", "badput"}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from ml_goodput_measurement.src.goodput import GoodputCalculator, GoodputRecorder
from ml_goodput_measurement.src.goodput_utils import get_timestamp_from_log_entry


class MemoryLog:
    """What GoodputRecorder writes and GoodputCalculator reads."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def write_cloud_logging_entry(self, entry: Any) -> None:
        """As ml-goodput's own logger."""
        self.entries.append(entry)

    def read_cloud_logging_entries(self, *_: Any, **__: Any) -> tuple[list[Any], Any]:
        """As ml-goodput's own logger."""
        last = get_timestamp_from_log_entry(self.entries[-1])
        return list(self.entries), (last, str(last))


def main() -> None:
    log = MemoryLog()
    recorder = GoodputRecorder("run", "log", True, cloud_logger=log)
    for kind, t, step in json.load(sys.stdin):
        moment = datetime.fromtimestamp(t, UTC)
        record = getattr(recorder, f"record_{kind}_time")
        record(step, moment) if kind == "step_start" else record(moment)
    with tempfile.TemporaryDirectory() as folder:
        calculator = GoodputCalculator("run", "log", cloud_logger=log, cache_dir=folder)
        goodput, badput, _ = calculator.get_job_goodput(include_badput_breakdown=True)
    named = {kind.name: value for kind, value in badput.items() if value}
    print(json.dumps({"version": version("ml-goodput-measurement"), "goodput": goodput, "badput": named}))


if __name__ == "__main__":
    main()
