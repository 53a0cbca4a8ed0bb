"""What is known of the versions in a root: which there are, what names them, what may go."""

from pitools.dataset.versions import Array, Version, arrays, check_complete, check_name, describe
from pitools.store.version_list import versions

__all__ = ["Array", "Version", "arrays", "check_complete", "check_name", "describe", "versions"]
