"""The exit codes that are ours: the package's docstring is their table."""

from __future__ import annotations

import signal

NOT_GRANTED = 75
RENDEZVOUS_FAILED, WRONG_RANK0_NODE, DATASET_MISSING = 90, 91, 92
HUNG = 93
ATTEMPT_NOT_STARTED = 94
STOPPED_FOR_RESUME = 95
NO_PORTS = 96

# What a program ends with that saved and stopped because it was told to.
STOPPED_CODES = (STOPPED_FOR_RESUME, 128 + signal.SIGTERM, 128 + signal.SIGUSR2)
