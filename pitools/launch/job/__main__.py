"""Parse the subcommands of `python -m pitools.launch.job`, for the job script. The package's docstring lists them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch.job import wait_for

RETRY = "retry"
_USAGE = "usage: python -m pitools.launch.job begin | step NAME -- COMMAND… | end CODE"


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code."""
    began = time.monotonic()
    if "PIT_RUN_DIR" in os.environ:
        wait_for.wait_writable(Path(os.environ["PIT_RUN_DIR"]))
    match argv:
        case ["begin"]:
            return _main_begin()
        case ["step", name, "--", *command] if command:
            from pitools.launch.job import step_runner

            return step_runner.run_step(command, Path(os.environ["PIT_ATTEMPT_DIR"]), name=name)
        case ["end", code] if code.isdecimal():
            return _main_end(int(code), time.monotonic() - began)
    print(_USAGE, file=sys.stderr)
    return 2


def _main_begin() -> int:
    from pitools.launch.job import begin_attempt, job_context

    try:
        print(begin_attempt.begin_attempt(job_context.load_context(os.environ)))
    except (begin_attempt.AttemptRefused, PitError, OSError) as error:
        return begin_attempt.report_refusal(error)  # without a path the script exits with this code
    return 0


def _main_end(code: int, waited_s: float) -> int:
    from pitools.launch.job import end_attempt, job_context

    attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
    job_code = end_attempt.end_attempt(
        job_context.load_context(os.environ), attempt, code, in_slurm=True, waited_s=waited_s
    )
    print(RETRY if job_code is None else job_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
