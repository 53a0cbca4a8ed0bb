"""What pip installs: the package's files are wherever the package is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pitools.site.load import bundled_dir

HOOKS = ("scripts/pit-prolog", "scripts/pit-healthcheck")
FILES = ("site_configs", "sbatch_templates", "scripts/cron", "scripts/hooks", *HOOKS)


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, made by its own build backend, without any network."""
    to, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source") / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repo, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(repo / name) and not name.startswith(("tests/", "perf/")):
            position = source / name
            position.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, position, follow_symlinks=False)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(to)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(to.glob("*.whl"))


def test_a_wheel_brings_every_file(repo: Path, wheel: Path) -> None:
    """Sites, templates, Slurm's hooks and the examples of cron are in it, to the byte, and the hooks are executable."""
    with zipfile.ZipFile(wheel) as zip_file:
        brought = {
            name.partition("shipped/")[2]: zip_file.read(name) for name in zip_file.namelist() if "/shipped/" in name
        }
        modes = [zip_file.getinfo(f"pitools/shipped/{hook}").external_attr >> 16 for hook in HOOKS]
    expected = {
        str(path.relative_to(repo)): path.read_bytes()
        for name in FILES
        for path in ([repo / name] if (repo / name).is_file() else (repo / name).iterdir())
    }
    assert brought == expected
    assert all(mode & 0o111 for mode in modes)
    assert not {"alpha.toml", "beta.toml"} & {Path(name).name for name in brought}


def test_a_package_in_any_folder_has_them(wheel: Path, tmp_path: Path) -> None:
    """As `pip install --target` leaves it, found by PYTHONPATH alone: the sites are listed and a script is rendered."""
    with zipfile.ZipFile(wheel) as zip_file:
        zip_file.extractall(tmp_path / "target")
    env = {name: value for name, value in os.environ.items() if name != "PIT_SITE_PATH"}
    env |= {"PYTHONPATH": str(tmp_path / "target"), "XDG_CONFIG_HOME": str(tmp_path)}

    def pit(*words: str) -> str:
        argv = [sys.executable, "-m", "pitools", *words]
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert len(pit("site", "list").splitlines()) == len(list(bundled_dir("site_configs").glob("*.toml")))
    assert "-m pitools stage run" in pit("script", "render", "train", "--data", "d=/x", "--", "true")
    assert pit("site", "show", "local", "--origin").count(str(tmp_path / "target" / "pitools" / "shipped")) > 3
