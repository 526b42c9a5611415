"""The benchmark of images draws whole images, and adds up pixels without a decode state."""

import json

import numpy as np
import pytest
from flax import nnx

from benchmarks import images, timing
from configs.schema import ModelConfig
from models.gpt import GPT, resolve_config
from sampling.sampler import TOKENS_PER_CALL, Sampler
from tests import small_run

CONTEXT = 70


def make(mode: str) -> GPT:
    config = ModelConfig(layers=1, heads=2, width=16, context=CONTEXT, dtype="float32", attention=(mode,))
    return GPT(resolve_config(config), 6, rngs=nnx.Rngs(0))


def test_a_sample_is_the_whole_image():
    seconds = images.sample_images(Sampler(make("linear")), 3)
    assert len(seconds) == -(-CONTEXT // TOKENS_PER_CALL)
    assert (seconds > 0).all()


def test_pixels_without_a_state_are_added_up_between_the_positions(monkeypatch):
    """A pixel takes 1 s with 32 tokens before it and less, and 1 s more for each 32 tokens; an image with a state the
    1, 2 and 3 s of each call of the sampler."""
    def time_by_turns(runs, *_):
        for run in runs.values():
            run()
        return {(mode, at): [6.0 if at is None else at / 32] for mode, at in runs}

    monkeypatch.setattr(images, "sample_images", lambda *_: np.array([1.0, 2.0, 3.0]))
    monkeypatch.setattr(images, "uncached_pixel", lambda *_: lambda: None)
    monkeypatch.setattr(timing, "time_by_turns", time_by_turns)
    rows = images.measure({"softmax": make("softmax"), "softmax:uncached": make("softmax")}, 4, 1, {"softmax": 7.0})
    assert images.positions(CONTEXT) == [32, 64, 70]
    assert [row.published for row in rows] == [7.0, None]
    seconds = 31 + sum(range(32, CONTEXT + 1)) / 32
    assert rows[1].milliseconds == pytest.approx(1e3 * seconds)
    assert rows[1].images_per_second == pytest.approx(4 / seconds)
    assert rows[1].pixel_milliseconds == {32: 1000, 64: 2000, 70: 70e3 / 32}
    assert rows[1].ratio == pytest.approx(seconds / 6)
    assert rows[0].pixel_milliseconds == pytest.approx({32: 2e3 / 32, 64: 3e3 / 6, 70: 3e3 / 6})
    assert rows[0].images_per_second == pytest.approx(4 / 6)


def test_a_pixel_without_a_state_is_the_one_with_it():
    model = make("softmax")
    sampler = Sampler(model)
    expected = sampler.encode(np.zeros(5, np.int32)).logits_BV
    found = images.uncached_pixel(model, 5, 2)()
    np.testing.assert_allclose(found[:, 0], np.repeat(expected, 2, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_rows_of_the_file_and_the_table(tmp_path, capsys):
    recipe, path = tmp_path / "mnist.py", tmp_path / "images.json"
    recipe.write_text(small_run.RECIPE)
    assert images.main(["--recipe", str(recipe), "--batches", "1,2", "--repeats", "3", "--dtype", "float32",
                        "--json", str(path), "--picture", str(tmp_path / "images.png")]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (batch, mode) for batch in (1, 2) for mode in ("linear", "softmax", "softmax:uncached")]
    for row in rows:
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["milliseconds"])
        assert list(row["pixel_milliseconds"]) == ["32"]
        assert row["error"] is None
    assert [row["published"] for row in rows[:3]] == [142.8, 7.56, 0.45]
    assert (tmp_path / "images.png").stat().st_size
    assert len(capsys.readouterr().out.splitlines()) == 8
