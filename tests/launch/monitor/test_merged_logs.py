"""The logs of several ranks as one stream: nothing lost, nothing twice, in the order of their times."""

from __future__ import annotations

import json
import re
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import UsageError
from pitools.launch import plan as planning
from pitools.launch.diagnosis import log_timestamps
from pitools.launch.monitor import merged_logs, rank_log
from pitools.launch.monitor.merged_logs import LogFilter, LogReader
from pitools.site.load import load_site

MakePlan = Callable[..., planning.Plan]
Pit = Callable[..., subprocess.CompletedProcess[str]]
SPAN = log_timestamps.make_span("2026-11-25T10:00:00Z", "2026-11-25T12:00:00Z")


@given(st.lists(st.binary(max_size=12), max_size=12), st.lists(st.integers(1, 9), max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_growing_file_is_read_once(tmp_path: Path, pieces: list[bytes], cuts: list[int]) -> None:
    """However a file grows, its lines are those of the whole file."""
    path, written = tmp_path / "0.out", b"\n".join(pieces)
    path.write_bytes(b"")
    reader, lines, rest = LogReader("0", path, SPAN, print), [], written
    for cut in cuts:
        part, rest = rest[:cut], rest[cut:]
        with path.open("ab") as file:
            file.write(part)
        lines += reader.read(LogFilter(), is_last=False)
    with path.open("ab") as file:
        file.write(rest)
    lines += reader.read(LogFilter(), is_last=True)
    assert "\n".join(line.text for line in lines) == written.decode("utf-8", "replace").removesuffix("\n")


def test_large_logs_are_read_in_pieces(make_plan: MakePlan, tmp_path: Path) -> None:
    """The lines of all ranks are in the order of their times, and no whole log is in memory."""
    logs = tmp_path / "attempts" / "0" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(make_plan("local")))
    count = 15_000
    for rank in range(2):
        lines = (f"2026-11-25T{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}Z {'x' * 200}\n" for i in range(count))
        (logs / f"{rank}.out").write_text("".join(lines))
    tracemalloc.start()
    lines = merged_logs.read_lines(
        tmp_path, load_site("local"), [0, 1], "ranks", LogFilter(), follow=False, report=print
    )
    total, last = 0, ""
    for line in lines:
        assert line.t >= last
        total, last = total + 1, line.t
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 2 * count
    assert peak < 3 << 20
    assert sum(map(len, rank_log.read_log(tmp_path, load_site("local"), 0, follow=False))) == count * 222


@pytest.mark.parametrize(
    ("text", "ranks"), [("all", [0, 1, 2, 3]), ("2", [2]), ("0-1,3", [0, 1, 3]), ("1-1", [1]), ("0,0-1", [0, 1])]
)
def test_ranks_are_lists_of_ranges(text: str, ranks: list[int]) -> None:
    """As Slurm writes lists of numbers."""
    assert merged_logs.parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["4", "0-4", "3-1", "", "a", "0,,1", "-1", "0-", "1" * 400])
def test_ranks_that_are_none_are_named(text: str) -> None:
    """With what there is."""
    with pytest.raises(UsageError):
        merged_logs.parse_ranks(text, 4)


def test_since_goes_by_the_lines_own_times(tmp_path: Path) -> None:
    """A line without a time has that of the line before it; a log without any is shown whole, and named."""
    (tmp_path / "0.out").write_text("2026-11-25T10:30:00Z a\n  more\n2026-11-25T11:00:00Z b\n  more b\n")
    (tmp_path / "1.out").write_text("x\ny\n")
    notes: list[str] = []
    wanted = LogFilter(since="2026-11-25T10:45:00.000Z", pattern=re.compile("[bx]"))
    texts = [
        [line.text for line in LogReader(name, tmp_path / f"{name}.out", SPAN, notes.append).read(wanted, is_last=True)]
        for name in ("0", "1")
    ]
    assert texts == [["2026-11-25T11:00:00Z b", "  more b"], ["x"]]
    assert [note.partition(":")[0] for note in notes] == ["1"]


def test_a_run_s_logs_as_they_are_typed(pit: Pit, tmp_path: Path) -> None:
    """All ranks with their numbers, a pattern, the job's own output; each wrong argument is an error of usage."""
    command = "date -u +%Y-%m-%dT%H:%M:%SZ; echo from $PIT_RANK"
    (tmp_path / "r.toml").write_text(f'name = "r"\nnodes = 2\ncommand = "{command}"\n')
    done = pit("launch", "run", "r.toml", "--wait")
    run = json.loads(done.stdout)["run_id"]

    def logs(*words: str) -> list[str]:
        done = pit("launch", "logs", run, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    # By the lines' own times: the ranks' clocks may be a second apart.
    assert sorted(line for line in logs("--ranks", "all") if "from" in line) == ["0: from 0", "1: from 1"]
    assert logs("--ranks", "0-1", "--grep", "from 1$", "-f") == ["1: from 1"]
    assert logs("--rank", "1", "--grep", "from") == logs("--rank", "1", "--of", "ranks", "--grep", "from") == ["from 1"]
    assert len(logs("--ranks", "all", "--since", "10m")) == 4
    assert logs("--attempt", "0", "--rank", "1", "--grep", "from") == ["from 1"]
    assert all(line.partition(":")[0] in ("0", "1", "job") for line in logs("--of", "all"))
    for words in (
        ("--ranks", "2"),
        ("--grep", "("),
        ("--since", "soon"),
        ("--rank", "0", "--ranks", "all"),
        ("--attempt", "1"),
    ):
        assert pit("launch", "logs", run, *words).returncode == 2, words
