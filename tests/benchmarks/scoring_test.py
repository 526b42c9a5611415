"""The benchmark of scores asks the same questions with contexts in common and without."""

import json

import pytest

from benchmarks import scoring
from sampling.scoring import ROWS

TINY = ["--context", "40", "--choices", "3", "--choice-tokens", "2", "--layers", "1", "--width", "8", "--repeats", "2"]


@pytest.mark.thorough
def test_a_row_has_the_samples_of_both(tmp_path, capsys):
    path = tmp_path / "scoring.json"
    assert scoring.main([*TINY, "--modes", "linear", "--json", str(path)]) == 0
    row, = json.loads(path.read_text())["rows"]
    assert row["mode"] == "linear"
    assert {name: len(samples) for name, samples in row["samples"].items()} == {"shared": 2, "anew": 2}
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "linear"


def test_each_choice_has_another_context_only_where_it_is_read_anew():
    shared, anew = scoring.questions(scoring.Options(context=40, choices=3, choice_tokens=2))
    assert len(shared) == len(anew) == 3 * ROWS
    assert [choice for _, choice in shared] == [choice for _, choice in anew]
    assert len({tuple(context) for context, _ in shared}) == ROWS
    assert len({tuple(context) for context, _ in anew}) == 3 * ROWS
    assert {(len(context), len(choice)) for context, choice in [*shared, *anew]} == {(40, 2)}
