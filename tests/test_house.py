"""The house rules that a machine can keep."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

BIN = Path(sys.executable).parent


def run(repo: Path, *argv: str) -> None:
    done = subprocess.run([str(BIN / argv[0]), *argv[1:]], cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "argv",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports",)],
    ids=["ruff", "format", "mypy", "imports"],
)
def test_checkers_are_content(repo: Path, argv: tuple[str, ...]) -> None:
    """ruff, mypy --strict and the import contracts find nothing, with the types of the libraries of one Python."""
    if sys.version_info[:2] != (3, 11) or not (BIN / argv[0]).exists():
        pytest.skip(f"{argv[0]} is judged by `scripts/test` alone, with the pinned versions on Python 3.11")
    run(repo, *argv)


def test_every_test_says_what_it_shows(repo: Path) -> None:
    """Each test has a docstring, and none has only itself for proof."""
    silent = [
        f"{path.relative_to(repo)}:{node.lineno} {node.name}"
        for path in (repo / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent


def test_files_stay_small(repo: Path) -> None:
    """No module of the package outgrows 500 lines: some 300 are usual, and cohesion counts for more."""
    long = [str(path) for path in (repo / "pitools").rglob("*.py") if len(path.read_text().splitlines()) > 500]
    assert not long


def test_subprocess_lives_in_one_place(repo: Path) -> None:
    """Only core/subprocesses.py starts programs; others may name the module's types."""
    users = set()
    for path in (repo / "pitools").rglob("*.py"):
        text = path.read_text()
        if any(call in text for call in ("subprocess.run(", "subprocess.Popen(", "os.system(", "check_output(")):
            users.add(str(path.relative_to(repo)))
    assert users == {"pitools/core/subprocesses.py"}


@pytest.mark.parametrize(
    "words", [["--help"], ["site", "list"], *([noun, "--help"] for noun in ("stage", "launch", "perf"))], ids=" ".join
)
def test_what_is_typed_most_imports_nothing_heavy(words: list[str]) -> None:
    """Start-up is the import list: none of the heavy packages is on it."""
    code = (
        "import sys; from pitools import cli; code = cli.run(cli.group, 'pit'); "
        "heavy = {'numpy', 'jax', 'torch', 'zarr', 'h5py', 'rich', 'submitit', 'jinja2'} & sys.modules.keys(); "
        "sys.exit(code or ', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_can_be_imported() -> None:
    """With each supported version of Python and the libraries, and without a warning."""
    code = (
        "import importlib, pkgutil, pitools\n"
        "for one in pkgutil.walk_packages(pitools.__path__, 'pitools.'):\n"
        "    if not one.name.endswith('__main__'): importlib.import_module(one.name)"
    )
    argv = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SETUP = configparser.ConfigParser()
SETUP.read(Path(__file__).resolve().parent.parent / "setup.cfg")
PYTHONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["pinned", "lowest"])
def test_locks_hold_what_setup_asks_for(repo: Path, name: str, python: str) -> None:
    """Each requirement of setup.cfg has one version in scripts/locks that it allows, on every Python named there."""
    extras = SETUP["options.extras_require"].items()
    requested = [
        SETUP["options"]["install_requires"],
        *(text for item, text in extras if (name, item) != ("lowest", "dev")),
    ]
    expected = [Requirement(line) for text in requested for line in text.splitlines() if line]
    lines = (repo / "scripts" / "locks" / f"{name}.txt").read_text().splitlines()
    locked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    marks = {"python_version": python, "python_full_version": f"{python}.0"}
    here = [item for item in locked if not item.marker or item.marker.evaluate(marks)]
    versions = {item.name: next(iter(item.specifier)).version for item in here}
    assert len(versions) == len(here)
    assert [
        str(item) for item in expected if item.name not in versions or versions[item.name] not in item.specifier
    ] == []
    if (name, python) == ("lowest", PYTHONS[0]):  # what is tested there is each bound itself; newer ones need more
        bounds = {item.name: spec.version for item in expected for spec in item.specifier if spec.operator == ">="}
        assert {name for name, bound in bounds.items() if versions[name] not in SpecifierSet(f"=={bound}.*")} == set()


def test_records_are_decoded_by_one_function(repo: Path) -> None:
    """JSON becomes a type by core.record.decode_json alone, which threads may call."""
    decode = re.compile(r"msgspec\.json\.decode\([^\n]*type=")
    users = [path for path in (repo / "pitools").rglob("*.py") if decode.search(path.read_text())]
    assert users == []
