"""One episode as a picture: people look rather than read.

head     the instruction; dataset, version, length; in red why it is in quarantine
frames   of each camera, evenly spaced, with their steps
curves   of actions and observations: columns of like range in one panel, many columns as a heat map
"""

from pitools.dataset.plot.figure import draw_episode

__all__ = ["draw_episode"]
