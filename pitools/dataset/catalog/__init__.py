"""What is known of the versions in a root: which there are, what names them, what may go."""

from pitools.dataset.catalog.versions import Array, Version, arrays, check_complete, check_name, describe
from pitools.store.versions import versions

__all__ = ["Array", "Version", "arrays", "check_complete", "check_name", "describe", "versions"]
