"""What may be the fault: how single ranks ended, by their failure records, their tracebacks and srun's messages."""

from __future__ import annotations

import re
import signal

import msgspec

from pitools.core.record import Record
from pitools.launch import fingerprint
from pitools.launch.diagnosis import patterns, tracebacks
from pitools.launch.diagnosis.bounded_read import one_line
from pitools.launch.diagnosis.patterns import FaultRole
from pitools.run.attempt_records import CauseKind, Confidence, RankFailure

# srun prints signals by the C library's descriptions.
_SIGNALS = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.Signals}
_SIGNALS |= {"out of memory": 125 - 128}
_SRUN_TASKS = re.compile(
    r"srun(?:\[\d+\])?: error: (?P<nodes>[\w.\[\],-]{1,4000}): tasks? (?P<ranks>[\d,\s-]{1,100000}): (?P<end>.{1,200})"
)
_EXIT_CODE = re.compile(r"Exited with exit code (\d{1,3})")
_MAX_TASKS = 4096


class Symptom(Record, frozen=True, kw_only=True, tag="pit.symptom/1"):
    """How one rank ended, or what a line of a log says of a fault, by one source.

    order: the position among srun's messages, which are in the order of exits; -1 for other sources.
    exit_code: above 128 for a signal; None if it is not known. rule: its name in patterns.toml, "" for none.
    blames_node: whether its node is at fault.
    """

    rank: int | None
    node: str
    t: str
    source: str
    description: str
    kind: CauseKind
    role: FaultRole
    confidence: Confidence
    rule: str = ""
    exit_code: int | None = None
    fingerprint: str = ""
    is_exception: bool = False
    blames_node: bool = False
    order: int = -1


def symptom_of_failure(failure: RankFailure, source: str) -> Symptom:
    """Return the exit of a rank from its failure record: its exception, or its exit code."""
    if failure.error or failure.trace:
        chain = tracebacks.parse_record(failure.error, failure.message, failure.trace)
        if chain:
            end = symptom_of_exception(chain, failure.rank, failure.node, failure.t, source)
            digest = failure.fingerprint or end.fingerprint
            return msgspec.structs.replace(end, exit_code=failure.exit_code, fingerprint=digest)
    return symptom_of_code(failure.exit_code, failure.rank, failure.node, failure.t, source)


def symptom_of_exception(
    chain: list[tracebacks.ParsedException], rank: int | None, node: str, t: str, source: str
) -> Symptom:
    """Return the exit of a rank by an uncaught exception; without a rule for it the kind is `program`."""
    raised, rule = tracebacks.explaining_exception(chain)
    description = one_line(f"{raised.error}: {raised.message}" if raised.message else raised.error)
    digest = fingerprint.fingerprint_exception(raised.error, raised.message, raised.trace)
    # An exception without a rule is certainly the program's. Errors of the system, such as a missing file, may have
    # other reasons, unless the user's own code raised them.
    confidence: Confidence = rule.confidence if rule else "certain"
    if not rule and raised.error in ("FileNotFoundError", "OSError", "RuntimeError", "PermissionError"):
        confidence = "certain" if raised.raised_by_user else "likely"
    return Symptom(
        rank=rank,
        node=node,
        t=t,
        source=source,
        description=description,
        fingerprint=digest,
        is_exception=True,
        kind=rule.kind if rule else "program",
        role=rule.role if rule else "fault",
        confidence=confidence,
        rule=rule.name if rule else "exception",
        blames_node=rule.blames_node if rule else False,
    )


def symptom_of_code(
    code: int, rank: int | None, node: str, t: str, source: str, description: str = "", order: int = -1
) -> Symptom:
    """Return the exit of a rank by its exit code, or 128 + its signal."""
    rule = patterns.match_exit_code(code)
    text = description or (f"ended by signal {code - 128}" if 128 < code < 128 + 65 else f"exit code {code}")
    return Symptom(
        rank=rank,
        node=node,
        t=t,
        source=source,
        description=one_line(text),
        exit_code=code,
        order=order,
        kind=rule.kind if rule else "unknown",
        role=rule.role if rule else "fault",
        confidence=rule.confidence if rule else "guess",
        rule=rule.name if rule else "",
        blames_node=rule.blames_node if rule else False,
        fingerprint=fingerprint.fingerprint_exit(f"exit code {code}"),
    )


def symptoms_from_srun(line: str, t: str, source: str, order: int) -> list[Symptom]:
    """Parse srun's message about the end of tasks, such as `n1: tasks 0-3: Killed`; [] for other lines."""
    match = _SRUN_TASKS.search(line)
    if not match:
        return []
    ranks = _expand_tasks(match["ranks"])
    node = match["nodes"] if "[" not in match["nodes"] and "," not in match["nodes"] else ""
    code_match = _EXIT_CODE.match(match["end"])
    signal_text = match["end"].removesuffix("(core dumped)").strip().lower()
    exit_code = int(code_match[1]) if code_match else 128 + _SIGNALS[signal_text] if signal_text in _SIGNALS else None
    if exit_code is None:
        return []
    description = one_line(line[match.start() :])
    return [symptom_of_code(exit_code, rank, node, t, source, description, order) for rank in ranks]


def _expand_tasks(text: str) -> list[int]:
    """Expand `0,2-4` to 0, 2, 3, 4; at most _MAX_TASKS."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and len(first) < 8 and (not last or (last.isdecimal() and len(last) < 8)):
            expanded = range(int(first), int(last or first) + 1)
            ranks += expanded[:_MAX_TASKS]
    return ranks[:_MAX_TASKS]
