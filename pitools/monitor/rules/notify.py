"""Notices of SLOs that begin to burn, burn faster, or no longer burn: once to each hook that listens for "slo".

~/.local/state/pitools/slo_notices.json   pit.slo-notices/1: what each hook was last sent

A hook that fails is started again by the next check. While samples are missing, nothing is over or gets better. What
was sent of an SLO is forgotten, without a notice, by the next check after it is taken out of its file, or the file is
removed: one that is renamed is new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps, user_dirs
from pitools.core.errors import ClusterError, ConfigError, NoSpace
from pitools.core.fs import write_atomic
from pitools.core.locks import lock
from pitools.core.record import Record, decode_json
from pitools.launch.hooks import run_hook
from pitools.monitor.rules.judge import Burning, SloState
from pitools.monitor.rules.schema import SHIPPED, SloFile
from pitools.site.schema import Hook

_RANK = {"": 0, "ticket": 1, "page": 2}


class SloNotice(Record, frozen=True, kw_only=True, tag="pit.slo-notice/1"):
    """What a hook gets on stdin. severity: `over` if the SLO no longer burns. The rest is of the SLO's state."""

    event: Literal["slo"] = "slo"
    t: str
    site: str
    slo: str
    tier: str
    resource: str
    severity: Literal["page", "ticket", "over"]
    objective: float
    period: str
    budget_left: float | None
    reason: str
    hint: str


class _Sent(NamedTuple):
    """What a hook was sent something of. file: of the SLO, "" for the shipped one."""

    file: str
    slo: str
    cluster: str
    tier: str
    resource: str
    command: tuple[str, ...]


class SentNotices(Record, frozen=True, kw_only=True, tag="pit.slo-notices/1"):
    """What burned when a hook was last started; what does not burn is left out."""

    sent: tuple[tuple[_Sent, Literal["ticket", "page"]], ...] = ()


def state_path() -> Path:
    """Return the file of what each hook was last sent."""
    return user_dirs.xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "slo_notices.json"


def notify(
    slos: SloFile, file: Path, states: Iterable[SloState], hooks_of: Callable[[str], Sequence[Hook]]
) -> list[str]:
    """Start the hooks of each cluster for what has changed since they were last started; return their errors.

    states: of all SLOs of a file. hooks_of: a cluster's hooks. Raises TryLater while another process notifies.
    """
    errors, path = [], state_path()
    place = "" if file == SHIPPED else str(file.resolve())  # the shipped one's changes with each version
    user_dirs.ensure_private_dir(path.parent)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ClusterError, NoSpace):  # a disk in trouble must not silence hooks
            held.enter_context(lock(path.with_suffix(".lock"), "notices of SLOs"))
        before, names = _read(path).sent, {slo.name for slo in slos.slo}
        sent: dict[_Sent, Burning] = {
            key: was for key, was in before if (key.slo in names if key.file == place else Path(key.file).exists())
        }
        if len(sent) < len(before):
            _write(path, sent)
        for state in states:
            for hook in hooks_of(state.cluster):
                key = _Sent(place, state.slo, state.cluster, state.tier, state.resource, hook.command)
                was = sent.get(key, "")
                is_better = _RANK[state.burning] < _RANK[was]
                if "slo" not in hook.on or was == state.burning or (is_better and not state.is_known):
                    continue
                env = {"PIT_EVENT": "slo", "PIT_SITE": state.cluster}
                if error := run_hook(hook, _notice(state), env, Path.home(), Path("/")):
                    errors.append(f"hook {hook.command[0]}, of slo {state.slo}: {error}")
                    continue
                sent[key] = state.burning
                if error := _write(path, sent):
                    errors.append(f"hook {hook.command[0]}, of slo {state.slo}, may be started again: {error}")
    return errors


def _write(path: Path, sent: dict[_Sent, Burning]) -> str:
    """Keep what was sent; return why that failed, or ""."""
    kept = tuple((key, burning) for key, burning in sent.items() if burning)
    try:
        write_atomic(path, msgspec.json.encode(SentNotices(sent=kept)), mode=0o600)
    except (ClusterError, NoSpace) as error:
        return str(error)
    return ""


def _read(path: Path) -> SentNotices:
    """Read what was sent. Raises ConfigError for a file that is not of ours."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return decode_json(path.read_bytes(), SentNotices)
        except msgspec.DecodeError as error:
            raise ConfigError("not a file of sent notices", where=str(path), hint=f"rm {path}") from error
    return SentNotices()


def _notice(state: SloState) -> SloNotice:
    left = "" if state.budget_left is None else f"{state.budget_left:.0%} of the error budget of {state.period} is left"
    return SloNotice(
        t=timestamps.now_rfc3339(),
        site=state.cluster,
        slo=state.slo,
        tier=state.tier,
        resource=state.resource,
        severity=state.burning or "over",
        objective=state.objective,
        period=state.period,
        budget_left=state.budget_left,
        reason="; ".join(text for text in (state.reason, left) if text),
        hint=state.hint,
    )
