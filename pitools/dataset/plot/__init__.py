"""Draw one episode as a picture.

head     the instruction; dataset, version, length; in red the reason of a quarantine
frames   of each camera, evenly spaced, with their steps
curves   of actions and observations: columns of similar range in one panel, many columns as a heat map
"""

from pitools.dataset.plot.figure import draw_episode

__all__ = ["draw_episode"]
