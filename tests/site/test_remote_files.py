"""Files that go to a site and come back, here over a local reach: the same shell runs at the other end of ssh."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, ConfigError, DataError
from pitools.site import remote_files, tar_stream
from pitools.site.schema import Site

ODD = 'it\'s "a  b" $HOME `id` é;&|<>*\\'


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """This machine."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return Site(name="here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file in a folder, a program, an empty folder, and odd names."""
    created = tmp_path / "in"
    (created / ODD / "empty").mkdir(parents=True)
    (created / ODD / "large").write_bytes(os.urandom(3 << 20))
    (created / "run").write_text("#!/bin/sh\n")
    (created / "run").chmod(0o700)
    (created / "x").write_bytes(b"")
    return created


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_folder_goes_and_comes_back(site: Site, folder: Path, tmp_path: Path) -> None:
    """Whole, by every name, with what may be executed; once there it is not sent again."""
    to = f"{tmp_path}/there/{ODD}/run"
    sent = remote_files.put_tree(site, folder, to)
    assert (sent.created, sent.bytes) == (True, (3 << 20) + 10)
    assert content(Path(to)) == content(folder)
    assert os.access(f"{to}/run", os.X_OK)
    (folder / "more").write_text("x")
    assert remote_files.put_tree(site, folder, to).created is False
    assert not (Path(to) / "more").exists()
    (Path(to) / "link").symlink_to("run")
    assert remote_files.get_tree(site, to, tmp_path / "back", without=["no"])
    assert {name for name, data in content(tmp_path / "back").items() if data is not None} == {
        f"{ODD}/large",
        "run",
        "x",
    }
    assert remote_files.get_tree(site, to, tmp_path / "back", without=[ODD.replace("\\", "\\\\").replace("*", "\\*")])
    assert set(content(tmp_path / "back")) == {"run", "x"}
    assert [path.name for path in Path(to).parent.iterdir()] == ["run"]
    assert not list(tmp_path.glob(".*"))


def test_what_is_just_being_written_stays(site: Site, tmp_path: Path) -> None:
    """A file that will have another name in a moment is no file that can be brought; other hidden ones come along."""
    target = tmp_path / "there"
    target.mkdir()
    for name in (".a.json.28672.8d3c8a58", "..verdict.28672.931f2747.28672.8d3c8a58", ".a.json", "a.json"):
        (target / name).write_text("x")
    assert remote_files.get_tree(site, str(target), tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [".a.json", "a.json"]


def test_what_is_refused(site: Site, folder: Path, tmp_path: Path) -> None:
    """Links and devices do not travel, nor more than was allowed, which names the largest; nothing is left there."""
    to = f"{tmp_path}/there/run"
    with pytest.raises(DataError, match=r"3\.0 MiB .* 1\.0 MiB") as caught:
        remote_files.put_tree(site, folder, to, limit=1 << 20)
    assert "large, 3.0 MiB" in caught.value.hint
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        remote_files.put_tree(site, folder, to)
    (folder / "link").unlink()
    os.mkfifo(folder / "fifo")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        remote_files.put_tree(site, folder, to)
    assert not (tmp_path / "there").exists() or not list((tmp_path / "there").iterdir())


def test_a_file_that_goes_while_it_is_sent(site: Site, folder: Path, tmp_path: Path) -> None:
    """What cannot be read, or shrinks, ends the whole of it."""
    entries = [tar_stream.TarEntry(name="a", data=b"x"), tar_stream.TarEntry(name="b", path=folder / "run")]
    listed = remote_files._require_fits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_files, "_require_fits", lambda *words: (listed(*words), (folder / "run").unlink())[0])
        with pytest.raises(ClusterError, match="No such file"):
            remote_files.put_tree(site, entries, f"{tmp_path}/there/run")
    assert not list((tmp_path / "there").iterdir())


def test_small_files(site: Site, tmp_path: Path) -> None:
    """Written whole, read back, told apart from what is not there, and from what is a link or too long."""
    path = f"{tmp_path}/{ODD}"
    assert remote_files.read_file(site, path) is None
    remote_files.write_file(site, path, bytes(range(256)))
    assert remote_files.read_file(site, path) == bytes(range(256))
    assert remote_files.existing(site, [path, f"{tmp_path}/no", str(tmp_path)]) == {path, str(tmp_path)}
    with pytest.raises(ClusterError, match="256 bytes"):
        remote_files.read_file(site, path, limit=255)
    (tmp_path / "link").symlink_to(path)
    assert remote_files.existing(site, [f"{tmp_path}/link"]) == set()
    with pytest.raises(ClusterError, match="not a file"):
        remote_files.read_file(site, f"{tmp_path}/link")
    with pytest.raises(ClusterError, match=r"No such file|nonexistent"):
        remote_files.write_file(site, f"{tmp_path}/no/file", b"x")
    remote_files.remove_paths(site, path, f"{tmp_path}/link", f"{tmp_path}/no")
    assert not list(tmp_path.iterdir())


def test_what_stands_in_the_way(site: Site, folder: Path, tmp_path: Path) -> None:
    """A link above is not followed; a file or link of that name stays what it is."""
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    with pytest.raises(ClusterError, match="is a link, not a folder"):
        remote_files.put_tree(site, folder, f"{tmp_path}/root/run")
    (tmp_path / "real" / "run").symlink_to("/nowhere")
    assert remote_files.put_tree(site, folder, f"{tmp_path}/real/run").created is False
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["run"]


def test_too_much_comes_back(site: Site, folder: Path, tmp_path: Path) -> None:
    """More than was allowed is refused there, and what was here before stays."""
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "old").write_text("x")
    with pytest.raises(ClusterError, match="it holds 3145738 bytes"):
        remote_files.get_tree(site, str(folder), tmp_path / "back", limit=1 << 20)
    assert remote_files.get_tree(site, f"{tmp_path}/no", tmp_path / "back") is False
    assert content(tmp_path / "back") == {"old": b"x"}


@pytest.mark.parametrize("bad", ["", "a", "/a\nb", "/a/../b", "/a/", "/a\0", "/"])
def test_paths_that_are_none(site: Site, bad: str, tmp_path: Path) -> None:
    """Relative, of two lines, climbing, or a root: refused before anything runs."""
    for use in (
        lambda: remote_files.put_tree(site, tmp_path, bad),
        lambda: remote_files.read_file(site, bad),
        lambda: remote_files.write_file(site, bad, b""),
        lambda: remote_files.existing(site, [bad]),
        lambda: remote_files.remove_paths(site, bad),
        lambda: remote_files.get_tree(site, bad, tmp_path),
    ):
        with pytest.raises(ConfigError):
            use()
    with pytest.raises(ConfigError, match="not removed"):
        remote_files.remove_paths(site, "/home")


def made(add: Callable[[tarfile.TarFile], None]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        add(archive)
    stream.seek(0)
    return stream


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = [
    *(member(name) for name in ("../out", "/out", "a/../../out", "a\nb", "..", ".")),
    *(member(kind.decode(), kind, "/etc/passwd") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
    *(member(kind.decode(), kind) for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)),
]


@pytest.mark.parametrize("info", HOSTILE, ids=lambda info: info.name)
def test_hostile_answers(info: tarfile.TarInfo, tmp_path: Path) -> None:
    """Names that lead out, links, devices: nothing of it is made."""
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="received a member"):
        tar_stream.unpack_tar(made(lambda archive: archive.addfile(info)), tmp_path / "in", limit=1 << 20)
    assert not list((tmp_path / "in").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_bomb(tmp_path: Path) -> None:
    """A file that claims to be larger than what is left is not even begun."""
    info = member("zeros")
    info.size = 1 << 40
    with pytest.raises(DataError, match="more than"):
        tar_stream.unpack_tar(io.BytesIO(info.tobuf()), tmp_path, limit=1 << 20)
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 5 * 512 + 700), noise=st.binary(max_size=40))
def test_half_an_answer_is_told(tmp_path: Path, cut: int, noise: bytes) -> None:
    """However a stream is cut, what was read is refused, or is a run of whole files."""
    full = made(lambda archive: [archive.addfile(_sized(name), io.BytesIO(b"x" * 700)) for name in "ab"] and None)
    to = tmp_path / os.urandom(4).hex()
    to.mkdir()
    try:
        tar_stream.unpack_tar(io.BytesIO(full.getvalue()[:cut] + noise), to, limit=1 << 20)
    except DataError:
        return
    assert all(path.read_bytes() == b"x" * 700 for path in to.iterdir())


def _sized(name: str) -> tarfile.TarInfo:
    info = member(name)
    info.size = 700
    return info
