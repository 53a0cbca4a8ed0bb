"""Read and write a sweep's folder, which has this layout.

<runs>/sweeps/<sweep>/         `sweeps.<uid>` in a folder of runs that belongs to another user, and that users share
    sweep.json          pit.sweep/1: the request and its sites
    points/<k>.json     pit.sweep-point/1: the k-th point and the folder of its run, on disk before the run is created
    arrays/<name>/      a job array of several runs' first jobs: `launch/submission/array_job.py` draws it
    <run name>          link to the run's folder
    .lock               lock of the process that launches
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import ConfigError, DataError, PitError, UsageError
from pitools.core.fs import from_os_error
from pitools.core.locks import is_owned_by_user
from pitools.core.record import Record
from pitools.launch.sweep.points import Point, point_id
from pitools.run import run_folder

LOCK_FILE = ".lock"


class Sweep(Record, frozen=True, kw_only=True, tag="pit.sweep/1"):
    """A sweep. request: path of its request file. digest: of the request and its sites; a sweep has one request."""

    name: str
    request: str
    digest: str
    sites: tuple[str, ...]
    created: str


class SweepPoint(Record, frozen=True, kw_only=True, tag="pit.sweep-point/1"):
    """One point of a sweep and its run. index: from 0, in the order of the launches."""

    index: int
    point: Point
    name: str
    site: str
    run_dir: str


def request_digest(request_text: str, sites: tuple[str, ...]) -> str:
    """Return the digest of a request file's text and the sites of its sweep."""
    return hashlib.sha256("\0".join((request_text, *sites)).encode()).hexdigest()


def sweeps_dir(runs: Path) -> Path:
    """Return the folder of this user's sweeps. Raises ClusterError."""
    try:
        return runs / ("sweeps" if not runs.exists() or is_owned_by_user(runs) else f"sweeps.{os.geteuid()}")
    except OSError as error:
        raise from_os_error(error, runs) from error


def open_sweep(sweep_dir: Path, request: Path, digest: str, sites: tuple[str, ...], access: str) -> Sweep:
    """Return the sweep of a folder, which is created if missing.

    Raises UsageError for a sweep of another request or other sites, ConfigError for a folder that others can change.
    """
    sweep = run_folder.read_record(sweep_dir / "sweep.json", Sweep)
    if sweep is None:
        if not sweep_dir.is_dir():
            run_folder.make_run_dir(sweep_dir, access)
        (sweep_dir / "points").mkdir(0o755, exist_ok=True)
        sweep = Sweep(
            name=sweep_dir.name,
            request=str(request.absolute()),
            digest=digest,
            sites=sites,
            created=timestamps.now_rfc3339(),
        )
        run_folder.write_record(sweep_dir / "sweep.json", sweep, durable=True)
    run_folder.require_own_run(sweep_dir, group_above=access == "group")
    if sweep.digest != digest:
        message = f'sweep "{sweep.name}" is of another request or other sites (expected {sweep.request} as it was)'
        raise UsageError(message, where=str(sweep_dir), hint="choose another name: --sweep NAME")
    return sweep


def find_sweep(runs: Path, sweep: str) -> Path:
    """Return the folder of a sweep, by its path or by its name below a site's runs. Raises UsageError."""
    root = sweeps_dir(runs)
    for path in (root / sweep, Path(sweep)):
        if sweep and (path / "sweep.json").is_file():
            return path.resolve()
    names = sorted(path.parent.name for path in root.glob("*/sweep.json"))
    hint = f"there are: {', '.join(names[-5:])}" if names else "pit launch run REQUEST --set KEY=VALUE,VALUE makes one"
    raise UsageError(f'no sweep "{sweep}"', where=str(root), hint=hint)


def load_sweep(sweep_dir: Path) -> Sweep:
    """Return a sweep's record. Raises DataError."""
    sweep = run_folder.read_record(sweep_dir / "sweep.json", Sweep)
    if sweep is None:
        raise DataError("not a sweep: it has no sweep.json", where=str(sweep_dir))
    return sweep


def read_points(sweep_dir: Path, report_error: Callable[[Path, PitError], None] | None = None) -> list[SweepPoint]:
    """Return the points of a sweep by their index.

    report_error: gets the error of a damaged record, which is then left out; with None, DataError is raised.
    """
    paths = [path for path in (sweep_dir / "points").glob("*.json") if path.stem.isdecimal()]
    points = []
    for path in sorted(paths, key=lambda path: int(path.stem)):
        try:
            points.append(run_folder.read_record(path, SweepPoint))
        except DataError as error:
            if report_error is None:
                raise
            report_error(path, error)
    return [point for point in points if point]


def add_point(sweep_dir: Path, point: SweepPoint) -> None:
    """Record a point, durably, before its run is created; link to the run by its name."""
    run_folder.write_record(sweep_dir / "points" / f"{point.index}.json", point, durable=True)
    with contextlib.suppress(FileExistsError):
        (sweep_dir / point.name).symlink_to(point.run_dir)


def remove_point(sweep_dir: Path, point: SweepPoint) -> None:
    """Remove the record of a point whose run was not launched."""
    with contextlib.suppress(OSError):
        (sweep_dir / point.name).unlink(missing_ok=True)
    (sweep_dir / "points" / f"{point.index}.json").unlink(missing_ok=True)


def forget_removed_runs(sweep_dir: Path) -> None:
    """Remove the records of points whose runs are gone, and a sweep without points. The caller holds its lock."""
    points = read_points(sweep_dir)
    # Without the folder of runs, its file system may not be mounted.
    gone = [p for p in points if Path(p.run_dir).parent.is_dir() and not Path(p.run_dir).exists()]
    for point in gone:
        remove_point(sweep_dir, point)
    if len(gone) == len(points):
        shutil.rmtree(sweep_dir, ignore_errors=True)  # NFS keeps a folder with a file that is open, as the lock's


def next_index(points: Sequence[SweepPoint]) -> int:
    """Return the index of the next new point: refused points leave gaps."""
    return max((point.index for point in points), default=-1) + 1


def points_by_id(points: list[SweepPoint]) -> dict[str, SweepPoint]:
    """Return the recorded points by what makes points equal."""
    return {point_id(point.point): point for point in points}


def require_unique_names(points: list[SweepPoint]) -> None:
    """Raise ConfigError for two points with one name."""
    by_name: dict[str, SweepPoint] = {}
    for point in points:
        if other := by_name.get(point.name):
            message = f'points {other.index} and {point.index} have the same name "{point.name}"'
            raise ConfigError(message, where="--name", hint="use more keys in --name, or {index}")
        by_name[point.name] = point
