"""Functions of users that derive features: `module:function`, or the name of an entry point of `pitools.derive`."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from pitools.core.errors import ConfigError, suggest
from pitools.store import digest

ENTRY_POINT_GROUP = "pitools.derive"


@lru_cache(maxsize=64)
def find_function(name: str) -> Callable[..., Any]:
    """The function of this name. Raises ConfigError when there is none that can be called."""
    try:
        found = _entry_point(name).load() if ":" not in name else _attribute(*name.split(":", 1))
    except ConfigError:
        raise
    except Exception as error:  # it runs a module of the user's
        hint = "install its package, or set PYTHONPATH to its folder"
        raise ConfigError(f"{name} cannot be loaded: {type(error).__name__}: {error}", hint=hint) from error
    if not callable(found):
        raise ConfigError(f"{name} is not a function", hint="name one that takes the inputs as arrays")
    function: Callable[..., Any] = found
    return function


def _attribute(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [key for key in vars(found) if not key.startswith("_")]
            raise ConfigError(f"{module} has no {part}", hint=suggest(part, public))
        found = getattr(found, part)
    return found


def _entry_point(name: str) -> importlib.metadata.EntryPoint:
    known = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    if name not in known.names:
        hint = suggest(name, known.names) or "give module:function, or install the package that has it"
        raise ConfigError(f"no entry point {name!r} of the group {ENTRY_POINT_GROUP}", hint=hint)
    return known[name]


def function_provenance(name: str) -> dict[str, str]:
    """What a function was: its name, its distribution and version where it has one, and a digest of its module's
    source, which holds whatever helpers it has there. Raises ConfigError."""
    given = name.partition(":")[0] if ":" in name else _entry_point(name).module
    module = sys.modules.get(
        getattr(find_function(name), "__module__", None) or given
    )  # NumPy's ufuncs name none before 2.1
    file = Path(getattr(module, "__file__", None) or "")
    owners = importlib.metadata.packages_distributions().get(getattr(module, "__name__", "").partition(".")[0], [])
    if ":" not in name and (owner := _entry_point(name).dist) is not None:
        owners = [owner.name]
    versions = [f"{owner} {importlib.metadata.version(owner)}" for owner in sorted(set(owners))]
    source = digest.digest_file(file)[1] if file.is_file() else ""
    return {"function": name, "distribution": ", ".join(versions), "source": source}
