from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pitools.checkpoint.store import lookup, owner, quarantine, retention, verify
from pitools.core.errors import ConfigError
from tests.checkpoint.conftest import FINGERPRINT, RUN, Save


def test_claim(folder: Path, save: Save) -> None:
    """A run takes an empty folder, and comes back to it with what it has saved."""
    owner.claim_folder(folder, RUN, FINGERPRINT)
    save(1)
    owner.claim_folder(folder, RUN, FINGERPRINT)
    assert owner.read_owner(folder) == owner.FolderOwner(run=RUN, state_fingerprint=FINGERPRINT)


def test_another_run_or_model(folder: Path, save: Save) -> None:
    """Another run's folder, and another model's, are refused; before its first save a run may change its model."""
    owner.claim_folder(folder, RUN, "xxh3_128:11")
    owner.claim_folder(folder, RUN, FINGERPRINT)
    save(1)
    with pytest.raises(ConfigError, match=f'expected "other", got "{RUN}"'):
        owner.claim_folder(folder, "other", FINGERPRINT)
    with pytest.raises(ConfigError, match=f"expected xxh3_128:11, got {FINGERPRINT}"):
        owner.claim_folder(folder, RUN, "xxh3_128:11")
    assert owner.read_owner(folder) == owner.FolderOwner(run=RUN, state_fingerprint=FINGERPRINT)


def test_two_runs_claim_at_once(folder: Path) -> None:
    """Of many who claim one folder at one moment one run wins, with all its ranks."""

    def claim(number: int) -> str:
        try:
            owner.claim_folder(folder, f"run-{number % 2}", FINGERPRINT)
        except ConfigError:
            return ""
        return f"run-{number % 2}"

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(claim, range(32)))
    whose = owner.read_owner(folder)
    assert whose is not None
    assert won.count(whose.run) == 16
    assert set(won) == {whose.run, ""}


def test_what_is_not_ours(folder: Path, save: Save, tmp_path: Path) -> None:
    """A folder with somebody's files, or another run's checkpoints, a link, and a file are refused as what they are."""
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r'"thesis\.tex"'):
        owner.claim_folder(folder, RUN, FINGERPRINT)
    (folder / "thesis.tex").rename(tmp_path / "thesis.tex")
    save(1, run="theirs")
    with pytest.raises(ConfigError, match='"step_1": of run "theirs"'):
        owner.claim_folder(folder, RUN, FINGERPRINT)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match=f"symbolic link, to {folder}"):
        owner.claim_folder(tmp_path / "link", "theirs", FINGERPRINT)
    with pytest.raises(ConfigError, match="not a folder"):
        owner.claim_folder(tmp_path / "thesis.tex", RUN, FINGERPRINT)
    assert not (folder / owner.OWNER_FILE).exists()


@pytest.mark.usefixtures("as_root")
def test_folder_of_another_user() -> None:
    """A user is not to go on in a folder of somebody else's, even where everybody may write."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as created:
        folder = Path(created) / "checkpoints"
        folder.mkdir()
        Path(created).chmod(0o755)
        folder.chmod(0o777)
        os.chown(folder, 12345, -1)
        child = os.fork()
        if not child:
            try:
                os.setuid(23456)
                owner.claim_folder(folder, RUN, FINGERPRINT)
            except ConfigError as error:
                os._exit(9 if "got 12345" in error.message else 8)
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert list(folder.iterdir()) == []


def test_half_deleted(folder: Path, save: Save) -> None:
    """Where owner.json is gone and this run's checkpoints are there, whole or not, the run takes them again."""
    for step in (1, 2):
        save(step)
    (folder / "step_2" / "manifest.json").unlink()
    owner.claim_folder(folder, RUN, FINGERPRINT)
    assert lookup.complete_steps(folder) == [1]


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[]" * 1000])
def test_damaged_owner(folder: Path, save: Save, data: bytes) -> None:
    """A damaged owner.json is told, with what to do; nothing is claimed by guessing."""
    owner.claim_folder(folder, RUN, FINGERPRINT)
    (folder / owner.OWNER_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match="owner"):
        owner.claim_folder(folder, RUN, FINGERPRINT)


def test_a_copy_of_another_runs_checkpoint(folder: Path, save: Save) -> None:
    """A checkpoint of another run in this one's folder is no progress, is told by `check`, and is never removed."""
    owner.claim_folder(folder, RUN, FINGERPRINT)
    save(1)
    save(99, run="theirs")
    assert (lookup.latest_step(folder), lookup.complete_steps(folder)) == (1, [1])
    (problem,) = verify.verify_checkpoint(folder / "step_99")
    assert (problem.problem, problem.got) == ("owner", f"run theirs, state {FINGERPRINT}")
    assert [item.step for item in retention.prune_checkpoints(folder, 1)] == [1]
    assert quarantine.quarantine_checkpoint(folder / "step_99", [problem]) is not None
    assert (folder / "latest").readlink() == Path("step_1")
