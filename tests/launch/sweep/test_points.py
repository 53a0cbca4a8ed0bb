"""Points of a sweep: every text that a user may give is a grid, or an error that names it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, PitError, UsageError
from pitools.launch import request as requests
from pitools.launch.sweep import points

KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
VALUES = st.text("abc019.-", min_size=1, max_size=5).filter(lambda text: ".." not in text)


@given(st.dictionaries(KEYS, st.lists(VALUES, min_size=1, max_size=4, unique_by=requests.typed_value), max_size=3))
def test_grid_has_every_combination_once(values: dict[str, list[str]]) -> None:
    """As many points as combinations, each once, the last key the fastest."""
    sets = points.parse_sets([f"{key}={','.join(listed)}" for key, listed in values.items()])
    made = points.make_points(sets)
    assert len(made) == math.prod(map(len, values.values()))
    assert len({json.dumps(point) for point in made}) == len(made)
    assert all(list(point) == list(values) for point in made)
    assert made == sorted(made, key=lambda point: [values[key].index(text) for key, text in point.items()])


@given(st.integers(-50, 50), st.integers(0, 60), st.integers(1, 7))
def test_range_includes_its_last_number(first: int, count: int, step: int) -> None:
    """`0..3` is 0, 1, 2 and 3; with a step, each step-th of them."""
    (values,) = points.parse_sets([f"seed={first}..{first + count}..{step}"]).values()
    assert list(values) == [str(number) for number in range(first, first + count + 1, step)]


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["lr"], '"lr"'),
        (["=1"], '"=1"'),
        (["lr="], "lr: empty value"),
        (["lr=1,,2"], "lr: empty value"),
        (["lr=1", "lr=2"], '"lr" is given twice'),
        (["lr=1,2,1"], "lr: 1 is given twice"),
        (["lr=1e-3,0.001"], "points 1 and 2 are equal"),
        (["seed=3..0"], "seed: empty range 3..0"),
        (["seed=0..99999"], "100000 points"),
        (["seed=0..999999999999"], "1000000000000 points"),
    ],
)
def test_wrong_sets_are_named(texts: list[str], named: str) -> None:
    """Before anything is launched, and without memory for a range that is too long."""
    with pytest.raises(UsageError) as caught:
        points.make_points(points.parse_sets(texts))
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 0),
        ("lr,seed\n1e-3\n", 2),
        ("lr,lr\n1,2\n", 1),
        ("lr,seed\n1e-3,\n", 2),
        ('{"lr": 1}\n{"seed": 1}\n', 2),
        ('{"lr": [1]}\n', 1),
        ('{"lr": 1, "lr": 2}\n', 1),
        ('{"lr": 1}\nnonsense\n', 2),
        ('{"lr": null}\n', 1),
    ],
)
def test_wrong_files_are_named_by_line(tmp_path: Path, text: str, line: int) -> None:
    """Exit code 3, with the file and the line."""
    (tmp_path / "points").write_text(text)
    with pytest.raises(ConfigError) as caught:
        points.read_points(tmp_path / "points")
    assert caught.value.where == f"{tmp_path / 'points'}{f':{line}' if line else ''}"


def test_one_point_has_one_value_for_each_key() -> None:
    """`launch plan` and `launch env` take no sweep; the error names the command that does."""
    assert points.parse_point(["lr=1e-3", "seed=2..2"]) == {"lr": "1e-3", "seed": "2"}
    with pytest.raises(UsageError, match="seed: 3 values") as caught:
        points.parse_point(["lr=1e-3", "seed=0..2"])
    assert "pit launch run" in caught.value.hint


def test_files_of_both_forms_are_equal(tmp_path: Path) -> None:
    """JSON Lines and CSV of the same points give the same points."""
    (tmp_path / "jsonl").write_text('{"lr": 0.001, "seed": 0}\n\n{"lr": 0.1, "seed": 1}\n')
    (tmp_path / "csv").write_text("lr,seed\n0.001,0\n0.1,1\n")
    made = points.read_points(tmp_path / "jsonl")
    assert made == points.read_points(tmp_path / "csv") == [{"lr": "0.001", "seed": "0"}, {"lr": "0.1", "seed": "1"}]
    assert len(points.make_points({"x": ["a", "b"]}, made)) == 4
    with pytest.raises(UsageError, match="given twice"):
        points.make_points({"lr": ["1"]}, made)


@given(st.text(max_size=20), st.text(max_size=12))
def test_names_are_valid_or_refused(template: str, text: str) -> None:
    """A template of any text gives a name of plain characters, or an error of ours."""
    try:
        name = points.run_name(template, "bc", {"lr": text}, 3)
    except PitError:
        return
    assert all(char in "abcdefghijklmnopqrstuvwxyz0123456789_-" for char in name)


def write(folder: Path, text: str) -> Path:
    (folder / "request.toml").write_text(text)
    return folder / "request.toml"


REQUEST = """\
name = "x"
command = "echo {lr} '{other}' ${lr} {flag}"
time = "5m"
[params]
lr = 1e-3
flag = false
note = "a"
[env]
A = "1"
"""


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"lr": "1"}, ("params", "lr"), 1.0),
        ({"params.lr": "1e-4"}, ("params", "lr"), 1e-4),
        ({"flag": "true"}, ("params", "flag"), True),
        ({"note": "007"}, ("params", "note"), "007"),
        ({"nodes": "4"}, ("nodes",), 4),
        ({"time": "30"}, ("time",), "30"),
        ({"env.A": "2"}, ("env", "A"), "2"),
        ({"retry.node": "1"}, ("retry", "node"), 1),
        ({"sbatch.hold": "true"}, ("sbatch", "hold"), True),
    ],
)
def test_values_have_the_type_of_their_key(
    tmp_path: Path, values: dict[str, str], path: tuple[str, ...], expected: Any
) -> None:
    """A text stays a text where the key takes one, and a number becomes a float where the request has one."""
    value: Any = requests.load_request(write(tmp_path, REQUEST), values)
    for name in path:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"lrr": "1"}, "lrr"),
        ({"params.new": "1"}, "params.new"),
        ({"flag": "3"}, "params.flag"),
        ({"lr": "fast"}, "params.lr"),
        ({"nodes": "many"}, "nodes"),
        ({"name.x": "1"}, "name.x"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, values: dict[str, str], key: str) -> None:
    """A key that is no key, and a value of another type."""
    with pytest.raises(ConfigError) as caught:
        requests.load_request(write(tmp_path, REQUEST), values)
    assert caught.value.key == key


def test_a_command_gets_its_parameters_quoted(tmp_path: Path) -> None:
    """Only declared names in plain braces are replaced; a value cannot become a second command."""
    request = requests.load_request(write(tmp_path, REQUEST), {"lr": "2", "flag": "true"})
    assert requests.command_text(request) == "echo 2.0 '{other}' ${lr} true"
    request = requests.load_request(
        write(tmp_path, 'name = "x"\ncommand = "echo {note}"\n[params]\nnote = "$(id); x"\n')
    )
    assert requests.command_text(request) == "echo '$(id); x'"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[params]\ntime = 1\n", "params.time"),
        ('[params]\n"a-b" = 1\n', "params.a-b"),
        ("[params]\nlr = 1\nLR = 2\n", "PIT_PARAM_LR"),
        ('[params]\nlr = "a\\nb"\n', "params.lr"),
        ('[sbatch]\noutput = "x"\n', "sbatch.output"),
        ('[sbatch]\n"--hold" = true\n', "sbatch.--hold"),
        ('[sbatch]\nwrap = "x"\n', "sbatch.wrap"),
        ('[sbatch]\ncomment = ""\n', "sbatch.comment"),
        ('[sbatch]\ncomment = "a\\nb"\n', "sbatch.comment"),
        ('[container]\nimag = "x"\n', "container.imag"),
    ],
)
def test_wrong_tables_are_named(tmp_path: Path, table: str, message: str) -> None:
    """Exit code 3 with the key in it."""
    with pytest.raises(ConfigError) as caught:
        requests.load_request(write(tmp_path, f'name = "x"\ncommand = "true"\n{table}'))
    assert message in caught.value.message
