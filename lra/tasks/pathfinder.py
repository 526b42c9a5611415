"""Pathfinder (32 x 32) and Path-X (128 x 128): do two dots lie on the same dashed path?

Images are generated here or read from the official release. Both sizes are "hard" (contours of 14 paddles), as in Long
Range Arena (Tay et al., 2020, arXiv 2011.04006). The task is that of Linsley et al. (2018, arXiv 1805.08315) and Kim et
al. (2020, arXiv 1906.01558). The generator follows theirs (github.com/drewlinsley/pathfinder) step by step, but handles
many images at once with precomputed stamps of paddles. A *snake* is a chain of paddles (short strokes), a *contour* one
of the two long snakes, a *distractor* a short one.

Differences from the original: labels are exactly balanced instead of random, an image depends only on its seed and
number, and markers near the border are not cropped before downscaling. Three oddities are the original's: distractors
at 32 x 32 are brighter than contours, few of the five are placed (1.2 on average), and they may overlap the last paddle
of the first contour. Report results on these images as "regenerated Pathfinder".

    python -m lra.tasks.pathfinder --out docs/pathfinder.png
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import copy
import functools
import math
import os
import pickle
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image, ImageDraw
from scipy import ndimage

from lra.tasks import Dataset, Split, dataset, files
from support.broken import Broken
from support.command import run_command, status
from support.errors import ConfigError, DataError
from support.machine import cores

VOCABULARY = 257
"""Grey values + 1; 0 is padding."""


@dataclass(frozen=True)
class Level:
    """Appearance of the images of a level; lengths are in pixels."""

    side: int
    seed_distance: int
    """Distance between the tails of the two contours, which start at least twice as far from the border."""
    marker_radius: float
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    """Space around a paddle; each image has one of these."""
    continuity: float
    """Straightness of snakes."""
    contrast: float
    """Contrast of the paddles of contours; that of markers is 1."""
    distractor_contrast: float
    distractors: int
    """Maximum number; a distractor that cannot be placed is left out."""
    distractor_length: int = 4
    """In paddles."""
    contour_length: int = 14
    """In paddles."""

    def reduced(self, side: int) -> "Level":
        """The same on a smaller image with equal density: contours get shorter, and distractors fewer, in proportion to
            its area."""
        return replace(self, side=side, seed_distance=self.seed_distance * side // self.side,
                       contour_length=round(self.contour_length * side**2 / self.side**2),
                       distractors=self.distractors * side**2 // self.side**2)


PATHFINDER = Level(side=32, seed_distance=7, marker_radius=1.5, paddle_length=2, thickness=0.5, margins=(1,),
                   continuity=1.0, contrast=1.5, distractor_contrast=2.0, distractors=5)
PATHX = Level(side=128, seed_distance=20, marker_radius=3.0, paddle_length=5, thickness=1.5, margins=(2, 3),
              continuity=1.8, contrast=0.9, distractor_contrast=0.9, distractors=8)
LEVELS = {"pathfinder": PATHFINDER, "pathx": PATHX}

SCALE = 2
"""Strokes and markers are drawn larger by this factor, and then downscaled."""
DEFAULT_EXAMPLES = {"train": 160_000, "val": 20_000, "test": 20_000}
VERSION = 2
"""Part of the names of cached files. Increment it when the same seed gives different images."""
EXTENSION_TRIALS = 3
DISTRACTOR_TRIALS = 5
OVERLAP = 459
"""Two masks of 0 to 255 whose sum reaches this somewhere (1.8 of 2) are too close."""
OCCUPIED = 76
"""A mask above this (0.3 of 1) blocks a new snake."""
BATCH = 1024
"""Images per batch."""
CHUNK = 2**22
"""Pixels per task of a process."""
MEASURED = 10_000
"""Most images of a split that baselines use."""


class Scenes(NamedTuple):
    """Positions in N images; rows and columns count from the upper left pixel.

    A paddle is (row, column, direction): the tip at the far end of its snake (at the start, for the first paddle), and
    the index of its stamp.
    """

    labels: np.ndarray
    """(N,) int32: 1 where both markers are on one contour."""
    margins: np.ndarray
    """(N,)"""
    contours: np.ndarray
    """(N, 2, contour length, 3)"""
    distractors: np.ndarray
    """(N, distractors, distractor length, 3)"""
    has_distractor: np.ndarray
    """(N, distractors): whether it was placed."""
    markers: np.ndarray
    """(N, 2, 2)"""


class _Streams:
    """Random numbers for the rows of a batch, each from its own stream: SplitMix64 (Steele et al., 2014).

    Args:
        numbers: (A,) of the images.
        purpose: (A,) or the same for all; each purpose of an image has its own stream.
    """

    def __init__(self, seed: int, numbers: np.ndarray, purpose: int | np.ndarray):
        self._states = _mix(np.array([seed % 2**64], np.uint64))
        for key in (numbers, np.broadcast_to(purpose, numbers.shape)):
            self._states = _mix(self._states + key.astype(np.uint64) * _STEP)

    def uniform(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """A float64 in [0, 1) for each of these rows."""
        self._states[rows] += _STEP
        return (_mix(self._states[rows]) >> np.uint64(11)) * 2.0**-53

    def below(self, bounds: int | np.ndarray) -> np.ndarray:
        """An int64 in [0, bound) for each row."""
        return (self.uniform() * bounds).astype(np.int64)


_LABEL, _LAYOUT, _DISTRACTOR, _CONTOURS = 0, 1, 2, 1000
"""Purposes; trials count up from the last two."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Stamps(NamedTuple):
    """Appearances of paddles with a given margin. Directions 0 to 359 are those of first paddles, in degrees from -180,
    drawn from the tail; the others are those of later paddles, drawn from the head back."""

    line: np.ndarray
    """(directions, w, w) uint8: the stroke, around its tip."""
    mask: np.ndarray
    """(directions, w, w) uint8: the stroke and the margin around it."""
    grown: np.ndarray
    """(directions, w', w') uint8: the mask and another margin around it, which excludes heads."""
    first_pivot: np.ndarray
    """(360, 2): from the tail of a first paddle to its pivot."""
    step: np.ndarray
    """(directions, 2): from pivot to pivot."""
    reach: np.ndarray
    """(K, 2): from a pivot to the possible heads of the next paddle."""
    turn: np.ndarray
    """(directions, K): weight of each head after a paddle of that direction."""
    footprints: tuple[np.ndarray | None, ...]
    """For each direction of first paddles, (C, 2): offsets from the tail that must be free; None: not allowed."""


@functools.cache
def _stamps(length: int, thickness: float, margin: int, continuity: float) -> _Stamps:
    radius = length + margin
    arc = np.arange(0, 360, 180 / (radius * np.pi)) * np.pi / 180  # in steps of one pixel
    reach = np.unique(np.floor(64 + radius * _towards(arc)).astype(int) - 64, axis=0)
    angles = np.concatenate([np.arange(-180, 180) * np.pi / 180, np.arctan2(reach[:, 0], reach[:, 1])])
    drawn = np.where(np.arange(len(angles)) < 360, angles, angles + np.pi)

    size = length + math.ceil(thickness) + margin
    line = np.stack([_stroke(SCALE * size, _translate(angle, SCALE * length), round(SCALE * thickness))
                     for angle in drawn])
    small = 2 * size + 1
    mask = _shrink(_dilate(line, SCALE * margin), small)

    turned = np.abs(angles[:, None] - angles[360:])
    turned = np.minimum(np.minimum(turned, 2 * np.pi - turned) * continuity, np.pi / 2)
    return _Stamps(
        line=_shrink(line, small), mask=mask,
        grown=_dilate(np.pad(mask, ((0, 0), (margin, margin), (margin, margin))), margin),
        first_pivot=_translate(angles[:360], length) + _translate(angles[:360] + np.pi, radius),
        step=_translate(angles, length + 2 * margin), reach=reach, turn=np.cos(turned) ** 2,
        footprints=tuple(_footprint(stamp, radius) for stamp in mask[:360]))


def _towards(angle: np.ndarray) -> np.ndarray:
    """Rows and columns of a unit vector."""
    return np.stack([np.sin(angle), np.cos(angle)], -1)


def _translate(angle: np.ndarray, distance: float) -> np.ndarray:
    """Whole pixels, rounded up; the summand absorbs floating-point errors of zeros."""
    return np.ceil(64 + distance * _towards(angle)).astype(int) - 64


def _stroke(radius: int, head: np.ndarray, width: int) -> np.ndarray:
    """A line of 255 from the centre of a square to ``head`` pixels from it."""
    image = Image.new("L", (2 * radius + 1, 2 * radius + 1))
    y, x = map(int, radius + head)
    ImageDraw.Draw(image).line([(radius, radius), (x, y)], fill=255, width=width)
    return np.asarray(image)


def _dilate(images: np.ndarray, radius: int) -> np.ndarray:
    """The largest value in a disk around each pixel of (N, H, W)."""
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return ndimage.grey_dilation(images, footprint=(y**2 + x**2 <= radius**2)[None], mode="constant")


def _shrink(images: np.ndarray, side: int) -> np.ndarray:
    """Square images (N, H, H) downscaled to ``side`` by a Lanczos filter with three lobes, as in Pillow: rounded to 0
    to 255 after columns and after rows."""
    scale = images.shape[-1] / side
    centres = (np.arange(side)[:, None] + 0.5) * scale
    distance = (np.arange(images.shape[-1]) + 0.5 - centres) / scale
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    weights /= weights.sum(1, keepdims=True)
    columns = np.clip(np.rint(images @ weights.T), 0, 255)
    return np.clip(np.rint(weights @ columns), 0, 255).astype(np.uint8)


def _marker(radius: float) -> np.ndarray:
    """(w, w) uint8: a disk, downscaled; its position is the middle pixel."""
    size = math.ceil(radius) + 3
    y, x = np.mgrid[-SCALE * size : SCALE * (size + 1), -SCALE * size : SCALE * (size + 1)]
    return _shrink(np.where(y**2 + x**2 <= (SCALE * radius) ** 2, 255, 0)[None], 2 * size + 1)[0]


def _footprint(mask: np.ndarray, radius: int) -> np.ndarray | None:
    """The pixels that a first paddle needs free, (C, 2); None: it is never drawn in this direction.

    As in the original they are shifted by one pixel right and down, so that in one corner of the image all may lie
    outside. There the original takes a maximum over nothing, and rejects the direction.
    """
    places = np.argwhere(mask == 255) - len(mask) // 2 + 1
    places = places[(np.abs(places) <= radius).all(1)]
    corners = [(places * quadrant >= 0).all(1).any() for quadrant in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
    return places if all(corners) else None


class _Canvas:
    """Occupied pixels of some images, with a border so that nothing lies outside."""

    def __init__(self, count: int, level: Level, stamps: _Stamps, margin: int):
        self.stamps, self.side = stamps, level.side
        self.edge = 2 * level.paddle_length + 3 * margin + 1
        size = level.side + 2 * self.edge
        first, last = self.edge, self.edge + level.side - 1
        self.mask = np.zeros((count, size, size), np.uint8)
        self.mask[:, (first, last), first : last + 1] = self.mask[:, first : last + 1, (first, last)] = 255
        self.grown = np.full((count, size, size), 255, np.uint8)
        inner = slice(first + margin + 1, last - margin)
        self.grown[:, inner, inner] = 0

    def add(self, rows: np.ndarray, paddles: np.ndarray) -> None:
        """Adds a paddle (row, column, direction) to each of these images."""
        _stamp(self.mask, self.edge, rows, paddles, self.stamps.mask)
        _stamp(self.grown, self.edge, rows, paddles, self.stamps.grown)

    def overlaps(self, rows: np.ndarray, paddles: np.ndarray) -> np.ndarray:
        """Whether a paddle would be too close to another, or to the border."""
        masks = self.stamps.mask[paddles[:, 2]]
        views, at = _windows(self.mask, self.edge, rows, paddles, masks.shape[-1])
        return (views[at].astype(np.uint16) + masks).max((1, 2)) >= OVERLAP

    def copy(self, rows: np.ndarray) -> "_Canvas":
        """A canvas of these images only."""
        canvas = copy.copy(self)
        canvas.mask, canvas.grown = self.mask[rows], self.grown[rows]
        return canvas

    def places(self, row: int | np.intp, direction: int | np.int64) -> np.ndarray:
        """Possible tails of a first paddle of a direction in one image, as row * side + column."""
        footprint = self.stamps.footprints[direction]
        if footprint is None:
            return np.zeros(0, np.int64)
        occupied = self.mask[row] > OCCUPIED
        taken = np.zeros((self.side, self.side), bool)
        for y, x in footprint + self.edge:
            taken |= occupied[y : y + self.side, x : x + self.side]
        return np.flatnonzero(~taken)


def _windows(images: np.ndarray, edge: int, rows: np.ndarray, paddles: np.ndarray, width: int,
             ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The squares of images, as a view; and the index of those around paddles, one in each of the images in ``rows``.
    """
    corner = edge - width // 2
    return (sliding_window_view(images, (width, width), axis=(1, 2), writeable=True),
            (rows, paddles[:, 0] + corner, paddles[:, 1] + corner))


def _stamp(images: np.ndarray, edge: int, rows: np.ndarray, paddles: np.ndarray, stamps: np.ndarray) -> None:
    """Draws one stamp into each of the images in ``rows``, which are unique; the brighter pixel stays."""
    views, at = _windows(images, edge, rows, paddles, stamps.shape[-1])
    views[at] = np.maximum(views[at], stamps[paddles[:, 2]])


def _extend(canvas: _Canvas, streams: _Streams, rows: np.ndarray, first: np.ndarray,
            length: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengthens snakes by paddles, alternately if there are two, until all are complete or one is stuck.

    Args:
        rows: of the canvas and its streams, those with snakes to lengthen.
        first: (A, S, 3) the first paddles of S snakes in each of the A rows of the canvas.

    Returns:
        the rows that succeeded, and (A, S, length, 3) paddles, complete in these rows.
    """
    paddles = np.zeros((*first.shape[:2], length, 3), np.int64)
    paddles[:, :, 0] = first
    pivots = first[:, :, :2] + canvas.stamps.first_pivot[first[:, :, 2]]
    for n in range(1, length):
        for snake in range(first.shape[1]):
            pivots[rows, snake] += canvas.stamps.step[paddles[rows, snake, n - 1, 2]]
            rows = _add_paddle(canvas, streams, rows, pivots[:, snake], paddles[:, snake], n)
            # Only now: a paddle may touch the previous one.
            canvas.add(rows, paddles[rows, snake, n - 1])
    canvas.add(rows, paddles[rows, -1, -1])
    return rows, paddles


def _add_paddle(canvas: _Canvas, streams: _Streams, rows: np.ndarray, pivots: np.ndarray, paddles: np.ndarray,
                n: int) -> np.ndarray:
    """Draws paddle ``n`` of a snake at random, into ``paddles`` (A, length, 3); returns the rows where it fits."""
    heads = pivots[rows, None] + canvas.stamps.reach
    free = 255 - canvas.grown[rows[:, None], heads[:, :, 0] + canvas.edge, heads[:, :, 1] + canvas.edge]
    chances = np.cumsum(free * canvas.stamps.turn[paddles[rows, n - 1, 2]], axis=1)
    open_ = chances[:, -1] >= 255e-4
    rows, heads, chances = rows[open_], heads[open_], chances[open_]
    done = []
    for _ in range(EXTENSION_TRIALS):
        choice = (chances <= (streams.uniform(rows) * chances[:, -1])[:, None]).sum(1)
        paddles[rows, n, :2] = heads[np.arange(len(rows)), choice]
        paddles[rows, n, 2] = 360 + choice
        again = canvas.overlaps(rows, paddles[rows, n])
        done.append(rows[~again])
        rows, heads, chances = rows[again], heads[again], chances[again]
    return np.concatenate(done)


def _contours(level: Level, stamps: _Stamps, margin: int, seed: int, numbers: np.ndarray) -> np.ndarray:
    """(A, 2, contour length, 3): both contours of each image. If one is stuck, both are redrawn."""
    centre = _Canvas(1, level, stamps, margin)
    inner = slice(centre.edge + 2 * level.seed_distance, centre.edge + level.side - 2 * level.seed_distance)
    centre.mask[:] = 255
    centre.mask[:, inner, inner] = 0
    # Tail and direction of the first contour. The original draws a direction first, and redraws it if nothing fits.
    places = {direction: found for direction in range(360) if len(found := centre.places(0, direction))}
    directions, counts = np.array([*places]), np.array([*map(len, places.values())])

    contours = np.zeros((len(numbers), 2, level.contour_length, 3), np.int64)
    pending, tried = np.arange(len(numbers)), np.zeros(len(numbers), np.int64)
    while len(pending):
        # Few succeed: with few images left, each is tried several times at once, and the first success counts.
        at_once = -(-BATCH // len(pending))
        images = np.repeat(pending[:BATCH], at_once)
        attempts = tried[images] + np.tile(np.arange(at_once), len(images) // at_once)
        tried[pending[:BATCH]] += at_once
        streams = _Streams(seed, numbers[images], _CONTOURS + attempts)

        first = np.zeros((len(images), 2, 3), np.int64)
        which = streams.below(len(directions))
        lots = streams.below(counts[which])
        first[:, 0, 2] = directions[which]
        tails = np.array([places[direction][lot] for direction, lot in zip(first[:, 0, 2], lots, strict=True)])
        first[:, 0, :2] = np.stack(np.divmod(tails, level.side), -1)
        first[:, 1, 2] = streams.below(360)
        around = streams.below(360) * np.pi / 180
        first[:, 1, :2] = np.rint(first[:, 0, :2] + level.seed_distance * _towards(around))
        canvas = _Canvas(len(images), level, stamps, margin)
        rows, paddles = _extend(canvas, streams, np.arange(len(images)), first, level.contour_length)
        rows = np.sort(rows)
        done, earliest = np.unique(images[rows], return_index=True)
        contours[done] = paddles[rows[earliest]]
        pending = np.setdiff1d(pending, done)
    return contours


def _distractors(level: Level, canvas: _Canvas, seed: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(A, distractors, length, 3) paddles and (A, distractors) whether they were placed."""
    paddles = np.zeros((len(numbers), level.distractors, level.distractor_length, 3), np.int64)
    found = np.zeros((len(numbers), level.distractors), bool)
    for n in range(level.distractors):
        for trial in range(DISTRACTOR_TRIALS):
            rows = np.flatnonzero(~found[:, n])
            streams = _Streams(seed, numbers[rows], _DISTRACTOR + n * DISTRACTOR_TRIALS + trial)
            directions, lots = streams.below(360), streams.uniform()
            first = np.zeros((len(rows), 1, 3), np.int64)
            has_place = np.zeros(len(rows), bool)
            for i, row in enumerate(rows):
                places = canvas.places(row, directions[i])
                if len(places):
                    first[i, 0] = *divmod(places[int(lots[i] * len(places))], level.side), directions[i]
                    has_place[i] = True
            tried = canvas.copy(rows)
            done, snakes = _extend(tried, streams, np.flatnonzero(has_place), first, level.distractor_length)
            canvas.mask[rows[done]], canvas.grown[rows[done]] = tried.mask[done], tried.grown[done]
            paddles[rows[done], n], found[rows[done], n] = snakes[done, 0], True
    return paddles, found


def scenes(level: Level, seed: int, numbers: np.ndarray) -> Scenes:
    """Lays out the images of these numbers (N,), each of which depends only on the seed and its own number."""
    streams = _Streams(seed, numbers, _LAYOUT)
    margins = np.array(level.margins)[streams.below(len(level.margins))]
    contours = np.zeros((len(numbers), 2, level.contour_length, 3), np.int64)
    distractors = np.zeros((len(numbers), level.distractors, level.distractor_length, 3), np.int64)
    has_distractor = np.zeros((len(numbers), level.distractors), bool)
    for margin in level.margins:
        stamps = _stamps(level.paddle_length, level.thickness, margin, level.continuity)
        images = np.flatnonzero(margins == margin)
        contours[images] = _contours(level, stamps, margin, seed, numbers[images])
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            canvas = _Canvas(len(batch), level, stamps, margin)
            # All but the last paddle of the first contour, as in the original.
            for snake, length in ((0, level.contour_length - 1), (1, level.contour_length)):
                for n in range(length):
                    canvas.add(np.arange(len(batch)), contours[batch, snake, n])
            distractors[batch], has_distractor[batch] = _distractors(level, canvas, seed, numbers[batch])
    labels_N = labels(seed, numbers)
    origins = streams.below(2)
    terminals = np.where(labels_N == 1, origins, 1 - origins)
    everything = np.arange(len(numbers))
    markers = np.stack([contours[everything, origins, 0, :2], contours[everything, terminals, -1, :2]], 1)
    return Scenes(labels_N, margins, contours, distractors, has_distractor, markers)


def labels(seed: int, numbers: np.ndarray) -> np.ndarray:
    """(N,) int32; of numbers 2n and 2n + 1 one is 0, the other 1."""
    return (_Streams(seed, numbers // 2, _LABEL).below(2) ^ (numbers & 1)).astype(np.int32)


def draw(level: Level, scenes: Scenes) -> np.ndarray:
    """(N, side, side) uint8: strokes and markers; the brightest pixel of each image is 255."""
    marker = _marker(level.marker_radius)
    drawn = np.zeros((len(scenes.labels), level.side, level.side), np.uint8)
    for margin in level.margins:
        line = _stamps(level.paddle_length, level.thickness, margin, level.continuity).line
        edge = max(line.shape[-1], marker.shape[-1])
        for batch in np.array_split(images := np.flatnonzero(scenes.margins == margin), -(-len(images) // BATCH) or 1):
            rows = np.arange(len(batch))
            canvas = np.zeros((len(batch), level.side + 2 * edge, level.side + 2 * edge), np.float32)
            for snake in np.moveaxis(scenes.contours[batch].reshape(len(batch), -1, 3), 1, 0):
                _stamp(canvas, edge, rows, snake, line * np.float32(level.contrast))
            for n in range(level.distractors):
                there = rows[scenes.has_distractor[batch, n]]
                for paddle in np.moveaxis(scenes.distractors[batch[there], n], 1, 0):
                    _stamp(canvas, edge, there, paddle, line * np.float32(level.distractor_contrast))
            for place in np.moveaxis(scenes.markers[batch], 1, 0):
                _stamp(canvas, edge, rows, np.pad(place, ((0, 0), (0, 1))), marker[None].astype(np.float32))
            inner = canvas[:, edge:-edge, edge:-edge]
            drawn[batch] = inner * (255 / inner.max((1, 2), keepdims=True)) + 0.5
    return drawn


def draw_numbers(level: Level, seed: int, numbers: Sequence[int]) -> np.ndarray:
    """(N, side, side) uint8: the images of these numbers."""
    return draw(level, scenes(level, seed, np.array(numbers)))


def load(*, folder: Path | None, max_length: int | None, counts: Mapping[str, int | None], seed: int,
         cache: Path | None, task: str = "pathfinder") -> Dataset:
    """Pathfinder, or with ``task="pathx"`` Path-X: pixels row by row; a token is the grey value + 1.

    Args:
        folder: the release's ``lra_release``, shuffled by ``seed``: 80 % train, 10 % val, 10 % test; None: generate
            images.
        max_length: a square number of pixels below the task's: generates smaller images, with shorter contours.
        counts: size of each split; None: 160,000 for train, as in the release, 20,000 for val and for test.
        seed: of generated images, or of the order of the release's.
        cache: folder for generated images.

    Raises:
        ConfigError: no image has this number of pixels, or the release has fewer examples.
        DataError: files are missing or damaged.
    """
    level = LEVELS[task]
    if max_length is not None:
        level = level.reduced(_side(max_length, level.side, task, generated=folder is None))
    if folder is None:
        notes = [f"generated {task}: {level.side} x {level.side} pixels, contours of {level.contour_length} paddles, "
                 f"seed {seed}"]
        found = {split: _generated(task, level, split, seed, count or DEFAULT_EXAMPLES[split], cache, notes)
                 for split, count in counts.items()}
    else:
        found, notes = _released(task, folder, level.side, counts, seed)
    splits = {}
    for split in counts:
        images, labels_N = found.pop(split)  # frees gigabytes
        tokens_NT = images.reshape(len(images), -1).astype(np.uint16)
        tokens_NT += 1
        splits[split] = Split((tokens_NT,), (np.full(len(images), level.side**2, np.int32),), labels_N)
    return dataset(splits, VOCABULARY, 2, notes, _baselines(splits, level))


def _side(pixels: int, most: int, task: str, *, generated: bool) -> int:
    """The side of a square image; generated ones have at least three eighths of the task's side."""
    sides = range(most * 3 // 8 if generated else most, most + 1)
    root = math.isqrt(pixels)
    if root in sides and root**2 == pixels:
        return root
    near = dict.fromkeys(min(max(side, sides[0]), most) for side in (root, root + 1))
    squares = " or ".join(f"{side**2} ({side} x {side})" for side in near)
    why = (f"images of {task} are squares with sides of {sides[0]} to {most} pixels" if generated else
           f"images of {task} in data.dir have sides of {most} pixels and cannot be cropped")
    raise ConfigError(f"data.max_length is {pixels}; expected {squares}: {why}")


def _baselines(splits: dict[str, Split], level: Level) -> dict[str, float]:
    """Test accuracy of baselines fitted on train: the majority in each decile of the brightness of images, and of the
    distance of their markers."""
    train, test = splits["train"], splits["test"]

    def by_tenths(measure: Callable[[np.ndarray], np.ndarray]) -> float:
        learned_from, asked = (measure(split.tokens[0][:MEASURED]) for split in (train, test))
        edges = np.unique(np.quantile(learned_from, np.arange(1, 10) / 10))
        tenths = np.searchsorted(edges, learned_from)
        ones = np.bincount(tenths, train.labels[:MEASURED], 10) * 2 > np.bincount(tenths, minlength=10)
        return float((test.labels[:MEASURED] == ones[np.searchsorted(edges, asked)]).mean())

    return {"brightness": by_tenths(lambda tokens_NT: tokens_NT.mean(1)),
            "marker distance": by_tenths(functools.partial(_distances, level))}


def _distances(level: Level, tokens_NT: np.ndarray) -> np.ndarray:
    """(N,) pixels between the two brightest squares of each image, as wide as markers and without overlap."""
    width, at_once = 2 * int(level.marker_radius) + 1, max(1, 2**16 // level.side**2)
    found = []
    for first in range(0, len(tokens_NT), at_once):
        images = tokens_NT[first : first + at_once].reshape(-1, level.side, level.side).astype(np.int32)
        for axis in (1, 2):
            images = sliding_window_view(images, width, axis=axis).sum(-1)
        places = []
        for _ in range(2):
            places.append(np.stack(np.divmod(images.reshape(len(images), -1).argmax(1), images.shape[2]), -1))
            covered = (abs(np.indices(images.shape[1:])[:, None] - places[-1].T[:, :, None, None]) < width).all(0)
            images[covered] = -1
        found.append(np.hypot(*(places[0] - places[1]).T))
    return np.concatenate(found)


def _generated(task: str, level: Level, split: str, seed: int, count: int, cache: Path | None,
               notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(count, side, side) uint8 images and (count,) labels, from ``cache`` if intact there, else generated and
    cached."""
    start = list(DEFAULT_EXAMPLES).index(split) * 2**40
    labels_N = labels(seed, np.arange(start, start + count))
    kept, remarks = files.cached(cache, f"{task}-{level.side}-{split}-{count}-seed{seed}-v{VERSION}", lambda: {
        "images": generate(level, seed, start, count, f"{task} {split}")})
    notes.extend(remarks)
    return kept["images"], labels_N


def generate(level: Level, seed: int, start: int, count: int, title: str = "images") -> np.ndarray:
    """(count, side, side) uint8: ``count`` images from ``start`` on, drawn by one process per core.

    Raises:
        DataError: a process failed.
    """
    numbers, size = range(start, start + count), CHUNK // level.side**2
    chunks = [numbers[at : at + size] for at in range(0, count, size)]
    if len(chunks) < 2:
        return draw_numbers(level, seed, numbers)
    from rich.console import Console
    from rich.progress import track

    status(f"generating {count:,} {title} …")
    images = np.empty((count, level.side, level.side), np.uint8)
    with ThreadPoolExecutor(len(cores())) as pool:
        drawn = pool.map(functools.partial(_in_process, level, seed), chunks)
        try:
            for at, chunk in zip(range(0, count, size), track(
                    drawn, title, len(chunks), console=Console(stderr=True), transient=True), strict=True):
                images[at : at + size] = chunk
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return images


WORKER_CODE = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from lra.tasks import pathfinder
sys.stdout.buffer.write(pathfinder.draw_numbers(*pickle.load(sys.stdin.buffer)).tobytes())
"""


def _in_process(level: Level, seed: int, numbers: range) -> np.ndarray:
    # multiprocessing would import the running script in each process, and with it jax and a model.
    ended = subprocess.run([sys.executable, "-P", "-c", WORKER_CODE, str(Path(__file__).parents[2])],
                           input=pickle.dumps((level, seed, numbers)), capture_output=True, check=False,
                           env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise DataError(f"an image generation process ended (exit code {ended.returncode}"
                        f"{': ' + said[-1] if said else ''}); try more memory, or fewer cores")
    return np.frombuffer(ended.stdout, np.uint8).reshape(-1, level.side, level.side)


def _released(task: str, folder: Path, side: int, counts: Mapping[str, int | None],
              seed: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Images and labels of each split, and notes. Broken images are skipped."""
    root = folder / f"pathfinder{side}" / "curv_contour_length_14"
    listed = _listed(root)
    order = np.random.default_rng(seed).permutation(len(listed))
    bounds = [0, len(listed) * 8 // 10, len(listed) * 9 // 10, len(listed)]
    found, broken, read = {}, Broken(root), 0
    for (split, count), first, last in zip(counts.items(), bounds[:-1], bounds[1:], strict=True):
        files.check_count(task, split, last - first, count)
        rows = [listed[i] for i in order[first:last][:count]]
        images, whole = np.empty((len(rows), side, side), np.uint8), np.ones(len(rows), bool)
        for i, (path, _) in enumerate(rows):
            if (image := _grey(path, side)) is None:
                whole[i] = False
                broken.add(f"{path.relative_to(root)}, missing or no PNG image of {side} x {side} pixels")
            else:
                images[i] = image
        read += len(rows)
        found[split] = images[whole], np.array([label for _, label in rows], np.int32)[whole]
    return found, list(broken.notes(read))


def _listed(root: Path) -> list[tuple[Path, int]]:
    """The images and labels of the metadata: text, despite the suffix, with a line ``subpath file index label …`` for
    each image."""
    tables = sorted((root / "metadata").glob("*.npy"))
    if not tables:
        raise DataError(f"{root}: expected metadata/*.npy and imgs/*/sample_*.png, as in lra_release.gz of the Long "
                        "Range Arena; give its unpacked folder lra_release as data.dir, or leave out data.dir to "
                        "generate images")
    listed = []
    for file in tables:
        for number, line in enumerate(file.read_bytes().decode(errors="replace").splitlines(), 1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise DataError(f"{file}: line {number}: expected text, 'subpath file index label …' with a label of 0 "
                                f"or 1, found {line[:60]!r}: unpack lra_release.gz again")
            listed.append((root / fields[0] / fields[1], int(fields[3])))
    return listed


def _grey(path: Path, side: int) -> np.ndarray | None:
    """(side, side) uint8 of a PNG file; None if it is not such an image."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            return np.asarray(image.convert("RGB"))[:, :, 0] if image.size == (side, side) else None
    except (OSError, SyntaxError, ValueError):
        return None


def command(arguments: Sequence[str]) -> None:
    """Draws examples of both tasks and both labels."""
    from matplotlib.figure import Figure

    parser = ArgumentParser(prog="python -m lra.tasks.pathfinder", description=command.__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="PNG to draw")
    options = parser.parse_args(arguments)
    if not os.access(options.out.parent, os.W_OK):
        parser.error(f"--out {options.out}: cannot be written; name a file in a folder that can be written to")
    columns = 6
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots(4, columns)
    for i, (name, level) in enumerate((("Pathfinder", PATHFINDER), ("Path-X", PATHX))):
        drawn = scenes(level, 0, np.arange(2 * columns))
        images = draw(level, drawn)
        for label, said in ((1, "one path"), (0, "two paths")):
            row = axes[2 * i + 1 - label]
            row[0].set_ylabel(f"{name}\n{said}")
            for axis, image in zip(row, images[drawn.labels == label], strict=True):
                axis.imshow(image, cmap="gray")
                axis.set(xticks=[], yticks=[])
    figure.savefig(options.out, format="png", dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("lra.tasks.pathfinder", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
