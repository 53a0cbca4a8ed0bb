"""The main job, as the commands a person would type, and a table of what happened.

python scripts/examples/main_job.py [recording.hdf5]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pitools.core.output import format_table
from pitools.core.units import format_duration, format_size

REPO = Path(__file__).resolve().parent.parent.parent
WORK, HERE = Path(".quickstart"), Path("scripts/examples")  # in the checkout, so that the commands read short
NVME = "/tmp/pitools-{user}/nvme"  # as the site `local` has it, so that the run finds the data already there


def pit(*words: str) -> list[dict[str, Any]]:
    """Run one command, shown as it would be typed; its records. Its talk and its progress bars go to the terminal."""
    print(f"\n$ {' '.join(words)}", file=sys.stderr)
    records = call(str(Path(sys.executable).with_name(words[0])), *words[1:])
    return [json.loads(line) for line in records.splitlines()]


def call(*argv: str) -> str:
    """Run one program; its output. One that fails, or Ctrl-C, which it has heard too, ends this one with its code."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            output = process.communicate()[0]
        except KeyboardInterrupt:
            process.wait()  # it may have a run to cancel: it is not to be killed meanwhile
            raise
    if process.returncode:
        sys.exit(process.returncode)
    return output


def main() -> None:
    """Record, ingest, stage, train, and say what happened."""
    recording = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    os.chdir(REPO)
    WORK.mkdir(exist_ok=True)
    if recording is None:
        recording = WORK / "recording.hdf5"
        print(f"\n$ python {HERE}/make_recording.py {recording}", file=sys.stderr)
        call(sys.executable, str(HERE / "make_recording.py"), str(recording))
    datasets = WORK / "datasets"
    dataset = pit("pit", "dataset", "ingest", str(recording), "--to", str(datasets), "--name", "demo")[-1]
    version = str(datasets / dataset["name"] / dataset["version"])
    staged = pit("pit-stage", "run", version, "--to", NVME, "--verify")[-1]
    request, data = str(HERE / "bc_jax.toml"), f"demo={version}"
    run = pit("pit", "launch", "run", request, "--site", "local", "--nodes", "2", "--data", data, "--wait")[-1]
    steps = pit("pit", "launch", "show", run["run_dir"], "--steps")[-1]
    report(dataset, staged, run, steps)


def report(dataset: dict[str, Any], staged: dict[str, Any], run: dict[str, Any], steps: dict[str, Any]) -> None:
    """Print what happened."""
    shares = ", ".join(f"{steps[f'{part}_share']:.0%} {part}" for part in ("input", "compute", "comm", "other"))
    rows = [
        ("dataset", f"{dataset['name']}: {dataset['episodes']} episodes, {dataset['steps']} steps"),
        (
            "staged",
            f"{format_size(staged['copied_bytes'])} copied, {format_size(staged['verified_bytes'])} verified"
            f" of {format_size(staged['bytes'])} ({staged['state']})",
        ),
        ("run", f"{run['state']}, {steps['ranks']} processes, {steps['steps']} steps"),
        ("loss", f"{steps['first_loss']:.4f} → {steps['last_loss']:.4f}"),
        ("step time", f"{format_duration(steps['step_s'])}: {shares}"),
        ("run folder", run["run_dir"]),
    ]
    print()
    for line in format_table(("what", "happened"), rows):
        print(line)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from what is done", file=sys.stderr)
        sys.exit(130)
