"""Reading and naming of runs."""

from pathlib import Path

import numpy as np
import pytest

from comparison.reading import Reader
from comparison.remarks import remarks
from comparison.runs import differences, group, load_run, name_runs
from support.errors import ConfigError, RunError
from tests.comparison.run_folders import read_lines, set_fields, write_lines, write_run
from tests.edited import edited
from training.accounting import flops_per_token

pytestmark = pytest.mark.fast


def test_runs_that_differ_in_what_changes_no_loss_are_seeds_of_one_setup(tmp_path):
    paths = [write_run(tmp_path / "a"), set_fields(write_run(tmp_path / "b", seed=1), {"checkpoint.every_steps": 7})]
    assert [len(setup.runs) for setup in group([load_run(path) for path in paths])] == [2]
    paths.append(write_run(tmp_path / "c", learning_rate=0.25))
    runs = [load_run(path) for path in paths]
    assert [setup.label for setup in group(runs)] == ["softmax, learning_rate 0.001", "softmax, learning_rate 0.25"]
    assert differences(runs) == {"optimizer.learning_rate": [0.001, 0.001, 0.25], "train.seed": [0, 1, 0],
                                 "checkpoint.every_steps": [500, 7, 500]}


def test_options_are_compared_by_name_across_modes(tmp_path):
    options = {"softmax": {"short_conv": 0, "qk_norm": "none", "forget_gate": False},
               "gated": {"short_conv": 4, "qk_norm": "none"}}
    runs = [load_run(set_fields(write_run(tmp_path / ",".join(modes), modes[0]), {
        "model.attention": modes, "model.modes": {mode: options[mode] for mode in modes}}))
        for modes in (["softmax"], ["gated"], ["gated", "softmax"])]
    assert differences(runs[:2]) == {"model.attention": [["softmax"], ["gated"]], "short_conv": [0, 4],
                                     "qk_activation": ["none", "silu"], "output_norm": ["none", "rms"],
                                     "output_gate": ["none", "sigmoid"], "forget_gate": [False, None],
                                     "decay": [None, "input"], "decay_rank": [None, 16],
                                     "decay_init": [None, "channel"], "rotary": [None, False]}
    found = differences(runs)
    assert found["short_conv"] == [0, 4, "gated 4, softmax 0"]
    assert found["forget_gate"] == [False, None, False]
    assert "qk_norm" not in found


def test_labels_have_the_implementation_where_it_differs(tmp_path):
    runs = [load_run(write_run(tmp_path / name, mode, form=form)) for name, mode, form in (
        ("a", "softmax", "blockwise"), ("b", "softmax", "cudnn"), ("c", "gated", "chunked"))]
    assert [setup.label for setup in group(runs)] == ["softmax (blockwise)", "softmax (cudnn)", "gated"]
    assert [setup.label for setup in group(runs[1:])] == ["softmax", "gated"]


def test_a_copy_is_no_second_seed_and_an_older_config_no_other_setup(tmp_path):
    first, second, copy = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1), write_run(tmp_path / "c")
    with edited(second / "config.json") as config:
        del config["model"]["initial_scale"]
    runs = [load_run(path) for path in (first, second, copy)]
    assert [[run.name for run in setup.runs] for setup in group(runs)] == [["a", "b"], ["c"]]
    assert remarks(runs) == ["a and c have the same config and seed: they are not averaged."]


def test_packed_documents_of_another_version_are_another_set_up(tmp_path):
    paths = [set_fields(write_run(tmp_path / name, seed=seed), {"data.packing": "documents"})
             for seed, name in enumerate("abc")]
    set_fields(paths[2], {"format": 1})
    runs = [load_run(path) for path in paths]
    assert [[run.name for run in setup.runs] for setup in group(runs)] == [["a", "b"], ["c"]]


def test_names_say_what_a_run_is(tmp_path):
    paths = [write_run(tmp_path / "run-1"), write_run(tmp_path / "2", "chunked", learning_rate=0.25, seed=3),
             write_run(tmp_path / "wide"), write_run(tmp_path / "other" / "wide")]
    runs = name_runs([load_run(path) for path in paths])
    assert [run.name for run in runs] == [
        "softmax, 4 × 256, context 32, learning_rate 0.001, seed 0",
        "chunked, 4 × 256, context 32, learning_rate 0.25, seed 3",
        str(tmp_path / "wide"), str(tmp_path / "other" / "wide")]


def test_flops_are_counted_without_parameters_and_only_of_known_modes(tmp_path):
    run = load_run(write_run(tmp_path / "run"))
    # 6 per parameter without the 32 × 256 positions, and three times 2 · 32 · 256 in each of 4 layers.
    per_token = 6 * (1234 - 32 * 256) + 3 * 4 * 2 * 32 * 256
    np.testing.assert_allclose(run.train.points["flops"], run.train.points["tokens"] * per_token)
    assert flops_per_token(run.config, {}) is None
    unknown = load_run(write_run(tmp_path / "unknown", "brand_new"))
    assert "flops" not in unknown.train.points
    lines = [line | {"flops": 7.0 * line["tokens"]} for line in read_lines(run.path)]
    write_lines(run.path, lines)
    np.testing.assert_allclose(load_run(run.path).train.points["flops"], 7 * run.train.points["tokens"])
    del lines[0]["flops"]  # begun by an older version
    write_lines(run.path, lines)
    np.testing.assert_allclose(load_run(run.path).train.points["flops"], run.train.points["tokens"] * per_token)


def test_bytes_memory_and_the_newest_sample(tmp_path):
    path = write_run(tmp_path / "run", tokenizer="gpt2", step_bytes=2**20)
    (path / "samples").mkdir()
    for step, text in ((20, "old"), (100, "new \N{SNOWMAN}")):
        (path / "samples" / f"{step:08}.txt").write_text(text)
    run = load_run(path)
    assert run.units_per_token == pytest.approx(4)
    assert run.peak_bytes == 2**20
    assert (run.sample_step, run.sample) == (100, "new \N{SNOWMAN}")
    write_lines(path, [line | {"peak_bytes": line["step"] * 1000} for line in read_lines(path)])
    assert load_run(path).peak_bytes == 100_000


def test_folders_that_are_no_runs_are_passed_over_and_only_changed_runs_read_again(tmp_path):
    write_run(tmp_path / "run-a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "report.html").write_text("")
    reader = Reader([tmp_path / "*"])
    found, state = reader.read(), reader.state()
    assert [run.path.name for run in found.runs] == ["run-a"]
    assert [Path(note.split(":")[0]).name for note in found.passed_over] == ["empty", "report.html"]
    write_run(tmp_path / "wide", every=0)
    assert reader.state() != state
    again = reader.read().runs
    assert [run.path.name for run in again] == ["run-a", "wide"]
    assert again[0].train is found.runs[0].train
    write_lines(again[0].path, read_lines(again[0].path)[:50])
    assert reader.read().runs[0].train.lines < found.runs[0].train.lines
    with pytest.raises(ConfigError, match="empty: not a run"):
        Reader([tmp_path / "empty"]).read()


def test_a_run_that_has_just_begun_says_so(tmp_path):
    path = write_run(tmp_path / "run")
    for remains in ("", None):
        (path / "metrics.jsonl").unlink() if remains is None else (path / "metrics.jsonl").write_text(remains)
        with pytest.raises(RunError, match="no steps yet"):
            load_run(path)
    (path / "evaluation.json").write_text('{"evaluations": []}')
    with pytest.raises(RunError, match="no steps yet"):
        load_run(path)
    for name, mode in (("nowhere", "softmax"), ("quickstart-gated", "gated")):
        with pytest.raises(ConfigError, match=f"no such folder; .*attention {mode}.* runs/{name}$"):
            load_run(Path("runs") / name)


def test_annealed_points_are_runs_of_their_length(tmp_path):
    folder = write_run(tmp_path / "run")
    assert load_run(folder).at_lengths() == []
    vals = [line for line in read_lines(folder) if line["split"] == "val"]
    write_lines(folder, [*read_lines(folder), vals[1] | {"split": "annealed", "begin": 30, "loss": 1.25}])
    set_fields(folder, {"train.anneal_at": [0.4, 1.0]})
    short, whole = load_run(folder).at_lengths()
    assert [short.name, whole.name] == ["run at 40", "run at 100"]
    assert (short.final(), whole.final()) == (1.25, vals[-1]["loss"])
    assert short.is_finished
    assert short.loss_at("train_seconds", 40.0, "val") == 1.25
    trained = load_run(write_run(tmp_path / "trained", steps=40))
    assert short.setup == trained.setup != whole.setup
    set_fields(folder, {"train.steps": 250})
    assert [run.name for run in load_run(folder).at_lengths()] == ["run at 40"]
    set_fields(folder, {"train.steps": None, "train.minutes": 1.0})
    assert [run.config["train"]["minutes"] for run in load_run(folder).at_lengths()] == [0.4, 1.0]
