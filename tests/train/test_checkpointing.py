"""When a loop saves, and with what."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.checkpoint.store import lookup
from pitools.train.checkpointing import should_save
from tests.train import forked_ranks


@given(total=st.integers(1, 100), every=st.integers(0, 20))
def test_a_checkpoint_is_due_at_the_end_and_every_so_often(total: int, every: int) -> None:
    """The last step is always kept, and between two checkpoints lie never more than `every` steps."""
    retained = [done for done in range(1, total + 1) if should_save(done, total, every, 0)]
    assert retained[-1] == total
    assert len(retained) == (1 if not every else -(-total // every))
    assert all(should_save(done, total, every, 15) for done in range(1, total + 1))


SAVE = """
from pathlib import Path
import numpy as np
from pitools.train.distributed import RankGroup
from pitools.train.rank import RankEnv
from pitools.train.checkpointing import make_checkpointer
with make_checkpointer(RankEnv(checkpoint_dir=Path({folder!r})), RankGroup(), "jax", {env!r}) as guard:
    guard.save(1, {{"w": np.ones(3)}})
"""


def test_the_launcher_says_where_and_whose(server: Callable[[str], forked_ranks.Server], tmp_path: Path) -> None:
    """The folder and the run's name are the launcher's."""
    pytest.importorskip("jax", reason="this framework is not installed")
    folder, env = tmp_path / "pick-1" / "checkpoints", {"PIT_RUN_DIR": str(tmp_path / "pick-1")}
    # In a process of its own: once JAX has a backend, every fork of this one would warn.
    code = SAVE.format(folder=str(folder), env=env)
    out = tmp_path / "out"
    assert server("jax").start(code, forked_ranks.environment(), out).wait(60) == 0, out.read_text()
    assert lookup.latest_step(folder) == 1
    assert '"run":"pick-1"' in (folder / "owner.json").read_text()


def test_a_relative_folder(server: Callable[[str], forked_ranks.Server], tmp_path: Path) -> None:
    """The folder is where the loop was when it named it; orbax itself refuses a relative path."""
    pytest.importorskip("jax", reason="this framework is not installed")
    out = tmp_path / "out"
    code = f"import os; os.chdir({str(tmp_path)!r})\n" + SAVE.format(folder="checkpoints", env={})
    assert server("jax").start(code, forked_ranks.environment(), out).wait(60) == 0, out.read_text()
    assert lookup.latest_step(tmp_path / "checkpoints") == 1


def test_without_a_folder_nothing_is_imported_for_it() -> None:
    """A loop that keeps nothing does not pay for what keeps checkpoints."""
    code = (
        "import sys; from pitools.train.checkpointing import make_checkpointer; "
        "from pitools.train.distributed import RankGroup; "
        "from pitools.train.rank import RankEnv; print(make_checkpointer(RankEnv(), RankGroup(), 'torch'), "
        "sorted({'orbax', 'torch', 'jax'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None []\n"
