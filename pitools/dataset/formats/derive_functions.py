"""Load users' functions that derive features: `module:function`, or an entry point of the group `pitools.derive`."""

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
    """Load the function of this name. Raises ConfigError if it cannot be loaded or called."""
    try:
        loaded = _find_entry_point(name).load() if ":" not in name else _find_attribute(*name.split(":", 1))
    except ConfigError:
        raise
    except Exception as error:  # importing a user's module may raise anything
        hint = "install its package, or set PYTHONPATH to its folder"
        raise ConfigError(f"{name} cannot be loaded: {type(error).__name__}: {error}", hint=hint) from error
    if not callable(loaded):
        raise ConfigError(f"{name} is not a function", hint="give a function that takes the inputs as arrays")
    function: Callable[..., Any] = loaded
    return function


def _find_attribute(module: str, name: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(value, part):
            public = [key for key in vars(value) if not key.startswith("_")]
            raise ConfigError(f"{module} has no {part}", hint=suggest(part, public))
        value = getattr(value, part)
    return value


def _find_entry_point(name: str) -> importlib.metadata.EntryPoint:
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    if name not in entry_points.names:
        hint = suggest(name, entry_points.names) or "give module:function, or install the function's package"
        raise ConfigError(f"no entry point {name!r} in the group {ENTRY_POINT_GROUP}", hint=hint)
    return entry_points[name]


def function_provenance(name: str) -> dict[str, str]:
    """Return a function's name, its distributions with versions, and the digest of its module's source.

    The module, because its helper functions matter too. Raises ConfigError.
    """
    module_name = name.partition(":")[0] if ":" in name else _find_entry_point(name).module
    module = sys.modules.get(
        getattr(find_function(name), "__module__", None) or module_name
    )  # NumPy's ufuncs name none before 2.1
    file = Path(getattr(module, "__file__", None) or "")
    owners = importlib.metadata.packages_distributions().get(getattr(module, "__name__", "").partition(".")[0], [])
    if ":" not in name and (owner := _find_entry_point(name).dist) is not None:
        owners = [owner.name]
    versions = [f"{owner} {importlib.metadata.version(owner)}" for owner in sorted(set(owners))]
    source = digest.digest_file(file)[1] if file.is_file() else ""
    return {"function": name, "distribution": ", ".join(versions), "source": source}
