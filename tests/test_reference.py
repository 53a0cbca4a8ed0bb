"""The reference that scripts/reference writes from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pitools.cli import NOUNS


def test_it_holds_every_command_and_every_record(repo: Path, tmp_path: Path) -> None:
    """A page of all commands, each with its options, and a page of all records, by their schemas."""
    subprocess.run([sys.executable, repo / "scripts" / "reference", "--to", tmp_path], check=True)
    commands, records = ((tmp_path / name).read_text() for name in ("commands.md", "records.md"))
    assert {f"pit {noun}" for noun in NOUNS} | {"pit launch run", "pit stage sync", "psbatch"} <= set(
        re.findall(r"^## (.*)$", commands, re.MULTILINE)
    )
    assert "--max-age" in commands
    source = "".join(path.read_text() for path in (repo / "pitools").rglob("*.py"))
    assert set(re.findall(r'tag="(pit\.[\w.-]+/\d+)"', source)) <= set(re.findall(r"^## (.*)$", records, re.MULTILINE))


def test_help_all_has_every_command() -> None:
    """`pit --help-all` prints the help of each command below each noun."""
    done = subprocess.run([sys.executable, "-m", "pitools", "--help-all"], capture_output=True, text=True, check=True)
    titles = re.findall(r"^(pit.*)\n=+$", done.stdout, re.MULTILINE)
    assert {f"pit {noun}" for noun in NOUNS} | {"pit launch prune", "pit launch sweep show"} <= set(titles)
    assert "--keep-last" in done.stdout
