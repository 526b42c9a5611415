"""The picture for a paper."""

import re

import comparison
from comparison.picture import picture
from comparison.runs import load_run
from comparison.style import COLOURS
from tests.comparison.made import write_run


def test_picture_draws_setups_in_their_modes_colours_and_seeds_as_a_band(tmp_path):
    runs = [load_run(write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed)) for seed in range(2)]
    runs.append(load_run(write_run(tmp_path / "chunked", "chunked", tokenizer="gpt2")))
    compared = comparison.compare(runs)
    svg = picture(compared, "svg", "Two modes")
    assert svg == picture(compared, "svg", "Two modes")
    text = svg.decode()
    colours = set(re.findall("stroke: (#[0-9a-f]{6}); stroke-width: 2.2", text))
    assert colours == {COLOURS["softmax"], COLOURS["chunked"]}
    assert text.count('id="FillBetweenPolyCollection_') == 2  # a panel each
    assert "softmax, mean of 2 seeds" in text
    assert "val bits per byte" in text
    assert picture(compared, "png").startswith(b"\x89PNG")
