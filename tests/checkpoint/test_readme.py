from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_recipes(repo: Path, tmp_path: Path) -> None:
    """The recipes of the README run as they are written, in order: a loop, its second start, its upkeep, and files."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    output = []
    recipes = re.findall(r"```(sh|python)\n(.*?)```", (repo / "pitools/checkpoint/README.md").read_text(), re.DOTALL)
    recipes.insert(1, ("python", f"{recipes[0][1]}\nprint(restored.step, int(optimizer.state[model.weight]['step']))"))
    for language, text in recipes:
        argv = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        output.append(done.stdout.splitlines())
    loop, resumed, upkeep, by_hand = output
    assert (loop, resumed) == ([], ["40 40"])
    assert [line.split()[0] for line in upkeep[:4]] == ["STEP", "40", "30", "20"]
    assert '"checkpoint":"step_40","path":"payload/__0_0.distcp","problem":"size"' in upkeep[4]
    assert '"quarantined":1,"newest_good_step":30' in upkeep[5]
    assert '"findings":0' in upkeep[6]
    assert [line.partition('"state":')[2].partition(",")[0] for line in upkeep[7:]] == ['"kept"', '"kept"']
    assert by_hand == ["7 []"]
