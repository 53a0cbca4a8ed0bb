"""Whether a version can be trusted: its files, what is in them, and what they are next to the version before.

`version` reads a version and yields what is wrong with it; `gate` compares two manifests, and reads nothing.
"""

from pitools.dataset.check.check_version import check_version
from pitools.dataset.check.drift import check_drift

__all__ = ["check_drift", "check_version"]
