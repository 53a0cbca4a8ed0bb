"""The exit codes that are ours: the package's docstring is their table."""

from __future__ import annotations

import signal

NO_LEAVE = 75
NOT_MET, MISPLACED, NO_DATA = 90, 91, 92
HUNG = 93
NOT_BEGUN = 94
TO_BE_CONTINUED = 95
NO_PORTS = 96

# What a program ends with that saved and stopped because it was told to.
STOPPED = (TO_BE_CONTINUED, 128 + signal.SIGTERM, 128 + signal.SIGUSR2)
