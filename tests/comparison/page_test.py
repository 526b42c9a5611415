import base64
import html
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from comparison import compare
from comparison.curves import MAX_MEANS, MAX_POINTS, Curve
from comparison.figures import Axis, Figure, Line, Point
from comparison.page import page
from comparison.runs import Run
from configs.schema import Config, ModelConfig, TrainConfig

pytestmark = pytest.mark.fast

HOSTILE = '</script><script>alert("1")</script><b>[red] & more'


def curve(steps, *, without=(), **columns):
    """A curve of a falling loss at these steps, of 2**20 tokens each."""
    steps = np.asarray(steps, float)
    points = {"step": steps, "tokens": steps * 2**20, "train_seconds": steps / 8, "wall_seconds": 5 + steps / 4,
              "loss": 2 + 1 / steps, "learning_rate": np.full_like(steps, 1e-3), "gradient_norm": 1 / steps} | columns
    points = {name: values for name, values in points.items() if name not in without}
    return Curve(points, points | {"lines": np.ones_like(steps)}, lines=len(steps), last_loss=2.0, median_speed=64.0)


def run(name, mode="chunked", *, seed=0, train=None, val=None, **rest):
    config = Config(model=ModelConfig(attention=(mode,), context=32), train=TrainConfig(seed=seed)).to_dict()
    return Run(name, Path(name), json.loads(json.dumps(config)), {}, curve(range(1, 31)) if train is None else train,
               curve(range(5, 31, 5)) if val is None else val, **rest)


def payload(text):
    """As the browser parses it."""
    found = re.search(r'<script id="payload" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unpacked(column):
    return np.frombuffer(base64.b64decode(column["base64"]), f"<{column['type']}")


def test_columns_come_back():
    steps = np.arange(1000, 4000, 500)
    loss = np.array([2.5, np.nan, 2.25, 2.0, 1.9, 1.8])
    flops = steps * 2.0**20 * 6e9
    val = curve(steps, bits_per_byte=loss / math.log(2) / 4, loss=loss)
    one, = payload(page(compare([run("one", train=curve(steps, loss=loss, flops=flops), val=val)])))["runs"]
    np.testing.assert_array_equal(unpacked(one["points"]["step"]), steps)
    np.testing.assert_array_equal(unpacked(one["points"]["tokens"]), steps * 2**20)  # past what 32 bits hold
    np.testing.assert_allclose(unpacked(one["val"]["loss"]), loss, rtol=1e-7)  # the gap too
    assert one["flops_per_token"] == pytest.approx(6e9)
    assert one["bits_per_nat"] == pytest.approx(1 / math.log(2) / 4)
    assert one["tokens_per_second"] == 64.0


def test_a_run_lacks_only_what_it_lacks():
    bare = run("bare", train=curve([1, 2], without=("wall_seconds", "gradient_norm")), val=Curve())
    one, = payload(page(compare([bare])))["runs"]
    assert set(one["means"]) == {"step", "tokens", "train_seconds", "loss", "learning_rate", "lines"}
    assert [one[name] for name in ("val", "flops_per_token", "bits_per_nat", "memory", "sample", "evaluations")] == [
        None, None, None, None, None, []]


def test_texts_are_escaped_and_nothing_is_loaded():
    comparison = compare([run(HOSTILE, sample=HOSTILE * 1000, sample_step=3), run("other", "softmax")])
    text = page(comparison, title=HOSTILE, note=HOSTILE)
    assert text == page(comparison, title=HOSTILE, note=HOSTILE)
    ours = text.replace(get_plotlyjs(), "")
    assert len(text) - len(ours) > 3_000_000
    assert ours.count("<script") == ours.count("</script") == 3
    assert f"<h1>{html.escape(HOSTILE)}</h1>" in text
    found = payload(text)
    assert (found["runs"][0]["name"], found["note"], found["reload_seconds"]) == (HOSTILE, HOSTILE, None)
    assert found["runs"][0]["sample"].startswith(HOSTILE)
    assert len(found["runs"][0]["sample"]) < 5000
    assert not re.search(r"\ssrc=|<link|href=|@import|url\(|https?://(?!www\.w3\.org)", ours)


def test_rows_belong_to_their_runs():
    comparison = compare([run("a", seed=0), run("b", "softmax"), run("c", seed=1)])
    found = payload(page(comparison))
    assert [setup["runs"] for setup in found["setups"]] == [[0, 2], [1]]
    rows = [(row["cells"][0], row["runs"], row["mean"]) for row in found["figures"]["rows"]]
    assert rows == [("a", [0], False), ("c", [2], False), ("mean of 2 seeds", [0, 2], True), ("b", [1], False)]
    assert [setup["averaged"] for setup in found["setups"]] == [[0, 2], [1]]
    assert [row["runs"] for row in found["times"]["rows"]] == [[0], [1], [2]]
    assert found["configs"][0] == {"field": "model.attention", "values": ["chunked", "softmax", "chunked"]}


def test_setups_differ_without_colours():
    runs = [run(f"run {i}", mode, train=curve([1, 2 + i])) for i, mode in enumerate(["chunked"] * 5 + ["softmax"] * 2)]
    for i, one in enumerate(runs):
        one.config["optimizer"]["learning_rate"] = 1e-3 * (i + 1)
    setups = payload(page(compare(runs)))["setups"]
    assert len({(setup["dash"], setup["symbol"]) for setup in setups[:5]}) == 5
    assert len({setup["colour"] for setup in setups}) == 2
    assert all(one["symbol"] != other["symbol"] for one, other in pairwise(setups))


def test_the_figures_of_a_study_come_with_the_look_of_their_lines():
    lines = [Line(label, mode, (Point(1e-3, 2.0, (1.5, 2.5), ("a", "b")), Point(3e-3, 1.0, None, ("c",))), best=1)
             for label, mode in (("chunked", "chunked"), (HOSTILE, "chunked"))]
    figure = Figure("rates", HOSTILE, Axis("learning rate", "log"), "val loss", tuple(lines), ("attention", "best"),
                    (("chunked", HOSTILE),), (HOSTILE,))
    text = page(compare([run("one")]), figures=[figure])
    assert text.count("<script") == page(compare([run("one")])).count("<script")
    found, = payload(text)["study"]
    assert found["lines"][0]["points"] == [
        {"x": 1e-3, "mean": 2.0, "interval": [1.5, 2.5], "seeds": 2, "runs": ["a", "b"]},
        {"x": 3e-3, "mean": 1.0, "interval": None, "seeds": 1, "runs": ["c"]}]
    assert [line["dash"] for line in found["lines"]] == ["solid", "dash"]
    assert [line["best"] for line in found["lines"]] == [3e-3, 3e-3]
    assert (found["title"], found["values"], found["rows"]) == (HOSTILE, [1e-3, 3e-3], [["chunked", HOSTILE]])


def test_fifty_long_runs_make_a_small_page():
    steps = np.linspace(1, 100_000, MAX_POINTS).round()
    noise = np.random.default_rng(0).standard_normal(MAX_POINTS)
    full = curve(steps, loss=2 + 0.1 * noise, gradient_norm=np.abs(noise), bits_per_byte=noise)
    train = Curve(full.points, {name: values[:MAX_MEANS] for name, values in full.means.items()}, lines=100_000)
    runs = [run(f"run {i}", seed=i, train=train, val=Curve(full.points, full.means, lines=MAX_POINTS),
                sample="lorem ipsum " * 500) for i in range(50)]
    assert len(page(compare(runs))) < 10_000_000
