"""Processes that die at each step of what they do to a folder of checkpoints."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# In forks of itself, each of which ends at the n-th system call that changes a file or a name.
_KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import build, contents, RUN, FINGERPRINT
from pitools.checkpoint.store import publish, quarantine, retention

def dying(call, left):
    def instead(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return call(*args, **more)
    return instead

def save(folder, step):
    place = build(folder, step, contents(step))
    publish.publish_checkpoint(
        folder, place, step, format="files", run=RUN, state_fingerprint=FINGERPRINT, world_size=1
    )

def one_step(folder):
    if sys.argv[3] == "save":
        save(folder, 9)
    elif sys.argv[3] == "prune":
        retention.prune_checkpoints(folder, 1)
    else:
        quarantine.quarantine_checkpoint(folder / "step_6", ())

for number in range(1000):
    folder = Path(sys.argv[1]) / str(number)
    for step in (3, 6):
        save(folder, step)
    child = os.fork()
    if not child:
        left = [number]
        for name in ("open", "rename", "replace", "link", "symlink", "fsync", "mkdir", "unlink", "rmdir", "write"):
            setattr(os, name, dying(getattr(os, name), left))
        one_step(folder)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code == 0:
        break
"""


def killed(what: str) -> Iterator[Path]:
    """Folders with steps 3 and 6 in which a process died at each step of a `save` of step 9, a `prune` of step 3 or
    a `quarantine` of step 6; the last in which none died.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        argv = [sys.executable, "-c", _KILLED, place, str(Path(__file__).parent), what]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
        codes = done.stdout.split()
        assert codes[-1] == "0"
        assert set(codes[:-1]) == {"9"}
        for number in range(len(codes)):
            yield Path(place) / str(number)
