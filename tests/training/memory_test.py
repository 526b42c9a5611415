"""The memory of a run against that of its devices."""

import dataclasses

import jax
import pytest
from flax import nnx

from configs.schema import Config, ModelConfig, TrainConfig
from models import attention
from models.gpt import GPT, resolve_config
from models.parameters import count_parameters
from support.errors import ConfigError
from training import memory
from training.memory import check_memory
from training.sharding import make_mesh

pytestmark = pytest.mark.fast

CONFIG = Config(model=resolve_config(ModelConfig(layers=2, heads=2, width=16, context=32, dtype="float32")),
                train=TrainConfig(batch_size=8, accumulate=2))


def check(monkeypatch, there: float) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: there)
    check_memory(CONFIG, nnx.eval_shape(lambda: GPT(CONFIG.model, 257, rngs=nnx.Rngs(0))), make_mesh(CONFIG))


def test_parameters_and_optimizer_that_do_not_fit_are_an_error_and_inputs_of_layers_a_note(monkeypatch, capsys):
    parameters = count_parameters(nnx.eval_shape(lambda: GPT(CONFIG.model, 257, rngs=nnx.Rngs(0))))
    state, batch = 4 * 4 * parameters, 4 * 8 * 32  # parameters, gradients and two moments; token ids
    layers = 4 * 4 * 32 * 2 * 16  # of a micro-batch
    with pytest.raises(ConfigError, match=rf"^model\.layers 2, model\.heads 2, .*: the model has {parameters:,} param"):
        check(monkeypatch, state - 1)
    with pytest.raises(ConfigError, match=r"^train\.batch_size is 8: a batch of 32 tokens a row needs 0\.00 GB"):
        check(monkeypatch, state + batch - 1)
    check(monkeypatch, state + batch + layers - 1)
    assert "lower train.batch_size, 8, or raise train.accumulate, 2" in capsys.readouterr().err
    check(monkeypatch, state + batch + layers)
    assert capsys.readouterr().err == ""


def test_random_features_count_once(monkeypatch):
    model = attention.resolve(dataclasses.replace(CONFIG.model, attention=("performer",), modes={
        "performer": {"features": 2**31 - 1}}))
    monkeypatch.setattr(memory, "device_bytes", lambda: 1e11)
    with pytest.raises(ConfigError, match=r"parameters and 34,359,738,352 random numbers of model\.modes, which "
                                          r".* need 137\.44 GB of memory, and a device has 100\.00 GB"):
        check_memory(CONFIG, nnx.eval_shape(lambda: GPT(model, 257, rngs=nnx.Rngs(0))), make_mesh(CONFIG))


def test_a_device_without_statistics_has_its_part_of_the_machine(monkeypatch):
    page, pages = memory.os.sysconf("SC_PAGE_SIZE"), memory.os.sysconf("SC_PHYS_PAGES")
    if jax.default_backend() == "cpu":
        assert memory.device_bytes() == page * pages / jax.local_device_count()
