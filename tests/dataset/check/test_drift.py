from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pitools.dataset import check
from pitools.dataset.check import drift
from pitools.dataset.check.drift import new_part
from pitools.dataset.check.thresholds import Thresholds
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, Manifest, Statistics

STEPS = 50
IMAGE = "obs/eye_image"


def statistics(values: np.ndarray) -> Statistics:
    """Of rows of columns, or of channels."""
    flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
    bad = ~np.isfinite(flat)
    retained = np.where(bad, np.nan, flat)
    numbers = (np.nanmin(retained, 0), np.nanmax(retained, 0), np.nanmean(retained, 0), np.nanstd(retained, 0))
    names = ("minimum", "maximum", "mean", "deviation")
    reported = {name: tuple(row.tolist()) for name, row in zip(names, numbers, strict=True)}
    finite = tuple((~bad).sum(0).tolist()) if bad.any() else msgspec.UNSET
    return Statistics(rows=len(values), non_finite=int(bad.sum()), finite=finite, **reported)


def data(episodes: int, seed: int = 0, **changes) -> dict[str, np.ndarray]:
    """Actions and frames of so many episodes, each around a place of its own."""
    rng = np.random.default_rng(seed)
    action = rng.normal(size=(episodes * STEPS, 4)) + np.repeat(rng.normal(size=(episodes, 4)) * 0.5, STEPS, axis=0)
    action[:, 3] = 0
    frames = rng.integers(60, 180, (episodes * 4, 6, 6, 3))
    values = {"action": action, IMAGE: frames}
    for name, change in changes.items():
        values[{"image": IMAGE}.get(name, name)] = change(values[{"image": IMAGE}.get(name, name)])
    return values


def manifest(values: dict[str, np.ndarray], *, parent: Manifest | None = None, **changes) -> Manifest:
    steps = len(values["action"])
    reference = {
        "name": "x",
        "episodes": steps // STEPS,
        "steps": steps,
        "files": (),
        "recordings": ({"file": "a"},),
        "arrays": {
            "action": ArraySchema(shape=values["action"].shape, dtype="float64"),
            IMAGE: ArraySchema(shape=(steps, 6, 6, 3), dtype="uint8"),
        },
        "statistics": {name: statistics(rows) for name, rows in values.items()},
        "instructions": {"pick": steps // STEPS // 2, "place": steps // STEPS - steps // STEPS // 2},
        "parent": manifests.version_of(manifests.encode_manifest(parent)) if parent else "",
    } | changes
    return Manifest(**reference)


def appended(parent: dict[str, np.ndarray], more: dict[str, np.ndarray], **changes) -> tuple[Manifest, Manifest]:
    """The manifests of a version with more episodes, and of its parent."""
    before = manifest(parent)
    both = {name: np.concatenate([rows, more[name]]) for name, rows in parent.items()}
    after = manifest(both, parent=before, **{"recordings": (*before.recordings, {"file": "b"}), **changes})
    return after, before


def checks(findings) -> list[tuple[str, str, str]]:
    return [(finding.level, finding.check.removesuffix("-drift"), finding.array) for finding in findings]


@pytest.mark.parametrize("episodes", [1, 5, 200])
def test_more_of_the_same(episodes) -> None:
    """A few episodes or many, from where the parent's came from, are let through."""
    assert check.check_drift(*appended(data(200), data(episodes, seed=1))) == []
    assert check.check_drift(manifest(data(200, seed=2)), manifest(data(200))) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"action": lambda rows: rows + np.array([0, 3, 0, 0])}, {"mean"}),
        ({"action": lambda rows: rows * [1, 1, 8, 1]}, {"deviation"}),
        ({"action": lambda rows: rows * [0.02, 1, 1, 1]}, {"deviation"}),
        ({"action": lambda rows: rows * [1, 0, 1, 1]}, {"constant"}),
        ({"action": lambda rows: np.where(np.arange(len(rows))[:, None] == 7, 90, rows)}, {"range", "deviation"}),
        ({"action": lambda rows: np.where(np.arange(len(rows))[:, None] < 9, np.nan, rows)}, {"nan"}),
        ({"image": lambda frames: frames // 4}, {"brightness"}),
    ],
    ids=["shift", "wider", "narrower", "constant", "range", "nan", "dark"],
)
@pytest.mark.parametrize("kind", ["append", "backfill"])
def test_values_that_drift(kind, change, expected) -> None:
    """A bad batch of data is found, be it the whole version or a tenth that drowns in what was there before."""
    if kind == "append":
        drift = check.check_drift(*appended(data(400), data(40, seed=1, **change)))
    else:
        drift = check.check_drift(manifest(data(40, seed=1, **change)), manifest(data(400)))
    output = {name for level, name, _ in checks(drift) if level == "fault"}
    assert expected & output
    assert output <= expected | {"range", "constant"}


@pytest.mark.parametrize("factor", [8, 1 / 8])
def test_another_unit(factor) -> None:
    """All columns of an action in another unit are refused where one column so wide or narrow may be by chance."""
    parent = data(12)
    added = data(6, seed=1, action=lambda rows: rows * factor)
    assert ("fault", "deviation", "action") in checks(check.check_drift(*appended(parent, added)))
    added = data(6, seed=1, action=lambda rows: rows * [1, 1, factor, 1])
    assert checks(check.check_drift(*appended(parent, added))) == []


def test_an_array_of_zeros() -> None:
    """An array that no longer changes at all is refused also in few episodes, in which one column may rest."""
    added = data(3, seed=1, action=lambda rows: rows * 0)
    assert ("fault", "constant", "action") in checks(check.check_drift(*appended(data(12), added)))
    added = data(3, seed=1, action=lambda rows: rows * [1, 1, 0, 1])
    assert checks(check.check_drift(*appended(data(12), added))) == []


def test_it_says_what_and_how_much() -> None:
    """The column that drifts most is named, with both numbers."""
    (finding,) = check.check_drift(
        manifest(data(200, action=lambda rows: rows + np.array([0, 3, 0, 0]))), manifest(data(200))
    )
    assert "column 1" in finding.problem
    assert finding.got == "2.938 in column 1"
    assert finding.expected.startswith("-0.06245 ")


def test_a_column_that_wakes_up() -> None:
    """A column that never moved in the parent and now does is worth a look."""
    drift = check.check_drift(
        manifest(data(200, action=lambda rows: rows + rows[:, :1] * [0, 0, 0, 1])), manifest(data(200))
    )
    assert ("warning", "constant", "action") in checks(drift)


def test_schema() -> None:
    """A step of another form is a fault; an array more or less is worth a look."""
    reference = manifest(data(20))
    other = {**reference.arrays, "action": ArraySchema(shape=(1000, 6), dtype="float64")}
    assert ("fault", "schema", "action") in checks(
        check.check_drift(msgspec.structs.replace(reference, arrays=other), reference)
    )
    less = {"action": reference.arrays["action"]}
    fewer = msgspec.structs.replace(reference, arrays=less)
    assert checks(check.check_drift(fewer, reference)) == [("warning", "schema", IMAGE)]
    assert checks(check.check_drift(reference, fewer)) == [("warning", "schema", IMAGE)]


def test_tasks() -> None:
    """Episodes of other instructions than before are worth a look, and which instruction it is."""
    (finding,) = check.check_drift(manifest(data(100), instructions={"fold": 100}), manifest(data(100)))
    assert (finding.level, finding.check, "'fold' (+100%)" in finding.got) == ("warning", "instruction-drift", True)
    instructions = {"pick": 100, "place": 100, "fold": 20}
    after, before = appended(data(200), data(20, seed=1), instructions=instructions)
    assert checks(check.check_drift(after, before)) == [("warning", "instruction", "")]


def test_length() -> None:
    """Episodes three times as long on average are a fault."""
    longer = msgspec.structs.replace(manifest(data(90)), episodes=30)
    assert checks(check.check_drift(longer, manifest(data(100)))) == [("fault", "length", "")]


def test_observations_may_move() -> None:
    """Poses of another scene are worth a look, and no reason to refuse it; other units are."""

    def renamed(**changes) -> Manifest:
        reference = manifest(data(200, **changes))
        named = {field: {"obs/joints": getattr(reference, field)["action"]} for field in ("arrays", "statistics")}
        return msgspec.structs.replace(reference, **named)

    moved = renamed(action=lambda rows: rows + np.array([0, 3, 0, 0]))
    assert checks(check.check_drift(moved, renamed())) == [("warning", "mean", "obs/joints")]
    degrees = renamed(action=lambda rows: rows * 57.3)
    assert ("fault", "deviation", "obs/joints") in checks(check.check_drift(degrees, renamed()))


def test_real_episodes_appended(bridge, tmp_path) -> None:
    """Real episodes, some added to others, are let through; in other units, or in the dark, they are not."""
    import h5py

    from pitools.dataset.ingest.ingest import ingest

    def some(name: str, numbers: range, change=lambda _: None) -> Path:
        with h5py.File(bridge) as source, h5py.File(tmp_path / name, "w") as file:
            file.create_group("data")
            for number in numbers:
                source.copy(f"data/demo_{number}", file["data"])
                change(file[f"data/demo_{number}"])
        return tmp_path / name

    def dark(demo) -> None:
        demo["obs/agentview_image"][...] = demo["obs/agentview_image"][...] // 4

    def millimetres(demo) -> None:
        demo["actions"][...] = demo["actions"][...] * np.array([1000, 1000, 1000, 1, 1, 1, 1], np.float32)

    parent = Path(ingest([some("a.hdf5", range(15))], root=tmp_path / "root", name="x").path)
    faults = {}
    for change in (lambda _: None, dark, millimetres):
        file = some(f"{change.__name__.strip('<>')}.hdf5", range(15, 25), change)
        child = Path(ingest([file], root=tmp_path / "root", name="x", append=parent, accept_drift=True).path)
        drift = check.check_drift(manifests.load_manifest(child)[0], manifests.load_manifest(parent)[0])
        faults[change.__name__] = {(item.check, item.array) for item in drift if item.level == "fault"}
    assert faults["<lambda>"] == set()
    assert faults["dark"] == {("brightness-drift", "obs/agentview_image")}
    assert faults["millimetres"] == {(f"{name}-drift", "action") for name in ("mean", "deviation", "range")}


def test_time_goes_on(make) -> None:
    """Times since 1970 of another day are beyond the parent's, and nothing is wrong with that."""

    def on(day: int):
        def change(demos) -> None:
            for demo in demos:
                demo["obs/timestamp"] = demo["obs/timestamp"] + 1.7e9 + 86400 * day

        return change

    parent = make(on(0))
    child = make(on(1), name="y", seed=1)
    assert check.check_drift(manifests.load_manifest(child)[0], manifests.load_manifest(parent)[0]) == []


def test_made_anew() -> None:
    """More episodes of other recordings are no append, though the parent is named: all of them are judged."""
    after, before = appended(data(100), data(20, seed=1), recordings=({"file": "c"}, {"file": "b"}))
    assert not new_part(after, before).appended
    assert new_part(*appended(data(100), data(20, seed=1))).appended


def test_a_large_mean() -> None:
    """Of what is added to values far from zero, what changes is not taken for what does not."""

    def far(episodes: int, seed: int) -> dict[str, np.ndarray]:
        return data(episodes, seed, action=lambda rows: rows * [1, 1, 1, 0] + 1.7e9)

    assert check.check_drift(*appended(far(200, 0), far(40, 1))) == []
    # Where it can be told, it is.
    still = data(40, 1, action=lambda rows: rows * [1, 0, 1, 1] + 30)
    drift = check.check_drift(*appended(data(200, 0, action=lambda rows: rows + 30), still))
    assert ("fault", "constant", "action") in checks(drift)


@pytest.mark.parametrize("part", ["parent", "both"])
def test_missing_values(part) -> None:
    """The mean and deviation of what is added are of its finite values, however many the parent lacks."""

    def gaps(rows: np.ndarray) -> np.ndarray:
        rows[: len(rows) // 2, 1] = np.nan
        return rows

    added = data(20, 1, action=lambda rows: (gaps(rows) if part == "both" else rows) + 0.2)
    after, before = appended(data(200, action=gaps), added)
    of_part, expected = new_part(after, before).statistics["action"], statistics(added["action"])
    assert of_part.mean == pytest.approx(expected.mean)
    assert of_part.deviation == pytest.approx(expected.deviation)
    assert check.check_drift(after, before) == []


def test_bounds() -> None:
    """Bounds decide, and levels."""
    pair = manifest(data(200, action=lambda rows: rows + np.array([0, 3, 0, 0]))), manifest(data(200))
    assert check.check_drift(*pair, Thresholds(mean_shift=5, range_growth=5)) == []
    assert checks(check.check_drift(*pair, Thresholds(levels={"mean-drift": "warning"}))) == [
        ("warning", "mean", "action")
    ]
    assert check.check_drift(*pair, Thresholds(levels={"mean-drift": "off"})) == []


def test_limits_of_the_page(repo) -> None:
    """docs/data.md has the limits that these numbers of episodes have."""
    rows = re.findall(r"^\| (\d+), and (\d+) \| (.*) \|$", (repo / "docs/data.md").read_text(), re.M)
    assert len(rows) == 4
    bounds = Thresholds()
    for known, added, cells in rows:
        part = drift.ComparedPart(
            episodes=int(added), parent_episodes=int(known), steps=1, statistics={}, instructions={}, appended=True
        )
        spread = bounds.deviation_ratio - 1
        limits = [
            bounds.mean_shift * part.tolerance_factor(drift._FEW_MEAN),
            1 + spread * part.tolerance_factor(drift._FEW_WIDE),
            1 + spread * part.tolerance_factor(drift._FEW_NARROW) if int(added) >= drift._MANY_NARROW else None,
            bounds.range_growth * part.tolerance_factor(drift._FEW_RANGE),
        ]
        expected = [f"{limit:.1f}" if limit else "" for limit in limits]
        assert [cell.strip().removesuffix(" times") for cell in cells.split("|")] == expected


def test_without_statistics() -> None:
    """Of versions that keep no statistics nothing is said of values."""
    bare = msgspec.structs.replace(manifest(data(20)), statistics=msgspec.UNSET, instructions=msgspec.UNSET)
    assert check.check_drift(bare, manifest(data(20))) == []
    assert check.check_drift(manifest(data(20)), bare) == []


def with_statistics(path: Path, resign, parent: str = "") -> Path:
    """A version whose manifest says what its actions are like."""
    from pitools.store.reader.version_reader import VersionReader

    store = VersionReader(path)
    reported = statistics(store.read("action", 0, store.manifest.steps))
    return resign(path, statistics={"action": reported}, parent=parent)


def test_against_the_parent(make, found, resign) -> None:
    """A version is compared with its parent, if that lies beside it, and with any other that is named."""

    def change(demos) -> None:
        for demo in demos:
            demo["actions"] += 6
            for key, value in demo.items():
                if not isinstance(value, str):
                    demo[key] = value[:14]

    parent = with_statistics(make(), resign)
    child = with_statistics(make(change, seed=1), resign, parent=parent.name)
    assert child.parent == parent.parent
    output = {finding.check for finding in found(child)}
    assert output == {"mean-drift", "length-drift", "range-drift"} - ({"range-drift"} - output)
    assert {finding.check for finding in found(parent, parent=child)} >= {"mean-drift", "length-drift"}
    moved = child.rename(child.parent.parent / child.name)
    assert found(moved) == []


@pytest.mark.parametrize("text", [b"{", b'{"schema": "pit.manifest/2"}', None], ids=["cut", "empty", "changed"])
def test_a_damaged_parent(make, found, resign, text) -> None:
    """A parent whose manifest is damaged is worth a warning, and hides nothing that is wrong with the child."""
    parent = with_statistics(make(), resign)
    change = lambda demos: demos[3]["actions"].__setitem__(5, np.nan)  # noqa: E731
    child = resign(make(change, seed=1), parent=parent.name)
    file = parent / manifests.MANIFEST_FILE
    file.write_bytes(file.read_bytes().replace(b'"name": "x"', b'"name": "y"') if text is None else text)
    output = [(finding.level, finding.check, finding.file) for finding in found(child)]
    assert ("warning", "parent", str(file)) in output
    assert ("fault", "nan", "") in output
    assert not any(check.endswith("-drift") for _, check, _ in output)
