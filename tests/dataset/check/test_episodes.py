from __future__ import annotations

import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.loader.sampling.episode_filter import EpisodeFilters, filter_episodes
from pitools.store.reader.version_reader import VersionReader

STEPS = sum(40 + number for number in range(8))


def offsets(path) -> np.ndarray:
    return VersionReader(path).offsets.copy()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda at: at.__setitem__(3, at[4] + 1), "episode 3 ends before it begins"),
        (lambda at: at.__setitem__(-1, at[-1] - 1), "first and last step"),
        (lambda at: at.__setitem__(0, 1), "first and last step"),
    ],
)
def test_offsets(copy, found, resign, rewrite, change, problem) -> None:
    """Beginnings of episodes that cannot be are damage, though every digest is right."""
    position = offsets(copy)
    change(position)
    rewrite(copy, "episode_offsets", position)
    (finding,) = found(resign(copy))
    assert (finding.level, finding.array, problem in finding.problem) == ("damage", "episode_offsets", True)


def test_offsets_of_other_lengths(copy, found, resign, rewrite) -> None:
    """Episodes that are cut elsewhere than they were recorded do not have the length that is said of them."""
    position = offsets(copy)
    position[3] -= 5
    rewrite(copy, "episode_offsets", position)
    findings = found(resign(copy))
    output = [finding for finding in findings if finding.check == "episodes"]
    assert [(finding.level, finding.episode, finding.got, finding.expected) for finding in output] == [
        ("damage", 2, "42", "37 steps"),
        ("damage", 3, "43", "48 steps"),
    ]


def test_unequal_length(copy, found, resign, manifest_of, places) -> None:
    """An array that has not one row for each step is damage."""
    import msgspec

    arrays = dict(manifest_of(copy).arrays)
    arrays["reward"] = msgspec.structs.replace(arrays["reward"], shape=(STEPS - 1,))
    path = resign(copy, arrays=arrays)
    assert ("episodes", "reward", None, None) in places(found(path))
    assert {finding.level for finding in found(path)} == {"damage"}


def test_lines(copy, found, resign, rewrite) -> None:
    """What is said of episodes has to be one line of JSON for each."""
    text = VersionReader(copy).read("episode_json", 0, VersionReader(copy).metadata_of("episode_json").shape[0])
    broken = text.copy()
    broken[:4] = ord("x")
    rewrite(copy, "episode_json", broken)
    (finding,) = found(resign(copy))
    assert (finding.level, finding.array) == ("damage", "episode_json")
    assert "not JSON Lines" in finding.problem


def test_too_short(make, found) -> None:
    """An episode of one step teaches nothing."""

    def change(demos) -> None:
        demos[2] = {key: value if isinstance(value, str) else value[:1] for key, value in demos[2].items()}

    findings = found(make(change))
    assert [(finding.level, finding.check, finding.episode, finding.got) for finding in findings] == [
        ("fault", "length", 2, "1 steps")
    ]


def test_too_long(make, found) -> None:
    """An episode ten times as long as the others is worth a look."""

    def change(demos) -> None:
        rng = np.random.default_rng(7)
        for key, value in demos[2].items():
            if not isinstance(value, str):
                demos[2][key] = np.concatenate([value] * 10)
        steps = len(demos[2]["actions"])
        demos[2]["obs/timestamp"] = 0.1 * np.arange(steps)
        demos[2]["actions"] += 0.01 * rng.normal(size=(steps, 7)).astype(np.float32)

    (finding,) = found(make(change))
    assert (finding.level, finding.check, finding.episode, finding.got) == ("warning", "length", 2, "420 steps")


@pytest.mark.parametrize(
    ("change", "step", "what"),
    [
        (lambda t: t.__setitem__(9, t[8]), 9, "do not increase"),
        (lambda t: t.__setitem__(slice(20, None), t[20:] - 50), 20, "do not increase"),
        (lambda t: t.__iadd__(np.where(np.arange(len(t)) >= 13, 1.0, 0)), 13, "a gap in time"),
        (lambda t: t.__setitem__(slice(None), 0.05 * np.arange(len(t))), None, "rate"),
    ],
)
def test_times(make, found, places, change, step, what) -> None:
    """Times that stand still, go back, leave a gap, or run at another rate, with episode and step."""
    findings = found(make(lambda demos: change(demos[3]["obs/timestamp"])))
    assert places(findings) == {("time", "obs/timestamp", 3, step)}
    assert (findings[0].level, what in findings[0].problem) == ("fault", True)


def test_language(make, found) -> None:
    """An episode without an instruction, where others have one, is named; a dataset without any is as it should be."""
    (finding,) = found(make(lambda demos: demos[3].pop("language")))
    assert (finding.level, finding.check, finding.episode, finding.got) == ("warning", "instruction", 3, "1 of 8")
    assert found(make(lambda demos: [known.pop("language") for known in demos], name="y")) == []


def test_splits(copy, found, resign, edit) -> None:
    """Splits that name episodes that are not there, share some, or are no lists, are found."""

    def change(known) -> None:
        known["attributes"]["splits"] = {"train": [0, 1, 2, 8, -1], "valid": [2, 7], "20_percent": [0, 1], "odd": "no"}

    edit(copy, "zarr.json", change)
    findings = found(resign(copy))
    assert {finding.problem.split(":")[0] for finding in findings} == {"split 'train'", "split 'odd'"}
    assert sorted(finding.got for finding in findings) == ["-1, 8", "2", "no"]
    assert {finding.level for finding in findings} == {"fault"}


@pytest.mark.parametrize("splits", [{"train": [0, 8]}, {"train": [-1]}, {"train": "no"}, ["train"]], ids=str)
def test_readers_refuse_wrong_splits(copy, make, resign, edit, tmp_path, splits) -> None:
    """Reading, appending to and re-encoding a version with such splits are refused as damage."""
    edit(copy, "zarr.json", lambda known: known["attributes"].update(splits=splits))
    path = resign(copy)
    root = tmp_path / "new"
    for use in (
        lambda: open_dataset(path).splits,
        lambda: filter_episodes(VersionReader(path), EpisodeFilters(splits=("train",))),
        lambda: ingest([path], root=root, name="x"),
        lambda: make(seed=1, append=path),
    ):
        with pytest.raises(DataError):
            use()
    assert not root.exists()


def test_levels_and_bounds(make, found, tmp_path) -> None:
    """A file of bounds makes a check stricter, milder, silent, or sets when it speaks."""
    from pitools.dataset.check.thresholds import load_thresholds

    def change(demos) -> None:
        demos[3].pop("language")
        demos[4]["obs/timestamp"][20:] += 1
        demos[5]["obs/eye_image"][:3] = 0

    path = make(change)
    (tmp_path / "bounds.toml").write_text('time_gap = 20\nlevels = {instruction = "fault", blank = "off"}')
    findings = found(path, thresholds=load_thresholds(tmp_path / "bounds.toml"))
    assert [(finding.level, finding.check) for finding in findings] == [("fault", "instruction")]
    assert len(found(path)) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time_gpa = 2", 'did you mean "time_gap"?'),
        ('levels = {blanc = "off"}', 'did you mean "blank"?'),
        ('levels = {blank = "no"}', ""),
        ("mean_shift = -1", ""),
        ("mean_shift = nan", ""),
        ("period_factor = 0", ""),
        ("x", ""),
    ],
)
def test_bounds_are_strict(tmp_path, text, said) -> None:
    """What is misspelt in a file of bounds is refused, with what was meant."""
    from pitools.core.errors import ConfigError
    from pitools.dataset.check.thresholds import load_thresholds

    (tmp_path / "b.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_thresholds(tmp_path / "b.toml")
    assert said in caught.value.hint
    assert "b.toml" in caught.value.where


def test_every_named_check_is_one(repo) -> None:
    """The names that bounds know are those that the checks use."""
    import re

    from pitools.dataset.check.thresholds import CHECKS

    folder = repo / "pitools/dataset/check"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    used = set(re.findall(r'check="([a-z-]+)"', text)) - {"always"}
    drift = {f"{name}-drift" for name in re.findall(r'(?:_drift_finding\(|_worst_columns\()\s*"([a-z]+)"', text)}
    damage = {"manifest", "file", "schema", "shard", "digest", "episodes"}
    assert (used | drift) - damage == set(CHECKS)


def test_too_short_among_short() -> None:
    """An episode of one step is too short, also where most are hardly longer; others are not."""
    from pitools.dataset.check.episodes import find_odd_lengths
    from pitools.dataset.check.thresholds import Thresholds

    (finding,) = find_odd_lengths(np.array([2, 3, 1, 2, 4]), Thresholds())
    assert (finding.level, finding.episode, finding.got) == ("fault", 2, "1 steps")
