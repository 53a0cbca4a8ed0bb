from __future__ import annotations

import os
import shutil

import pytest
from devcluster_parts import root
from devcluster_parts.errors import BusyProblem, ClusterProblem
from devcluster_parts.layout import Settings

MARKER = "devcluster.json"


def claim(path, *, create=True):
    with root.lock_root(path, create=create, timeout_s=0.2) as target:
        return target


def test_a_new_folder_is_made_and_marked(tmp_path):
    """The first `up` makes the folder; the settings are read back as they were kept."""
    folder = tmp_path / "dc"
    settings = Settings(clusters=("g",), nodes=2, cloud="cloud[1-2]")
    assert claim(folder)
    root.write_settings(folder, settings)
    assert claim(folder)
    assert root.read_settings(folder) == settings


def test_nothing_there_is_no_error_for_down(tmp_path):
    """`down` twice is safe, and makes no folder."""
    folder = tmp_path / "dc"
    assert not claim(folder, create=False)
    assert not folder.exists()


def test_a_folder_with_other_files_is_refused(tmp_path, devcluster):
    """Exit 4, and the files stay, whichever verb it is."""
    folder = tmp_path / "dc"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(ClusterProblem, match="did not write"):
        claim(folder)
    for verb in ("down", "status"):
        done = devcluster(verb, "--root", folder)
        assert done.returncode == 4
        assert str(folder) in done.stderr
    assert (folder / "thesis.tex").exists()


def test_a_marker_of_another_schema_is_refused(tmp_path):
    """A file of the same name is not enough."""
    (tmp_path / MARKER).write_text('{"schema": "other/1"}')
    with pytest.raises(ClusterProblem, match="did not write"):
        claim(tmp_path)


def test_a_marker_that_is_a_link_is_refused(tmp_path):
    """The marker must lie in the folder itself."""
    folder = tmp_path / "dc"
    folder.mkdir()
    real = tmp_path / "real.json"
    real.write_text('{"schema": "pit.devcluster/1"}')
    (folder / MARKER).symlink_to(real)
    with pytest.raises(ClusterProblem, match="did not write"):
        claim(folder)


def test_a_link_to_a_folder_of_ours_is_refused(tmp_path):
    """Whoever can make a link could choose what `down` removes."""
    (tmp_path / "real").mkdir()
    (tmp_path / "dc").symlink_to(tmp_path / "real")
    with pytest.raises(ClusterProblem, match="symbolic link"):
        claim(tmp_path / "dc")


def test_a_folder_others_may_write_into_is_refused(tmp_path):
    """Configuration there could be replaced by anyone."""
    folder = tmp_path / "dc"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ClusterProblem, match="others may write"):
        claim(folder)


def test_a_parent_in_which_anyone_may_replace_it_is_refused(tmp_path):
    """A world-writable parent needs the sticky bit, as /var/tmp has it."""
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ClusterProblem, match="anyone may replace"):
        claim(parent / "dc")
    parent.chmod(0o1777)
    assert claim(parent / "dc")


@pytest.mark.usefixtures("as_root")
def test_a_folder_of_another_user_is_refused(tmp_path):
    """Somebody else may have made the fixed path before us."""
    folder = tmp_path / "dc"
    folder.mkdir()
    shutil.chown(folder, "nobody")
    with pytest.raises(ClusterProblem, match="belongs to user"):
        claim(folder)


def test_one_devcluster_at_a_time(tmp_path):
    """The second finds the root held, and says to try again (exit 75)."""
    with root.lock_root(tmp_path / "dc", create=True, timeout_s=1.0), pytest.raises(BusyProblem) as caught:
        claim(tmp_path / "dc")
    assert caught.value.exit_code == 75


def test_an_up_interrupted_at_its_first_write_is_recovered(tmp_path):
    """A marker half written is ours, not a stranger's file."""
    folder = tmp_path / "dc"
    folder.mkdir()
    (folder / f".{MARKER}.123").write_text('{"sch')
    assert claim(folder)
    root.remove_contents(folder, keep_logs=False)
    assert not folder.exists()


def test_down_may_keep_the_logs(tmp_path):
    """With the logs kept the folder is still ours, and holds no cluster."""
    folder = tmp_path / "dc"
    claim(folder)
    root.write_settings(folder, Settings())
    for name in ("log", "db"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    root.remove_contents(folder, keep_logs=True)
    assert sorted(os.listdir(folder)) == [MARKER, "log"]
    assert root.read_settings(folder) is None
    assert claim(folder)


def test_removal_does_not_follow_links(tmp_path):
    """A link below the root is removed, not what it names."""
    folder, outside = tmp_path / "dc", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    claim(folder)
    (folder / "nvme").symlink_to(outside)
    (folder / "alpha").mkdir()
    (folder / "alpha" / "link").symlink_to(outside)
    root.remove_contents(folder, keep_logs=False)
    assert (outside / "precious").exists()
    assert not folder.exists()
