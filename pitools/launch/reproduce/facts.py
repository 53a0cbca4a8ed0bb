"""Facts about a run: (part, key) → text. Two runs, or a run and a repetition now, are compared by their facts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.record import Record
from pitools.launch.plan import Plan, load_plan, site_of_plan
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
    """One fact that differs. part: one of PARTS. a, b: the texts of both sides, "" if a side has no such fact."""

    part: str
    key: str
    a: str
    b: str


def compare_facts(a: Facts, b: Facts) -> list[Difference]:
    """Return every difference, in the order of PARTS."""
    keys = sorted({*a, *b}, key=lambda key: (PARTS.index(key[0]), key[1]))
    return [
        Difference(part=part, key=key, a=a.get((part, key), ""), b=b.get((part, key), ""))
        for part, key in keys
        if a.get((part, key)) != b.get((part, key))
    ]


def facts_of_run(run_dir: Path) -> Facts:
    """Return the facts of a run, with its outcome. Raises DataError for damaged records."""
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
    packages = _read_text(run_dir / environment.ENVIRONMENT_FILE)
    site_json = _read_text(run_dir / provenance.SITE_FILE)
    return facts | _provenance_facts(record, packages, json.loads(site_json) if site_json else {})


def facts_now(plan: Plan, site: Site, run_dir: Path) -> Facts:
    """Return the facts of a new run of `plan` started now, with the code of the run `run_dir`."""
    record = provenance.read_provenance(run_dir)
    assert record is not None  # the caller has read the code through it
    lock, packages = environment.capture_environment(plan.python, site_of_plan(plan, site), plan.request.env)
    site_json = provenance.site_text(site)
    record = msgspec.structs.replace(
        record,
        environment=lock,
        site=digest.digest_bytes(site_json),
        template=provenance.template_digest(site),
        variables=environment.select_variables(command=plan.request.command, env=plan.request.env)[0],
    )
    facts = _plan_facts(plan) | _provenance_facts(record, packages, json.loads(site_json))
    return facts | {("code", key): value for key, value in _code_facts(run_dir, record)}


def _plan_facts(plan: Plan) -> Facts:
    request = msgspec.to_builtins(plan.request)
    for key in ("workdir", "data"):  # compared by the parts `code` and `data`
        del request[key]
    job = {**msgspec.to_builtins(plan.job), "site": plan.site, "python": plan.python, "nvme": plan.nvme}
    facts = {("request", key): value for key, value in flatten(request)}
    facts |= {("plan", key): value for key, value in flatten(job) if key not in request}
    return facts | {("data", data.name): data.version for data in plan.data}


def _provenance_facts(record: provenance.Provenance, packages: str, site: Mapping[str, Any]) -> Facts:
    git, lock = record.git, record.environment
    git_facts = {"commit": git.commit, "patch": git.patch, "branch": git.branch, "problem": git.problem}
    facts = {("git", key): value for key, value in git_facts.items() if value}
    python = {"python": lock.python, "implementation": lock.implementation, "problem": lock.problem}
    python |= {f"{package.name} at {package.path}": package.git_describe for package in lock.editable}
    python |= environment.parse_packages(packages)
    facts |= {("environment", key): value for key, value in python.items() if value}
    facts |= {("site", key): value for key, value in flatten(site)}
    facts |= {("variables", name): value for name, value in record.variables.items()}
    return facts | {("template", "digest"): record.template, ("plan", "pitools"): record.pitools}


def _code_facts(run_dir: Path, record: provenance.Provenance | None) -> Iterator[tuple[str, str]]:
    if record is None or not record.code:
        yield "", _NOT_RECORDED
        return
    listing = code_copy.read_listing(run_dir)
    for file in (*listing.files, *listing.linked):
        if file.kind != "folder":
            yield file.path, f"{file.bytes} bytes, {file.digest}" if file.kind == "file" else f"→ {file.link}"


def _node_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    if ranks := rank_nodes(run_dir):
        yield "by rank", " ".join(ranks)


def rank_nodes(run_dir: Path) -> list[str]:
    """Return the node of each rank in the newest attempt with a host file; [] without one."""
    for attempt in reversed(run_folder.attempt_dirs(run_dir)):
        if nodes := _read_text(attempt / "hostfile").split():
            return nodes
    return []


def _machine_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    for attempt in reversed(run_folder.attempt_dirs(run_dir)):
        if machine := run_folder.read_record(attempt / "machine.json", import_guard.RankMachine):
            fields = msgspec.structs.asdict(machine)
            yield from ((key, value) for key, value in fields.items() if key != "node" and value)
            return


def _outcome_facts(run_dir: Path) -> Iterator[tuple[str, str]]:
    attempt_dirs = run_folder.attempt_dirs(run_dir)
    verdict = run_folder.read_record(run_dir / "verdict.json", attempts.Verdict)
    if verdict:
        yield "verdict", f"{verdict.state}: {verdict.kind}"
    if attempt_dirs:
        yield "attempts", str(len(attempt_dirs))
    if last_exit := run_folder.last_exit(run_dir):
        yield "exit code", str(last_exit.exit_code)
    for attempt in reversed(attempt_dirs):
        log = attempt / "steps" / "0.jsonl"
        if log.is_file() and (lines := steps.read_step_log(log)):
            yield "steps", str(lines[-1].step + 1)
            yield "loss", repr(lines[-1].loss)
            return


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for each leaf of nested dictionaries. Lists become JSON; empty values are left out."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif value not in (None, "", [], ()):
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
