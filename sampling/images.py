"""Samples of images, and the PNG files that show them: of ``sample.py``, and ``RUN/samples/STEP.png`` in training."""

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt8

from data.sources.images import ImageFormat, decode_images
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from sampling.samples import Samples
from support.errors import ConfigError
from support.files import replacing

IMAGES = 16
"""Number of images of a sample during training."""
TEMPERATURE = 1.0
"""Default temperature: the model's own distribution."""
_LEAST_SIDE = 64
"""Images of at most half this size are enlarged by a whole factor, to at most this size."""
_GAP = 4
_GAP_SHADE = 128


def image_sampler(model: GPT, image: ImageFormat, mesh: Mesh | None = None) -> Sampler:
    """A sampler of a model of images, which never samples the separator; ``mesh`` as for :class:`Sampler`."""
    return Sampler(model, excluded=image.vocabulary.separator, mesh=mesh)


def sample_images(sampler: Sampler, image: ImageFormat, sampling: Sampling, *, samples: int,
                  upper_YWC: UInt8[np.ndarray, "Y W C"] | None = None) -> UInt8[np.ndarray, "N H W C"]:
    """Samples whole images, or the rest of an image, level by level.

    Args:
        sampler: of :func:`image_sampler`.
        image: format of the images that the model was trained on.
        sampling: sampling options.
        samples: N.
        upper_YWC: levels of the first Y < H rows of all images.

    Returns:
        levels.

    Raises:
        ConfigError: an option is out of range, or ``upper_YWC`` does not fit.
    """
    if samples < 1:
        raise ConfigError(f"the number of images is {samples}; expected at least 1")
    if upper_YWC is not None and not (
            np.issubdtype(upper_YWC.dtype, np.integer) and upper_YWC.ndim == 3 and 0 < len(upper_YWC) < image.height
            and upper_YWC.shape[1:] == (image.width, image.channels)
            and 0 <= upper_YWC.min() <= upper_YWC.max() < image.levels):
        raise ConfigError(f"the given rows have the shape {upper_YWC.shape}; expected (Y, {image.width}, "
                          f"{image.channels}) with Y from 1 to {image.height - 1}, and whole levels below "
                          f"{image.levels}")
    given_T = np.zeros(0, np.int32) if upper_YWC is None else upper_YWC.astype(np.int32).ravel()
    prompt_T = np.append(np.int32(image.vocabulary.separator), given_T)
    tokens = image.tokens - len(given_T)
    # The last token of an image needs no position.
    parts = list(sampler.generate(prompt_T, sampling, max_new_tokens=tokens, samples=samples, past_last=True))
    levels_NT = np.concatenate([np.broadcast_to(given_T, (samples, len(given_T))), *parts], axis=1)
    return levels_NT.astype(np.uint8).reshape(samples, image.height, image.width, image.channels)


def write_grid(path: Path, images_NHWC: UInt8[np.ndarray, "N H W C"], levels: int, *, columns: int | None = None,
               ) -> None:
    """Write images as a PNG file, row by row, small ones enlarged by a whole factor.

    Args:
        path: output path.
        images_NHWC: levels.
        levels: number of levels; the highest is white.
        columns: images per row. None: about as many as rows.

    Raises:
        OSError: it cannot be written.
    """
    import PIL.Image

    N, H, W, C = images_NHWC.shape
    columns = columns or math.ceil(math.sqrt(N))
    rows, factor = -(-N // columns), max(1, _LEAST_SIDE // max(H, W))
    shades = np.rint(images_NHWC * (255 / (levels - 1))).astype(np.uint8).repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = H * factor + _GAP, W * factor + _GAP
    grid = np.full((rows * height - _GAP, columns * width - _GAP, C), _GAP_SHADE, np.uint8)
    for number, picture in enumerate(shades):
        top, left = number // columns * height, number % columns * width
        grid[top : top + H * factor, left : left + W * factor] = picture
    with replacing(path) as beside, beside.open("wb") as file:
        PIL.Image.fromarray(grid if C == 3 else grid[..., 0]).save(file, "png")


def read_upper(path: Path, image: ImageFormat) -> list[UInt8[np.ndarray, "Y W C"]]:
    """The levels of the upper parts of images in an image file: one, or several side by side. Black is level 0, white
    the highest; other shades are rounded.

    Args:
        path: a file of Y < H rows, in the mode of the images.
        image: format of the whole images.

    Raises:
        ConfigError: it has another size or mode.
        DataError: it cannot be read.
    """
    found, levels = decode_images([(str(path), path)])
    Y, W, C = found.shape[1:]
    if image.channels != C or not 0 < Y < image.height or W % image.width:
        raise ConfigError(f"{path} has {ImageFormat.of_shape((Y, W, C), levels)}; expected 1 to "
                          f"{image.height - 1} rows of {image.width} pixels or a multiple of it, as the images of the "
                          f"model have {image}")
    rounded = np.rint(found[0] * ((image.levels - 1) / (levels - 1))).astype(np.uint8)
    return np.split(rounded, W // image.width, axis=1)


class ImageSamples(Samples):
    """Grids of sampled images.

    Args:
        folder: output folder.
        image: format of the images.
        keep_through: as in :class:`Samples`.
    """

    suffix: ClassVar[str] = ".png"

    def __init__(self, folder: Path, image: ImageFormat, *, keep_through: int):
        super().__init__(folder, keep_through=keep_through)
        self._image = image

    def make_sampler(self, model: GPT) -> Sampler:
        return image_sampler(model, self._image)

    def write_sample(self, path: Path, sampler: Sampler) -> None:
        images_NHWC = sample_images(sampler, self._image, Sampling(temperature=TEMPERATURE), samples=IMAGES)
        write_grid(path, images_NHWC, self._image.levels)
