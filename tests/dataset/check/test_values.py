from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.dataset.check.vectors import VectorStats
from pitools.dataset.ingest.ingest import ingest


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
@pytest.mark.parametrize("deep", [False, True])
def test_clean(make, found, codec, deep) -> None:
    """In a version without a fault nothing is found."""
    assert found(make(codec=codec), deep=deep) == []


def test_real_recording(bridge, tmp_path, found) -> None:
    """25 episodes of a real robot give rise to nothing."""
    from pathlib import Path

    from pitools.dataset.ingest.ingest import ingest

    version = ingest([bridge], root=tmp_path, name="bridge")
    assert found(Path(version.path), deep=True) == []


def test_nan(make, found, places) -> None:
    """A NaN and an infinity are found, in the episode and at the step where they are first."""

    def change(demos) -> None:
        demos[2]["actions"][7:9, 3] = np.nan
        demos[5]["obs/joints"][11, 0] = np.inf

    findings = found(make(change))
    assert places(findings) == {("nan", "action", 2, 7), ("nan", "obs/joints", 5, 11)}
    assert {finding.got for finding in findings} == {"2 steps", "1 steps"}
    assert {finding.level for finding in findings} == {"fault"}


def test_nan_in_what_is_too_large(make, found, places) -> None:
    """In a point cloud, a NaN at an episode's first step is found by a sample, and anywhere by a deep check."""

    def change(demos) -> None:
        for demo in demos:
            demo["obs/points"] = np.ones((len(demo["actions"]), 700, 3), np.float32)
        demos[4]["obs/points"][0, 5] = np.nan
        demos[6]["obs/points"][9, 5] = np.nan

    path = make(change)
    assert places(found(path)) == {("nan", "obs/points", 4, 0)}
    assert places(found(path, deep=True)) == {("nan", "obs/points", 4, 0), ("nan", "obs/points", 6, 9)}


def test_constant(make, found) -> None:
    """Columns that never change are worth a look, an action of which nothing does is a fault; a reward may be 0."""

    def change(demos) -> None:
        for demo in demos:
            demo["actions"][:, 6] = 1
            demo["obs/joints"][:, 2] = 0.5

    findings = found(make(change))
    assert [(finding.level, finding.check, finding.array) for finding in findings] == [
        ("warning", "constant", "action"),
        ("warning", "constant", "obs/joints"),
    ]
    assert findings[0].problem == "column 6 is the same in every step"
    findings = found(make(lambda demos: [known["actions"].fill(1) for known in demos], name="dead"))
    assert ("fault", "every column is the same in every step") in {(item.level, item.problem) for item in findings}


def test_still(make, found, places) -> None:
    """An episode whose observations stay what they were is worth a look."""
    findings = found(make(lambda demos: demos[3]["obs/joints"].__setitem__(slice(None), 0.25)))
    assert places(findings) == {("motionless", "obs/joints", 3, None)}
    assert findings[0].level == "warning"


def test_mostly_still(make, found) -> None:
    """What rests in most episodes, as an object that nobody touches, may well rest; so may a gripper in any."""

    def change(demos) -> None:
        for number, reference in enumerate(demos):
            steps = len(reference["actions"])
            reference["obs/object"] = (
                np.full((steps, 3), number / 7) + (number == 5) * np.linspace(0, 1, steps)[:, None]
            )
            reference["obs/gripper"] = np.full((steps, 2), 0.04) - (number < 6) * np.linspace(0, 0.03, steps)[:, None]

    assert found(make(change)) == []


@pytest.mark.parametrize("scale", [1000.0, -60.0])
def test_outlier(make, found, places, scale) -> None:
    """One step far beyond the rest is found, above or below, and what it was is said."""
    findings = found(make(lambda demos: demos[1]["actions"].__setitem__((20, 4), scale)))
    assert places(findings) == {("outlier", "action", 1, 20)}
    assert findings[0].got == f"{scale:g}"


def test_outlier_of_a_whole_episode(make, found, places) -> None:
    """An episode in other units does not make itself ordinary."""
    findings = found(make(lambda demos: demos[6]["actions"].__imul__(1000)))
    assert {(finding.check, finding.array, finding.episode) for finding in findings} == {("outlier", "action", 6)}


def test_a_gripper_is_no_outlier(make, found) -> None:
    """A column that mostly rests, and now and then moves, is ordinary."""

    def change(demos) -> None:
        for demo in demos:
            demo["actions"][:, 6] = 0
            demo["actions"][20:22, 6] = 1

    assert found(make(change)) == []


@pytest.mark.parametrize("closes", [2, 3, 8])
def test_a_noisy_gripper_is_no_outlier(make, found, places, closes) -> None:
    """A gripper that rests, but for its noise, and closes now and then is ordinary; a value beyond that is not."""

    def change(demos, far: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        for number, reference in enumerate(demos):
            reference["actions"][:, 6] = 0.08 + 1e-4 * rng.normal(size=len(reference["actions"]))
            if number < closes:
                reference["actions"][20:23, 6] = 0.01 * number
        demos[5]["actions"][30, 6] = far or demos[5]["actions"][30, 6]

    assert found(make(change)) == []
    assert places(found(make(lambda demos: change(demos, 50.0), name="far"))) == {("outlier", "action", 5, 30)}


@pytest.mark.parametrize("row", [(4, 4), (2, 2, 3)])
def test_matrices(make, found, row) -> None:
    """Poses as matrices, and the like, are as ordinary as vectors."""

    def change(demos) -> None:
        for demo in demos:
            demo["obs/pose"] = np.random.default_rng(len(demo["actions"])).normal(size=(len(demo["actions"]), *row))

    assert found(make(change)) == []


@pytest.mark.parametrize("kind", ["bool", "int64", "float16", "uint64"])
def test_other_types(make, found, kind) -> None:
    """Flags, counts and half floats, over episodes short and long, give rise to nothing."""

    def change(demos) -> None:
        for number, reference in enumerate(demos):
            reference["obs/flag"] = (np.arange(len(reference["actions"])) // 7 % 2 + number % 2).astype(kind)
        for reference in demos[:2]:
            for key in [key for key, value in reference.items() if not isinstance(value, str)]:
                reference[key] = reference[key][:12]

    assert found(make(change), deep=True) == []


def test_duplicate(make, found, places) -> None:
    """An episode that is there twice is found, and of which it is a copy."""
    findings = found(make(lambda demos: demos.__setitem__(5, {**demos[2], "language": "another"})))
    assert places(findings) == {("duplicate", "", 5, None)}
    assert findings[0].got == "episode 2"


def test_drawn_again(make, found) -> None:
    """The same movements, drawn again in another light, are another episode."""

    def change(demos) -> None:
        frames = demos[2]["obs/eye_image"] + np.uint8(20)
        demos[5] = {**demos[2], "obs/eye_image": frames}

    assert found(make(change)) == []


def test_statistics(copy, found, resign, manifest_of) -> None:
    """What the manifest says of the values has to be true of them."""
    from pitools.store.manifest import Statistics
    from pitools.store.reader.version_reader import VersionReader

    values = VersionReader(copy).read("action", 0, manifest_of(copy).steps).astype(np.float64)

    def told(**changes) -> dict[str, Statistics]:
        reference = {
            "minimum": values.min(0),
            "maximum": values.max(0),
            "mean": values.mean(0),
            "deviation": values.std(0),
        }
        reference |= {key: reference[key] + value for key, value in changes.items()}
        return {"action": Statistics(rows=len(values), **{key: tuple(row.tolist()) for key, row in reference.items()})}

    copy = resign(copy, statistics=told())
    assert found(copy) == []
    for change in ("minimum", "maximum", "mean", "deviation"):
        copy = resign(copy, statistics=told(**{change: np.eye(7)[4] * 1e-3}))
        (finding,) = found(copy)
        assert (finding.level, finding.check) == ("fault", "statistics")
        assert f"the manifest's {change} is not that of the values, in column 4" in finding.problem


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("large", [1e160, 1e308])
def test_statistics_of_the_largest_numbers(make, found, resign, manifest_of, large) -> None:
    """Values whose sums or squares float64 cannot hold make a version that is as its manifest says; minimum and maximum
    are compared all the same."""

    def change(demos) -> None:
        for demo in demos:
            demo["obs/large"] = np.where(demo["obs/joints"] > 0, large, -large)

    path = make(change)
    assert found(path) == []
    reported = manifest_of(path).statistics
    wrong = msgspec.structs.replace(reported["obs/large"], maximum=(1.0,) * 7)
    assert {finding.check for finding in found(resign(path, statistics=reported | {"obs/large": wrong}))} == {
        "statistics"
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_gathered_from_parts_in_any_order(data) -> None:
    """Whatever runs of steps are looked at in whatever order, what is gathered is what NumPy says of the whole."""
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    steps = int(offsets[-1])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.normal(size=(steps, 3)).astype(np.float32)
    values[rng.random(values.shape) < data.draw(st.sampled_from([0, 0.2]))] = np.nan
    cuts = sorted({0, steps, *data.draw(st.lists(st.integers(0, steps), max_size=5))})
    runs = [(low, high) for low, high in pairwise(cuts) if low < high]
    array, full = VectorStats("a", offsets, (3,), keep_values=True), VectorStats("a", offsets, (3,))
    for low, high in data.draw(st.permutations(runs)):
        array.add_steps(low, values[low:high])
    if steps:
        full.add_steps(0, values)
    assert np.array_equal(array.fingerprint, full.fingerprint)
    assert np.array_equal(array.values, values, equal_nan=True)
    for episode, (low, high) in enumerate(pairwise(offsets)):
        own_part = values[low:high]
        bad = ~np.isfinite(own_part).all(axis=1)
        assert array.non_finite.count[episode] == bad.sum()
        assert not bad.any() or array.non_finite.first_steps[episode] == low + bad.argmax()
        for column in range(3):
            retained = own_part[np.isfinite(own_part[:, column]), column]
            assert array.low[episode, column] == (retained.min() if len(retained) else np.inf)
            assert array.high[episode, column] == (retained.max() if len(retained) else -np.inf)
    for column in range(3):
        retained = values[np.isfinite(values[:, column]), column].astype(np.float64)
        assert array.rows[column] == len(retained)
        if len(retained):
            assert np.allclose(
                [array.mean[column], array.deviation[column]], [retained.mean(), retained.std()], atol=1e-12
            )


def test_identity_is_of_order_and_content() -> None:
    """Two episodes are alike if their rows are, in order, wherever they lie in the dataset."""
    rows = np.random.default_rng(0).normal(size=(5, 2))
    offsets = np.array([0, 5, 10, 15, 20])
    array = VectorStats("a", offsets, (2,))
    array.add_steps(0, np.concatenate([rows, rows[::-1], rows, rows + np.array([0, 1e-12])]))
    a, b, c, d = array.fingerprint.tolist()
    assert a == c
    assert len({a, b, d}) == 3


def test_state_is_observed(found, tmp_path) -> None:
    """The state of a replay buffer, which is not below obs/, is judged as an observation is."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(1200, 4)).astype("f4")
    state[:, 3] = 1
    state[50:53, 0] = 1e9
    group = zarr.create_group(tmp_path / "z.zarr", zarr_format=2)
    group.create_array("data/state", data=state)
    group.create_array("data/action", data=rng.normal(size=(1200, 2)).astype("f4"))
    group.create_array("meta/episode_ends", data=np.arange(40, 1201, 40))
    path = Path(ingest([tmp_path / "z.zarr"], root=tmp_path / "root", name="x").path)
    assert {(each.check, each.array, each.episode) for each in found(path)} >= {
        ("outlier", "state", 1),
        ("constant", "state", None),
    }
