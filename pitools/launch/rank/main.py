"""Run one rank: find rank 0, set the environment, and run the user's program.

    python -m pitools.launch.rank.main jax -- python train.py …      in a script that a user submits
    python -m pitools.launch.rank.main plan <run>/plan.json          in a run
    python -m pitools.launch.rank.main submitit FOLDER               for a callable that submitit pickled into FOLDER

The exit code is the program's, or one of pitools: see pitools/launch/job.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, DataError, PitError, Unreachable
from pitools.core.record import decode_json
from pitools.launch.exit_codes import DATASET_MISSING, NO_PORTS, RENDEZVOUS_FAILED, WRONG_RANK0_NODE
from pitools.launch.plan import Plan
from pitools.launch.probes import oom, stacks
from pitools.launch.rank import environment, failure_record, rendezvous
from pitools.launch.request import Parameter, command_text, param_variables
from pitools.run import run_folder
from pitools.stage.cache import lease

RENDEZVOUS_TIMEOUT_S = 300.0  # JAX's own time-out: the slowest node may still be pulling its container
# bash must survive the signals at which its programs save. `trap :` instead of `trap ''`: programs inherit ignored
# signals. On TERM, bash waits for its current program, starts no further one, and returns that program's code.
_IGNORE_SIGNALS = "trap : HUP USR1 USR2; trap exit TERM; "


def run_rank(plan_path: str) -> None:
    """Run this rank of a plan in this process. Raises SystemExit with the program's exit code unless that is 0."""
    plan = decode_json(Path(plan_path).read_bytes(), Plan)
    request = plan.request
    prepare_rank(request.framework)
    from pitools.launch.provenance import import_guard  # only a run has a copy of the code to guard

    import_guard.check_imports(plan)
    os.environ.update(param_variables(request))
    if request.command:
        shell = ["bash", "-o", "pipefail", "-c", _IGNORE_SIGNALS + command_text(request)]
        code = subprocesses.run_in_process_group(shell, env=os.environ, cwd=Path(request.workdir))
        if code:
            raise SystemExit(code)
        return
    os.chdir(request.workdir)
    sys.path.insert(0, request.workdir)
    module, function = request.entry.split(":")
    os.environ[environment.IMPORTING] = request.entry
    try:
        entry = getattr(importlib.import_module(module), function)
    finally:
        del os.environ[environment.IMPORTING]
    entry(**request.args, **_param_arguments(entry, request.params))


def _param_arguments(entry: Callable[..., object], params: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the arguments that give an entry its parameters: one mapping if it has an argument `params`."""
    if params and "params" in inspect.signature(entry).parameters:
        return {"params": dict(params)}
    return dict(params)


def prepare_rank(framework: str) -> None:
    """Rendezvous with rank 0, and set this process's environment. Raises SystemExit with an exit code of pitools."""
    try:
        context = environment.load_rank_context(os.environ)
    except PitError as error:
        print(f"pit: {error}; {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
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
    folders = python_folders(Path(sys.executable), context.attempt_dir)
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
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
        t=timestamps.now_rfc3339(),
    )
    run_folder.write_record(context.attempt_dir / "ranks" / f"{context.rank}.json", record)


def python_folders(executable: Path, attempt_dir: Path) -> list[str]:
    """Return the first folders of a rank's PATH, in which `python` is this interpreter, as it is for an entry.

    A folder without such a `python`, as Debian's /usr/bin, is preceded by one in the attempt that has a link.
    """
    folder, shim = executable.parent, attempt_dir / "bin"
    with contextlib.suppress(OSError):
        if (folder / "python").samefile(executable):
            return [str(folder)]
    with contextlib.suppress(OSError):  # a full disk: the program may do without `python`
        shim.mkdir(mode=0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # made by another rank
            (shim / "python").symlink_to(executable)
    return [str(shim), str(folder)]


def _hold_leases(data: Mapping[str, str]) -> None:
    """Lease the staged datasets until this process ends, so that no other job evicts them."""
    for path in data.values():
        try:
            lease.acquire(Path(path))  # the descriptor stays open until the process ends
        except DataError:
            raise
        except PitError as error:  # e.g. a root mounted read-only; the data is readable
            print(f"pit: no lease on a dataset: {error}", file=sys.stderr)


def find_rank0(context: environment.RankContext) -> str:
    """Return the coordinator's `address:port` after this rank and rank 0 have authenticated each other."""
    if context.rank != 0:
        return rendezvous.find_coordinator(
            context.job_identity, context.head_address, context.rank, timeout_s=RENDEZVOUS_TIMEOUT_S
        )
    if context.node != context.head_node:
        raise ClusterError(f"rank 0 is on {context.node} (expected {context.head_node}, the first of the rank order)")
    # The server's thread holds the guard port until this process ends: no other job of pitools takes the pair.
    server = rendezvous.RendezvousServer(context.job_identity, context.head_address)
    server.wait_for_ranks(RENDEZVOUS_TIMEOUT_S)
    return server.coordinator


def rank_environment(
    context: environment.RankContext,
    environ: Mapping[str, str],
    framework: str,
    coordinator: str,
    data: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that a rank's program gets in addition to its job's. data: dataset name → folder."""
    variables = environment.common_variables(context, environ, data)
    if framework == "jax":
        variables |= environment.jax_variables(context, environ, coordinator)
    elif framework == "torch":
        variables |= environment.torch_variables(context, coordinator)
    return variables


def main(argv: list[str]) -> int:
    """Run one rank in one of the three modes of the module's docstring, and return its exit code."""
    mode, *rest = argv or [""]
    if mask := os.environ.pop("PIT_UMASK", ""):  # the submitter's umask, unlike that of the job's own logs
        os.umask(int(mask, 8))
        os.environ["SLURM_UMASK"] = mask  # for steps that the program starts
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
    """End this process with an exit code; without clean-up if it is not 0.

    JAX's clean-up would wait for the other ranks, which wait for this one, and then abort with another code. Output
    that cannot be written, to a full disk, does not change the code.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # ValueError: closed by the program
        os._exit(code)
    if code:
        os._exit(code)


if __name__ == "__main__":
    try:
        exit_process(main(sys.argv[1:]))
    except SystemExit as error:
        exit_process(failure_record.exit_code(error))
    except BaseException:  # noqa: BLE001 (this process ends with the error)
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        exit_process(1)
