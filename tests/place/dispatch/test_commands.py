"""`pit place run`, `tick`, `watch` and `list` over sites that do not answer, with files that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PIT = Path(sys.executable).with_name("pit")
REQUEST = 'name = "bc"\ncommand = "true"\ntime = "1m"\n'
SITE = """\
name = "{name}"
[connection]
kind = "ssh"
host = "{name}"
[defaults]
partition = "train"
[paths]
runs = "/runs"
python = "/python"
[partitions.train]
nodes = 2
"""


class Machine:
    """A user's machine with sites dark and faint, whose hosts refuse every connection until they are told not to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sites = folder / "sites"
        (folder / "bin").mkdir()
        self.sites.mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text('#!/bin/sh\n[ "$1" = -G ] && exit 1\necho "Connection refused" >&2\nexit 255\n')
        ssh.chmod(0o755)
        (folder / "bc.toml").write_text(REQUEST)
        for name in ("dark", "faint"):
            self.site(name)

    def site(self, name: str, **replaced: str) -> None:
        text = SITE.format(name=name)
        for old, new in replaced.items():
            text = text.replace(f"{old} = ", new)
        (self.sites / f"{name}.toml").write_text(text)

    @contextmanager
    def start(self, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        """A command at work; killed when it takes far too long, so that nobody reads for ever."""
        env = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "PIT_SITE_PATH": str(self.sites),
            "PIT_QUEUE": str(self.folder / "place"),
            **more,
        }
        argv = [str(PIT), "place", *words]
        with subprocess.Popen(
            argv, env=env, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            timer = threading.Timer(60, process.kill)
            timer.start()
            try:
                yield process
            finally:
                timer.cancel()
                process.kill()

    def pit(self, *words: str, **more: str) -> tuple[int | None, str, str]:
        with self.start(*words, **more) as process:
            out, err = process.communicate()
        return process.returncode, out, err


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_tick_with_every_site_dark(machine: Machine) -> None:
    """Exit code 75 at each; cron, which mails what is on stderr, has one line a site, when it went dark."""
    assert machine.pit("run", "bc.toml", "--site", "dark", "--site", "faint")[0] == 0
    code, _, output = machine.pit("tick")
    assert (code, [line.split(":")[1].strip() for line in output.splitlines()]) == (75, ["dark", "faint"])
    for _ in range(2):
        code, _, output = machine.pit("tick")
        assert (code, output) == (75, "")
    # The queue tells it as long as it is so.
    code, out, output = machine.pit("list")
    assert (code, len(output.splitlines())) == (0, 2)
    assert "Connection refused" in json.loads(out)["reason"]


def test_a_tick_without_anything_to_ask_is_content(machine: Machine) -> None:
    """An empty queue has no site that could be silent. One that is new may be one whose disk is not mounted."""
    code, out, err = machine.pit("tick")
    assert (code, out, f"{machine.folder}/place is new" in err) == (0, "", True)
    assert machine.pit("tick") == (0, "", "")


@pytest.mark.parametrize("command", [("run", "bc.toml", "--site", "dark"), ("tick",), ("list",), ("cancel", "x")])
def test_the_queue_is_no_list_of_hosts(machine: Machine, command: tuple[str, ...]) -> None:
    """Before anything is done: an empty line and exit code 0 would read as an answer."""
    assert machine.pit(*command, "--format", "hosts")[:2] == (2, "")
    assert machine.pit("list")[1] == ""


def test_a_broken_job_is_told_once(machine: Machine) -> None:
    """A damaged folder in the queue is no mail each minute; `list` goes on to tell it, and exits 5."""
    assert machine.pit("tick")[0] == 0
    (machine.folder / "place" / "jobs" / "bad").mkdir()
    (machine.folder / "place" / "jobs" / "bad" / "job.json").write_text("{")
    assert [len(machine.pit("tick")[2].splitlines()) for _ in range(3)] == [1, 0, 0]
    assert machine.pit("list")[0] == 5
    code, _, output = machine.pit("watch", "--until-empty")
    assert (code, "jobs/bad" in output) == (5, True)


def test_list_names_every_broken_job(machine: Machine) -> None:
    """Exit 5, with a line for each."""
    machine.pit("tick")
    for name in ("bad", "worse"):
        (machine.folder / "place" / "jobs" / name).mkdir()
        (machine.folder / "place" / "jobs" / name / "job.json").write_text("{")
    code, _, output = machine.pit("list")
    assert (code, "jobs/bad" in output, "jobs/worse" in output) == (5, True, True)


def test_run_names_the_sites_that_it_leaves_out(machine: Machine) -> None:
    """A file that is broken, a path that is relative, no interpreter: each is told; of a named site it is an error."""
    machine.site("broken", nodes="noodles = ")
    machine.site("near", runs='runs = "x" #')
    machine.site("bare", python="# ")
    (machine.sites / "here.toml").write_text("[partitions.train]\nnodes = 2\n")  # runs = "runs" by default
    code, out, output = machine.pit("run", "bc.toml")
    assert (code, json.loads(out)["state"]) == (0, "queued")
    reported = {line.split()[1] for line in output.splitlines()}
    assert {"broken", "near", "bare", "here"} <= reported
    assert not reported & {"dark", "faint"}
    for name in ("broken", "near", "bare", "here"):
        assert machine.pit("run", "bc.toml", "--site", name)[0] == 3


def test_whoever_waits_is_told_what_a_tick_finds(machine: Machine) -> None:
    """`run --wait` says at once that its site is silent, and what its job waits for."""
    with machine.start("run", "bc.toml", "--site", "dark", "--wait") as process:
        assert process.stderr
        reported = [process.stderr.readline() for _ in range(2)]
    assert reported[0].startswith("pit: dark: ")
    assert reported[1].startswith("pit: bc-")
    assert "Connection refused" in reported[1]


def test_what_is_wrong_of_one_job_declares_none_lost(machine: Machine) -> None:
    """An unknown id, or a job without a ticket at that site, after one that has it: exit code 2, and no mark."""
    job_ids = [json.loads(machine.pit("run", "bc.toml", "--site", "dark")[1])["job_id"] for _ in range(2)]
    folder = machine.folder / "place" / "jobs" / job_ids[0]
    submit = {"schema": "pit.journal-entry/1", "t": "2026-01-01T00:00:00Z", "kind": "submit", "ticket": 1}
    (folder / "journal.jsonl").write_text(json.dumps({**submit, "pool": "dark/train", "runs_dir": "/runs"}) + "\n")
    for wrong in ("nosuch", job_ids[1]):
        assert machine.pit("declare-lost", "dark", job_ids[0], wrong)[0] == 2
        assert not list(folder.glob("lost.*"))
    machine.site("dark", nodes="noodles = ")
    code, _, err = machine.pit("declare-lost", "dark", job_ids[0])
    assert (code, 'kind = "ssh"' in err) == (1, True)
    assert not list(folder.glob("lost.*"))
    machine.site("dark")
    code, out, _ = machine.pit("declare-lost", "dark", job_ids[0])
    assert (code, json.loads(out)["state"]) == (0, "queued")


@pytest.mark.parametrize("form", ["tsv", "table", "jsonl", "hosts"])
def test_watch_prints_what_was_asked_for(machine: Machine, form: str) -> None:
    """TSV is TSV, with the same columns in each line; a table in a pipe is lines for people; hosts it has none."""
    machine.pit("run", "bc.toml", "--site", "dark")
    with machine.start("watch", "--format", form) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(1 if form == "hosts" else 2)]
        code = process.wait() if form == "hosts" else 0
    if form == "tsv":
        assert [line.split("\t")[:3] for line in lines] == [["kind", "name", "state"], ["site", "dark", "unreachable"]]
        assert len({line.count("\t") for line in lines}) == 1
    elif form == "table":
        assert lines[0].startswith("dark: unreachable")
    elif form == "jsonl":
        assert [json.loads(line)["schema"] for line in lines] == ["pit.site-status-row/1", "pit.queue-job-row/1"]
    else:
        assert (code, lines) == (2, [""])
