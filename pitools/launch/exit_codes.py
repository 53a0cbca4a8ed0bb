"""The exit codes that pitools gives a job; the docstring of `pitools.launch.job` explains each."""

from __future__ import annotations

import signal

NOT_GRANTED = 75
RENDEZVOUS_FAILED, WRONG_RANK0_NODE, DATASET_MISSING = 90, 91, 92
HUNG = 93
ATTEMPT_NOT_STARTED = 94
STOPPED_FOR_RESUME = 95
NO_PORTS = 96
PREFLIGHT_FAILED = 97

# Exit codes of a program that saved and stopped because of a signal.
STOPPED_CODES = (STOPPED_FOR_RESUME, 128 + signal.SIGTERM, 128 + signal.SIGUSR2)
