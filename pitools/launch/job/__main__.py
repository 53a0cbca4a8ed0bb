"""`python -m pitools.launch.job`: what the job script calls. The package's docstring shows how."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch import exit_codes
from pitools.launch.job import wait_for

RETRY = "retry"
_USAGE = "usage: python -m pitools.launch.job begin | attend NAME -- COMMAND… | end CODE"


def main(argv: list[str]) -> int:
    """One of the words that the docstring shows."""
    began = time.monotonic()
    if "PIT_RUN_DIR" in os.environ:
        wait_for.until_writable(Path(os.environ["PIT_RUN_DIR"]))
    match argv:
        case ["begin"]:
            return _begin()
        case ["attend", name, "--", *words] if words:
            from pitools.launch.job import step_runner

            return step_runner.step(words, Path(os.environ["PIT_ATTEMPT_DIR"]), name=name)
        case ["end", code] if code.isdecimal():
            return _end(int(code), time.monotonic() - began)
    print(_USAGE, file=sys.stderr)
    return 2


def _begin() -> int:
    from pitools.launch.job import begin_attempt, job_context

    try:
        print(begin_attempt.begin(job_context.job(os.environ)))
    except begin_attempt.NoBeginning as no:
        print(f"pit: {no}", file=sys.stderr)
        # Without a line the script ends, with this code.
        return no.code
    except (PitError, OSError) as error:
        print(f"pit: no attempt: {error}", file=sys.stderr)
        return exit_codes.NOT_BEGUN
    return 0


def _end(code: int, waited_s: float) -> int:
    from pitools.launch.job import end_attempt, job_context

    attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
    job_code = end_attempt.end(job_context.job(os.environ), attempt, code, in_slurm=True, waited_s=waited_s)
    print(RETRY if job_code is None else job_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
