"""Launch the points of a sweep that have no run yet. Safe to repeat after any interruption.

point on disk ─▶ run folder ─┬─ alike, in Slurm ─▶ one job array ─▶ job.json of each run
                             └─ else ────────────▶ one job each
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock
from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import array_job, local_process, submissions, submit
from pitools.launch.sweep import sweep_folder
from pitools.launch.sweep.points import Point, point_id
from pitools.launch.sweep.sweep_folder import SweepPoint
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.errors import OutcomeUnknown

_LOCK_TIMEOUT_S = 10.0
_LOCAL_POLL_S = 0.5


class PlannedPoint(NamedTuple):
    """A point that is to be launched: its site, and its plan, which has the run's name."""

    point: Point
    site: Site
    plan: Plan


class LaunchResult(NamedTuple):
    """The points of a launch, in their order. launched, existing: how many runs were started, and were there before."""

    points: list[SweepPoint]
    launched: int
    existing: int


def launch_points(
    sweep_dir: Path,
    planned: Sequence[PlannedPoint],
    *,
    at_a_time: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> LaunchResult:
    """Start a run for each point that has none. at_a_time: how many may run at once at each site, 0 for no limit.

    In Slurm the limit is that of the array; on a site without Slurm this process waits until a run has ended. advance:
    gets the number of points done. Raises TryLater while another process launches this sweep, and the errors of a
    submission: points that were not launched are launched by a repetition.
    """
    with lock(sweep_dir / sweep_folder.LOCK_FILE, f"sweep {sweep_dir.name}", timeout_s=_LOCK_TIMEOUT_S):
        recorded = sweep_folder.read_points(sweep_dir)
        for array_dir in sorted((sweep_dir / "arrays").glob("*/runs")):
            _complete_array(array_dir.parent, {point.run_dir: point for point in recorded}, planned)
        by_id = sweep_folder.points_by_id(recorded)
        points = _number_points(planned, by_id, sweep_folder.next_index(recorded))
        sweep_folder.require_unique_names([*recorded, *(point for point in points if point not in recorded)])
        existing = [point for point in points if _has_job(Path(point.run_dir))]
        advance(len(existing))
        missing = [(point, plan) for point, plan in zip(points, planned, strict=True) if point not in existing]
        for group in _alike(missing):
            _launch_group(sweep_dir, group, at_a_time, advance)
        return LaunchResult(points, len(missing), len(existing))


def _number_points(planned: Sequence[PlannedPoint], by_id: Mapping[str, SweepPoint], first: int) -> list[SweepPoint]:
    """Return the record of each point: that on disk, or a new one with the next number."""
    points = []
    for item in planned:
        point = by_id.get(point_id(item.point))
        if point is None:
            name = item.plan.name
            run_dir = Path(item.plan.runs_dir) / run_folder.new_run_id(name)
            point = SweepPoint(index=first, point=item.point, name=name, site=item.site.name, run_dir=str(run_dir))
            first += 1
        points.append(point)
    return points


def _has_job(run_dir: Path) -> bool:
    """Return whether a run exists and its first job is known."""
    return (run_dir / "plan.json").exists() and submissions.latest_job(run_dir) is not None


def _alike(missing: Sequence[tuple[SweepPoint, PlannedPoint]]) -> Iterable[list[tuple[SweepPoint, PlannedPoint]]]:
    """Yield the points in groups that can be one array each, in their order."""
    groups: dict[tuple[str, tuple[str, ...] | int], list[tuple[SweepPoint, PlannedPoint]]] = {}
    for point, item in missing:
        is_alone = not array_job.is_array_plan(item.plan, item.site) or (Path(point.run_dir) / "plan.json").exists()
        flags = point.index if is_alone else array_job.array_flags(item.plan, item.site)
        groups.setdefault((item.site.name, flags), []).append((point, item))
    return groups.values()


def _launch_group(
    sweep_dir: Path,
    group: Sequence[tuple[SweepPoint, PlannedPoint]],
    at_a_time: int,
    advance: Callable[[int], None],
) -> None:
    _, first = group[0]
    submit.check_submittable(first.plan, first.site)
    if len(group) > 1:
        size = array_job.max_tasks(first.site)
        for start in range(0, len(group), size):
            _launch_array(sweep_dir, group[start : start + size], at_a_time, advance)
        return
    ((point, item),) = group
    if item.site.scheduler == "none":
        _wait_for_turn(sweep_dir, item.site, at_a_time or 1)
    sweep_folder.add_point(sweep_dir, point)
    run_dir = Path(point.run_dir)
    try:
        if (run_dir / "plan.json").exists():  # its submitter was killed before the submission
            resume_run(run_dir, item.site)
        else:
            submit.submit_run(item.plan, item.site, run_id=run_dir.name)
    except OutcomeUnknown:
        raise
    except PitError:
        if not run_dir.exists():
            sweep_folder.remove_point(sweep_dir, point)
        raise
    advance(1)


def _launch_array(
    sweep_dir: Path, group: Sequence[tuple[SweepPoint, PlannedPoint]], at_a_time: int, advance: Callable[[int], None]
) -> None:
    """Create the folders of several runs, and submit their first jobs as one array."""
    _, first = group[0]
    stamp = timestamps.now_rfc3339()[:19].replace("-", "").replace(":", "").replace("T", "-")
    array_dir = sweep_dir / "arrays" / f"{sweep_dir.name}-{group[0][0].index}-{stamp}"
    run_dirs = [Path(point.run_dir) for point, _ in group]
    try:
        (sweep_dir / "arrays").mkdir(0o755, exist_ok=True)
        for task, (point, item) in enumerate(group):
            sweep_folder.add_point(sweep_dir, point)
            _create_task(Path(point.run_dir), item, array_dir.name, str(task))
            advance(1)
        array_job.create_array(array_dir, first.plan, first.site, run_dirs, at_a_time)
        array_job.submit_array(array_dir, first.plan, first.site)
    except BaseException as error:
        if not submissions.job_numbers(array_dir):  # sbatch was not called, or refused the job
            _undo_array(sweep_dir, array_dir, group)
        if isinstance(error, OSError):
            raise from_os_error(error, array_dir) from error
        raise


def _create_task(run_dir: Path, item: PlannedPoint, array: str, task: str) -> None:
    """Create a run's folder, with its script and the intent to submit it as a task of an array."""

    def populate(building: Path) -> None:
        script = planning.render_script(item.plan, item.site, run_dir=str(run_dir))
        write_atomic(building / "script.sbatch", script, durable=False)
        submissions.record_intent(building, 0, item.site, (), array=array, task=task)

    submit.create_run_dir(run_dir, item.plan, item.site, populate)


def _undo_array(sweep_dir: Path, array_dir: Path, group: Sequence[tuple[SweepPoint, PlannedPoint]]) -> None:
    """Remove the folders and records of runs whose array was not submitted."""
    for point, _ in group:
        shutil.rmtree(point.run_dir, ignore_errors=True)
        sweep_folder.remove_point(sweep_dir, point)
    shutil.rmtree(array_dir, ignore_errors=True)


def _complete_array(array_dir: Path, recorded: Mapping[str, SweepPoint], planned: Sequence[PlannedPoint]) -> None:
    """Submit an array whose submission was interrupted, and record the jobs of its runs."""
    unknown = [run for run in array_job.array_runs(array_dir) if run.is_dir() and submissions.is_unresolved(run, 0)]
    if not unknown:
        return
    sites = {item.site.name: item.site for item in planned}
    point = recorded.get(str(unknown[0]))
    if point is None or point.site not in sites:
        print(f"pit: {array_dir}: its site is not among those of this launch: not completed", file=sys.stderr)
        return
    array_job.submit_array(array_dir, planning.load_plan(unknown[0]), sites[point.site])


def _wait_for_turn(sweep_dir: Path, site: Site, at_a_time: int) -> None:
    """Wait until fewer than `at_a_time` runs of the sweep have a process on this machine."""
    while True:
        running = [
            point
            for point in sweep_folder.read_points(sweep_dir)
            if point.site == site.name
            and (Path(point.run_dir) / "plan.json").exists()
            and local_process.is_supervised(Path(point.run_dir))
        ]
        if len(running) < at_a_time:
            return
        time.sleep(_LOCAL_POLL_S)
