"""Check a version: its files, its values, and their drift from the parent version.

`check_version` reads a version and yields its findings; `drift` compares two manifests, without reading arrays.
"""

from pitools.dataset.check.check_version import check_version
from pitools.dataset.check.drift import check_drift

__all__ = ["check_drift", "check_version"]
