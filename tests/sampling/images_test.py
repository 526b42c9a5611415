"""Sampled images follow the parallel model to the last pixel, without separators; PNG files in and out."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from configs.schema import ModelConfig
from data.sources.images import ImageFormat
from models.gpt import GPT, resolve_config
from sampling.images import ImageSamples, image_sampler, read_upper, sample_images, write_grid
from sampling.sampler import Sampler, Sampling
from support.errors import ConfigError, DataError

FORMAT = ImageFormat(3, 2, 3, 5)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def model() -> GPT:
    """As many positions as tokens of an image. The separator is the likeliest token everywhere."""
    config = resolve_config(ModelConfig(layers=1, heads=2, width=16, context=FORMAT.tokens, dtype="float32",
                                        initial_scale=0.3, attention=("linear",)))
    model = GPT(config, FORMAT.levels + 1, rngs=nnx.Rngs(0))
    model.final_norm.bias[...] = 10 * model.token_embedding.embedding[FORMAT.levels]
    return model


@pytest.fixture(scope="module")
def greedy(model: GPT) -> Callable[[list[int]], list[int]]:
    """A whole image after given levels, by a forward pass over all positions for each of the others."""
    logits = jax.jit(lambda tokens_BT: model.logits(model.forward(tokens_BT)[0]))

    def complete(given: list[int]) -> list[int]:
        tokens = [FORMAT.levels, *given]
        while len(tokens) <= FORMAT.tokens:
            padded = jnp.array([tokens + [0] * (FORMAT.tokens - len(tokens))])
            tokens.append(int(jnp.argmax(logits(padded)[0, len(tokens) - 1, : FORMAT.levels])))
        return tokens[1:]

    return complete


def test_an_image_is_sampled_to_its_last_pixel(model, greedy):
    (part,) = Sampler(model).generate(np.array([FORMAT.levels]), GREEDY, max_new_tokens=3)
    assert part.tolist() == [[FORMAT.levels] * 3]  # without the exclusion of separators
    found = sample_images(image_sampler(model, FORMAT), FORMAT, GREEDY, samples=2)
    assert found.shape == (2, 3, 2, 3)
    assert found[0].ravel().tolist() == found[1].ravel().tolist() == greedy([])


def test_a_completion_has_the_given_rows_and_continues_them(model, greedy):
    upper = np.random.default_rng(0).integers(5, size=(2, 2, 3)).astype(np.uint8)
    sampler = image_sampler(model, FORMAT)
    found = sample_images(sampler, FORMAT, GREEDY, samples=1, upper_YWC=upper)
    assert found.ravel().tolist() == greedy(upper.ravel().tolist())
    first, again, other = (sample_images(sampler, FORMAT, Sampling(1.0, seed=seed), samples=4, upper_YWC=upper)
                           for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first[:, :2] == upper).all()
    assert (first != other).any()
    for wrong in (upper[:0], upper[:, :1], np.zeros((3, 2, 3), np.uint8), upper + 5):
        with pytest.raises(ConfigError, match=r"the given rows have .*; expected \(Y, 2, 3\) with Y from 1 to 2"):
            sample_images(sampler, FORMAT, GREEDY, samples=1, upper_YWC=wrong)


def test_text_still_stops_at_the_last_position(model):
    parts = list(Sampler(model).generate(np.array([0]), GREEDY, max_new_tokens=99))
    assert sum(part.shape[1] for part in parts) == FORMAT.tokens - 1


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_has_every_image_in_its_place_and_can_be_read_again(tmp_path, channels):
    image = ImageFormat(70, 3, channels, 17)  # too tall to be enlarged
    images = np.random.default_rng(0).integers(17, size=(5, 70, 3, channels)).astype(np.uint8)
    write_grid(tmp_path / "grid.png", images, 17, columns=2)
    with Image.open(tmp_path / "grid.png") as opened:
        shades = np.asarray(opened, float).reshape(3 * 74 - 4, 2 * 7 - 4, channels)
    for number, pixels in enumerate(images):
        top, left = 74 * (number // 2), 7 * (number % 2)
        np.testing.assert_array_equal(np.rint(shades[top : top + 70, left : left + 3] * 16 / 255), pixels)
    strip = np.rint(np.concatenate(list(images[:4, :9]), axis=1) * (255 / 16)).astype(np.uint8)
    Image.fromarray(strip.squeeze()).save(tmp_path / "strip.png")
    np.testing.assert_array_equal(read_upper(tmp_path / "strip.png", image), images[:4, :9])


def test_small_images_are_enlarged_to_be_seen(tmp_path):
    write_grid(tmp_path / "grid.png", np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1), 4)
    with Image.open(tmp_path / "grid.png") as opened:
        assert opened.size == (64, 64)
        np.testing.assert_array_equal(np.asarray(opened)[::32, ::32], [[0, 85], [170, 255]])


def test_images_that_are_no_upper_parts(tmp_path):
    for size, mode, message in (((2, 3), "RGB", "3 × 2 pixels, RGB; expected 1 to 2 rows of 2 pixels or a multiple"),
                                ((3, 2), "RGB", "2 × 3 pixels, RGB"), ((2, 2), "L", "2 × 2 pixels, grey")):
        Image.new(mode, size).save(tmp_path / "half.png")
        with pytest.raises(ConfigError, match=f"half.png has {message}"):
            read_upper(tmp_path / "half.png", FORMAT)
    (tmp_path / "half.png").write_text("text")
    with pytest.raises(DataError, match=r"half\.png cannot be read"):
        read_upper(tmp_path / "half.png", FORMAT)


def test_samples_of_training_are_grids_and_later_ones_are_deleted(tmp_path, model):
    folder = tmp_path / "samples"
    samples = ImageSamples(folder, FORMAT, keep_through=0)
    for step in (5, 10):
        samples.write(step, model)
    assert (folder / "00000005.png").read_bytes() == (folder / "00000010.png").read_bytes()
    ImageSamples(folder, FORMAT, keep_through=5)
    assert [path.name for path in folder.iterdir()] == ["00000005.png"]
