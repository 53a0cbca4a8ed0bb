"""Tickets at a site that shares no file system with this machine: the same functions as launch/tickets/shared_fs.py.

The site's `connection` uploads the run's folder, with a copy of the request's workdir, and the missing datasets. Every
function may be repeated after a lost connection; a name becomes one job.
"""

from pitools.launch.tickets.remote.datasets import find_datasets, missing_datasets, send_dataset
from pitools.launch.tickets.remote.paths import is_remote, ticket_dir
from pitools.launch.tickets.remote.paths import remote_runs_dir as runs_dir
from pitools.launch.tickets.remote.states import (
    cancel_tickets,
    fetch_resumable,
    fetch_run,
    remove_ticket_dirs,
    revoke,
    ticket_states,
    withdraw_grants,
)
from pitools.launch.tickets.remote.submission import RemoteJobRef, submit_ticket

__all__ = [
    "RemoteJobRef",
    "cancel_tickets",
    "fetch_resumable",
    "fetch_run",
    "find_datasets",
    "is_remote",
    "missing_datasets",
    "remove_ticket_dirs",
    "revoke",
    "runs_dir",
    "send_dataset",
    "submit_ticket",
    "ticket_dir",
    "ticket_states",
    "withdraw_grants",
]
