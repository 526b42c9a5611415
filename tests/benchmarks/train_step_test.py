"""The benchmark of training steps prints and writes what it promises, and stops before any work where it cannot."""

import importlib.util
import json
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from benchmarks import nanogpt, picture, timing, train_step
from configs.schema import Config, ModelConfig, TrainConfig
from models.gpt import resolve_config

TINY = ["--tokens", "64", "--width", "16", "--layers", "1", "--heads", "2", "--repeats", "2", "--dtype", "float32"]


@pytest.mark.thorough
def test_rows_of_the_file_and_the_table(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert train_step.main([*TINY, "--contexts", "32,64", "--modes", "chunked,softmax:materialised", "--json",
                            str(path)]) == 0
    contents = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert "--contexts 32,64 " in contents["command"]
    rows = contents["rows"]
    assert [(row["context"], row["mode"], row["implementation"], row["batch"]) for row in rows] == [
        (32, "chunked", "chunked", 2), (32, "softmax:materialised", "materialised", 2),
        (64, "chunked", "chunked", 1), (64, "softmax:materialised", "materialised", 1)]
    for chunked, softmax in zip(rows[::2], rows[1::2], strict=True):
        assert softmax["ratio"] == 1
        assert chunked["ratio"] == pytest.approx(softmax["milliseconds"] / chunked["milliseconds"])
    for row in rows:
        assert len(row["samples"]) == 2
        assert min(row["samples"]) <= row["milliseconds"] <= max(row["samples"])
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["milliseconds"])
        assert row["peak_bytes"] > 12 * 257 * 16  # float32 embeddings and their two moments alone
        assert row["error"] is None
    heading, *lines, crossing = capsys.readouterr().out.splitlines()[1:]
    assert heading.split()[:3] == ["size", "context", "mode"]
    assert heading.endswith("× softmax")
    assert crossing.startswith("chunked and softmax:materialised ")
    assert len(lines) == 4
    assert lines[1].split()[1] == "softmax:materialised"
    assert lines[1].split()[-1] == "1.00"


def test_modes_cross_where_their_interpolated_times_are_equal():
    def rows(size, **curves):
        return [train_step.Row(context, 1, size, mode=mode, milliseconds=times[n])
                for n, context in enumerate((1024, 4096, 16384)) for mode, times in curves.items()]

    softmax, linear, slow = (1.0, 16.0, 256.0), (4.0, 16.0 / 4, 64.0 / 4), (2.0, 20.0, 300.0)
    assert train_step.crossings(rows(None, softmax=softmax, slow=slow, linear=linear)) == [
        "softmax and slow do not cross from 1,024 to 16,384 tokens",
        "softmax and linear cross at about 2,000 tokens",  # halfway on the logarithmic axis
        "slow and linear cross at about 1,600 tokens"]
    between = rows("124M", softmax=(1.0, None, 256.0), linear=(16.0, None, 16.0))
    assert train_step.crossings(between) == ["124M: softmax and linear cross at about 4,100 tokens"]
    assert train_step.crossings(rows("124M", softmax=(1.0, 2.0, 1.0), linear=(1.5, 1.5, 1.5))) == [
        "124M: softmax and linear cross at about 2,300 and 7,300 tokens"]
    assert train_step.crossings(rows(None, softmax=(1.0, None, None), linear=linear)) == []


def test_flops_are_six_a_parameter_and_the_attentions_own():
    config = Config(model=resolve_config(ModelConfig(layers=2, heads=2, width=16, context=64, attention=("softmax",))),
                    train=TrainConfig(batch_size=3))
    layer = 12 * 16**2 + 13 * 16  # four projections and the MLP, their biases and the two norms
    expected = 6 * (11 * 16 + 2 * layer + 2 * 16) * 3 * 64 + 3 * 2 * (2 * 3 * 64 * 64 * 16)
    assert train_step.model_flops(config, 11) == expected


@pytest.mark.thorough
def test_a_step_that_does_not_fit_recomputes_its_blocks(tmp_path, monkeypatch):
    needed = iter([2**60, 2**60, 2**20])
    monkeypatch.setattr(train_step, "peak_bytes", lambda compiled: next(needed))
    path = tmp_path / "step.json"
    assert train_step.main([*TINY, "--contexts", "32", "--modes", "chunked", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["remat"], row["peak_bytes"], row["error"]) == ("block", 2**20, None)


@pytest.mark.parametrize(("found_out", "error"), [
    ("when it is made", MemoryError), ("when it is made", jax.errors.JaxRuntimeError),
    ("when it runs for the third time", jax.errors.JaxRuntimeError)])
def test_what_does_not_fit_beside_others_is_timed_alone(found_out, error, monkeypatch):
    alive = weakref.WeakSet()

    class Step:
        peak_bytes, compile_seconds, calls = 1, 1.0, 0

        def __init__(self, config, vocabulary_size):
            alive.add(self)
            self.crowded(found_out == "when it is made")

        def __call__(self):
            self.calls += 1
            self.crowded(self.calls == 3)
            return np.zeros(())

        def crowded(self, now):
            if now and len(alive) > 1:
                raise error("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(train_step, "Step", Step)
    monkeypatch.setattr(nanogpt, "make_step", lambda *_: lambda: None)
    options = train_step.main.parse([*TINY, "--repeats", "4", "--remat", "none"])
    configs = {mode: train_step.make_config(mode, 32, train_step.sizes(options)[None], options)
               for mode in ("softmax", "chunked", "linear")}
    *rows, peer = train_step.measure(configs, None, options, timing.CostPredictor(60), Path("model.py"))
    assert [row.mode for row in rows] == list(configs)
    assert [row.alone for row in rows] == [found_out != "when it is made", True, True]
    assert (peer.error, len(peer.samples), peer.alone) == (None, 4, found_out != "when it is made")
    for row in rows:
        assert row.error is None
        assert len(row.samples) == 4
        assert row.ratio == pytest.approx(rows[0].milliseconds / row.milliseconds)


@pytest.mark.thorough
def test_what_is_timed_is_training():
    """From a state like a new one: the loss is that of a model that knows nothing, and falls."""
    options = train_step.main.parse([*TINY])
    # A mode with parameters, random directions and a count of its own.
    step = train_step.Step(train_step.make_config("performer", 32, train_step.sizes(options)[None], options), 257)
    losses = [float(step().loss) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] < 6


def test_gpt2_sizes_one_sequence_a_step_softplus_features():
    options = train_step.main.parse(["--sizes", "124M", "--dtype", "bfloat16"])
    (size,) = train_step.sizes(options).values()
    config = train_step.make_config("chunked:chunked", 8192, size, options)
    assert config.train.batch_size == 1
    assert config.model.modes["chunked"].feature_map == "softplus"
    config = train_step.make_config("softmax", 1024, size, train_step.main.parse(["--sizes", "124M"]))
    parameters = train_step.model_flops(config, size.vocabulary) / 6 / 1024
    assert parameters == pytest.approx(124e6, rel=0.1)  # and attention's own share


def test_the_picture_has_the_published_curves(tmp_path):
    rows = [train_step.Row(context, 1, "124M", mode=mode, milliseconds=context / 100)
            for mode in ("softmax", "chunked:chunked", "chunked:pallas_gpu") for context in (1024, 2048)]
    picture.render_panels(tmp_path / "step.svg", train_step.panels(rows), title="a device")
    drawn = (tmp_path / "step.svg").read_text()
    assert "<!-- chunked:chunked (published) -->" in drawn
    assert "<!-- softmax (published) -->" in drawn
    assert "<!-- chunked:pallas_gpu (published) -->" not in drawn  # the same curve once


@pytest.mark.thorough
def test_without_torch_the_peer_is_a_row_with_the_reason(tmp_path):
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    (tmp_path / "model.py").write_text("")
    path = tmp_path / "step.json"
    assert train_step.main([*TINY, "--contexts", "32", "--modes", "chunked", "--peer", f"nanogpt={tmp_path}",
                            "--json", str(path)]) == 0
    ours, peer = json.loads(path.read_text())["rows"]
    assert peer["mode"] == "nanogpt"
    assert "No module named 'torch'" in peer["error"]
    assert ours["milliseconds"] is not None


def test_a_long_run_has_fewer_samples():
    samples = timing.time_by_turns({"short": lambda: None, "long": lambda: time.sleep(0.02)}, 10, sample_seconds=0,
                                   seconds=0.05)
    assert len(samples["short"]) == 10
    assert len(samples["long"]) == timing.LEAST_SAMPLES


def test_runs_take_turns():
    calls = []
    timing.time_by_turns({name: lambda name=name: calls.append(name) for name in "ab"}, 3, sample_seconds=0)
    assert calls == [*"a" * timing.WARM_UPS, *"b" * timing.WARM_UPS, *"ab" * 3]


MODEL = """
from unittest.mock import MagicMock

print("number of parameters: 0.01M")
GPTConfig, model = dict, MagicMock()
model.to.return_value, model.return_value = model, (None, model.loss)

def GPT(config):
    model.config = config
    return model
"""


def test_nanogpts_step_has_our_sizes_and_optimizer(tmp_path, monkeypatch, capsys):
    torch = MagicMock()
    torch.cuda.is_available.return_value = False
    torch.from_numpy = lambda x: SimpleNamespace(to=lambda device: x)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "model.py").write_text(MODEL)
    config = Config(model=ModelConfig(layers=1, heads=2, width=16, context=32, dtype="float32"),
                    train=TrainConfig(batch_size=2))
    nanogpt.make_step(nanogpt.find(f"nanogpt={tmp_path}"), config, 11)()
    model, ours = sys.modules["nanogpt_model"].model, config.optimizer
    assert model.config == {"block_size": 32, "vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 16,
                            "dropout": 0.0, "bias": True}
    assert [x.shape for x in model.call_args.args] == [(2, 32)] * 2
    model.configure_optimizers.assert_called_once_with(
        ours.weight_decay, ours.learning_rate, (ours.beta1, ours.beta2), "cpu")
    optimizer = model.configure_optimizers.return_value
    assert model.loss.backward.call_count == optimizer.step.call_count == optimizer.zero_grad.call_count == 2
    assert torch.nn.utils.clip_grad_norm_.call_args.args[1] == ours.clip_norm
    assert capsys.readouterr().out == ""  # what nanoGPT prints is no result
