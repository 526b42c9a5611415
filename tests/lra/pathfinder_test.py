"""Pathfinder and Path-X: contents and sources of their images, and errors for invalid files."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from lra import tasks
from lra.tasks import Dataset, pathfinder
from lra.tasks.pathfinder import PATHFINDER, PATHX, Level, Scenes
from support.errors import ConfigError, DataError


def made(level: Level, count: int) -> tuple[Level, Scenes, np.ndarray]:
    scenes = pathfinder.scenes(level, 3, np.arange(count))
    return level, scenes, pathfinder.draw(level, scenes)


@pytest.fixture(scope="module")
def small() -> tuple[Level, Scenes, np.ndarray]:
    return made(PATHFINDER, 600)


@pytest.fixture(scope="module")
def large() -> tuple[Level, Scenes, np.ndarray]:
    return made(PATHX, 24)


@pytest.fixture(params=["small", "large"])
def images(request: pytest.FixtureRequest) -> tuple[Level, Scenes, np.ndarray]:
    return request.getfixturevalue(request.param)


def load(task: str = "pathfinder", **options) -> Dataset:
    return tasks.load(task, **{"folder": None, "max_length": None, "train_examples": 40, "val_examples": 20, "seed": 0}
                      | options)


@pytest.fixture(scope="module")
def generated() -> Dataset:
    return load()


def test_both_contours_have_fourteen_paddles_that_follow_one_another(images):
    level, scenes, _ = images
    tips = scenes.contours[..., :2]
    assert tips.shape[1:] == (2, 14, 2)
    assert tips.min() >= 0
    assert tips.max() < level.side
    steps = np.linalg.norm(np.diff(tips[:, :, 1:], axis=2), axis=-1)
    # From head to head: a paddle and twice its margin, up to rounding to pixels.
    margins = scenes.margins[:, None, None]
    assert (abs(steps - (level.paddle_length + 2 * margins)) <= margins + 2).all()
    begin = np.linalg.norm(tips[:, 0, 0] - tips[:, 1, 0], axis=-1)
    np.testing.assert_allclose(begin, level.seed_distance, atol=1)


def test_every_paddle_is_drawn(images):
    level, scenes, drawn = images
    snakes = [scenes.contours.reshape(len(drawn), -1, 3),
              np.where(scenes.has_distractor[:, :, None, None], scenes.distractors, scenes.contours[:, :1, :1])
              .reshape(len(drawn), -1, 3)]
    tips = np.concatenate(snakes, axis=1)
    lit = drawn[np.arange(len(drawn))[:, None], tips[..., 0], tips[..., 1]]
    assert (lit > 30).all()
    without = pathfinder.draw(level, scenes._replace(contours=scenes.contours[:, :, :-1]))
    assert (without != drawn).any((1, 2)).mean() > 0.9


def test_markers_lie_on_the_tips_of_one_contour_where_the_label_is_1(images):
    level, scenes, drawn = images
    first, last = scenes.contours[:, :, 0, :2], scenes.contours[:, :, -1, :2]
    origin = (first == scenes.markers[:, None, 0]).all(-1)
    terminal = (last == scenes.markers[:, None, 1]).all(-1)
    assert (origin.sum(1) == 1).all()
    # Occasionally two contours end in one place; such images are ambiguous.
    certain = terminal.sum(1) == 1
    assert certain.mean() > 0.95
    np.testing.assert_array_equal((origin == terminal).all(1)[certain], scenes.labels[certain] == 1)
    assert 0.3 < origin[:, 0].mean() < 0.7
    disk = np.argwhere(np.hypot(*np.mgrid[-3:4, -3:4]) <= level.marker_radius - 0.5) - 3
    places = scenes.markers[:, :, None] + disk
    inside = np.clip(places, 0, level.side - 1)
    # The brightest stroke of a small image is brighter than its markers.
    assert (drawn[np.arange(len(drawn))[:, None, None], inside[..., 0], inside[..., 1]] > 130).mean() > 0.99


def test_distractors_keep_apart_from_other_snakes(images):
    level, scenes, _ = images

    def occupied(paddles, margin):
        masks = pathfinder._stamps(level.paddle_length, level.thickness, margin, level.continuity).mask
        size, image = masks.shape[-1], np.zeros((level.side + 60, level.side + 60), int)
        for row, column, direction in paddles.reshape(-1, 3):
            corner = 30 + np.array([row, column]) - size // 2
            window = image[corner[0] : corner[0] + size, corner[1] : corner[1] + size]
            window[:] = np.maximum(window, masks[direction])
        return image

    for i in range(24):
        # Distractors may overlap the last paddle of the first contour.
        before = [scenes.contours[i, 0, :-1], scenes.contours[i, 1]]
        for snake in scenes.distractors[i][scenes.has_distractor[i]]:
            others = occupied(np.concatenate(before), scenes.margins[i])
            assert (others + occupied(snake[1:], scenes.margins[i])).max() < 1.8 * 255
            before.append(snake)


def test_images_are_like_those_of_the_original(small, large):
    """Against 60 and 16 images that the original's code drew: mean grey 20.1 and 8.0, pixels that are not black 33.9 %
    and 13.8 %, distractors 1.10 and 7.8. Bounds are three or four standard errors of the original's few images."""
    for (_, scenes, drawn), grey, not_black, distractors in (
            (small, (18.9, 21.3), (0.32, 0.36), (0.8, 1.4)), (large, (7.4, 8.6), (0.13, 0.147), (7.3, 8.0))):
        assert (drawn.max((1, 2)) == 255).all()
        assert (drawn.min((1, 2)) == 0).all()
        assert grey[0] < drawn.mean() < grey[1]
        assert not_black[0] < (drawn > 0).mean() < not_black[1]
        assert distractors[0] < scenes.has_distractor.sum(1).mean() < distractors[1]
    assert set(large[1].margins) == {2, 3}


@pytest.mark.parametrize(("length", "thickness", "margin"), [(2, 0.5, 1), (5, 1.5, 3)])
def test_strokes_are_those_of_pillow(length, thickness, margin):
    stamps = pathfinder._stamps(length, thickness, margin, 1.0)
    side = stamps.line.shape[-1]
    centre = side - 1
    for degrees in range(-175, 180, 25):
        angle = np.deg2rad(degrees)
        large = Image.new("L", (2 * side - 1, 2 * side - 1))
        x, y = (int(np.ceil(centre + 2 * length * along)) for along in (np.cos(angle), np.sin(angle)))
        ImageDraw.Draw(large).line([(centre, centre), (x, y)], fill=255, width=int(2 * thickness))
        expected = large.resize((side, side), Image.Resampling.LANCZOS)
        np.testing.assert_allclose(stamps.line[180 + degrees].astype(int), np.asarray(expected, int), atol=1)


@pytest.mark.thorough
def test_labels_are_balanced_and_cannot_be_read_from_brightness():
    data = load(train_examples=1000, val_examples=500)
    for split in data.splits.values():
        assert split.labels.mean() == 0.5
        assert set(split.labels[::2]) == {0, 1}, "the label must not show in the place"
    assert data.baselines["majority class"] == 0.5
    assert abs(data.baselines["brightness"] - 0.5) < 0.09  # four standard deviations of a fair coin


def test_tokens_are_grey_values_and_none_is_padding(generated):
    data = generated
    drawn = pathfinder.draw(PATHFINDER, pathfinder.scenes(PATHFINDER, 0, np.arange(40)))
    train = data.splits["train"]
    assert (data.vocabulary, data.classes) == (257, 2)
    np.testing.assert_array_equal(train.tokens[0].reshape(40, 32, 32), drawn.astype(int) + 1)
    assert train.tokens[0].max() == 256
    np.testing.assert_array_equal(train.lengths[0], 1024)
    assert {name: len(split.labels) for name, split in data.splits.items()} == {"train": 40, "val": 20, "test": 20}
    assert not any((data.splits["val"].tokens[0][:, None] == data.splits[other].tokens[0]).all(-1).any()
                   for other in ("train", "test"))


def test_an_image_depends_on_the_seed_and_its_number_alone(small):
    level, _, drawn = small
    numbers = np.array([511, 3, 4])
    few = pathfinder.scenes(level, 3, numbers)
    np.testing.assert_array_equal(pathfinder.draw(level, few), drawn[numbers])
    np.testing.assert_array_equal(few.labels, pathfinder.labels(3, np.arange(600))[numbers])
    other = pathfinder.draw(level, pathfinder.scenes(level, 4, numbers))
    assert (other != drawn[numbers]).any((1, 2)).all()


def test_processes_draw_what_one_process_draws(monkeypatch, small):
    monkeypatch.setattr(pathfinder, "CHUNK", 16 * 32**2)
    np.testing.assert_array_equal(pathfinder.generate(PATHFINDER, 3, 2, 40), small[2][2:42])


def test_a_process_that_fails_is_told_of(monkeypatch):
    monkeypatch.setattr(pathfinder, "CHUNK", 32**2)
    monkeypatch.setattr(pathfinder, "WORKER_CODE", "raise MemoryError('no room')")
    with pytest.raises(DataError, match=r"exit code 1: MemoryError: no room"):
        pathfinder.generate(PATHFINDER, 3, 0, 2)


def test_generated_images_are_kept(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    data = load(cache=cache, train_examples=4, val_examples=2)
    monkeypatch.setattr(pathfinder, "generate", None)
    again = load(cache=cache, train_examples=4, val_examples=2)
    assert again.checksum == data.checksum
    np.testing.assert_array_equal(again.splits["test"].tokens[0], data.splits["test"].tokens[0])
    kept = sorted(cache.iterdir())
    assert len(kept) == 3
    with pytest.raises(TypeError):
        load(cache=cache, train_examples=4, val_examples=2, seed=1)
    kept[0].write_bytes(kept[0].read_bytes()[:-100])
    with pytest.raises(TypeError):
        load(cache=cache, train_examples=4, val_examples=2)


def test_a_cache_that_cannot_be_written_is_told_of(tmp_path):
    (tmp_path / "cache").write_text("a file")
    data = load(cache=tmp_path / "cache", train_examples=4, val_examples=2)
    assert len(data.notes) == 4
    assert "cannot be written" in data.notes[1]


def test_checksum_tells_data_apart(generated):
    same, other, fewer = load(), load(seed=1), load(train_examples=38)
    assert same.checksum == generated.checksum
    assert len({same.checksum, other.checksum, fewer.checksum}) == 3


def test_fewer_tokens_are_smaller_images():
    data = load(max_length=576, train_examples=4, val_examples=2)
    assert data.splits["train"].tokens[0].shape == (4, 24 * 24)
    assert "24 x 24 pixels, contours of 8 paddles" in data.notes[0]
    assert load(max_length=1024, train_examples=4, val_examples=2).splits["train"].tokens[0].shape == (4, 1024)


@pytest.mark.parametrize("level", [PATHFINDER, PATHX], ids=["pathfinder", "pathx"])
def test_smaller_images_are_as_crowded(level):
    """The fraction of stroke pixels is the same for the smallest images as for whole ones."""
    smallest = level.reduced(level.side * 3 // 8)

    def strokes(level: Level) -> float:
        return 2 * level.contour_length * level.paddle_length / level.side**2

    np.testing.assert_allclose(strokes(smallest), strokes(level), rtol=0.02)
    _, scenes, drawn = made(smallest, 50)
    assert drawn.shape[1:] == (smallest.side, smallest.side)
    assert scenes.contours.shape[1:3] == (2, smallest.contour_length)


def test_guessing_by_the_distance_of_markers_is_told():
    """With short contours, markers on one contour are slightly further apart."""
    _, scenes, drawn = made(PATHFINDER.reduced(12), 4000)
    distances = pathfinder._distances(PATHFINDER.reduced(12), drawn.reshape(len(drawn), -1).astype(np.uint16) + 1)
    true = np.hypot(*(scenes.markers[:, 0] - scenes.markers[:, 1]).T)
    assert (abs(distances - true) < 1.5).mean() > 0.95
    guessed = load(max_length=144, train_examples=4000, val_examples=4000).baselines["marker distance"]
    assert 0.54 < guessed < 0.60


@pytest.mark.parametrize(("task", "max_length", "folder", "expected"), [
    ("pathfinder", 600, None,
     r"expected 576 \(24 x 24\) or 625 \(25 x 25\): .* squares with sides of 12 to 32 pixels$"),
    ("pathfinder", 150, None, r"expected 144 \(12 x 12\) or 169 \(13 x 13\): images of"),
    ("pathfinder", 143, None, r"expected 144 \(12 x 12\): images of"),
    ("pathfinder", 121, None, r"expected 144 \(12 x 12\): images of"),
    ("pathfinder", 1000, None, r"expected 961 \(31 x 31\) or 1024 \(32 x 32\): images of"),
    ("pathfinder", 4900, None, r"expected 1024 \(32 x 32\): images of"),
    ("pathx", 4000, None, r"expected 3969 \(63 x 63\) or 4096 \(64 x 64\): .* squares with sides of 48 to 128 pixels$"),
    ("pathx", 16_385, None, r"expected 16384 \(128 x 128\): images of"),
    ("pathfinder", 576, Path("lra"), r"expected 1024 \(32 x 32\): .* have sides of 32 pixels and cannot be cropped$"),
    ("pathfinder", 5000, Path("lra"), r"expected 1024 \(32 x 32\): .* cannot be cropped$"),
])
def test_a_length_that_is_no_image_is_refused_with_the_nearest_that_are(task, max_length, folder, expected):
    with pytest.raises(ConfigError, match=rf"data\.max_length is {max_length}; {expected}"):
        load(task, folder=folder, max_length=max_length)


def test_images_are_not_held_beside_all_their_tokens(monkeypatch):
    """Three splits of images take a byte per pixel, their tokens two, and tokens are made split by split."""
    size = 2**22
    count = size // 1024
    monkeypatch.setattr(pathfinder, "DEFAULT_EXAMPLES", dict.fromkeys(pathfinder.DEFAULT_EXAMPLES, count))
    monkeypatch.setattr(pathfinder, "generate", lambda *_: np.zeros((count, 32, 32), np.uint8))
    tracemalloc.start()
    try:
        load(train_examples=count, val_examples=count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * size  # the last images and all tokens: 7


def release(folder: Path, side: int, count: int) -> Path:
    """The folder of a release of which image i has the grey value i mod 256, and the label i mod 2."""
    root = folder / f"pathfinder{side}" / "curv_contour_length_14"
    (root / "metadata").mkdir(parents=True)
    for batch in range(2):
        (root / "imgs" / str(batch)).mkdir(parents=True)
        lines = []
        for i in range(batch * count // 2, (batch + 1) * count // 2):
            Image.fromarray(np.full((side, side), i % 256, np.uint8)).save(root / f"imgs/{batch}/sample_{i}.png")
            lines.append(f"imgs/{batch} sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n")
        (root / "metadata" / f"{batch}.npy").write_text("".join(lines))
    return root


def test_the_release_is_read(tmp_path):
    release(tmp_path, 32, 100)
    data = load(folder=tmp_path, train_examples=None, val_examples=10)
    assert {name: len(split.labels) for name, split in data.splits.items()} == {"train": 80, "val": 10, "test": 10}
    greys = {name: split.tokens[0].astype(int) - 1 for name, split in data.splits.items()}
    for name, grey in greys.items():
        assert (grey == grey[:, :1]).all()
        np.testing.assert_array_equal(data.splits[name].labels, grey[:, 0] % 2)
    assert sorted(np.concatenate([*greys.values()])[:, 0]) == [*range(100)]
    assert (np.diff(greys["train"][:, 0]) != 1).any(), "not shuffled"
    assert data.notes == ()
    with pytest.raises(ConfigError, match=r"data\.val_examples is 12; expected at most 10, the val split"):
        load(folder=tmp_path, val_examples=12)
    few = load(folder=tmp_path, train_examples=7, val_examples=3)
    np.testing.assert_array_equal(few.splits["train"].tokens[0], data.splits["train"].tokens[0][:7])
    assert load(folder=tmp_path, train_examples=7, val_examples=3, seed=1).checksum != few.checksum


def test_path_x_reads_images_of_its_size(tmp_path):
    release(tmp_path, 128, 20)
    data = load("pathx", folder=tmp_path, train_examples=None, val_examples=None)
    assert data.splits["train"].tokens[0].shape == (16, 128 * 128)
    with pytest.raises(DataError, match=r"pathfinder32.curv_contour_length_14: expected metadata"):
        load(folder=tmp_path)


def test_a_few_broken_images_are_left_out(tmp_path):
    root = release(tmp_path, 32, 1000)
    (root / "imgs/0/sample_172.png").write_bytes(b"")
    data = load(folder=tmp_path, train_examples=None, val_examples=None)
    assert sum(len(split.labels) for split in data.splits.values()) == 999
    (note,) = data.notes
    assert "1 of 1,000 rows are broken, the first at imgs/0/sample_172.png, missing or no PNG image of 32 x 32" in note
    (root / "imgs/0/sample_0.png").unlink()
    damaged = root / "imgs/1/sample_700.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    Image.fromarray(np.zeros((16, 32), np.uint8)).save(root / "imgs/1/sample_800.png")
    with pytest.raises(DataError, match=r"4 of 1,000 rows are broken, the first at .*sample_\d+.png, missing or no"):
        load(folder=tmp_path, train_examples=None, val_examples=None)


@pytest.mark.parametrize("line", ["imgs/0 sample_3.png 3 2 1.0", "imgs/0 sample_3.png 3", "\ufffdNUMPY"])
def test_metadata_that_say_something_else_are_refused(tmp_path, line):
    root = release(tmp_path, 32, 10)
    file = root / "metadata" / "1.npy"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"1\.npy: line 6: expected text.*label of 0 or 1"):
        load(folder=tmp_path)


def test_a_missing_folder_is_told_with_what_is_expected_there(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.pathfinder32.*metadata/\*\.npy and imgs/\*/sample_.*data\.dir"):
        load(folder=tmp_path / "nowhere")


def test_examples_are_drawn(tmp_path, capsys):
    picture = tmp_path / "pathfinder.png"
    assert pathfinder.main(["--out", str(picture)]) == 0
    with Image.open(picture) as image:
        assert image.size == (800, 600)
    with pytest.raises(SystemExit, match="2"):
        pathfinder.main(["--out", str(tmp_path / "none" / "x.png")])
    assert "x.png: cannot be written; name a file in a folder" in capsys.readouterr().err
