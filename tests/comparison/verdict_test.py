"""The summary claims only what the runs show."""

import pytest

from comparison.remarks import remarks
from comparison.runs import group, load_run
from comparison.verdict import verdict
from tests.comparison.run_folders import read_lines, set_fields, write_evaluated, write_lines, write_run

pytestmark = pytest.mark.fast


def summary(*paths):
    return verdict(group([load_run(path) for path in paths]))


def test_lower_at_equal_steps_and_at_equal_time_and_where_curves_cross(tmp_path):
    # softmax is better at equal steps; chunked is four times as fast and better at equal time (both end at 100 s).
    softmax = write_run(tmp_path / "softmax", form="blockwise")
    chunked = write_run(tmp_path / "chunked", "chunked", steps=400, seconds=0.25, loss=2.1, slope=0.004)
    # 2 - 0.01 s = 2.1 - 0.016 s where s is 16.7, but softmax was first evaluated at 20 s: no crossing is known.
    assert summary(softmax, chunked) == [
        "After 100 steps, softmax has the lower val loss: 1.0000, versus 1.7000 for chunked.",
        "After 100.0 s of training, chunked has the lower val loss: 0.5000, versus 1.0000 for softmax.",
        "With one seed each, there are no confidence intervals: train more seeds, such as with --train.seed 1."]
    later = write_run(tmp_path / "later", "chunked", steps=400, seconds=0.25, loss=2.3, slope=0.004)
    assert summary(softmax, later)[1] == (
        "chunked passes softmax after 50.0 s of training and is 0.3000 lower at 100.0 s of training: "
        "val loss 0.7000, versus 1.0000 for softmax.")
    assert summary(softmax) == []


def seeds(folder, mode, losses, **options):
    return [write_run(folder / f"{mode}-{seed}", mode, seed=seed, loss=loss, **options)
            for seed, loss in enumerate(losses)]


def test_seeds_have_an_interval_and_no_difference_is_shown_where_it_covers_zero(tmp_path):
    softmax = seeds(tmp_path, "softmax", [2.0, 2.1, 2.2])
    alike = seeds(tmp_path, "chunked", [2.05, 2.15, 2.25])
    assert summary(*softmax, *alike)[0] == (
        "After 100 steps, val loss does not differ significantly: 1.1000 for softmax and 1.1500 for chunked; the 95 % "
        "interval of the difference, −0.1767 to 0.2767 over 3 seeds each, includes zero.")
    assert len(summary(*softmax, *alike)) == 2
    higher = seeds(tmp_path, "linear", [3.0, 3.1, 3.2])
    assert summary(*softmax, *higher)[0] == (
        "After 100 steps, softmax has the lower val loss: 1.1000, versus 2.1000 for linear (95 % interval of the "
        "difference: 0.7733 to 1.2267 over 3 seeds each).")
    assert summary(*softmax, *higher, *alike)[0] == (
        "After 100 steps, the lowest val loss is 1.1000 for softmax, versus 2.1000 for linear; no significant "
        "difference from 1.1500 for chunked.")
    # A single seed is assumed to have the others' variance, which hides the smaller difference.
    assert summary(*softmax, higher[0])[-1].startswith("Only one seed of linear: its variance")
    assert "val loss does not differ significantly" in summary(*softmax, alike[0])[0]
    assert "softmax has the lower val loss" in summary(*softmax, higher[0])[0]


def test_a_seed_that_ended_early_does_not_count_and_is_named(tmp_path):
    softmax = seeds(tmp_path, "softmax", [2.0, 2.1])
    chunked = seeds(tmp_path, "chunked", [3.0, 3.1, 3.2])
    died = write_run(tmp_path / "died", seed=2, loss=1.0, steps=40, planned=100)
    found = summary(*softmax, died, *chunked)
    assert found[0].startswith(
        "After 100 steps, softmax has the lower val loss: 1.0500, versus 2.1000 for chunked (95 % interval")
    assert "over 2 and 3 seeds" in found[0]
    assert "After 100.0 s of training, softmax has the lower val loss: 1.0500" in found[1]
    assert found[2:] == ["Left out, as other runs are longer: seed 2 of softmax (last evaluated at step 40)."]
    # If the other set-up is not longer than that, it counts.
    assert summary(*softmax, died, *seeds(tmp_path / "short", "chunked", [3.0, 3.1], steps=40))[0].startswith(
        "After 40 steps, val loss does not differ significantly: 1.3000 for softmax")
    one_left = summary(softmax[0], died, *chunked)
    assert one_left[2].startswith("Left out, as other runs are longer: seed 2 of softmax")
    assert one_left[3].startswith("Only one seed of softmax: its variance")


def test_seeds_of_one_length_all_count_however_fast_they_were(tmp_path):
    # The same steps with other times, and about the same time with other steps.
    by_steps = [write_run(tmp_path / f"a{seed}", seed=seed, loss=2 + 0.1 * seed, seconds=1 + 0.3 * seed)
                for seed in range(3)]
    by_time = [write_run(tmp_path / f"b{seed}", "chunked", seed=seed, loss=4 + 0.1 * seed, every=10, steps=steps,
                         planned=1000, seconds=150 / steps) for seed, steps in enumerate((100, 120, 150))]
    found = summary(*by_steps, *by_time)
    assert found[0].startswith("After 100 steps, softmax")
    assert found[1].startswith("After 100.0 s of training, softmax")
    assert len(found) == 2
    assert all("over 3 seeds each" in text for text in found)


def test_a_setup_that_ended_far_before_the_others_does_not_hold_them_back(tmp_path):
    runs = [write_run(tmp_path / "softmax"), write_run(tmp_path / "chunked", "chunked", loss=2.5)]
    died = [write_run(tmp_path / f"linear-{seed}", "linear", seed=seed, steps=steps, every=10,
                      planned=100) for seed, steps in enumerate((30, 40))]
    assert summary(*runs, *died) == [
        "After 100 steps, softmax has the lower val loss: 1.0000, versus 1.5000 for chunked.",
        "After 100.0 s of training, softmax has the lower val loss: 1.0000, versus 1.5000 for chunked.",
        "Left out, as other runs are longer: linear (last evaluated at step 40).",
        "With one seed each, there are no confidence intervals: train more seeds, such as with --train.seed 2."]
    # With only two, none is left out.
    assert summary(runs[0], died[1])[0].startswith("After 40 steps")
    # As long in time as the others, only slower: it counts, and its steps limit the comparison.
    slow = write_run(tmp_path / "slow", "linear", steps=20, seconds=5.0)
    found = summary(*runs, slow)
    assert [text.partition(",")[0] for text in found[:2]] == ["After 20 steps", "After 100.0 s of training"]
    assert len(found) == 3


def test_of_many_the_summary_names_whom_the_lowest_passed_and_where(tmp_path):
    runs = [write_run(tmp_path / "chunked", "chunked", loss=2.4, steps=200, every=10),
            write_run(tmp_path / "softmax", loss=2.2, slope=0.005, steps=200, every=10),  # meets it at step 40
            write_run(tmp_path / "linear", "linear", loss=1.9, slope=0.00375, steps=200, every=10),  # at step 80
            write_run(tmp_path / "local", "local", loss=2.5, slope=0.004, steps=200, every=10)]  # never
    steps, time, *_ = summary(*runs)
    assert steps == (
        "After 200 steps, the lowest val loss is 0.4000 for chunked, versus 1.1500 for linear, 1.2000 for softmax and "
        "1.7000 for local. chunked passes linear after 80 steps and softmax after 40 steps.")
    assert time.endswith("chunked passes linear after 80.0 s and softmax after 40.0 s.")
    # Only crossings before the place of comparison count: here that is before linear and softmax are passed.
    short = write_run(tmp_path / "short", "local", loss=2.5, slope=0.004, steps=60, seconds=10.0, every=10)
    assert "passes" not in summary(*runs[::2], short)[0]
    assert summary(*runs[:3], short)[0].startswith("After 60 steps, the lowest val loss is 1.6750 for linear, versus")


def test_nothing_is_claimed_that_the_data_do_not_carry(tmp_path):
    softmax = write_run(tmp_path / "softmax", corpus_checksum="a")
    never = write_run(tmp_path / "never", "chunked", every=0, corpus_checksum="a")
    assert summary(softmax, never) == []
    assert remarks([load_run(never)]) == ["never is not compared: it has no val loss. The plot shows its train loss."]
    assert summary(softmax, write_evaluated(tmp_path / "evaluated", "chunked", source="elsewhere")) == []
    late = write_run(tmp_path / "late", "chunked", every=100, steps=100, seconds=2.0, corpus_checksum="a")
    assert summary(softmax, late)[1] == (
        "No comparison at equal training time: late has no val loss at 100.0 s of training.")
    other = write_run(tmp_path / "other", "chunked", corpus_checksum="b")
    assert summary(softmax, other) == ["No comparison: these runs have different data."]
    for name, environment in (("device", {"devices": ["cuda:0"]}), ("beside", {"shared_device": True})):
        other = write_run(tmp_path / name, "chunked", corpus_checksum="a", slope=0.005, **environment)
        assert [sentence.split(",")[0] for sentence in summary(softmax, other)] == [
            "After 100 steps", "With one seed each"]


def test_without_a_comparison_the_last_losses_and_a_remedy_are_named(tmp_path):
    slow = write_run(tmp_path / "slow", steps=12, seconds=1.0, every=12, loss=5.0)
    for loss, better in ((4.0, ""), (6.0, " softmax is lower than gated after fewer steps and less training time.")):
        late = write_run(tmp_path / f"late-{loss}", "gated", steps=40, seconds=0.5, every=40, loss=loss)
        found = summary(slow, late)
        assert found[0] == f"No comparison at equal steps: late-{loss} has no val loss at 12 steps."
        assert found[1] == f"No comparison at equal training time: late-{loss} has no val loss at 12.0 s of training."
        ends = ["4.8800 for softmax (12 steps, 12.0 s)", f"{loss - 0.4:.4f} for gated (40 steps, 20.0 s)"]
        assert found[2] == f"Last val losses: {' and '.join(ends if better else ends[::-1])}.{better}"
        assert found[3] == "Evaluate more often, such as with --train.eval-every 6."
        assert found[4].endswith("train more seeds, such as with --train.seed 1.")
    # A comparison at equal steps needs no remedy.
    assert not [text for text in summary(slow, write_run(tmp_path / "often", "gated", steps=40, every=5))
                if "eval-every" in text]


def test_a_schedule_that_has_come_further_down_is_mentioned(tmp_path):
    short = write_run(tmp_path / "short", decay_steps=110)
    long = write_run(tmp_path / "long", "chunked", steps=200, slope=0.005, decay_steps=200)
    steps, _, _ = summary(short, long)
    assert steps.endswith(
        "At this point, the learning rate of softmax is at 9 % of its peak, that of chunked at 50 %, so this "
        "comparison favours softmax; bound the runs by the same --train.steps.")
    warming_up = write_run(tmp_path / "warming-up", "gated", slope=0.005)
    write_lines(warming_up, [line | {"learning_rate": 1e-5 * line["step"] / 2} for line in read_lines(warming_up)])
    assert "learning rate" not in " ".join(summary(warming_up, write_run(tmp_path / "constant")))
    alike_in_time = {"train.steps": None, "train.minutes": 5.0}
    assert summary(*(set_fields(run, alike_in_time) for run in (short, long)))[1].endswith("so this comparison favours "
                                                                                       "softmax.")
    alike = write_run(tmp_path / "alike", "chunked", slope=0.005, decay_steps=112)
    assert "learning rate" not in " ".join(summary(short, alike))


def test_other_tokenizers_are_compared_per_byte(tmp_path):
    runs = [write_run(tmp_path / "bytes", corpus_checksum="a"),
            write_run(tmp_path / "gpt2", "chunked", loss=3.0, tokenizer="gpt2", corpus_checksum="b")]
    assert summary(*runs)[0] == (
        "After 100 steps, chunked has the lower val bits per byte: 0.7213, versus 1.4427 for softmax.")


def test_each_context_is_for_itself(tmp_path):
    runs = [write_run(tmp_path / f"{mode}-{context}", mode, context=context, loss=loss)
            for context in (32, 64) for mode, loss in (("softmax", 2.0), ("chunked", 2.5))]
    found = summary(*runs)
    assert [text.partition(":")[0] for text in found] == ["With context 32", "With context 64"]
    assert all("After 100 steps, softmax has the lower val loss: 1.0000, versus 1.5000 for chunked." in text
               for text in found)
    assert summary(runs[0], runs[3]) == ["No comparison: no two set-ups have the same size and context."]
