"""Path-X: Pathfinder on images of 128 x 128 pixels; see :mod:`lra.tasks.pathfinder`."""

import functools

from lra.tasks import pathfinder

VOCABULARY = pathfinder.VOCABULARY
load = functools.partial(pathfinder.load, task="pathx")
