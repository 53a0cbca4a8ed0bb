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


def compare_facts(a: Facts, b: Facts) -> list[Difference]:
    """Every difference, in the order of PARTS."""
    keys = sorted({*a, *b}, key=lambda key: (PARTS.index(key[0]), key[1]))
    return [
        Difference(part=part, key=key, a=a.get((part, key), ""), b=b.get((part, key), ""))
        for part, key in keys
        if a.get((part, key)) != b.get((part, key))
    ]


def facts_of_run(run_dir: Path) -> Facts:
    """What is known of a run, its end included. Raises DataError for records that are none."""
    record = provenance.read_provenance(run_dir)
    facts = _plan_facts(load_plan(run_dir))
    for part, pairs in (
        ("code", _code_facts(run_dir, record)),
        ("nodes", _node_facts(run_dir)),
        ("machine", _machine_facts(run_dir)),
        ("outcome", _outcome_facts(run_dir)),
    ):
        facts |= {(part, key): value for key, value in pairs}
    if record is None:
        return facts | {(part, ""): _NOT_RECORDED for part in ("git", "environment", "site")}
    text = _text(run_dir / environment.ENVIRONMENT_FILE)
    site = _text(run_dir / provenance.SITE_FILE)
    return facts | _provenance_facts(record, text, json.loads(site) if site else {})


def facts_now(plan: Plan, site: Site, run_dir: Path) -> Facts:
    """What a new run of this plan, with the code of the run `run_dir`, would be made from at this moment."""
    record = provenance.read_provenance(run_dir)
    assert record is not None  # its code was found by it
    lock, text = environment.capture_environment(plan.python, site, plan.request.env)
    raw = provenance.site_text(site)
    record = msgspec.structs.replace(
        record,
        environment=lock,
        site=digest.digest_bytes(raw),
        template=provenance.template_digest(site),
        variables=environment.select_variables(command=plan.request.command, env=plan.request.env)[0],
    )
    facts = _plan_facts(plan) | _provenance_facts(record, text, json.loads(raw))
    return facts | {("code", key): value for key, value in _code_facts(run_dir, record)}


def _plan_facts(plan: Plan) -> Facts:
    request = msgspec.to_builtins(plan.request)
    for key in ("workdir", "data"):  # the code, and the data's versions, stand for themselves
        del request[key]
    job = {**msgspec.to_builtins(plan.job), "site": plan.site, "python": plan.python, "nvme": plan.nvme}
    facts = {("request", key): value for key, value in flatten(request)}
    facts |= {("plan", key): value for key, value in flatten(job) if key not in request}
    return facts | {("data", data.name): data.version for data in plan.data}


def _provenance_facts(record: provenance.Provenance, packages: str, site: Mapping[str, Any]) -> Facts:
    git, found = record.git, record.environment
    told = {"commit": git.commit, "patch": git.patch, "branch": git.branch, "said": git.problem}
    facts = {("git", key): value for key, value in told.items() if value}
    python = {"python": found.python, "implementation": found.implementation, "said": found.problem}
    python |= {f"{one.name} at {one.path}": one.git_describe for one in found.editable}
    python |= environment.parse_packages(packages)
    facts |= {("environment", key): value for key, value in python.items() if value}
    facts |= {("site", key): value for key, value in flatten(site)}
    facts |= {("variables", name): value for name, value in record.variables.items()}
    return facts | {("template", "digest"): record.template, ("plan", "pitools"): record.pitools}


def _code_facts(run_dir: Path, record: provenance.Provenance | None) -> Iterator[tuple[str, str]]:
    if record is None or not record.code:
        yield "", _NOT_RECORDED
        return
    held = code_copy.read_listing(run_dir)
    for one in (*held.files, *held.linked):
        if one.kind != "folder":
            yield one.path, f"{one.bytes} bytes, {one.digest}" if one.kind == "file" else f"→ {one.link}"


def _node_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    if ranks := rank_nodes(run_dir):
        yield "by rank", " ".join(ranks)


def rank_nodes(run_dir: Path) -> list[str]:
    """The node of each rank, in the newest attempt that got as far as to have an order of nodes."""
    for made in reversed(run_folder.attempt_dirs(run_dir)):
        if lines := _text(made / "hostfile").split():
            return lines
    return []


def _machine_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    for made in reversed(run_folder.attempt_dirs(run_dir)):
        if machine := run_folder.read_record(made / "machine.json", import_guard.RankMachine):
            told = msgspec.structs.asdict(machine)
            yield from ((key, value) for key, value in told.items() if key != "node" and value)
            return


def _outcome_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    made = run_folder.attempt_dirs(run_dir)
    verdict = run_folder.read_record(run_dir / "verdict.json", attempts.Verdict)
    if verdict:
        yield "verdict", f"{verdict.state}: {verdict.kind}"
    if made:
        yield "attempts", str(len(made))
    if ended := run_folder.last_exit(run_dir):
        yield "exit code", str(ended.exit_code)
    for one in reversed(made):
        log = one / "steps" / "0.jsonl"
        if log.is_file() and (lines := steps.read_step_log(log)):
            yield "steps", str(lines[-1].step + 1)
            yield "loss", repr(lines[-1].loss)
            return


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every leaf of nested dictionaries and lists."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flatten(one, f"{prefix}.{key}" if prefix else str(key))
    elif value not in (None, "", [], ()):
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
