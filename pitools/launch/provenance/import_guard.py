"""The code that runs is the run's own copy: made so, and then checked, in every rank before its program starts.

A copy alone is not enough: an editable install, a .pth file or PYTHONPATH may still lead into the workdir that it was
taken from, and Python would import what is there now. Each such path is replaced by its place in the copy; then what
Python finds is compared.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from pitools.core import subprocesses
from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.record import Record
from pitools.launch.plan import Plan
from pitools.launch.provenance import provenance, workdir_walk
from pitools.run import run_folder

SHIM_DIR = ".path"
_PROBE_S = 120.0
# What Python would import, without importing it.
_PROBE = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except Exception:
        found = None
    places = [*(found.submodule_search_locations or ()), found.origin] if found else []
    print(name, next((place for place in places if place), ""), sep="\\t")
"""
_OWN_PACKAGE = "pitools"


class RankMachine(Record, frozen=True, kw_only=True, tag="pit.rank-machine/1"):
    """Where rank 0 of an attempt ran. driver: NVIDIA's version, "" for none."""

    node: str
    python: str
    kernel: str
    architecture: str
    driver: str = ""


class WorkdirPaths:
    """The workdir that a run's code was copied from, as seen from the run."""

    def __init__(self, workdir: Path, copy: Path) -> None:
        self.workdir, self.copy = Path(os.path.realpath(workdir)), copy
        self._run_dir = Path(os.path.realpath(copy.parent))
        self.mirror = lru_cache(maxsize=None)(self._mirror)

    def _mirror(self, path: str) -> str:
        """Where the copy has what is at `path`; "" for what is no part of the workdir, or was left out of the copy."""
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.workdir) or real.is_relative_to(self._run_dir):
            return ""
        inner = real.relative_to(self.workdir)
        above = [self.workdir / parent for parent in (inner, *inner.parents) if parent.name]
        if any(workdir_walk.is_skipped(one) for one in above):
            return ""
        return str(self.copy / inner)

    def mirrored(self, paths: Iterable[str]) -> list[str]:
        """Paths, with those into the workdir replaced."""
        return [self.mirror(path) or path for path in paths]


def check_imports(plan: Plan) -> None:
    """Lead this process, and the programs that it starts, to the run's copy of its code, and see that they get there.

    To be called in each rank, before its program; an entry point's module is imported here. Does nothing for a run
    without a copy. Raises ConfigError naming the package that would be imported from elsewhere, DataError where the
    copy is gone, and whatever the import raises.
    """
    copy = Path(plan.request.workdir)
    record = provenance.provenance_of_code(copy)
    _record_machine()
    if record is None:
        return
    if not copy.is_dir():
        raise DataError("the run's copy of its code is gone", where=str(copy), hint="launch it from its workdir")
    live = WorkdirPaths(Path(record.workdir), copy)
    names = _redirect_imports(live)
    os.chdir(copy)
    if plan.request.entry:
        _check_entry(plan, live, names)
    elif probed := {*names, *_installed(live, record)}:
        _check_child_processes(live, sorted(probed))


def _redirect_imports(live: WorkdirPaths) -> dict[str, str]:
    """Replace every path by which Python would come to the workdir; the top-level modules that were on such a path."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    names: dict[str, str] = {}
    # The first place is the program's own, which no other program gets.
    for path in sys.path[1:]:
        if path not in given and (mirror := live.mirror(path)):
            names |= dict(_modules(Path(mirror)))
    for mapping in _editable_finders():
        for name, path in list(mapping.items()):
            if mirror := live.mirror(path):
                mapping[name] = names[name] = mirror
    sys.path[:] = live.mirrored(sys.path)
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", None)
        if isinstance(places, list) and any(live.mirror(place) for place in places):
            places[:] = live.mirrored(places)
    importlib.invalidate_caches()
    for variable in ("PYTHONPATH", "PATH"):
        if paths := os.environ.get(variable):
            os.environ[variable] = os.pathsep.join(live.mirrored(paths.split(os.pathsep)))
    if names:
        # Whoever this process starts reads the same .pth files: only what comes before them is found first. Links to
        # what they lead to, and not the folders themselves, where a `types.py` would hide the standard library's.
        shim = _shim(live.copy.parent / SHIM_DIR, names)
        rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([shim, *(path for path in rest if path != shim)])
    return names


def _editable_finders() -> Iterator[dict[str, str]]:
    """Where the finders of editable installs look: module → its file or folder."""
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None)
        if name.startswith("__editable__") and isinstance(mapping, dict):
            yield mapping


def _installed(live: WorkdirPaths, record: provenance.Provenance) -> Iterator[str]:
    """The modules of the packages that were installed from the workdir, by whatever means."""
    for package in record.environment.editable:
        if mirror := live.mirror(package.path):
            for place in (Path(mirror), Path(mirror) / "src"):
                yield from (name for name, path in _modules(place) if (Path(path) / "__init__.py").is_file())


def _modules(place: Path) -> Iterator[tuple[str, str]]:
    """(name, path) of the modules in a folder that do not hide the standard library's."""
    try:
        found = sorted(place.iterdir())
    except OSError:
        return
    for path in found:
        name = path.name if path.is_dir() else path.name.partition(".")[0] if _is_module(path.name) else ""
        if name.isidentifier() and name not in sys.stdlib_module_names:
            yield name, str(path)


def _is_module(name: str) -> bool:
    return any(name.endswith(suffix) for suffix in importlib.machinery.all_suffixes())


def _shim(place: Path, names: dict[str, str]) -> str:
    """A folder with a link to each of these modules; all ranks make the same."""
    place.mkdir(exist_ok=True)
    for path in map(Path, names.values()):
        link = place / path.name
        if not link.is_symlink():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(os.path.relpath(path, place))
    return str(place)


def _check_entry(plan: Plan, live: WorkdirPaths, names: Iterable[str]) -> None:
    """Import the entry point, and look at where all that was imported came from."""
    sys.path.insert(0, str(live.copy))
    module = plan.request.entry.partition(":")[0]
    found = importlib.import_module(module)
    _raise_if_workdir(live, module, getattr(found, "__file__", None) or "")
    for name, one in list(sys.modules.items()):
        top = name.partition(".")[0]
        # What started this rank was there before it; it is no part of what is trained.
        if top != _OWN_PACKAGE or name == module:
            _raise_if_workdir(live, top, getattr(one, "__file__", None) or "")
    for name in names:
        found_spec = importlib.util.find_spec(name)
        _raise_if_workdir(live, name, (found_spec.origin or "") if found_spec else "")


def _check_child_processes(live: WorkdirPaths, names: Iterable[str]) -> None:
    """Ask Python, started anew as a command would start it, where it finds these modules."""
    try:
        done = subprocesses.run([sys.executable, "-c", _PROBE, *names], timeout_s=_PROBE_S)
    except PitError as error:
        raise ConfigError(f"it cannot be told what code would run: {error.message}", where=sys.executable) from error
    for line in done.stdout.splitlines():
        name, _, place = line.partition("\t")
        _raise_if_workdir(live, name, place)


def _raise_if_workdir(live: WorkdirPaths, name: str, place: str) -> None:
    if not place.startswith("/") or not live.mirror(place):
        return
    package = ", ".join(sorted(set(_distributions(name)))) or name
    what = f'"{package}" would be imported from {place}, and not from the run\'s copy of it'
    hint = "install it without --editable, or set snapshot = false"
    raise ConfigError(what, where=str(live.copy), hint=hint)


def _distributions(name: str) -> list[str]:
    from importlib import metadata  # 50 ms where there are many packages

    return metadata.packages_distributions().get(name, [])


def _record_machine() -> None:
    """Where the attempt runs, told by its rank 0."""
    attempt = os.environ.get("PIT_ATTEMPT_DIR")
    if not attempt or os.environ.get("PIT_RANK") != "0":
        return
    driver = ""
    with contextlib.suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        driver = line.partition("Module")[2].split()[0]
    with contextlib.suppress(PitError, OSError):  # it is for the record only
        run_folder.write_record(
            Path(attempt) / "machine.json",
            RankMachine(
                node=os.environ.get("PIT_NODE", ""),
                python=platform.python_version(),
                kernel=platform.release(),
                architecture=platform.machine(),
                driver=driver,
            ),
        )
