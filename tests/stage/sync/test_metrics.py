from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.stage.sync import metrics
from pitools.stage.sync.metrics import METRICS, PREFIX, SyncTotals, read_samples, render, write_ended, write_started

SAMPLE = re.compile(
    r"[a-zA-Z_:][a-zA-Z0-9_:]*"  # name
    r'\{[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"(?:,[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*")*\}'
    r" [0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
)


def value(path: Path, name: str, **labels: str) -> float | None:
    return read_samples(path).get((PREFIX + name, tuple(labels.items())))


def check_exposition(text: str) -> None:
    """The text format's own rules: each metric once, HELP and TYPE before its samples, no sample twice."""
    observed: set[str] = set()
    current = ""
    samples: set[str] = set()
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in observed
            observed.add(current)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2:] in ([current, "gauge"], [current, "counter"])
            assert (line.split(" ")[3] == "counter") == current.endswith("_total")
        else:
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(current + "{")
            assert line.rpartition(" ")[0] not in samples
            samples.add(line.rpartition(" ")[0])


def test_a_run_is_written_in_the_collectors_format(tmp_path: Path):
    """Every metric is there, with its help and type, and in the numbers of the run."""
    path = tmp_path / "pit.prom"
    totals = SyncTotals(2, 1000, 1, 500, {"pick*": (3, 4000)}, {"/nvme": 12345}, {5: 2})
    write_ended(path, "stage", totals, 0, started_s=1000.0, now=1002.5, wall_s=2.5)
    check_exposition(path.read_text())
    assert {name.removeprefix(PREFIX) for name, _ in read_samples(path)} == set(METRICS)
    assert value(path, "kept_bytes", policy="stage", rule="pick*") == 4000
    assert value(path, "free_bytes", policy="stage", root="/nvme") == 12345
    assert value(path, "last_duration_seconds", policy="stage") == 2.5
    assert value(path, "last_success_timestamp_seconds", policy="stage") == 1002.5
    assert value(path, "errors_total", policy="stage", kind="data") == 2
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["pit.prom"]


def test_counters_go_on_and_gauges_are_of_the_last_run(tmp_path: Path):
    """A rule that is gone is gone from the file; what was counted, and the last success, stay."""
    path = tmp_path / "pit.prom"
    write_ended(path, "stage", SyncTotals(2, 1000, kept_by_rule={"a": (1, 10)}), 0, started_s=100, now=110, wall_s=2.5)
    write_ended(
        path,
        "stage",
        SyncTotals(1, 500, kept_by_rule={"b": (2, 20)}, errors={75: 1}),
        75,
        started_s=200,
        now=210,
        wall_s=2.5,
    )
    assert value(path, "copied_bytes_total", policy="stage") == 1500
    assert value(path, "staged_sets_total", policy="stage") == 3
    assert value(path, "errors_total", policy="stage", kind="later") == 1
    assert value(path, "kept_sets", policy="stage", rule="a") is None
    assert value(path, "kept_sets", policy="stage", rule="b") == 2
    assert value(path, "last_success_timestamp_seconds", policy="stage") == 110
    assert value(path, "last_end_timestamp_seconds", policy="stage") == 210
    assert value(path, "last_exit_code", policy="stage") == 75


def test_a_run_that_hangs_shows(tmp_path: Path):
    """Its start is later than the last end, and all that was known before it still stands."""
    path = tmp_path / "pit.prom"
    write_ended(path, "stage", SyncTotals(kept_by_rule={"a": (1, 10)}), 0, started_s=100, now=110, wall_s=2.5)
    samples = read_samples(path)
    write_started(path, "stage", 300)
    after = read_samples(path)
    start = (PREFIX + "last_start_timestamp_seconds", (("policy", "stage"),))
    assert after[start] == 300 > after[PREFIX + "last_end_timestamp_seconds", (("policy", "stage"),)]
    assert {**after, start: 100.0} == samples
    check_exposition(path.read_text())


@pytest.mark.parametrize("begins", [True, False])
def test_a_policy_that_never_succeeded_has_a_last_success(tmp_path: Path, begins: bool):
    """It is 0, so that an alert on its age fires: of a series that is absent there is none."""
    path = tmp_path / "pit.prom"
    if begins:
        write_started(path, "stage", 300)
    else:
        write_ended(path, "stage", SyncTotals(errors={3: 1}), 3, started_s=300, now=301, wall_s=1)
    assert value(path, "last_success_timestamp_seconds", policy="stage") == 0


def test_policies_share_a_file_without_harm(tmp_path: Path):
    """Another policy's samples are left as they stand."""
    path = tmp_path / "pit.prom"
    write_ended(path, "a", SyncTotals(1, 10, kept_by_rule={"r": (1, 1)}), 0, started_s=1, now=2, wall_s=2.5)
    write_ended(path, "b", SyncTotals(2, 20, kept_by_rule={"r": (2, 2)}), 5, started_s=3, now=4, wall_s=2.5)
    assert value(path, "kept_sets", policy="a", rule="r") == 1
    assert value(path, "kept_sets", policy="b", rule="r") == 2
    check_exposition(path.read_text())


@given(st.dictionaries(st.text(max_size=12), st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60)), max_size=4))
def test_any_name_can_be_a_label(kept: dict[str, tuple[int, int]]):
    """Quotes, backslashes, line ends and whatever a folder's name may hold are escaped, and come back."""
    samples = {(PREFIX + "kept_sets", (("policy", "p"), ("rule", name))): float(n) for name, (n, _) in kept.items()}
    text = render(samples)
    if samples:
        check_exposition(text)
    names = [re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), raw) for raw in re.findall(r'rule="(.*)"}', text)]
    assert sorted(names) == sorted(kept)


def test_names_survive_the_file(tmp_path: Path):
    """What is written is read again, so that counters of odd names go on; a name that is not UTF-8 is made so."""
    path = tmp_path / "pit.prom"
    for _ in range(2):
        totals = SyncTotals(3, kept_by_rule={'a"b\\c\nd\re': (1, 2)}, free={os.fsdecode(b"/nvme/\xff"): 7})
        write_ended(path, 'p"\\', totals, 0, started_s=1, now=2, wall_s=2.5)
    path.read_bytes().decode("utf-8", "strict")
    assert value(path, "staged_sets_total", policy='p"\\') == 6
    assert value(path, "kept_bytes", policy='p"\\', rule='a"b\\c\nd\re') == 2
    assert value(path, "free_bytes", policy='p"\\', root="/nvme/?") == 7


@pytest.mark.parametrize("text", ["", "garbage", "\xff{", f'{PREFIX}kept_sets{{policy="a"}} nan?', "other 1\n"])
def test_a_file_of_another_hand_is_begun_anew(tmp_path: Path, text: str):
    """A torn or foreign file costs the counters, and no run."""
    path = tmp_path / "pit.prom"
    path.write_text(text, encoding="latin-1")
    write_ended(path, "stage", SyncTotals(1), 0, started_s=1, now=2, wall_s=2.5)
    check_exposition(path.read_text())
    assert value(path, "staged_sets_total", policy="stage") == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    """The collector's folder is often another user's."""
    with pytest.raises(ClusterError):
        write_started(tmp_path / "nowhere" / "pit.prom", "stage", 1)


def test_every_exit_code_has_a_kind():
    """An error that is not counted would be no error to monitoring."""
    assert set(metrics.ERROR_KINDS) == {3, 4, 5, 75}


def test_a_clock_that_was_set_back_does_not_shorten_a_run(tmp_path: Path):
    """How long it took is told by a clock that does not jump."""
    path = tmp_path / "pit.prom"
    write_ended(path, "stage", SyncTotals(), 0, started_s=2000, now=1000, wall_s=12.5)
    check_exposition(path.read_text())
    assert value(path, "last_duration_seconds", policy="stage") == 12.5


def test_policies_that_end_at_once_are_all_counted(tmp_path: Path):
    """The file is read and replaced by one at a time, and who only wants to look at the folder is not waited for."""
    path = tmp_path / "pit.prom"
    pids = []
    for policy in "abcd":
        pid = os.fork()
        if not pid:
            for _ in range(20):
                write_ended(path, policy, SyncTotals(1), 0, started_s=1, now=2, wall_s=1)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    assert [value(path, "staged_sets_total", policy=policy) for policy in "abcd"] == [20] * 4


def test_a_folder_that_somebody_keeps_locked_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Anybody may lock a folder they can read: then the file is written all the same."""
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write_started(tmp_path / "pit.prom", "stage", 1)
    os.close(descriptor)
    assert value(tmp_path / "pit.prom", "last_start_timestamp_seconds", policy="stage") == 1
