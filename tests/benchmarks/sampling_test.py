"""The benchmark of sampling prints and writes what it promises, at positions that it reads no text for."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import sampling, timing
from configs.schema import ModelConfig
from models.gpt import GPT, resolve_config
from sampling.sampler import TOKENS_PER_CALL
from support.errors import ConfigError
from tests import small_run

TINY = ["--width", "16", "--layers", "1", "--heads", "2", "--repeats", "3", "--dtype", "float32"]


@pytest.mark.thorough
def test_rows_of_the_file_and_the_table(tmp_path, capsys):
    path = tmp_path / "sampling.json"
    assert sampling.main([*TINY, "--positions", "8,524288", "--batches", "1,2", "--modes", "chunked", "--prompt", "40",
                          "--json", str(path), "--picture", str(tmp_path / "sampling.png")]) == 0
    contents = json.loads(path.read_text())
    rows = contents["rows"]
    assert [(row["batch"], row["position"]) for row in rows] == [(1, 8), (1, 524_288), (2, 8), (2, 524_288)]
    for row, first in zip(rows, (rows[0], rows[0], rows[2], rows[2]), strict=True):
        assert len(row["samples"]) == 3
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["milliseconds"])
        assert row["ratio"] == pytest.approx(row["milliseconds"] / first["milliseconds"])
        before = next(other for other in rows if other["position"] == row["position"])
        assert row["batch_ratio"] == pytest.approx(row["tokens_per_second"] / before["tokens_per_second"])
        assert row["bandwidth"] is None  # a CPU's is not known
        assert row["error"] is None
    assert (tmp_path / "sampling.png").stat().st_size
    (prompt,) = contents["prompts"]
    assert (prompt["mode"], prompt["tokens"]) == ("chunked", 40)
    assert prompt["ratio"] == pytest.approx(prompt["one_by_one_seconds"] / prompt["seconds"])
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_the_model_of_a_recipe_is_the_recipes(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(small_run.RECIPE.replace("context=32", "context=32, positions='rotary'"))
    ((name, vocabulary), modes), = sampling.make_configs(sampling.main.parse(["--recipe", str(recipe)])).items()
    assert (name, vocabulary, set(modes)) == ("mine", 257, {"softmax", "chunked"})
    assert {(config.width, config.positions) for config in modes.values()} == {(16, "rotary")}


def test_the_peer_is_timed_at_the_same_sizes_or_a_row_with_the_reason(monkeypatch):
    cases = []

    def measure(*case):
        cases.append(case)
        if case[2] == 8:
            raise ModuleNotFoundError("No module named 'torch'")
        return [4e-3, 2e-3, 3e-3]

    monkeypatch.setattr(sampling.transformers_gpt2, "measure", measure)
    config = ModelConfig(layers=1, heads=2, width=16)
    rows = sampling.measure_peer(config, 257, None, 2, sampling.main.parse(["--positions", "4,8", "--repeats", "3"]))
    assert cases == [(config, 257, 4, 2, 3), (config, 257, 8, 2, 3)]
    assert (rows[0].mode, rows[0].milliseconds, rows[0].tokens_per_second) == ("transformers", 3.0, 2 / 3e-3)
    assert rows[1].error == "ModuleNotFoundError: No module named 'torch'"


def test_bytes_are_those_of_parameters_and_of_the_state():
    for mode, state_bytes in (("softmax", 2 * 4 * 100 * 16), ("linear", 4 * 2 * (8 * 8 + 8))):
        config = ModelConfig(layers=2, heads=2, width=16, context=32, positions="none", dtype="float32",
                             attention=(mode,))
        model = nnx.eval_shape(lambda config=config: GPT(resolve_config(config), 11, rngs=nnx.Rngs(0)))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert sampling.bytes_read(model, 100, 3) == parameters * 4 + 3 * 2 * state_bytes


def test_a_case_beyond_the_memory_is_a_row_without_times(tmp_path, monkeypatch):
    def refuse(needed):
        raise MemoryError("needs more")

    monkeypatch.setattr(timing, "check_memory", refuse)
    path = tmp_path / "sampling.json"
    assert sampling.main([*TINY, "--positions", "8", "--modes", "softmax", "--json", str(path)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["milliseconds"] is None
    assert row["error"] == "out of memory: needs more"


def test_times_are_of_a_token_and_relative_to_the_first_position(monkeypatch):
    monkeypatch.setattr(timing, "time_by_turns", lambda runs, *_: {case: [1.0 * case[1]] for case in runs})
    options = sampling.main.parse(["--positions", "8,16", "--repeats", "1"])
    rows = sampling.measure({"chunked": make_sampler()}, None, 2, options)
    sampling.compare(rows)
    seconds = 8 / sampling.CALLS_PER_SAMPLE / TOKENS_PER_CALL
    assert rows[0].milliseconds == pytest.approx(1e3 * seconds)
    assert rows[0].tokens_per_second == pytest.approx(2 / seconds)
    assert [row.ratio for row in rows] == [1, 2]


def make_sampler(**fields: Any) -> sampling.Sampler:
    """With a mode of every kind of state."""
    config = resolve_config(ModelConfig(**{"layers": 3, "heads": 2, "width": 16, "context": 32, "positions": "none",
                                           "dtype": "float32", "attention": ("chunked", "local", "softmax")} | fields))
    return sampling.Sampler(GPT(config, 11, rngs=nnx.Rngs(0)))


def test_a_continuation_needs_no_prompt():
    sample_tokens = sampling.continuation(make_sampler(), 5000, calls=3, samples=2)
    sampled = [np.asarray(sample_tokens()) for _ in range(3)]
    assert [tokens_BT.shape for tokens_BT in sampled] == [(2, TOKENS_PER_CALL)] * 3
    assert all((tokens_BT >= 0).all() and (tokens_BT < 11).all() for tokens_BT in sampled)
    assert (sampled[0] != sampled[1]).any()


@pytest.mark.thorough
def test_a_continuation_comes_back_to_its_position(monkeypatch):
    """Or what is measured at a position would be the time at those after it."""
    sampler, positions = make_sampler(), []
    make_decoder = sampler.decoder

    def decoder(*arguments):
        decode = make_decoder(*arguments)
        return lambda state, *rest: (positions.append(state.cache.position_B.tolist()), decode(state, *rest))[1]

    monkeypatch.setattr(sampler, "decoder", decoder)
    sample_tokens = sampling.continuation(sampler, 5000, calls=2, samples=2)
    for _ in range(5):
        sample_tokens()
    assert positions == [[place] * 2 for place in (5000, 5000 + TOKENS_PER_CALL) * 2 + (5000,)]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["softmax", "chunked"])
def test_nothing_is_compiled_while_tokens_are_timed_one_by_one(mode, monkeypatch, caplog):
    seconds_a_call, compiled = timing.seconds_a_call, []

    def watched(*arguments):
        caplog.clear()
        with jax.log_compiles():
            seconds = seconds_a_call(*arguments)
        compiled.append([record.message for record in caplog.records if "Compiling" in record.message])
        return seconds

    monkeypatch.setattr(timing, "seconds_a_call", watched)
    sampling.measure_prompt(make_sampler(attention=(mode,)), 300)
    *reading, drawing = compiled
    assert reading[0]
    assert drawing == []


def test_a_continuation_beyond_the_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="64 tokens are more than the 32 that the model has positions"):
        sampling.continuation(make_sampler(positions="learned"), 32, calls=1)
