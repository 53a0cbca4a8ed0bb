"""The versions in a root: list and search them, tag, quarantine and retire them."""
