"""Notices of SLOs that begin to burn, burn faster, or no longer burn: once to each hook that listens for "slo".

~/.local/state/pitools/slo_notices.json   pit.slo-notices/1: what each hook was last sent

A hook that fails is started again by the next check. While samples are missing, nothing is over or gets better.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core import timestamps, user_dirs
from pitools.core.errors import ConfigError
from pitools.core.fs import write_atomic
from pitools.core.locks import lock
from pitools.core.record import Record, decode_json
from pitools.launch.hooks import run_hook
from pitools.monitor.rules.judge import SloState
from pitools.site.schema import Hook

_WORSE = {"": ("ticket", "page"), "ticket": ("page",), "page": ()}


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


class SentNotices(Record, frozen=True, kw_only=True, tag="pit.slo-notices/1"):
    """What burned when a hook was last started, by hook and SLO; one that does not burn is left out."""

    sent: dict[str, str] = {}


def state_path() -> Path:
    """Return the file of what each hook was last sent."""
    return user_dirs.xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "slo_notices.json"


def notify(states: Iterable[SloState], hooks_of: Callable[[str], Sequence[Hook]], path: Path) -> list[str]:
    """Start the hooks of each cluster for what has changed since they were last started; return their errors.

    hooks_of: a cluster's hooks. path: of SentNotices. Raises TryLater while another process notifies.
    """
    errors = []
    user_dirs.ensure_private_dir(path.parent)
    with lock(path.with_suffix(".lock"), "notices of SLOs"):
        sent = dict(_read(path).sent)
        for state in states:
            for hook in hooks_of(state.cluster):
                key = " ".join((*hook.command, "|", state.cluster, state.slo, state.tier, state.resource))
                last = sent.get(key, "")
                if (
                    "slo" not in hook.on
                    or last == state.burning
                    or (last in _WORSE[state.burning] and not state.is_known)
                ):
                    continue
                notice = _notice(state)
                env = {"PIT_EVENT": "slo", "PIT_SITE": state.cluster}
                if error := run_hook(hook, notice, env, Path.home(), Path("/")):
                    errors.append(f"hook {hook.command[0]}, of slo {state.slo}: {error}")
                    continue
                sent[key] = state.burning
                kept = {key: burning for key, burning in sent.items() if burning}
                write_atomic(path, msgspec.json.encode(SentNotices(sent=kept)), mode=0o600)
    return errors


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
