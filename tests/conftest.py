"""What every test may use: the repository, and the two clusters of scripts/devcluster where they run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "scripts"))  # the parts of devcluster are no package of ours

from devcluster_parts import sites  # noqa: E402
from devcluster_parts.layout import DEFAULT_ROOT, Layout, Settings  # noqa: E402
from devcluster_parts.tools import PACKAGES, search_path  # noqa: E402

from pitools.core import trust  # noqa: E402

# How long an example takes there, or is looked for, shows nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

CLUSTERS = Path(os.environ.get("PIT_DEVCLUSTER") or DEFAULT_ROOT)


def _up(name: str) -> bool:
    conf = CLUSTERS / name / "slurm.conf"
    if not os.access(conf, os.R_OK) or conf.stat().st_uid != os.geteuid():  # another's has no account for us
        return False
    trust.require_trusted(conf, "slurm.conf")  # sinfo loads the plugins that it names
    try:
        env = {**os.environ, "SLURM_CONF": str(conf)}
        return subprocess.run(["sinfo", "-h"], env=env, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="session", autouse=True)
def dev_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the site files of alpha and beta: all that a user of this session has, whether they run or not.

    What is kept between calls is this session's too, and nothing that the developer's home knows of their clusters.
    The processes that tests start have the pitools of this checkout, also with an environment of another one's.
    """
    folder = tmp_path_factory.mktemp("config") / "pitools" / "sites"
    folder.mkdir(parents=True)
    layout = Layout(root=CLUSTERS, settings=Settings())
    for cluster in layout.clusters:
        (folder / f"{cluster.name}.toml").write_text(sites.site_file_text(layout, cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder.parents[1]))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", str(REPO), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return REPO


@pytest.fixture(scope="session")
def clusters() -> Path:
    """The root folder of the running development clusters; skips without them, or fails where they are required."""
    if _up("alpha") and _up("beta"):
        return CLUSTERS
    return _without_slurm("the development clusters are not up: scripts/devcluster up")


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skips what starts Slurm's daemons itself where there are none, or fails where they are required."""
    if missing := [program for program in PACKAGES if shutil.which(program, path=search_path()) is None]:
        _without_slurm(f"{missing[0]} is not installed")


def _without_slurm(reason: str) -> NoReturn:
    (pytest.fail if os.environ.get("PIT_REQUIRE_SLURM") else pytest.skip)(f"needs Slurm: {reason}")


@pytest.fixture(scope="session")
def as_root() -> None:
    """Skips what only root can do: mount, give files away, act as another user."""
    if os.geteuid():
        pytest.skip("needs root")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Has this process, and those that it starts, end by Ctrl-C and a lost terminal, which `&` and nohup ignore."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep each file on one of pytest-xdist's workers, with its fixtures, and all that use alpha and beta on one.

    The groups of `--dist loadgroup` are no choice: with pytest 9.2 nothing is left of them, and nothing says so.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            text = (REPO / path).read_text()
            return "alpha and beta" if "mark.slurm" in text and "slurm_installed" not in text else path

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line how many tests were skipped for want of root or Slurm."""
    reasons = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    needs = {text: sum(f"needs {text}" in reason for reason in reasons) for text in ("root", "Slurm")}
    if any(needs.values()):
        output = " and ".join(f"{count} need {text}" for text, count in needs.items())
        terminalreporter.write_line(f"Of the tests {output}: they were skipped.")


@pytest.fixture(scope="session")
def bridge() -> Path:
    """25 real WidowX episodes in the robomimic layout."""
    path = REPO.parent / "shared" / "data" / "robot" / "bridge_widowx_robomimic.hdf5"
    if not path.is_file():
        pytest.skip("the WidowX recording is not beside the checkout (../shared/data/robot)")
    return path


@pytest.fixture
def pit(tmp_path: Path, dev_sites: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command of ours as a user would, in a folder of its own, with none of the developer's settings."""
    home = tmp_path / "home"
    shutil.copytree(dev_sites, home / ".config" / "pitools" / "sites")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_", "SBATCH_"))}
    env |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "COLUMNS": "120"}
    env["XDG_CACHE_HOME"] = str(home / ".cache")
    bin_folder = Path(os.sys.executable).parent  # type: ignore[attr-defined]

    def call(
        *words: str, env: dict[str, str] = env, stdin: str = "", umask: int = -1, **more: str
    ) -> subprocess.CompletedProcess[str]:
        name = words[0] if words[0] in ("pit-stage", "psbatch") else "pit"
        rest = words[1:] if words[0] == name else words
        return subprocess.run(
            [str(bin_folder / name), *rest],
            cwd=tmp_path,
            env={**env, **more},
            input=stdin,
            text=True,
            capture_output=True,
            timeout=280,
            check=False,
            umask=umask,
        )

    return call
