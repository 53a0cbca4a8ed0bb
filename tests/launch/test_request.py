"""Requests are checked strictly, and the error names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.launch import request as requests

GOOD = 'name = "x"\nentry = "m:f"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "request.toml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Paths are relative to the request file, not to the caller; a name that is no folder is left to the site."""
    (tmp_path / "sets" / "demo").mkdir(parents=True)
    request = requests.load_request(write(tmp_path, GOOD + '[data]\ndemo = "sets/demo"\nother = "pick"\n'))
    assert request.workdir == str(tmp_path)
    assert request.data == {"demo": str(tmp_path / "sets" / "demo"), "other": "pick"}


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (GOOD + "node = 4\n", 'unknown key "node"', 'did you mean "nodes"?'),
        (GOOD + 'sbatch = "--qos=high"\n', 'key "sbatch"', ""),
        (GOOD + 'qos = "high"\n', 'unknown key "qos"', "tier"),
        (GOOD + 'mail-type = "END"\n', 'unknown key "mail-type"', "[sbatch]"),
        (GOOD + "[retry]\nnoed = 1\n", 'unknown key "retry.noed"', "node"),
        (GOOD + 'command = "true"\n', "entry and command are both given", "leave one"),
        ('name = "x"\n', "either entry or command", ""),
        ('name = "x"\nentry = "module.function"\n', "entry =", "module:function"),
        ('name = "X y"\nentry = "m:f"\n', "name =", "lower case"),
        ('name = "x"\ncommand = "torchrun --nproc-per-node 1 a.py"\n', 'runs "torchrun"', "tasks_per_node"),
        (GOOD + "nodes = 0\n", "nodes = 0", ""),
        (GOOD + "gpus_per_node = -1\n", "gpus_per_node", ""),
        (GOOD + 'framework = "pytorch"\n', 'key "framework"', "torch"),
        (GOOD + 'topology = "best"\n', 'key "topology"', "reservation"),
        (GOOD + "[env]\nA = '1'\nN = 3\n", 'key "env.N"', ""),
        (GOOD + 'time = "soon"\n', "time:", "2h"),
        (GOOD + '[env]\nWANDB_API_KEY = "x"\n', "looks like a secret", "export WANDB_API_KEY"),
        (GOOD + '[env]\n"A-B" = "x"\n', "not a variable name", ""),
        (GOOD + '[env]\nPIT_ATTEMPT_DIR = "/etc"\n', "PIT_ATTEMPT_DIR", "omit PIT_ATTEMPT_DIR"),
        (GOOD + '[env]\nPATH = "/tmp"\n', "PATH", "command ="),
        (GOOD + '[env]\nA = "x\\ny"\n', "newline", ""),
        (GOOD + 'constraint = "a\\u0000b"\n', "newline, NUL", ""),
        ('name = "x"\ncommand = "true"\n[args]\na = 1\n', "args go with entry", ""),
        (GOOD + 'memory = "lots"\n', "memory = 'lots'", "64G"),
        (GOOD + 'nodelist = "n[1"\n', "nodelist: 'n[1' is not a host list", "n[01-04,07]"),
        (GOOD + 'exclude = "n[1"\n', "exclude: 'n[1' is not a host list", ""),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, what: str, hint: str) -> None:
    """Exit code 3 with the file, the key, and what to write instead."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        requests.load_request(path)
    assert what in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.where == str(path)


def test_a_secret_s_value_is_never_in_the_message(tmp_path: Path) -> None:
    """The error names the variable, not its value."""
    with pytest.raises(ConfigError) as caught:
        requests.load_request(write(tmp_path, GOOD + '[env]\nHF_TOKEN = "hunter2"\n'))
    assert "hunter2" not in f"{caught.value.message}{caught.value.where}{caught.value.hint}"


def test_datasets_are_filled_in_by_name(tmp_path: Path) -> None:
    """--data fills an open name, refuses an unknown one, and a name left open is an error."""
    request = requests.load_request(write(tmp_path, GOOD + '[data]\ndemo = ""\n'))
    assert requests.fill_datasets(request, {"demo": "/d"}).data == {"demo": "/d"}
    with pytest.raises(ConfigError, match="no path"):
        requests.fill_datasets(request, {})
    with pytest.raises(ConfigError, match='no dataset "dmeo"') as caught:
        requests.fill_datasets(request, {"dmeo": "/d"})
    assert caught.value.hint == 'did you mean "demo"?'


def test_the_examples_are_valid(repo: Path) -> None:
    """The requests we ship load."""
    names = [requests.load_request(path).name for path in sorted((repo / "scripts" / "examples").glob("*.toml"))]
    assert names == ["bc-jax", "bc-torch"]


def test_the_reference_names_every_key(repo: Path) -> None:
    """scripts/examples/README.md has each key of a request."""
    text = (repo / "scripts" / "examples" / "README.md").read_text()
    assert not [
        key for key in requests.Request.__struct_fields__ if f"`{key}`" not in text and f"`[{key}]`" not in text
    ]


@pytest.mark.parametrize(
    "command",
    [
        "OMP_NUM_THREADS=2 torchrun a.py",
        'NOTE="two words" exec torchrun a.py',
        "/opt/venv/bin/torchrun a.py",
        "cd src && torchrun a.py",
        "set -e\ntorchrun a.py",
        "python -u -m torch.distributed.run a.py",
    ],
)
def test_launcher_behind_a_prefix_is_refused(tmp_path: Path, command: str) -> None:
    """A launcher in the command would train an independent model on every rank."""
    with pytest.raises(ConfigError, match=r"torchrun|torch\.distributed"):
        requests.load_request(write(tmp_path, f'name = "x"\ncommand = """{command}"""\n'))


@pytest.mark.parametrize("command", ["python torchrun.py", "echo 'a; torchrun b'", "python a.py --with torchrun"])
def test_launcher_name_as_an_argument_is_allowed(tmp_path: Path, command: str) -> None:
    """A launcher's name as an argument, in quotes or as a file name is no launcher."""
    requests.load_request(write(tmp_path, f'name = "x"\ncommand = """{command}"""\n'))


def test_a_key_of_a_table_is_named_with_it(tmp_path: Path) -> None:
    """`--set steps=60`, where steps is an argument of the entry: the error names args.steps."""
    with pytest.raises(ConfigError) as raised:
        requests.set_values({"args": {"steps": 10}}, {"steps": "60"}, "request.toml")
    assert "args.steps" in raised.value.hint
