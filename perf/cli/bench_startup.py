"""How long a command takes to answer, in multiples of an interpreter that does nothing.

perf/run cli_startup [--quick]      needs the network once, to install torchx beside us in .venv-peers
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from perf.harness.harness import Case, compare, interleave, report
from perf.harness.workspace import PEERS

BIN = Path(sys.executable).parent
LIMIT = 6.0  # times `python -c pass`
HEAVY = ("numpy", "jax", "torch", "zarr", "rich", "submitit", "jinja2")
OURS = {"pit --help": ["--help"], "pit site list": ["site", "list"]}


def command(*argv: str | Path) -> Callable[[], object]:
    return lambda: subprocess.run([str(word) for word in argv], stdout=subprocess.DEVNULL, check=True)


def heavy_imports(words: list[str]) -> list[str]:
    """Which of the heavy packages the command imported."""
    code = (
        "import sys; from pitools import cli; code = cli.run(cli.group, 'pit'); "
        f"sys.exit(code or ','.join(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    return [name for name in done.stderr.strip().split(",") if name]


def torchx_version() -> str:
    python = PEERS / "bin" / "python"
    if not (PEERS / "bin" / "torchx").exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "torchx"], check=True)
    show = "from importlib.metadata import version; print(version('torchx'))"
    return subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


def main(rounds: int) -> int:
    torchx = torchx_version()
    runs = {
        "python -c pass": command(sys.executable, "-c", "pass"),
        "import submitit": command(sys.executable, "-c", "import submitit"),
        "torchx --help": command(PEERS / "bin" / "torchx", "--help"),
        **{name: command(BIN / "pit", *words) for name, words in OURS.items()},
    }
    times = interleave(rounds, runs)
    versions = {
        "python -c pass": sys.version.split()[0],
        "import submitit": version("submitit"),
        "torchx --help": torchx,
    }
    cases: list[Case] = []
    for ours in OURS:
        for peer, target in (("python -c pass", 1 / LIMIT), ("import submitit", 1.0), ("torchx --help", 1.0)):
            cases.append(compare(ours, peer, versions[peer], times[ours], times[peer], target=round(target, 4)))
    code = report(cases)
    for name, words in OURS.items():
        if actual := heavy_imports(words):
            print(f"{name} imports {', '.join(actual)}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(5 if "--quick" in sys.argv else 25))
