"""The development cluster `alpha`, for benchmarks that submit jobs."""

from __future__ import annotations

import sys
from pathlib import Path

from pitools.core.errors import PitError
from pitools.site import load
from pitools.site.schema import Site


def alpha() -> Site:
    """Return its site. Exits with the command to type if the cluster is not up."""
    try:
        site = load.load_site("alpha")
        Path(site.slurm.conf).read_text()
    except (PitError, OSError) as error:
        sys.exit(
            f'cluster alpha: not up: {error}\neval "$(scripts/devcluster up)"  (as root, with Debian\'s Slurm packages)'
        )
    return site
