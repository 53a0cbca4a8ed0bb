"""pitools: a Slurm-centric HPC toolkit of composable commands for robot-model training.

    import pitools

    run = pitools.launch("request.toml", site="alpha", nodes=4)     start a run; `Run` has its state, logs, causes
    pitools.runs(site="alpha")                                      all runs of a site
    pitools.Executor(site="alpha")                                  submitit's interface, for callables
    pitools.load("datasets/reach", windows={"action": (0, 16)}, batch_size=64)  batches for NumPy, torch or JAX

Importing pitools imports nothing else; each name is imported at its first use.
"""

TYPE_CHECKING = False  # as typing's, without its import, which takes longer than everything else here
__version__ = "0.1.0"
__all__ = ["Executor", "Run", "launch", "load", "runs"]

if TYPE_CHECKING:
    from pitools.launch.api import Run, launch, runs
    from pitools.launch.auto_executor import Executor
    from pitools.loader.api import load

# `launch` is also the name of a package, which can be called: see there.
_MODULES = {
    "Executor": "pitools.launch.auto_executor",
    "Run": "pitools.launch.api",
    "load": "pitools.loader.api",
    "runs": "pitools.launch.api",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'pitools' has no attribute {name!r}")
    from importlib import import_module

    value = import_module("pitools.launch") if name == "launch" else getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
