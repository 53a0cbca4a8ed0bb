"""Decide which pending job is submitted to which pool now; shared by the live dispatcher and the simulator."""

from pitools.place.policy.decide import decide
from pitools.place.policy.job_table import JobTableBuilder
from pitools.place.policy.params import PolicyParams

__all__ = ["JobTableBuilder", "PolicyParams", "decide"]
