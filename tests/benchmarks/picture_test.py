"""The pictures show what they are given, the published beside ours, and are drawn where values are missing."""

import pytest

from benchmarks.picture import Panel, published, render_panels


def test_a_picture_names_its_curves_axes_and_device(tmp_path):
    path = tmp_path / "step.svg"
    render_panels(path, [
        Panel({"chunked": {1024: 2.0, 4096: 8.0}, "softmax": {1024: 3.0, 4096: None}}, "forward", x="context",
              y="milliseconds", published={"chunked": {1024: 15.2}, "fla": {1024: 3.37}}),
        Panel({"chunked": {512: 0.5}}, "memory"),
        Panel({"chunked": {512: None}}, "nothing was measured"),
    ], title="A training step, H200")
    drawn = path.read_text()
    for text in ("chunked", "chunked (published)", "fla (published)", "softmax", "forward", "memory", "context",
                 "milliseconds", "nothing was measured", "A training step, H200", "4k"):
        assert f"<!-- {text} -->" in drawn
    render_panels(path.with_suffix(".png"), [Panel({"chunked": {1: 1.0}})], title="")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_vertical_axis_has_plain_numbers_and_does_not_blow_up_noise(tmp_path):
    path = tmp_path / "noise.svg"
    render_panels(path, [Panel({"chunked": {64: 1000.0, 128: 1001.0}})], title="")
    drawn = path.read_text()
    assert "<!-- 1,000 -->" in drawn
    assert "<!-- 1,200 -->" in drawn
    assert "10^" not in drawn
    render_panels(path, [Panel({"chunked": {64: 0.002, 128: 300.0}})], title="")
    for text in ("0.01", "1", "100"):
        assert f"<!-- {text} -->" in path.read_text()


def test_every_published_figure_says_where_it_is_from():
    for part in ("training_step", "sampling", "kernel"):
        assert published(part, "source")
    assert published("training_step", "models", "124M", "chunked")[524288] == pytest.approx(2221.137)
    assert published("kernel", "shapes", "B1 T8192 H96 D128", "helion", "both") == 2.01
    with pytest.raises(KeyError):
        published("training_step", "models", "7B")
