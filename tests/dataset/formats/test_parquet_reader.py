from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pitools.core.errors import DataError
from pitools.dataset.formats import detect


def column(path: Path, key: str, values: list[object], kind: pa.DataType | None = None) -> Path:
    """Other values for a column of the first data file."""
    file = path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(key), key, pa.array(values, kind)), file)
    return file


@pytest.mark.parametrize(
    ("key", "values", "why"),
    [
        ("frame_index", [0, 1, 2, 3, 0, 2, 1], "row 1 of it is said to be step 2"),
        ("timestamp", [0.0, 0.05, 0.1, 0.15, 0.0, 0.05, 0.15], "step 2 is of 0.1500 s, at 20 frames a second"),
        ("timestamp", [0.0, 0.05, 0.1, 0.15, 0.0, float("nan"), 0.1], "step 1 is of nan s, at 20 frames a second"),
    ],
)
def test_rows_in_disorder(lerobot, key, values, why) -> None:
    """An episode whose rows are not in order, or not of the times of its frames, is refused, and no other."""
    path = lerobot(4, 3).path
    column(path, key, values)
    found = detect.scan_recording(path, "auto")
    assert [episode.name for episode in found.episodes] == ["episode_000000"]
    assert [(item.name, item.reason) for item in found.rejected] == [("episode_000001", why)]


@pytest.mark.parametrize(
    ("key", "values", "kind", "what"),
    [
        # Three rows of one value are as many as one row of three.
        ("action", [[1.0], [2.0], [3.0]], pa.list_(pa.float32()), r"rows of 1 values, where \(3,\) was expected"),
        ("action", [[1.0] * 6] * 3, pa.list_(pa.float32()), r"rows of 6 values, where \(3,\) was expected"),
        ("action", [[1.0] * 3, [2.0] * 2, [3.0]], pa.list_(pa.float32()), "rows of 1 to 3 values"),
        ("next.reward", [0, 300, 0], pa.int64(), "its int64 values do not fit uint8"),
        ("next.reward", [0.0, 0.5, 1.0], pa.float64(), "its double values do not fit uint8|its float64 values"),
    ],
)
def test_rows_of_another_form(lerobot, whole, key, values, kind, what) -> None:
    """Rows of another length or type than the dataset says are refused, and never spread, cut or wrapped."""
    path = lerobot(3, 4).path
    known = json.loads((path / "meta/info.json").read_text())
    known["features"]["next.reward"]["dtype"] = "uint8"
    (path / "meta/info.json").write_text(json.dumps(known))
    rest = pq.read_table(path / "data/chunk-000/file-000.parquet")[key].to_pylist()[3:]
    file = column(path, key, [*values, *rest], kind)
    with pytest.raises(DataError, match=what) as caught:
        whole(detect.scan_recording(path, "auto").episodes[0])
    assert caught.value.where == f"{file}: {key}: row 0"


def test_wider_numbers(lerobot, whole) -> None:
    """Numbers that are stored wider than they need are the same numbers."""
    made = lerobot(3)
    column(made.path, "next.reward", made.values["next.reward"].tolist(), pa.float64())
    got = whole(detect.scan_recording(made.path, "auto").episodes[0])["reward"]
    np.testing.assert_array_equal(got, made.values["next.reward"])


def test_missing_value(lerobot, whole) -> None:
    """A null in a column is refused by file, column and row."""
    made = lerobot(4)
    path = made.path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    values = [[1.0, 2.0, 3.0], None, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    at = table.column_names.index("action")
    pq.write_table(table.set_column(at, "action", pa.array(values, pa.list_(pa.float32()))), path)
    with pytest.raises(DataError, match="a value is missing") as caught:
        whole(detect.scan_recording(made.path, "auto").episodes[0])
    assert caught.value.where == f"{path}: action: row 0"
