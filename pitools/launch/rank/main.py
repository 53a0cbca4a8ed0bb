"""Run one rank: find rank 0, set the environment, and run the user's program.

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
from pitools.launch.exit_codes import DATASET_MISSING, NO_PORTS, RENDEZVOUS_FAILED, WRONG_RANK0_NODE
from pitools.launch.plan import Plan
from pitools.launch.probes import oom, stacks
from pitools.launch.rank import environment, failure_record, rendezvous
from pitools.run import run_folder
from pitools.stage.cache import lease

RENDEZVOUS_TIMEOUT_S = 300.0  # as long as JAX itself waits: the slowest node may still be pulling its container
# bash outlives the signals at which its programs may save. A trap, and not `trap ''`: what bash ignores its programs
# would ignore too. At TERM it waits for the program it is in, goes no further, and returns that program's code.
_IGNORE_SIGNALS = "trap : HUP USR1 USR2; trap exit TERM; "


def run_rank(plan_path: str) -> None:
    """Run this rank of a plan in this process. Raises SystemExit with the program's code when it is not 0."""
    plan = decode_json(Path(plan_path).read_bytes(), Plan)
    request = plan.request
    prepare_rank(request.framework)
    from pitools.launch.provenance import import_guard  # what a person's own script starts has no copy of its code

    import_guard.check_imports(plan)
    if request.command:
        shell = ["bash", "-c", _IGNORE_SIGNALS + request.command]
        code = subprocesses.run_in_process_group(shell, env=os.environ, cwd=Path(request.workdir))
        if code:
            raise SystemExit(code)
        return
    os.chdir(request.workdir)
    sys.path.insert(0, request.workdir)
    module, function = request.entry.split(":")
    getattr(importlib.import_module(module), function)(**request.args)


def prepare_rank(framework: str) -> None:
    """Rendezvous with rank 0 and set this process's environment. Raises SystemExit with a code of pitools."""
    context = environment.load_rank_context(os.environ)
    stacks.register_handler(context.attempt_dir, context.rank)
    try:
        data = environment.dataset_dirs(context)
        _hold_leases(data)
        coordinator = find_rank0(context)
    except PitError as error:
        print(f"pit: rank {context.rank} on {context.node}: {error}", file=sys.stderr)
        codes = {Unreachable: RENDEZVOUS_FAILED, DataError: DATASET_MISSING, rendezvous.NoFreePorts: NO_PORTS}
        code = codes.get(type(error), WRONG_RANK0_NODE)
        raise SystemExit(code) from error
    # `python` in a command is this one, as it is for an entry: not whichever the submitter's shell had.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ.update(rank_environment(context, os.environ, framework, coordinator, data))
    record = run_folder.RankRecord(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=context.local_rank,
        node=context.node,
        pid=os.getpid(),
        coordinator=coordinator,
        data=data,
        oom_kills=oom.oom_kill_count(),
    )
    run_folder.write_record(context.attempt_dir / "ranks" / f"{context.rank}.json", record)


def _hold_leases(data: Mapping[str, str]) -> None:
    """Lease the staged datasets while this process lives, so that no other job evicts them."""
    for path in data.values():
        try:
            lease.acquire(Path(path))  # the descriptor is closed by nobody but the kernel
        except DataError:
            raise
        except PitError as error:  # a root that is mounted read-only, say: the data is there all the same
            print(f"pit: no lease: {error}", file=sys.stderr)


def find_rank0(context: environment.RankContext) -> str:
    """The coordinator's `address:port`, once this rank and rank 0 have proved to each other that they are one job."""
    if context.rank != 0:
        return rendezvous.find_coordinator(
            context.job_identity, context.head_address, context.rank, timeout_s=RENDEZVOUS_TIMEOUT_S
        )
    if context.node != context.head_node:
        raise ClusterError(f"rank 0 is on {context.node}, but the rank order begins with {context.head_node}")
    # The guard's thread keeps it for as long as this process lives, and with it its port: no other job of ours takes
    # the pair.
    guard = rendezvous.RendezvousServer(context.job_identity, context.head_address)
    guard.wait_for_ranks(RENDEZVOUS_TIMEOUT_S)
    return guard.coordinator


def rank_environment(
    context: environment.RankContext,
    environ: Mapping[str, str],
    framework: str,
    coordinator: str,
    data: Mapping[str, str],
) -> dict[str, str]:
    """The variables a rank gets on top of its job's."""
    variables = environment.common_variables(context, environ, data)
    if framework == "jax":
        variables |= environment.jax_variables(context, environ, coordinator)
    elif framework == "torch":
        variables |= environment.torch_variables(context, coordinator)
    return variables


def main(argv: list[str]) -> int:
    """One rank, in one of the three ways that the module's docstring shows."""
    mode, *rest = argv or [""]
    if mask := os.environ.pop("PIT_UMASK", ""):  # that of the submitter's shell, not of the job's own logs
        os.umask(int(mask, 8))
        os.environ["SLURM_UMASK"] = mask  # of steps that the program starts
    with failure_record.record_failure():
        if mode == "plan" and len(rest) == 1:
            run_rank(rest[0])
        elif mode == "submitit" and len(rest) == 1:
            from submitit.core.submission import process_job

            os.environ["SUBMITIT_EXECUTOR"] = "slurm"
            process_job(rest[0])
        elif mode in ("jax", "torch", "none") and len(rest) > 1 and rest[0] == "--":
            prepare_rank(mode)
            if code := subprocesses.run_in_process_group(rest[1:], env=os.environ):
                raise SystemExit(code)
        else:
            print("usage: python -m pitools.launch.rank.main jax|torch|none -- COMMAND…", file=sys.stderr)
            return 2
    return 0


def exit_process(code: int) -> None:
    """End this process with a code, at once if it is a failure.

    On the way out JAX would wait for the other ranks, which wait for this one, and then abort with a code of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    try:
        exit_process(main(sys.argv[1:]))
    except SystemExit as error:
        exit_process(error.code if isinstance(error.code, int) else 1)
    except BaseException:  # noqa: BLE001 (whatever it was, this process is about to end with it)
        traceback.print_exc()
        exit_process(1)
