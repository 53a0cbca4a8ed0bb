"""Which job goes where, now: the one decision that the live dispatcher and the simulator share."""

from pitools.place.policy.decide import decide
from pitools.place.policy.job_table import JobTableBuilder
from pitools.place.policy.params import PolicyParams

__all__ = ["JobTableBuilder", "PolicyParams", "decide"]
