"""Tickets of a site that shares no file system with this machine: the same functions as launch/tickets/shared_fs.py.

What a run needs travels over the site's `reach`: the run's folder with a snapshot of the request's workdir, and the
datasets that are not there yet. Everything may be repeated after a connection was lost, and makes one job of a name.
"""

from pitools.launch.tickets.remote.datasets import missing, send
from pitools.launch.tickets.remote.paths import is_far, run_dir
from pitools.launch.tickets.remote.states import cancel, fetch, forget, state, take_back
from pitools.launch.tickets.remote.submission import Sent, submit

__all__ = [
    "Sent",
    "cancel",
    "fetch",
    "forget",
    "is_far",
    "missing",
    "run_dir",
    "send",
    "state",
    "submit",
    "take_back",
]
