"""How single ranks ended: by their own last word, by a traceback in their output, or by what srun says of them."""

from __future__ import annotations

import re
import signal

import msgspec

from pitools.core.record import Record
from pitools.launch import fingerprint
from pitools.launch.diagnosis import patterns, tracebacks
from pitools.launch.diagnosis.bounded_read import shown
from pitools.launch.diagnosis.patterns import Role, Sure
from pitools.run.attempt_records import Kind, RankFailure

# srun's words for a signal are the C library's.
_SIGNALS = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.Signals}
_SIGNALS |= {"out of memory": 125 - 128}
_TASKS = re.compile(
    r"srun(?:\[\d+\])?: error: (?P<nodes>[\w.\[\],-]{1,4000}): tasks? (?P<ranks>[\d,\s-]{1,100000}): (?P<what>.{1,200})"
)
_CODE = re.compile(r"Exited with exit code (\d{1,3})")
_MOST = 4096


class End(Record, frozen=True, kw_only=True, tag="pit.rank-end/1"):
    """How one rank ended, as one source has it.

    order: the place among srun's messages, which come as ranks end, on one clock; -1 for other sources. exit_code: 128
    and more for a signal; None where only a traceback is known. rule: the table's name for it, "" for none. is_local:
    its node is at fault.
    """

    rank: int | None
    node: str
    t: str
    source: str
    what: str
    kind: Kind
    role: Role
    sure: Sure
    rule: str = ""
    exit_code: int | None = None
    fingerprint: str = ""
    is_exception: bool = False
    is_local: bool = False
    order: int = -1


def of_failure(failure: RankFailure, source: str) -> End:
    """A rank's last word: its exception, or the code it gave."""
    if failure.error or failure.trace:
        chain = tracebacks.of_record(failure.error, failure.message, failure.trace)
        if chain:
            end = of_exception(chain, failure.rank, failure.node, failure.t, source)
            mark = failure.fingerprint or end.fingerprint
            return msgspec.structs.replace(end, exit_code=failure.exit_code, fingerprint=mark)
    return of_code(failure.exit_code, failure.rank, failure.node, failure.t, source)


def of_exception(chain: list[tracebacks.Raised], rank: int | None, node: str, t: str, source: str) -> End:
    """An uncaught exception; one that the table does not know is the user's."""
    raised, known = tracebacks.kind_of(chain)
    what = shown(f"{raised.error}: {raised.message}" if raised.message else raised.error)
    mark = fingerprint.of(raised.error, raised.message, raised.trace)
    # What the user's code raised by itself, or an exception of the language's own, is the program's word for it. The
    # system's refusals (no such file, say) may have other reasons.
    sure: Sure = known.sure if known else "certain"
    if not known and raised.error in ("FileNotFoundError", "OSError", "RuntimeError", "PermissionError"):
        sure = "certain" if raised.own_raise else "likely"
    return End(
        rank=rank,
        node=node,
        t=t,
        source=source,
        what=what,
        fingerprint=mark,
        is_exception=True,
        kind=known.kind if known else "user",
        role=known.role if known else "fault",
        sure=sure,
        rule=known.name if known else "exception",
        is_local=known.local if known else False,
    )


def of_code(code: int, rank: int | None, node: str, t: str, source: str, what: str = "", order: int = -1) -> End:
    """An exit code, or 128 + a signal."""
    known = patterns.of_end(code)
    text = what or (f"ended by signal {code - 128}" if 128 < code < 128 + 65 else f"exit code {code}")
    return End(
        rank=rank,
        node=node,
        t=t,
        source=source,
        what=shown(text),
        exit_code=code,
        order=order,
        kind=known.kind if known else "unknown",
        role=known.role if known else "fault",
        sure=known.sure if known else "guess",
        rule=known.name if known else "",
        is_local=known.local if known else False,
        fingerprint=fingerprint.of_end(f"exit code {code}"),
    )


def of_srun(line: str, t: str, source: str, order: int) -> list[End]:
    """What one of srun's messages says of tasks; [] where it is no such message."""
    found = _TASKS.search(line)
    if not found:
        return []
    ranks = _numbers(found["ranks"])
    node = found["nodes"] if "[" not in found["nodes"] and "," not in found["nodes"] else ""
    code = _CODE.match(found["what"])
    word = found["what"].removesuffix("(core dumped)").strip().lower()
    number = int(code[1]) if code else 128 + _SIGNALS[word] if word in _SIGNALS else None
    if number is None:
        return []
    what = shown(line[found.start() :])
    return [of_code(number, rank, node, t, source, what, order) for rank in ranks]


def _numbers(text: str) -> list[int]:
    """`0,2-4` → 0, 2, 3, 4; no more than a step can have."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and len(first) < 8 and (not last or (last.isdecimal() and len(last) < 8)):
            span = range(int(first), int(last or first) + 1)
            found += span[:_MOST]
    return found[:_MOST]
