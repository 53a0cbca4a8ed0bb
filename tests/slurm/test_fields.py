"""Cutting answers: rows that nobody can forge, and the values in them."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.slurm import fields

LINE = st.text().filter(lambda text: "\n" not in text)


def printed(table: list[tuple[str, ...]], sep: str) -> str:
    return "".join(sep.join(row) + "\n" for row in table)


@given(st.lists(st.tuples(LINE, st.text(), st.text(), LINE), max_size=6), st.text("0123456789abcdef", min_size=12))
def test_any_text_survives_between_marks(table: list[tuple[str, ...]], mark: str) -> None:
    """Values with newlines, bars and control characters come back as they were."""
    sep = f"|{mark}|"
    if any(sep in sep.join(row).replace(sep, "", 3) for row in table):
        return
    assert fields.split_rows(printed(table, sep), sep, 4, "x") == [list(row) for row in table]


@given(st.lists(st.tuples(LINE, st.text(), LINE), min_size=1, max_size=4), st.data())
def test_half_an_answer_is_refused_or_a_prefix(table: list[tuple[str, ...]], data: st.DataObject) -> None:
    """An answer cut anywhere gives an error or some of its first rows, never another row."""
    text = printed(table, "|12ab|")
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        rows = fields.split_rows(cut, "|12ab|", 3, "x")
    except ClusterError:
        return
    assert rows == [list(row) for row in table][: len(rows)]


def test_a_row_of_wrong_width_is_shown() -> None:
    """The error names the counts and shows the line that is wrong."""
    with pytest.raises(ClusterError) as caught:
        fields.split_rows("a|b|c\nd|e\n", "|", 3, "squeue")
    assert caught.value.message == "cannot parse the output of squeue: 2 values (expected 3)"
    assert caught.value.where == "line: 'd|e'"


def test_marks_are_never_the_same() -> None:
    """Two calls do not share a mark, so that one user cannot write down the next."""
    assert len({fields.new_separator() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("text", "zone", "moment"),
    [
        ("2026-11-21T01:22:49", "UTC", "2026-11-21T01:22:49.000Z"),
        ("2026-11-21T01:22:49", "Europe/Berlin", "2026-11-21T00:22:49.000Z"),
        ("2026-07-01T00:00:00", "America/New_York", "2026-07-01T04:00:00.000Z"),
        ("Unknown", "UTC", ""),
        ("N/A", "UTC", ""),
        ("None", "UTC", ""),
        ("", "UTC", ""),
    ],
)
def test_moments(text: str, zone: str, moment: str) -> None:
    """Zoneless local times become UTC; Slurm's spellings of nothing become nothing."""
    assert fields.parse_slurm_time(text, ZoneInfo(zone)) == moment


def test_a_moment_without_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a zone a time is this machine's."""
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert fields.parse_slurm_time("2026-11-21T09:00:00") == "2026-11-21T00:00:00.000Z"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["tomorrow", "2026-13-01T00:00:00", "Tomorr 12:00"])
def test_what_is_no_moment(text: str) -> None:
    """A time in another form is an error that shows it."""
    with pytest.raises(ClusterError, match="not a time"):
        fields.parse_slurm_time(text)


@pytest.mark.parametrize(
    ("text", "unit_s", "total_s"),
    [
        ("7-00:00:00", 1, 604800),
        ("4:00:00", 1, 14400),
        ("10:00", 1, 600),
        ("0:08", 1, 8),
        ("10080", 60, 604800),
        ("0", 1, 0),
        ("UNLIMITED", 1, None),
        ("Partition_Limit", 60, None),
        ("NONE", 1, None),
        ("", 60, None),
    ],
)
def test_spans(text: str, unit_s: int, total_s: int | None) -> None:
    """Durations in each of Slurm's forms, in seconds; no limit is None."""
    assert fields.parse_slurm_duration(text, unit_s) == total_s


@pytest.mark.parametrize(
    ("text", "number"),
    [("16", 16), ("4K", 4096), ("1.5K", 1536), ("2-4", 2), ("1-1", 1), ("UNLIMITED", None), ("", None)],
)
def test_counts(text: str, number: int | None) -> None:
    """Numbers, shortened numbers and ranges."""
    assert fields.parse_count(text) == number


@pytest.mark.parametrize("function", [fields.parse_count, fields.parse_slurm_duration])
def test_what_is_no_number(function: object) -> None:
    """A word where a number belongs is an error that shows it."""
    with pytest.raises(ClusterError, match="cannot parse") as caught:
        function("many")  # type: ignore[operator]
    assert "many" in caught.value.where


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h100:8", ("h100", 8)),
        ("gpu:8", ("", 8)),
        ("gpu", ("", 1)),
        ("gpu:h100:8(S:0-1,3),shard:h100:16(S:0)", ("h100", 8)),
        ("gpu:a100:4,gpu:v100:2,nvme:1", ("a100,v100", 6)),
        ("gpu:tesla:no_consume:4", ("tesla", 4)),
        ("gpu:1g.10gb:7", ("1g.10gb", 7)),
        ("gres/gpu:h100=2", ("h100", 2)),
        ("gpu:h100:0(IDX:N/A)", ("h100", 0)),
        ("craynetwork:4", ("", 0)),
        ("(null)", ("", 0)),
    ],
)
def test_gpus(gres: str, found: tuple[str, int]) -> None:
    """Type and number of GPUs in every form of a gres."""
    assert fields.parse_gpus(gres) == found


def test_pairs_keep_spaces_and_the_first_of_a_key() -> None:
    """A value runs to the next key; a repeated key cannot override the first."""
    values = fields.key_values("Node=n1 OS=Linux 6.1 #1 SMP @0  State=IDLE  ReqB:S:C:T=0:0:*:* State=DOWN Empty=")
    assert values == {"Node": "n1", "OS": "Linux 6.1 #1 SMP @0", "State": "IDLE", "ReqB:S:C:T": "0:0:*:*", "Empty": ""}


@given(st.text())
def test_pairs_take_any_text(text: str) -> None:
    """Garbage gives few or no pairs, never a failure."""
    fields.key_values(text)
    fields.key_values(text, ("A", "B"))
    fields.parse_gpus(text)
    fields.parse_gpus(f"gpu:{text}")
    fields.parse_tres(text)


def test_amounts_of_tres_are_in_slurms_units() -> None:
    """Memory is in MiB whatever its suffix, as sacctmgr prints it; a word is no limit."""
    limits = {"cpu": "4K", "mem": "7812.50G", "gres/gpu": "0", "node": "UNLIMITED"}
    assert fields.parse_tres_amounts(limits) == {"cpu": 4096, "mem": 8000000, "gres/gpu": 0}
    assert fields.parse_tres_amounts({"mem": "2000"}) == fields.parse_tres_amounts({"mem": "2000M"}) == {"mem": 2000}
