"""The code that runs is the copy: however the live workdir may be on Python's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pitools.launch.provenance import import_guard, provenance
from tests.launch.conftest import MakeRun

# As a rank does it: look, then run the program.
RANK = """
import sys, msgspec
from pathlib import Path
from pitools.launch.plan import Plan
from pitools.launch.provenance import import_guard
plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
import_guard.check_imports(plan)
if plan.request.entry:
    module, name = plan.request.entry.split(":")
    getattr(__import__(module, fromlist=[name]), name)(**plan.request.args)
else:
    import os, subprocess
    sys.exit(subprocess.run(["bash", "-c", plan.request.command], cwd=plan.request.workdir).returncode)
"""
WHERE = "def main():\n    print('from', __file__)\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own, with our packages, where a test may install what it wants."""
    root = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    repo = Path(provenance.__file__).parents[3]
    (packages(root / "bin" / "python") / "ours.pth").write_text("\n".join([*paths, str(repo)]) + "\n")
    return root / "bin" / "python"


def packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*/site-packages"))


def start(python: Path, run_dir: Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [str(python), "-c", RANK, str(run_dir / "plan.json")]
    path = f"{python.parent}:{os.environ['PATH']}"
    arguments = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(argv, cwd=cwd, env=arguments, capture_output=True, text=True, check=False, timeout=60)


def test_an_entry_comes_from_the_copy(python: Path, work: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """What the workdir became after submission does not run, even where the rank starts in it."""
    run_dir = make_run(entry="loop:main")
    (work / "loop.py").write_text("raise SystemExit('the live code ran')\n")
    for cwd in (work, tmp_path):
        done = start(python, run_dir, cwd, PYTHONPATH=str(work))
        assert done.stdout == f"from {run_dir}/code/loop.py\n", done.stderr


@pytest.mark.parametrize("how", ["pth", "finder", "namespace", "variable"])
@pytest.mark.parametrize("what", ["entry", "command"])
def test_an_editable_install_leads_to_the_copy(
    python: Path, work: Path, make_run: MakeRun, tmp_path: Path, how: str, what: str
) -> None:
    """Whether a .pth file, setuptools' finder or PYTHONPATH leads into the workdir: what runs is the copy."""
    package = work / "src" / "policy"
    package.mkdir(parents=True)
    if how != "namespace":
        (package / "__init__.py").touch()
    (package / "train.py").write_text(WHERE)
    (work / "src" / "types.py").write_text("raise SystemExit('this hides the standard library')\n")
    env = {}
    place = packages(python)
    if how == "pth" or how == "namespace":
        (place / "policy.pth").write_text(f"{work / 'src'}\n")
    elif how == "finder":
        finder = (place / "__editable___x_finder.py").write_text
        finder(FINDER.format(mapping={"policy": str(package)}))
        (place / "policy.pth").write_text("import __editable___x_finder; __editable___x_finder.install()\n")
    else:
        (work / "src" / "types.py").unlink()
        env["PYTHONPATH"] = str(work / "src")
    program = (
        {"entry": "policy.train:main"}
        if what == "entry"
        else {"command": "python -c 'import policy.train; policy.train.main()'"}
    )
    try:
        run_dir = make_run(**program)
        (package / "train.py").write_text("raise SystemExit('the live code ran')\n")
        done = start(python, run_dir, tmp_path, **env)
    finally:
        for path in [*place.glob("policy.pth"), *place.glob("__editable__*")]:
            path.unlink()
    assert done.stderr == ""
    # By a link that stands for one module, where a whole folder would bring its neighbours.
    place, shown = run_dir / "code" / "src", done.stdout.replace(f"{run_dir}/.path", f"{run_dir}/code/src")
    assert shown == f"from {place}/policy/train.py\n"


FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {mapping!r}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(Finder)
"""
STUBBORN = FINDER.replace("MAPPING", "WHERE").replace("append(Finder)", "insert(0, Finder)")


@pytest.mark.parametrize("what", ["entry", "command"])
def test_what_cannot_be_led_there_is_refused(
    python: Path, work: Path, make_run: MakeRun, tmp_path: Path, what: str
) -> None:
    """A finder that insists on the live workdir ends the rank before its program, naming package and place."""
    (work / "policy").mkdir()
    (work / "policy" / "__init__.py").write_text("def main(): print('ran')\n")
    place = packages(python)
    (place / "stubborn.py").write_text(STUBBORN.format(mapping={"policy": str(work / "policy")}))
    text = "import stubborn; stubborn.install()\n"
    (place / "policy.pth").write_text(f"{text}{work}\n")
    program = {"entry": "policy:main"} if what == "entry" else {"command": "python -c 'import policy; policy.main()'"}
    try:
        done = start(python, make_run(**program), tmp_path)
    finally:
        (place / "policy.pth").unlink()
    assert done.returncode == 1
    assert f'"policy" would be imported from {work}/policy' in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize("what", [{"entry": "loop:main"}, {"command": "echo ran"}])
def test_a_large_extension_module_is_linked(
    python: Path, work: Path, make_run: MakeRun, tmp_path: Path, what: dict[str, str]
) -> None:
    """An extension module too large for the copy is used where it is, which the record says, and refuses no run."""
    (work / "kernels.so").touch()
    os.truncate(work / "kernels.so", 65 << 20)
    (packages(python) / "kernels.pth").write_text(f"{work}\n")
    try:
        run_dir = make_run(**what)
        done = start(python, run_dir, tmp_path)
    finally:
        (packages(python) / "kernels.pth").unlink()
    assert done.returncode == 0, done.stderr
    record = provenance.read_provenance(run_dir)
    assert record is not None
    assert [warning.split()[0] for warning in record.warnings] == ["kernels.so"]


def test_a_check_that_fails_refuses_the_run(python: Path, work: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """Where a child process cannot say what it would import, its program does not start."""
    pth = packages(python) / "broken.pth"
    pth.write_text(f"{work}\nimport os; '.path' in os.environ.get('PYTHONPATH', '') and os._exit(3)\n")
    try:
        done = start(python, make_run(command="echo ran"), tmp_path)
    finally:
        pth.unlink()
    assert (done.returncode, done.stdout) == (1, "")
    assert "ConfigError" in done.stderr


def test_a_module_that_reaches_back_is_refused(python: Path, work: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """A program that itself puts the live workdir on its path is found out once it has imported from there."""
    (work / "lib").mkdir()
    (work / "lib" / "helper.py").touch()
    (work / "loop.py").write_text(
        f"import sys; sys.path.insert(0, {str(work / 'lib')!r})\nimport helper\ndef main(): print('ran')\n"
    )
    done = start(python, make_run(entry="loop:main"), tmp_path)
    assert f'"helper" would be imported from {work}/lib/helper.py' in done.stderr
    assert done.stdout == ""


def test_an_environment_in_the_workdir_is_no_live_code(
    python: Path, work: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    """Packages of a virtual environment that is kept in the workdir are imported from it, as ever."""
    inside = work / ".venv" / "lib" / "site-packages"
    inside.mkdir(parents=True)
    (work / ".venv" / "pyvenv.cfg").touch()
    (inside / "dependency.py").write_text("value = 7\n")
    (work / "loop.py").write_text("import dependency\ndef main(): print(dependency.value)\n")
    done = start(python, make_run(entry="loop:main"), tmp_path, PYTHONPATH=str(inside))
    assert done.stdout == "7\n", done.stderr


def test_without_a_copy_nothing_is_touched(python: Path, work: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """snapshot = false runs the workdir as it is, and the record and a warning say so."""
    run_dir = make_run(command=f"pwd; echo $PYTHONPATH; cd {work}", snapshot=False)
    done = start(python, run_dir, tmp_path, PYTHONPATH=str(work))
    assert done.stdout == f"{work}\n{work}\n"
    record = provenance.read_provenance(run_dir)
    assert record is not None
    assert record.code == ""
    assert "snapshot = false" in record.warnings[0]


def test_a_copy_that_is_gone(python: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """A run whose code was deleted says so."""
    run_dir = make_run(entry="loop:main")
    (run_dir / "code").rename(tmp_path / "moved")
    assert "the run's copy of its code is missing" in start(python, run_dir, tmp_path).stderr


def test_rank_0_tells_where_it_ran(python: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """The machine of an attempt is known afterwards, to be compared."""
    run_dir = make_run(entry="loop:main")
    attempt = run_dir / "attempts" / "0"
    start(python, run_dir, tmp_path, PIT_ATTEMPT_DIR=str(attempt), PIT_RANK="0", PIT_NODE="n01")
    machine = msgspec.json.decode((attempt / "machine.json").read_bytes(), type=import_guard.RankMachine)
    assert (machine.node, machine.kernel) == ("n01", os.uname().release)
