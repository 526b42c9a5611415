"""The curves of the approximations, on fewer points, show what the documentation claims."""

import json

import pytest

from lra import approximation


@pytest.fixture
def few(monkeypatch):
    for name, value in (("T", 64), ("H", 1), ("D", 8), ("FEATURES", (8, 128)), ("K", (8, 64)), ("ROUNDS", (1, 8)),
                        ("BIAS_DRAWS", (64, 1024)), ("MATRIX_DRAWS", 100), ("FIT_STEPS", 100)):
        monkeypatch.setattr(approximation, name, value)


@pytest.mark.thorough
def test_more_of_everything_is_nearer(few, tmp_path):
    assert approximation.main(["--out", str(tmp_path / "a"), "--draws", "3"]) == 0
    curves = json.loads((tmp_path / "a.json").read_text())["curves"]
    for name in ("orthogonal", "independent"):
        assert curves["favor"][name]["128"] < 0.7 * curves["favor"][name]["8"]
    assert curves["linformer"]["linformer"]["64"] < 0.7 * curves["linformer"]["linformer"]["8"] < 0.7
    for size in ("32", "64"):
        assert curves["reformer"][f"chunks of {size}"]["8"] < curves["reformer"][f"chunks of {size}"]["1"]
    # 16 times the draws: the error of an unbiased estimate falls about fourfold, that of a biased one stays.
    assert curves["bias"]["matrix of weights"]["1024"] < 0.35 * curves["bias"]["matrix of weights"]["64"]
    assert curves["bias"]["output"]["1024"] > 0.5 * curves["bias"]["output"]["64"]
    matrix = curves["favor_matrix"]
    for points in matrix.values():
        assert points["128"] < 0.25 * points["8"]
    assert matrix["orthogonal"]["128"] < 0.8 * matrix["independent"]["128"]
    assert matrix["cosines and sines"]["128"] < matrix["cosines and phases"]["128"]
    for points in curves["spectrum"].values():
        assert list(points.values()) == sorted(points.values())
        assert points["64"] == pytest.approx(1)
    assert curves["spectrum"]["0.6 times the length"]["8"] > curves["spectrum"]["2 times the length"]["8"] > 8 / 64
    assert (tmp_path / "a.png").stat().st_size > 10_000
