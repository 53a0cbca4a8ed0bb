"""What runs as every rank: find the others, set the environment, become the user's program.

    python -m pitools.launch.rank.main jax -- python train.py …      of a script that a person submits
    python -m pitools.launch.rank.main plan <run>/plan.json          of a run
    python -m pitools.launch.rank.main submitit FOLDER               of a callable that submitit submitted: its pickle

Its exit code is the program's, or one of ours: see pitools/launch/job.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, DataError, PitError, Unreachable
from pitools.core.record import decode_json
from pitools.launch.exit_codes import MISPLACED, NO_DATA, NO_PORTS, NOT_MET
from pitools.launch.plan import Plan
from pitools.launch.probes import oom, stacks
from pitools.launch.rank import environment, failure_record, rendezvous
from pitools.run import run_folder
from pitools.stage.cache import lease

JOIN_S = 300.0  # as long as JAX itself waits: the slowest node may still be pulling its container
# bash outlives the signals at which its programs may save. A trap, and not `trap ''`: what bash ignores its programs
# would ignore too. At TERM it waits for the program it is in, goes no further, and returns that program's code.
_OUTLIVE = "trap : HUP USR1 USR2; trap exit TERM; "


def run(plan_path: str) -> None:
    """Run this rank of a plan in this process. Raises SystemExit with the program's code when it is not 0."""
    plan = decode_json(Path(plan_path).read_bytes(), Plan)
    request = plan.request
    _enter(request.framework)
    from pitools.launch.provenance import import_guard  # what a person's own script starts has no copy of its code

    import_guard.check_running(plan)
    if request.command:
        shell = ["bash", "-c", _OUTLIVE + request.command]
        code = subprocesses.in_group(shell, env=os.environ, cwd=Path(request.workdir))
        if code:
            raise SystemExit(code)
        return
    os.chdir(request.workdir)
    sys.path.insert(0, request.workdir)
    module, function = request.entry.split(":")
    getattr(importlib.import_module(module), function)(**request.args)


def _enter(framework: str) -> None:
    """Meet the other ranks and set this process's environment. Raises SystemExit with a code of ours."""
    at = environment.place(os.environ)
    stacks.arm(at.attempt_dir, at.rank)
    try:
        data = environment.datasets(at)
        _lease(data)
        coordinator = _meet(at)
    except PitError as error:
        print(f"pit: rank {at.rank} on {at.node}: {error}", file=sys.stderr)
        codes = {Unreachable: NOT_MET, DataError: NO_DATA, rendezvous.NoPorts: NO_PORTS}
        code = codes.get(type(error), MISPLACED)
        raise SystemExit(code) from error
    # `python` in a command is this one, as it is for an entry: not whichever the submitter's shell had.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ.update(variables(at, os.environ, framework, coordinator, data))
    record = run_folder.Rank(
        rank=at.rank,
        world_size=at.world_size,
        local_rank=at.local_rank,
        node=at.node,
        pid=os.getpid(),
        coordinator=coordinator,
        data=data,
        oom_kills=oom.oom_kills(),
    )
    run_folder.write(at.attempt_dir / "ranks" / f"{at.rank}.json", record)


def _lease(data: Mapping[str, str]) -> None:
    """Hold what was staged for as long as this process lives, so that no other job makes room with it."""
    for path in data.values():
        try:
            lease.hold(Path(path))  # the descriptor is closed by nobody but the kernel
        except DataError:
            raise
        except PitError as error:  # a root that is mounted read-only, say: the data is there all the same
            print(f"pit: no lease: {error}", file=sys.stderr)


def _meet(at: environment.Place) -> str:
    """The coordinator's `address:port`, once this rank and rank 0 have proved to each other that they are one job."""
    if at.rank != 0:
        return rendezvous.join(at.job, at.address, at.rank, timeout_s=JOIN_S)
    if at.node != at.head:
        raise ClusterError(f"rank 0 is on {at.node}, but the rank order begins with {at.head}")
    # The guard's thread keeps it for as long as this process lives, and with it its port: no other job of ours takes
    # the pair.
    guard = rendezvous.Guard(at.job, at.address)
    guard.wait(JOIN_S)
    return guard.coordinator


def variables(
    at: environment.Place, environ: Mapping[str, str], framework: str, coordinator: str, data: Mapping[str, str]
) -> dict[str, str]:
    """The variables a rank gets on top of its job's."""
    added = environment.common(at, environ, data)
    if framework == "jax":
        added |= environment.jax(at, environ, coordinator)
    elif framework == "torch":
        added |= environment.torch(at, coordinator)
    return added


def main(argv: list[str]) -> int:
    """One rank, in one of the three ways that the module's docstring shows."""
    how, *rest = argv or [""]
    if mask := os.environ.pop("PIT_UMASK", ""):  # that of the submitter's shell, not of the job's own logs
        os.umask(int(mask, 8))
        os.environ["SLURM_UMASK"] = mask  # of steps that the program starts
    with failure_record.of_failure():
        if how == "plan" and len(rest) == 1:
            run(rest[0])
        elif how == "submitit" and len(rest) == 1:
            from submitit.core.submission import process_job

            os.environ["SUBMITIT_EXECUTOR"] = "slurm"
            process_job(rest[0])
        elif how in ("jax", "torch", "none") and len(rest) > 1 and rest[0] == "--":
            _enter(how)
            if code := subprocesses.in_group(rest[1:], env=os.environ):
                raise SystemExit(code)
        else:
            print("usage: python -m pitools.launch.rank.main jax|torch|none -- COMMAND…", file=sys.stderr)
            return 2
    return 0


def end(code: int) -> None:
    """End this process with a code, at once if it is a failure.

    On the way out JAX would wait for the other ranks, which wait for this one, and then abort with a code of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    try:
        end(main(sys.argv[1:]))
    except SystemExit as error:
        end(error.code if isinstance(error.code, int) else 1)
    except BaseException:  # noqa: BLE001 (whatever it was, this process is about to end with it)
        traceback.print_exc()
        end(1)
