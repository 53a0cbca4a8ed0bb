"""A run as facts, each a line of text under a part and a key, so that any two runs, or a run and now, compare alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.record import Record
from pitools.launch.plan import Plan, load_plan
from pitools.launch.provenance import code_copy, environment, import_guard, provenance
from pitools.run import attempt_records as attempts
from pitools.run import run_folder, steps
from pitools.site.schema import Site
from pitools.store import digest

PARTS = (
    "request",
    "plan",
    "code",
    "git",
    "environment",
    "data",
    "site",
    "template",
    "variables",
    "nodes",
    "machine",
    "outcome",
)
_NOT_RECORDED = "not recorded"

Facts = dict[tuple[str, str], str]


class Difference(Record, frozen=True, kw_only=True, tag="pit.difference/1"):
    """One fact that is not the same. part: see PARTS. a, b: "" where one side has nothing there."""

    part: str
    key: str
    a: str
    b: str


def compare(a: Facts, b: Facts) -> list[Difference]:
    """Every difference, in the order of PARTS."""
    keys = sorted({*a, *b}, key=lambda key: (PARTS.index(key[0]), key[1]))
    return [
        Difference(part=part, key=key, a=a.get((part, key), ""), b=b.get((part, key), ""))
        for part, key in keys
        if a.get((part, key)) != b.get((part, key))
    ]


def of_run(run_dir: Path) -> Facts:
    """What is known of a run, its end included. Raises DataError for records that are none."""
    record = provenance.read(run_dir)
    facts = _of_plan(load_plan(run_dir))
    for part, pairs in (
        ("code", _code(run_dir, record)),
        ("nodes", _nodes(run_dir)),
        ("machine", _machine(run_dir)),
        ("outcome", _outcome(run_dir)),
    ):
        facts |= {(part, key): value for key, value in pairs}
    if record is None:
        return facts | {(part, ""): _NOT_RECORDED for part in ("git", "environment", "site")}
    text = _text(run_dir / environment.FILE_NAME)
    site = _text(run_dir / provenance.SITE)
    return facts | _of_record(record, text, json.loads(site) if site else {})


def now(plan: Plan, site: Site, run_dir: Path) -> Facts:
    """What a new run of this plan, with the code of the run `run_dir`, would be made from at this moment."""
    record = provenance.read(run_dir)
    assert record is not None  # its code was found by it
    lock, text = environment.lock(plan.python, site, plan.request.env)
    raw = provenance.site_text(site)
    record = msgspec.structs.replace(
        record,
        environment=lock,
        site=digest.of_bytes(raw),
        template=provenance.template_digest(site),
        variables=environment.variables(command=plan.request.command, env=plan.request.env)[0],
    )
    facts = _of_plan(plan) | _of_record(record, text, json.loads(raw))
    return facts | {("code", key): value for key, value in _code(run_dir, record)}


def _of_plan(plan: Plan) -> Facts:
    request = msgspec.to_builtins(plan.request)
    for key in ("workdir", "data"):  # the code, and the data's versions, stand for themselves
        del request[key]
    job = {**msgspec.to_builtins(plan.job), "site": plan.site, "python": plan.python, "nvme": plan.nvme}
    facts = {("request", key): value for key, value in flat(request)}
    facts |= {("plan", key): value for key, value in flat(job) if key not in request}
    return facts | {("data", data.name): data.version for data in plan.data}


def _of_record(record: provenance.Provenance, packages: str, site: Mapping[str, Any]) -> Facts:
    git, found = record.git, record.environment
    told = {"commit": git.commit, "patch": git.patch, "branch": git.branch, "said": git.said}
    facts = {("git", key): value for key, value in told.items() if value}
    python = {"python": found.python, "implementation": found.implementation, "said": found.said}
    python |= {f"{one.name} at {one.path}": one.described for one in found.editable}
    python |= environment.packages(packages)
    facts |= {("environment", key): value for key, value in python.items() if value}
    facts |= {("site", key): value for key, value in flat(site)}
    facts |= {("variables", name): value for name, value in record.variables.items()}
    return facts | {("template", "digest"): record.template, ("plan", "pitools"): record.pitools}


def _code(run_dir: Path, record: provenance.Provenance | None) -> Iterator[tuple[str, str]]:
    if record is None or not record.code:
        yield "", _NOT_RECORDED
        return
    held = code_copy.listing(run_dir)
    for one in (*held.files, *held.linked):
        if one.kind != "folder":
            yield one.path, f"{one.bytes} bytes, {one.digest}" if one.kind == "file" else f"→ {one.link}"


def _nodes(run_dir: Path) -> Iterator[tuple[str, str]]:
    if ranks := ranks_of(run_dir):
        yield "by rank", " ".join(ranks)


def ranks_of(run_dir: Path) -> list[str]:
    """The node of each rank, in the newest attempt that got as far as to have an order of nodes."""
    for made in reversed(run_folder.attempts(run_dir)):
        if lines := _text(made / "hostfile").split():
            return lines
    return []


def _machine(run_dir: Path) -> Iterator[tuple[str, str]]:
    for made in reversed(run_folder.attempts(run_dir)):
        if machine := run_folder.read(made / "machine.json", import_guard.Machine):
            told = msgspec.structs.asdict(machine)
            yield from ((key, value) for key, value in told.items() if key != "node" and value)
            return


def _outcome(run_dir: Path) -> Iterator[tuple[str, str]]:
    made = run_folder.attempts(run_dir)
    verdict = run_folder.read(run_dir / "verdict.json", attempts.Verdict)
    if verdict:
        yield "verdict", f"{verdict.state}: {verdict.kind}"
    if made:
        yield "attempts", str(len(made))
    if ended := run_folder.last_exit(run_dir):
        yield "exit code", str(ended.exit_code)
    for one in reversed(made):
        log = one / "steps" / "0.jsonl"
        if log.is_file() and (lines := steps.read(log)):
            yield "steps", str(lines[-1].step + 1)
            yield "loss", repr(lines[-1].loss)
            return


def flat(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every leaf of nested dictionaries and lists."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{at}.{key}" if at else str(key))
    elif value not in (None, "", [], ()):
        yield at, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
