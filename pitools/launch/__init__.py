"""Launch runs, follow them, and continue them after faults.

`pitools.launch(…)` is a call of this package, with the arguments of `help("pitools.launch.api.launch")`.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """A package whose call is `api.launch`: `import pitools.launch.plan` makes it `pitools.launch` as well."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Start a run; see `pitools.launch.api.launch`."""
        from pitools.launch.api import launch

        return launch(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
