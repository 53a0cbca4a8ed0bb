"""Which job goes where, now: the one decision that the live dispatcher and the simulator share."""

from pitools.place.policy.columns import Columns
from pitools.place.policy.decide import decide
from pitools.place.policy.rules import Policy

__all__ = ["Columns", "Policy", "decide"]
