"""Redirect imports to the run's copy of its code, and verify that, in every rank before its program starts.

A copy alone is not enough: an editable install, a .pth file or PYTHONPATH may still name the original workdir, and
Python would import its current code. Each such path is replaced by its counterpart in the copy; then the paths that
Python finds are checked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator
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
# Prints the paths that Python would import modules from, without an import.
_PROBE = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        spec = None
    paths = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    print(name, next((path for path in paths if path), ""), sep="\\t")
"""
_OWN_PACKAGE = "pitools"


class RankMachine(Record, frozen=True, kw_only=True, tag="pit.rank-machine/1"):
    """The machine of rank 0 of an attempt. driver: NVIDIA's version, "" for none."""

    node: str
    python: str
    kernel: str
    architecture: str
    driver: str = ""


class WorkdirPaths:
    """Map paths in the workdir that a run's code was copied from to paths in the copy."""

    def __init__(self, workdir: Path, copy: Path) -> None:
        self.workdir, self.copy = Path(os.path.realpath(workdir)), copy
        self.run_dirs = (copy.parent, Path(os.path.realpath(copy.parent)))
        self.mirror = lru_cache(maxsize=None)(self._mirror)

    def _mirror(self, path: str) -> str:
        """Return the copy's path of `path`; "" outside the workdir, and for a file left out of the copy."""
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.workdir) or real.is_relative_to(self.run_dirs[1]):
            return ""
        relative = real.relative_to(self.workdir)
        folders = [self.workdir / parent for parent in (relative, *relative.parents) if parent.name]
        if any(workdir_walk.is_skipped(folder) for folder in folders):
            return ""
        return str(self.copy / relative)

    def mirror_all(self, paths: Iterable[str]) -> list[str]:
        """Return the paths, with those in the workdir replaced."""
        return [self.mirror(path) or path for path in paths]


def check_imports(plan: Plan) -> None:
    """Redirect the imports of this process and its children to the run's copy of its code, and verify the result.

    Called in each rank before its program; imports an entry point's module. Does nothing for a run without a copy.
    Raises ConfigError naming a package that would be imported from the workdir, DataError for a missing copy, and any
    exception of the import.
    """
    copy = Path(plan.request.workdir)
    record = provenance.provenance_of_code(copy)
    _record_machine()
    if record is None:
        return
    if not copy.is_dir():
        raise DataError("the run's copy of its code is missing", where=str(copy), hint="launch it from its workdir")
    workdir_paths = WorkdirPaths(Path(record.workdir), copy)
    names = _redirect_imports(workdir_paths)
    os.chdir(copy)
    if plan.request.entry:
        _check_entry(plan, workdir_paths, names)
    elif names_to_check := {*names, *_editable_modules(workdir_paths, record)}:
        _check_child_processes(workdir_paths, sorted(names_to_check))


def _redirect_imports(workdir_paths: WorkdirPaths) -> dict[str, str]:
    """Replace every import path in the workdir; return the top-level modules on these paths, and their new paths."""
    pythonpath = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    names: dict[str, str] = {}
    # sys.path[0] is this program's own folder, which child processes do not inherit.
    for path in sys.path[1:]:
        if path not in pythonpath and (mirror := workdir_paths.mirror(path)):
            names |= dict(_modules_in(Path(mirror)))
    for mapping in _editable_finders():
        for name, path in list(mapping.items()):
            if mirror := workdir_paths.mirror(path):
                mapping[name] = names[name] = mirror
    sys.path[:] = workdir_paths.mirror_all(sys.path)
    for module in list(sys.modules.values()):
        module_path = getattr(module, "__path__", None)
        if isinstance(module_path, list) and any(workdir_paths.mirror(path) for path in module_path):
            module_path[:] = workdir_paths.mirror_all(module_path)
    importlib.invalidate_caches()
    for variable in ("PYTHONPATH", "PATH"):
        if paths := os.environ.get(variable):
            os.environ[variable] = os.pathsep.join(workdir_paths.mirror_all(paths.split(os.pathsep)))
    if names:
        # Child processes read the same .pth files; only PYTHONPATH precedes these. It gets a folder of links to the
        # modules, not their own folders, where a `types.py` would hide the standard library's.
        shim = _make_shim(workdir_paths.copy.parent / SHIM_DIR, names)
        rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([shim, *(path for path in rest if path != shim)])
    return names


def _editable_finders() -> Iterator[dict[str, str]]:
    """Yield the mappings of the finders of editable installs: module → its file or folder."""
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None)
        if name.startswith("__editable__") and isinstance(mapping, dict):
            yield mapping


def _editable_modules(workdir_paths: WorkdirPaths, record: provenance.Provenance) -> Iterator[str]:
    """Yield the modules of the packages that are installed editable from the workdir."""
    for package in record.environment.editable:
        if mirror := workdir_paths.mirror(package.path):
            for folder in (Path(mirror), Path(mirror) / "src"):
                yield from (name for name, path in _modules_in(folder) if (Path(path) / "__init__.py").is_file())


def _modules_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of the modules in a folder, without those named as a module of the standard library."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        name = path.name if path.is_dir() else path.name.partition(".")[0] if _is_module(path.name) else ""
        if name.isidentifier() and name not in sys.stdlib_module_names:
            yield name, str(path)


def _is_module(name: str) -> bool:
    return any(name.endswith(suffix) for suffix in importlib.machinery.all_suffixes())


def _make_shim(folder: Path, names: dict[str, str]) -> str:
    """Make a folder with a link to each of these modules, shared by all ranks; return its path."""
    folder.mkdir(exist_ok=True)
    for path in map(Path, names.values()):
        link = folder / path.name
        if not link.is_symlink():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(os.path.relpath(path, folder))
    return str(folder)


def _check_entry(plan: Plan, workdir_paths: WorkdirPaths, names: Iterable[str]) -> None:
    """Import the entry point, and check the path of every imported module."""
    sys.path.insert(0, str(workdir_paths.copy))
    module = plan.request.entry.partition(":")[0]
    entry_module = importlib.import_module(module)
    _raise_if_workdir(workdir_paths, module, getattr(entry_module, "__file__", None) or "")
    for name, imported in list(sys.modules.items()):
        top = name.partition(".")[0]
        # pitools itself, which starts the rank, is not part of the run's code.
        if top != _OWN_PACKAGE or name == module:
            _raise_if_workdir(workdir_paths, top, getattr(imported, "__file__", None) or "")
    for name in names:
        spec = importlib.util.find_spec(name)
        _raise_if_workdir(workdir_paths, name, (spec.origin or "") if spec else "")


def _check_child_processes(workdir_paths: WorkdirPaths, names: Collection[str]) -> None:
    """Check the paths at which a child process would find these modules. Raises ConfigError if it reports none."""
    try:
        done = subprocesses.run([sys.executable, "-c", _PROBE, *names], timeout_s=_PROBE_S)
    except PitError as error:
        raise ConfigError(f"cannot check the import paths: {error.message}", where=sys.executable) from error
    paths = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    if done.code or not set(names) <= paths.keys():
        reason = (done.stderr.strip() or f"exit code {done.code}").splitlines()[-1]
        hint = f"see why this fails there: {sys.executable} -c 'import importlib.util'"
        raise ConfigError(f"cannot check the import paths: {reason}", where=sys.executable, hint=hint)
    for name in names:
        _raise_if_workdir(workdir_paths, name, paths[name])


def _raise_if_workdir(workdir_paths: WorkdirPaths, name: str, path: str) -> None:
    # A path in the run's folder is the copy, even where that is a link to a file too large to be copied.
    in_run = any(Path(os.path.normpath(path)).is_relative_to(folder) for folder in workdir_paths.run_dirs)
    if not path.startswith("/") or in_run or not workdir_paths.mirror(path):
        return
    package = ", ".join(sorted(set(_distributions(name)))) or name
    problem = f'"{package}" would be imported from {path} (expected the run\'s copy)'
    hint = "install it without --editable, or set snapshot = false"
    raise ConfigError(problem, where=str(workdir_paths.copy), hint=hint)


def _distributions(name: str) -> list[str]:
    from importlib import metadata  # 50 ms where there are many packages

    return metadata.packages_distributions().get(name, [])


def _record_machine() -> None:
    """Record the machine of the attempt, in rank 0 alone."""
    attempt = os.environ.get("PIT_ATTEMPT_DIR")
    if not attempt or os.environ.get("PIT_RANK") != "0":
        return
    driver = ""
    with contextlib.suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        driver = line.partition("Module")[2].split()[0]
    with contextlib.suppress(PitError, OSError):  # only `diff` reads it
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
