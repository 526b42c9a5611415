"""Published figures beside ours."""

import json

import pytest

from comparison.figures import Axis, Figure, Line, Point, render
from comparison.page import figure_payload
from comparison.published import PUBLISHED, published
from comparison.study import load_study
from support.errors import ConfigError

pytestmark = pytest.mark.fast

OURS = Figure("loss", "Loss", Axis("context", "log"), "loss", (
    Line("softmax", "softmax", (Point(1024, 3.0, None, ("a",)), Point(8192, 2.9, None, ("b",)))),), ("attention",),
    (("softmax",),))
ENTRY = {"source": "Somebody, 2024", "setup": "a model", "quantity": "train loss",
         "lines": {"softmax": {"1024": 3.2, "32768": 3.4}, "linear": {"1024": 3.3}}}


@pytest.fixture
def theirs(tmp_path):
    path = tmp_path / "published.json"
    path.write_text(json.dumps({"loss": ENTRY}))
    return published("loss", path)


def test_published_lines_are_rendered_beside_ours_with_their_source(theirs):
    figure = theirs.beside(OURS)
    assert [line.label for line in figure.lines] == ["softmax", "softmax (published)", "linear (published)"]
    assert [point.x for point in figure.lines[1].points] == [1024, 32768]
    assert figure.values == [1024, 8192, 32768]
    assert figure.remarks == (
        "Published: train loss of a model. softmax (published): 3.2000 at 1,024, 3.4000 at 32,768. linear (published): "
        "3.3000 at 1,024. Source: Somebody, 2024.",)
    assert figure.has_legend
    found = figure_payload(figure)
    assert [line["published"] for line in found["lines"]] == [None, "Somebody, 2024", "Somebody, 2024"]
    assert [line["dash"] for line in found["lines"]] == ["solid", "dash", "solid"]
    svg = render(figure, "svg").decode()
    assert "opacity: 0.6" in svg
    assert "opacity: 0.6" not in render(OURS, "svg").decode()


def test_the_difference_of_published_lines_is_where_both_have_values(theirs):
    gap = theirs.minus("softmax")
    (line,) = gap.lines
    assert line.label == "linear (published)"
    assert [(point.x, point.y) for point in line.points] == [(1024, pytest.approx(0.1))]
    assert gap.quantity == "difference in train loss from softmax"
    with pytest.raises(ConfigError, match="no published line of gated; expected one of linear"):
        gap.minus("gated")


@pytest.mark.parametrize(("name", "text", "message"), [
    ("loss", None, r"published\.json: no such file"),
    ("loss", "{", "damaged"),
    ("accuracy", {"loss": ENTRY, "half": ENTRY}, "no figure accuracy; expected one of loss, half"),
    ("half", {"half": {"source": "Somebody"}}, "figure half is damaged .*'lines'"),
    ("texts", {"texts": ENTRY | {"lines": {"softmax": {"a": 1}}}}, "figure loss has numbers .* texts"),
])
def test_a_published_figure_that_cannot_be_used_is_refused(name, text, message, tmp_path):
    path = tmp_path / "published.json"
    if text is not None:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ConfigError, match=message):
        published(name, path).beside(OURS)


def test_every_committed_figure_can_be_read_and_has_a_source():
    for name in json.loads(PUBLISHED.read_text()):
        found = published(name)
        assert found.source
        assert all(line.published == found.source and line.points for line in found.lines)
    # 24 hours of 8 H100s: the gap grows with the context.
    softmax, linear = ({point.x: point.y for point in line.points}
                       for line in published("loss-against-context-124M").lines)
    assert [(round(softmax[at], 3), round(linear[at], 3)) for at in (1024, 8192, 32768)] == [
        (3.207, 3.296), (3.193, 3.349), (3.281, 3.536)]


def test_a_study_that_asks_for_an_unknown_figure_is_refused_before_its_runs(tmp_path):
    path = tmp_path / "study.py"
    path.write_text("from comparison.published import published\nBESIDE = published('speed')\n")
    with pytest.raises(ConfigError, match=r"^.*published\.json: no figure speed; expected one of loss-"):
        load_study(path)
