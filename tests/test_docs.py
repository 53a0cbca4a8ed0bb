"""The pages of docs/: each block runs as it is written, in the order of its page; the site is built in strict mode."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
GENERATED = {"commands.md", "records.md", "python_reference.md"}
NEED_SLURM = {"cluster.md", "operators.md", "python.md", "tenancy.md"}
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name not in GENERATED)
# A block with a title is a file; `sh` and `python` run; `text` is output, or what is not to be typed as it is.
_BLOCK = re.compile(r"^ *```([a-z]*)(?: title=\"([\w./-]+)\")?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# What a page promises of its own blocks: expressions of which each is found in what they print, in this order.
_SHOWN = {
    "train.md": [
        r'"attempt":"0".*"kind":"program"',
        r'"attempt":"1".*"kind":"(finished|succeeded)"',
        r'"steps":60',
        r'"event":"verdict"',
    ],
    "failures.md": [r'"state":"FAILED"', "ModuleNotFoundError", r'"state":"COMPLETED"'],
    "performance.md": [
        r" 0 +10 +40 +20 ",
        r'"verdict":"input"',
        r'"verdict":"input"',
        r'"changes":\{"params.workers":"2"\}',
        r'"pit.perf-trial/1".*"verdict":"less"',
        r'"rank":1,"cause":"compute"',
        r'"verdict":"regression"',
        "short",
        "TP4",
        r"causal +0\.\d",
    ],
    "monitor.md": [r" 59 +0\.03"],
    "capacity.md": [
        r"robots +normal",
        r"preempt urgent normal +team vision",
        r"rent cloud 16 3\.5.* all ",
        "FORECAST WITHIN",
    ],
    "index.md": [r'"state":"COMPLETED"', r"1: rank 1 of 2 reads \S*/objects/"],
    "cluster.md": [r'"state":"COMPLETED"', "1: rank 1 on alpha"],
    "tenancy.md": ["add cho in team robots"],
}
_KNOWN = {"sh", "python", "toml", "text"}


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(language, name of the file, text) of each block of a page."""
    return _BLOCK.findall((DOCS / page).read_text())


@pytest.fixture
def desk(repo: Path, tmp_path: Path, dev_sites: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: the checkout's scripts, and settings of nobody."""
    for name in ("scripts", "site_configs"):
        (tmp_path / name).symlink_to(repo / name)
    (tmp_path / "home").mkdir()
    for name in [name for name in os.environ if name.startswith(("PIT_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    config = tmp_path / "home" / ".config"
    shutil.copytree(dev_sites, config / "pitools" / "sites")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    return tmp_path


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page, and look for what it promises."""
    script = []
    for number, (language, name, text) in enumerate(blocks(page)):
        assert language in _KNOWN, f"{page}: a block of {language or 'no language'}"
        file = folder / (name or f"block{number}.{language}")
        if name or language == "python":
            file.write_text(text)
        if language == "python":
            script.append(f"python {file.name}" if not name else f"python -m py_compile {file.name}")
        elif language == "sh":
            script.append(text)
    text = "\n".join(script)
    argv = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{page}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    position = 0
    for pattern in _SHOWN.get(page, []):
        match = re.compile(pattern).search(done.stdout, position)
        assert match, f"{page}: {pattern}\n{done.stdout[position:]}"
        position = match.end()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in NEED_SLURM])
def test_the_blocks_of_a_page_run(page: str, desk: Path) -> None:
    """In one shell, one after the other, on this machine alone."""
    run_page(page, desk)


_UNTIL_STOPPED = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
from save_in_time import should_stop
steps = 0
while not should_stop():
    steps += 1
    if steps == 3:
        open(os.environ["RANK"], "w").close()
print(steps)
dist.destroy_process_group()
raise SystemExit(95)
"""


def test_ranks_agree_on_their_last_step_as_the_page_says(tmp_path: Path) -> None:
    """save_in_time.py of train.md: a signal at one rank ends both after the same step."""
    pytest.importorskip("torch")
    (text,) = (text for _, name, text in blocks("train.md") if name == "save_in_time.py")
    (tmp_path / "save_in_time.py").write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _UNTIL_STOPPED],
            cwd=tmp_path,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        while not (tmp_path / "0").exists() or not (tmp_path / "1").exists():
            assert [rank.poll() for rank in ranks] == [None, None]
            time.sleep(0.01)
        ranks[1].send_signal(signal.SIGUSR2)
        steps = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [95, 95]
    assert steps[0] == steps[1] != ""


@pytest.mark.slurm
@pytest.mark.parametrize("page", sorted(NEED_SLURM))
def test_the_blocks_of_a_page_about_slurm_run(
    page: str, desk: Path, clusters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on alpha's login node, where the page needs clusters."""
    monkeypatch.setenv("SLURM_CONF", str(clusters / "alpha" / "slurm.conf"))
    run_page(page, desk)


def test_the_site_is_built_in_strict_mode(repo: Path, tmp_path: Path) -> None:
    """No dead link, no page that the navigation lacks, and the reference has every command."""
    pytest.importorskip("mkdocs")
    subprocess.run([repo / "scripts" / "docs", tmp_path / "site"], check=True, capture_output=True)
    assert "pit launch prune" in (tmp_path / "site" / "commands" / "index.html").read_text()
    assert {path.parent.name for path in (tmp_path / "site").glob("*/index.html")} >= {
        Path(page).stem for page in PAGES if page != "index.md"
    }
