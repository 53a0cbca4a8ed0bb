"""The copy of the code: what is in it, what is only linked to, and what changes in it are seen."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, DataError
from pitools.launch.provenance import code_copy


def taken(work: Path, to: Path) -> tuple[code_copy.CodeListing, dict[str, str]]:
    """The listing, and what is in the copy: path → content, `→ target`, or `/`."""
    workdir = code_copy.copy_workdir(work, to)
    actual = {}
    for path in sorted(to.rglob("*")):
        inner = str(path.relative_to(to))
        if path.is_symlink():
            actual[inner] = f"→ {path.readlink()}"
        else:
            actual[inner] = "/" if path.is_dir() else path.read_text()
    return workdir, actual


def test_bytes_are_copied_and_never_shared(work: Path, tmp_path: Path) -> None:
    """A later change of the workdir is none of the copy; modes and times come along."""
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o700)
    (work / "team.txt").write_text("names\n")
    (work / "team.txt").chmod(0o640)
    copied_files, actual = taken(work, tmp_path / "code")
    assert [item.path for item in copied_files.files] == ["loop.py", "run.sh", "settings.toml", "team.txt"]
    for name in actual:
        assert (tmp_path / "code" / name).stat().st_mode == (work / name).stat().st_mode
        assert (tmp_path / "code" / name).stat().st_mtime_ns == (work / name).stat().st_mtime_ns
        assert (tmp_path / "code" / name).stat().st_ino != (work / name).stat().st_ino
    with (work / "settings.toml").open("a") as file:
        file.write("rate = 2\n")
    assert (tmp_path / "code" / "settings.toml").read_text() == "rate = 1\n"


def test_links_lead_into_the_copy_or_to_where_they_led(work: Path, tmp_path: Path) -> None:
    """A link inside stays inside, also an absolute one; one that leads out, or nowhere, is kept and told."""
    (tmp_path / "set").mkdir()
    (work / "a").mkdir()
    (work / "a" / "inside").symlink_to(work / "loop.py")
    (work / "data").symlink_to("../set")
    (work / "dangling").symlink_to("/nowhere/at/all")
    copied_files, actual = taken(work, tmp_path / "code")
    assert actual["a/inside"] == "→ ../loop.py"
    assert actual["data"] == f"→ {tmp_path}/set"
    assert {item.path: item.link for item in copied_files.linked} == {
        "data": f"{tmp_path}/set",
        "dangling": "/nowhere/at/all",
    }


def test_what_is_no_code_is_linked_or_left(work: Path, tmp_path: Path) -> None:
    """Environments, datasets and a file of a gigabyte are linked to; caches and runs are not there; pipes are told."""
    for name in (
        ".venv/pyvenv.cfg",
        "set/v1/manifest.json",
        "set/v1/zarr.json",
        "runs/x/plan.json",
        "runs/x/attempts/0/log",
        "__pycache__/loop.pyc",
        ".git/HEAD",
    ):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("x")
    (work / "weights.bin").touch()
    os.truncate(work / "weights.bin", 1 << 30)
    os.mkfifo(work / "pipe")
    copied_files, actual = taken(work, tmp_path / "code")
    assert actual[".venv"] == f"→ {work}/.venv"
    assert actual["set/v1"] == f"→ {work}/set/v1"
    assert actual["weights.bin"] == f"→ {work}/weights.bin"
    assert next(item for item in copied_files.linked if item.path == "weights.bin").bytes == 1 << 30
    assert copied_files.skipped == ("pipe",)
    assert not {"__pycache__", ".git", "runs/x", "pipe"} & set(actual)


def test_names_that_are_no_text_are_told(work: Path, tmp_path: Path) -> None:
    """Newlines, quotes and odd letters are names like others; bytes that are no UTF-8 are not kept, and said so."""
    odd = ["a\nb.py", "q\"'.py", "-rf", "ü ñ.py", "tab\t"]
    for name in odd:
        (work / name).write_text("x")
    (Path(os.fsdecode(os.fsencode(work) + b"/bad\xff.py"))).write_text("x")
    copied_files, _ = taken(work, tmp_path / "code")
    assert set(odd) <= {file.path for file in copied_files.files}
    assert copied_files.skipped == ("bad\\xff.py",)


def test_too_much_names_what_it_is(work: Path, tmp_path: Path) -> None:
    """More than the limit is refused before anything is copied, naming the largest part and the way out."""
    (work / "outputs").mkdir()
    for number in range(5):
        (work / "outputs" / str(number)).touch()
        os.truncate(work / "outputs" / str(number), 60 << 20)
    with pytest.raises(ConfigError, match=r"300\.0 MiB.*256\.0 MiB") as caught:
        code_copy.copy_workdir(work, tmp_path / "code")
    assert "outputs: 300.0 MiB" in caught.value.hint
    assert "snapshot = false" in caught.value.hint
    assert not (tmp_path / "code").exists()


@given(
    st.dictionaries(
        st.text("abé _-.", min_size=1, max_size=6).filter(lambda name: name.strip(". ")),
        st.binary(max_size=50),
        max_size=6,
    )
)
@settings(max_examples=30, deadline=None)
def test_a_copy_is_known_by_its_digest(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    """The same files give the same digest, and one other byte another; a copy is found unchanged."""
    root = tmp_path_factory.mktemp("w")
    run_dir = tmp_path_factory.mktemp("r")
    for name, content in files.items():
        (root / name).write_bytes(content)
    workdir = code_copy.copy_workdir(root, run_dir / "code")
    assert workdir == code_copy.copy_workdir(root, run_dir / "again")
    (run_dir / code_copy.LISTING_FILE).write_bytes(msgspec.json.encode(workdir))
    assert code_copy.changed_paths(run_dir) == []
    for name, content in files.items():
        (run_dir / "code" / name).write_bytes(content + b"x")
        assert code_copy.changed_paths(run_dir) == [name]
        (run_dir / "code" / name).write_bytes(content)


def test_a_listing_does_not_lead_out(tmp_path: Path) -> None:
    """A listing that somebody wrote by hand names no file outside of the run."""
    for path in ("../x", "/etc/passwd", "a//b", "a/./b"):
        (tmp_path / code_copy.LISTING_FILE).write_text(
            f'{{"schema":"pit.code/1","files":[{{"path":"{path}","kind":"file","bytes":0,"digest":"","link":""}}]}}'
        )
        with pytest.raises(DataError, match="path inside"):
            code_copy.changed_paths(tmp_path)


@pytest.mark.parametrize("part", ["files", "linked"])
def test_no_file_is_written_through_a_link(tmp_path: Path, part: str) -> None:
    """A listing with a path below one of its links is refused, before anything is written."""
    outside, run_dir = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (run_dir / "code").mkdir(parents=True)
    link = code_copy.CopiedFile(path="a", kind="link", link=str(outside))
    below = code_copy.CopiedFile(path="a/b", kind="link", link="/etc")
    hostile = code_copy.CodeListing(files=(link,), linked=(below,))
    if part == "files":
        hostile = code_copy.CodeListing(files=(link, code_copy.CopiedFile(path="a/b", kind="folder")))
    (run_dir / code_copy.LISTING_FILE).write_bytes(msgspec.json.encode(hostile))
    with pytest.raises(DataError):
        code_copy.restore_code(run_dir, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert list(outside.iterdir()) == []
