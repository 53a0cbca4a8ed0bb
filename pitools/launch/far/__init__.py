"""Tickets of a site that shares no file system with this machine: the same functions as launch/near.py.

What a run needs travels over the site's `reach`: the run's folder with a snapshot of the request's workdir, and the
datasets that are not there yet. Everything may be repeated after a connection was lost, and makes one job of a name.
"""

from pitools.launch.far.data import missing, send
from pitools.launch.far.follow import cancel, fetch, forget, state, take_back
from pitools.launch.far.job import Sent, submit
from pitools.launch.far.there import run_dir

__all__ = [
    "Sent", "cancel", "fetch", "forget", "missing", "run_dir", "send", "state", "submit", "take_back",
]  # fmt: skip
