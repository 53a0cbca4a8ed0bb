"""Thresholds of the checks, which a site may set in a TOML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from pitools.core import strict_toml
from pitools.core.errors import ConfigError, suggest
from pitools.dataset.check.finding import Finding

# Checks that a file of bounds can make stricter, milder or silent. Damage is always damage.
CHECKS = (
    "extra",
    "missing-chunk",
    "nan",
    "constant",
    "motionless",
    "outlier",
    "time",
    "blank",
    "frozen",
    "length",
    "duplicate",
    "instruction",
    "split",
    "statistics",
    "parent",
    "schema-drift",
    "mean-drift",
    "deviation-drift",
    "range-drift",
    "constant-drift",
    "nan-drift",
    "brightness-drift",
    "instruction-drift",
    "length-drift",
)


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of the checks. Sigmas are robust: outliers do not widen their own limits.

    levels: check → fault, warning or off, instead of its own level. min_steps: the shortest episode. length_sigmas: of
    log(steps), from the median. outlier_sigmas: from the column's median. times: names (last part) of arrays of times.
    time_gap: a step of this many periods is a gap. period_factor: an episode's median period against the dataset's.
    blank_mean, blank_deviation: grey levels, of 255; a frame below both is black, one without deviation is blank.
    frozen_steps: a frame is frozen if it repeats for this long while the action moves by frozen_motion of its
    deviation. Drift from the parent, each widened for few episodes: mean_shift in deviations, deviation_ratio and
    length_ratio as factors, range_growth in ranges of the parent, brightness in grey levels, instruction_shift as the
    share of episodes that would have to change their instruction, length_shift as the Kolmogorov-Smirnov distance.
    """

    levels: dict[str, Literal["fault", "warning", "off"]] = {}
    min_steps: int = 2
    length_sigmas: float = 6.0
    outlier_sigmas: float = 20.0
    times: tuple[str, ...] = ("timestamp", "timestamps", "time", "times", "stamp", "stamps")
    time_gap: float = 3.0
    period_factor: float = 1.5
    blank_mean: float = 8.0
    blank_deviation: float = 3.0
    frozen_steps: int = 10
    frozen_motion: float = 0.1
    mean_shift: float = 1.0
    deviation_ratio: float = 3.0
    range_growth: float = 2.0
    brightness: float = 30.0
    instruction_shift: float = 0.3
    length_ratio: float = 2.0
    length_shift: float = 0.4

    def apply_levels(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield findings with their levels overridden by `levels`, without those that are off."""
        for finding in findings:
            level = finding.level if finding.level == "damage" else self.levels.get(finding.check, finding.level)
            if level != "off":
                yield finding if level == finding.level else msgspec.structs.replace(finding, level=level)


def load_thresholds(path: Path) -> Thresholds:
    """Read thresholds from a TOML file; missing keys keep their defaults. Raises ConfigError naming the key."""
    tables: dict[str, Any] = strict_toml.read_toml(path)
    bounds = strict_toml.convert_tables(tables, Thresholds, str(path))
    for name in bounds.levels:
        if name not in CHECKS:
            raise ConfigError(f'unknown check "levels.{name}"', where=str(path), hint=suggest(name, CHECKS))
    for field in bounds.__struct_fields__:
        value = getattr(bounds, field)
        if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
            raise ConfigError(f'key "{field}": expected a number from 0 up, got {value}', where=str(path))
        if field in ("period_factor", "deviation_ratio", "length_ratio") and value < 1:
            raise ConfigError(f'key "{field}": expected a number from 1 up, got {value}', where=str(path))
    return bounds
