"""A model of images through every command: trained, evaluated, sampled and compared."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import eval
import sample
from comparison import compare
from comparison.page import payload
from comparison.runs import load_run
from comparison.table import headings
from data import prepare
from data.token_files import TokenFiles
from lineargpt import open_run
from support.errors import ConfigError
from tests import small_run


@pytest.fixture(autouse=True)
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Token files of images of 4 × 3 pixels, ``tokens``, of which 10 are test, and ``run``, trained on them."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        (folder / "png" / split).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random.integers(200, 256, size=(4, 3)).astype(np.uint8)).save(
                folder / "png" / split / f"{number}.png")
    (folder / "tiny.py").write_text(small_run.RECIPE)
    prepare.prepare(str(folder / "png"), "pixels", folder / "tokens")
    with small_run.settings():
        assert small_run.run(folder / "tiny.py", "--run-dir", folder / "run", "--data.dir", folder / "tokens",
                             "--data.tokenizer", "pixels", "--data.packing", "rows", "--model.context", 12,
                             "--attention", "linear", "--train.sample-every", 2) == 0
    return folder


def main(command, *arguments: object) -> int:
    return command.main(list(map(str, arguments)))


@pytest.mark.fast
def test_val_lines_have_bits_per_dimension(folder):
    line, = small_run.lines(folder / "run", "val")
    assert line["bits_per_dimension"] == pytest.approx(line["loss"] / math.log(2), rel=1e-12)
    assert "bits_per_byte" not in line


def test_evaluation_of_val_and_of_test(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(eval, folder / "run", "--windows", 4) == 0
    line, = small_run.lines(folder / "run", "val")
    entry, = json.loads((folder / "run" / "evaluation.json").read_text())["evaluations"]
    assert (entry["windows"], entry["tokens"], entry["short_context"]) == (4, 48, [])
    assert entry["bits_per_dimension"] == pytest.approx(line["bits_per_dimension"], rel=1e-5)
    before = (folder / "run" / "evaluation.json").read_bytes()
    capsys.readouterr()
    assert main(eval, folder / "run", "--split", "test") == 0  # on all of it
    assert (folder / "run" / "evaluation.json").read_bytes() == before
    entry, = json.loads((folder / "run" / "evaluation-test.json").read_text())["evaluations"]
    assert (entry["windows"], entry["tokens"]) == (10, 120)
    (read,) = load_run(folder / "run").test_evaluations
    assert read["bits_per_dimension"] == entry["bits_per_dimension"]
    told = capsys.readouterr().out
    assert "bits per dimension" in told
    baseline = TokenFiles.open(folder / "tokens").meta["pixel_histogram"]["test"]
    assert f"tokens: the histogram of each pixel has {baseline:.4f} bits per dimension on all of test" in told
    (tmp_path / "other").mkdir()
    for number in range(3):
        Image.new("L", (2, 6)).save(tmp_path / "other" / f"{number}.png")
    assert main(eval, folder / "run", "--data.source", tmp_path / "other") == 2
    assert "has 6 × 2 pixels, grey, 256 levels; expected the images of " in capsys.readouterr().err


def test_a_grid_of_samples_and_completions(folder, tmp_path):
    assert main(sample, folder / "run", "--images", 3, "--out", tmp_path / "grid.png") == 0
    with Image.open(tmp_path / "grid.png") as opened:
        assert opened.mode == "L"
        assert opened.size == (2 * 48 + 4, 2 * 64 + 4)  # enlarged 16 times
    upper = np.array([[10, 20, 30, 40, 50, 60]], np.uint8)  # of two images
    Image.fromarray(upper).save(tmp_path / "half.png")
    assert main(sample, folder / "run", "--images", 3, "--complete", tmp_path / "half.png", "--out",
                tmp_path / "done.png", "--temperature", 0.5) == 0
    with Image.open(tmp_path / "done.png") as opened:
        shades = np.asarray(opened)
    assert shades.shape == (3 * 68 - 4, 2 * 52 - 4)
    for top in (0, 68, 136):
        assert shades[top, 0:48:16].tolist() == [10, 20, 30]
        assert shades[top, 52:100:16].tolist() == [40, 50, 60]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--prompt", "a"], r"is a model of images; expected --images N --out FILE\.png in place of a prompt"),
    ([], r"run is a model of images; expected --images N --out FILE\.png$"),
    (["--images", 4, "--prompt", "a", "--out", "OUT"], "--prompt is for text, and --images for images"),
    (["--images", 4, "--num-samples", 9, "--out", "OUT"], "--num-samples is for text, and --images for images"),
    (["--images", 4], r"--out is None; with --images, expected the name of a \.png file"),
    (["--out", "OUT"], "--out .* requires --images"),
    (["--images", 4, "--out", "OUT", "--complete", "PNG"],
     "has 4 × 3 pixels, grey; expected 1 to 3 rows of 3 pixels or a multiple of it"),
])
def test_options_that_do_not_fit_a_model_of_images(folder, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin", None)
    stands_for = {"OUT": tmp_path / "x.png", "PNG": folder / "png" / "train" / "0.png"}
    assert main(sample, folder / "run", *(stands_for.get(word, word) for word in arguments)) == 2
    assert re.search(message, capsys.readouterr().err.strip(), re.MULTILINE)
    assert not (tmp_path / "x.png").exists()


def test_the_comparison_has_bits_per_dimension_and_the_picture(folder):
    runs = [load_run(folder / "run")]
    found = compare(runs)
    assert "bits per dimension" in headings(found.columns)
    assert "bits per byte" not in headings(found.columns)
    last = small_run.lines(folder / "run", "val")[-1]
    assert found.rows[0].figures["bits_per_dimension"] == last["bits_per_dimension"]
    page = payload(found)
    shown = page["runs"][0]
    assert (page["bits"], shown["bits_per_nat"]) == ("bits per dimension", pytest.approx(1 / math.log(2)))
    newest = (folder / "run" / "samples" / "00000002.png").read_bytes()
    assert shown["sample_image"] == "data:image/png;base64," + base64.b64encode(newest).decode()
    assert (shown["sample"], shown["sample_step"]) == (None, 2)


def test_images_from_python(folder):
    run = open_run(folder / "run")
    upper = np.full((2, 3, 1), 7, np.uint8)
    found = run.sample_images(2, upper=upper)
    assert (found.shape, found.dtype) == ((2, 4, 3, 1), np.uint8)
    assert (found[:, :2] == 7).all()
    with pytest.raises(ConfigError, match="run is a model of images, without a tokenizer of text"):
        run.sample("def ")
