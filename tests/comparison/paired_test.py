"""Two set-ups paired by seed and val window, against sums by hand."""

import pytest

from comparison.paired import paired_difference
from comparison.runs import group, load_run
from comparison.verdict import verdict
from tests.comparison.run_folders import write_run, write_windows

pytestmark = pytest.mark.fast

HARD = (0.0, 1.0, 5.0, 0.5)
"""Excess loss of each of four windows over the first, for every model."""


def evaluated(folder, mode, excess, *, seeds=None, **windows):
    """Runs of a mode whose val windows cost 2 nats a token, what the window and the seed cost, and the mode's excess of
    that seed."""
    found = []
    for seed, more in zip(seeds or range(len(excess)), excess, strict=True):
        path = write_run(folder / f"{mode}-{seed}", mode, seed=seed, loss=3.0 + seed + more)
        found.append(load_run(write_windows(path, [2.0 + seed + hard + more for hard in HARD], **windows)))
    return found


def test_seeds_and_windows_cancel_in_a_paired_difference(tmp_path):
    softmax = evaluated(tmp_path, "softmax", [0.0, 0.0, 0.0])
    chunked = evaluated(tmp_path, "chunked", [0.1, 0.12, 0.14])
    pair = paired_difference(softmax, chunked)
    assert pair is not None
    assert pair.by_seed == pytest.approx([0.1, 0.12, 0.14])
    # Mean 0.12, standard deviation 0.02: 0.12 ± 4.3027 · 0.02 / √3, where the seeds alone differ by 1.
    assert pair.interval() == pytest.approx((0.12 - 0.04968, 0.12 + 0.04968), abs=1e-5)
    assert pair.is_shown()
    assert (pair.seeds, pair.windows, pair.missing) == ((0, 1, 2), 4, ((), ()))
    sentences = verdict(group([*softmax, *chunked]))
    assert "val loss does not differ significantly" in sentences[0]  # by Welch's interval the seeds hide it
    assert sentences[2] == (
        "Paired by seed and val window after 100 steps, softmax has the lower val loss: 4.6250, versus "
        "4.7450 for chunked (95 % interval of the difference: 0.0703 to 0.1697 over 3 seeds of 4 windows each).")


def test_no_difference_is_shown_where_the_paired_interval_covers_zero(tmp_path):
    runs = [*evaluated(tmp_path, "softmax", [0.0, 0.0, 0.0]), *evaluated(tmp_path, "chunked", [0.1, -0.1, 0.03])]
    assert "does not differ significantly: 4.6250 for softmax and 4.6350" in verdict(group(runs))[2]
    runs += evaluated(tmp_path, "linear", [1.0, 1.01, 1.02])
    assert verdict(group(runs))[2].endswith(
        "versus 5.6350 for linear; no significant difference from 4.6350 for chunked.")


def test_windows_of_unlike_lengths_count_by_their_tokens(tmp_path):
    a, b = evaluated(tmp_path, "softmax", [0.0]), evaluated(tmp_path, "chunked", [0.0])
    for run, losses in ((a[0], [1.0, 2.0]), (b[0], [1.4, 2.1])):
        write_windows(run.path, losses, tokens=[10, 30])
    pair = paired_difference(*([load_run(runs[0].path)] for runs in (a, b)))
    assert pair is not None
    assert pair.mean == pytest.approx((10 * 0.4 + 30 * 0.1) / 40)
    assert pair.interval() is None  # of one seed
    assert not pair.is_shown()


def test_seeds_that_one_lacks_are_named_and_the_others_count(tmp_path):
    softmax = evaluated(tmp_path, "softmax", [0.0, 0.0, 0.0], seeds=[0, 1, 2])
    chunked = evaluated(tmp_path, "chunked", [0.1, 0.12], seeds=[1, 3])
    pair = paired_difference(softmax, [*chunked, *evaluated(tmp_path / "more", "chunked", [0.2], seeds=[2])])
    assert pair is not None
    assert (pair.seeds, pair.missing) == ((1, 2), ((3,), (0,)))
    assert pair.by_seed == pytest.approx([0.1, 0.2])
    found = verdict(group([*softmax, *chunked, *evaluated(tmp_path / "other", "chunked", [0.2], seeds=[2])]))
    assert "over 2 seeds" in found[2]
    assert found[2].endswith("softmax lacks seed 3 and chunked lacks seed 0: the other 2 seeds are used.")
    assert paired_difference(softmax[:1], chunked) is None


def test_the_lower_of_two_is_the_one_that_is_lower_over_what_they_have_in_common(tmp_path):
    softmax = evaluated(tmp_path, "softmax", [0.0, 0.01, 9.0], seeds=[0, 1, 2])
    chunked = evaluated(tmp_path, "chunked", [0.2, 0.215], seeds=[0, 1])
    found = verdict(group([*softmax, *chunked]))[2]
    assert "softmax has the lower val loss" in found


def test_other_windows_are_not_paired(tmp_path):
    softmax = evaluated(tmp_path, "softmax", [0.0, 0.0])
    chunked = evaluated(tmp_path, "chunked", [0.1, 0.2], checksum="decade")
    assert paired_difference(softmax, chunked, windows_only=True) is None
    assert not any("paired" in text for text in verdict(group([*softmax, *chunked])))
    # The final val losses can be: 2, and 3 with the seed.
    pair = paired_difference(softmax, chunked)
    assert pair is not None
    assert (pair.windows, pair.steps) == (None, (100,))
    assert pair.a == pytest.approx([2.0, 3.0])
    assert pair.by_seed == pytest.approx([0.1, 0.2])


def test_an_evaluation_whose_files_are_damaged_or_do_not_belong_together_is_left_out(tmp_path):
    """As after a kill between the writing of ``evaluation-windows.npz`` and of ``evaluation.json``."""
    run, = evaluated(tmp_path, "softmax", [0.0])
    (key, windows), = run.window_losses.items()
    assert key == ("a book", 32, "c0ffee")
    assert windows.tokens_N.tolist() == [32] * 4
    file = run.path / "evaluation-windows.npz"
    whole, report = file.read_bytes(), (run.path / "evaluation.json").read_text()
    write_windows(run.path, [1.0, 2.0, 3.0, 5.0])
    assert file.read_bytes() != whole
    (run.path / "evaluation.json").write_text(report)
    assert run.evaluations

    def left_out(reason: str) -> None:
        with pytest.warns(UserWarning, match=rf"^the evaluation of {run.path} is left out: {reason}"):
            found = load_run(run.path)
        assert found.val.points["loss"].tolist() == run.val.points["loss"].tolist()
        assert (found.evaluated_step, found.evaluations, found.window_losses) == (None, [], {})

    left_out(f"{file} does not match evaluation.json; run eval.py again")
    file.write_bytes(whole[:-30])
    left_out(f"{file} is damaged")
    file.unlink()
    assert load_run(run.path).window_losses == {}
    (run.path / "evaluation.json").write_text(report.replace("100", '"100"'))
    left_out(f'{run.path / "evaluation.json"} is damaged: step is "100", expected a whole number or null')
