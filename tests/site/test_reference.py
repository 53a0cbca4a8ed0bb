"""What the reference of every key says of them."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
# Where a value is filled in or shown, and nothing depends on it.
SHOWN = {"site/model.py", "site/probe.py", "place/estimate/explain.py"}


def test_nothing_depends_on_a_key_for_information() -> None:
    """A key that is marked † is read nowhere in the product but where it is shown."""
    reference = (REPO / "site_configs" / "README.md").read_text()
    keys = re.findall(r"`(\w+)` †", reference)
    assert len(keys) > 3
    keys[keys.index("version")] = r"slurm\.version"  # other things have versions, too
    readers = re.compile(rf"\b(?:site|said|part|partition|topology)\.({'|'.join(keys)})\b")
    sources = {path.relative_to(REPO / "pitools").as_posix(): path for path in (REPO / "pitools").rglob("*.py")}
    found = {name: readers.findall(path.read_text()) for name, path in sources.items() if name not in SHOWN}
    assert {name: read for name, read in found.items() if read} == {}
