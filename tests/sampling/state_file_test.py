"""A saved and loaded state equals the original; states of other models and damaged files are refused by name."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from configs.schema import ModelConfig
from models import attention as attentions
from models.gpt import GPT, resolve_config
from sampling import state_file
from sampling.sampler import DecodeState, Sampler
from support.errors import JsonError, StateError

ALL = tuple(attentions.sampling_modes())
MODES = ("chunked", "linear", "local", "softmax")
CONFIG = ModelConfig(layers=len(MODES), heads=2, width=16, context=1024, positions="rotary", dtype="float32",
                     attention=MODES)


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_model(seed: int = 0, **changes: object) -> GPT:
    return GPT(resolve_config(dataclasses.replace(CONFIG, **changes)), 300, rngs=nnx.Rngs(seed))


@functools.cache
def sampler() -> Sampler:
    return Sampler(make_model())


@functools.cache
def read(length: int) -> DecodeState:
    return sampler().encode(np.random.default_rng(0).integers(300, size=length))


def save(path: Path, length: int = 5) -> Path:
    state_file.save(path, read(length), sampler().model, origin="runs/first step 3")
    return path


def refused(path: Path, model: GPT | None = None) -> str:
    with pytest.raises(StateError) as caught:
        state_file.load(path, model or sampler().model)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message


def test_the_entries_of_a_file_keep_their_names(tmp_path):
    """Files of earlier versions stay readable."""
    model = make_model(layers=2, attention=("softmax", "gated_delta"))
    state_file.save(tmp_path / "s", Sampler(model).encode(np.arange(3, dtype=np.int32)), model, origin="")
    with safe_open(tmp_path / "s", framework="numpy") as file:
        assert set(file.keys()) == {
            "logits_BV", "seen_BV", "cache.position_B", *(f"cache.layers.0.{name}" for name in (
                "k_BHSD", "v_BHSD", "filled_B")), "cache.layers.1.mode",
            *(f"cache.layers.1.inputs_BPF.{i}" for i in range(3))}


@pytest.mark.parametrize(("length", "modes", "dtype"), [
    (5, MODES, "float32"), pytest.param(5, MODES, "bfloat16", marks=pytest.mark.thorough),
    pytest.param(600, ALL, "float32", marks=pytest.mark.thorough)])
def test_saved_and_loaded_is_the_same_to_the_last_bit(length, modes, dtype, tmp_path):
    """Growing caches have room for 1,024 tokens again."""
    common = (modes, dtype) == (MODES, "float32")
    drawn = sampler() if common else Sampler(make_model(layers=len(modes), attention=modes, dtype=dtype))
    state = drawn.encode(np.random.default_rng(0).integers(300, size=length))
    state_file.save(tmp_path / "s", state, drawn.model, origin="runs/first step 3")
    loaded = state_file.load(tmp_path / "s", drawn.model)
    assert loaded.position == length
    for a, b in zip(*(jax.tree.leaves(drawn.encode(np.zeros(0, np.int32), found)) for found in (loaded, state)),
                    strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_only_what_is_filled_is_kept(tmp_path):
    size, longer = (save(tmp_path / str(length), length).stat().st_size for length in (5, 600))
    growing = sum(block.attention.state_bytes(1) for block in sampler().model.blocks
                  if block.attention.decode_state == "growing")
    constant = sum(block.attention.state_bytes(1) for block in sampler().model.blocks
                   if block.attention.decode_state in ("constant", "window"))
    # Blocks of at most 512 positions; beside the caches, logits, tokens seen and the header.
    assert 5 * growing + constant < size < 5 * growing + constant + 300 * 5 + 4000
    assert 595 * growing <= longer - size < (595 + 512) * growing


@pytest.mark.parametrize(("changes", "named"), [
    ({"width": 32}, "model.width is 16 in the file and 32 here"),
    ({"positions": "none"}, "model.positions is rotary in the file and none here"),
    ({"attention": ("linear",)}, "model.attention is chunked"),
    ({"modes": {"chunked": {"feature_map": "softplus"}}}, "model.modes.chunked.feature_map is elu in the file"),
    ({"seed": 1}, "the same sizes, but other parameters")])
def test_another_model_is_refused_by_what_differs(changes, named, tmp_path):
    message = refused(save(tmp_path / "s"), make_model(**changes))
    assert f"the state of another model, runs/first step 3: {named}" in message
    assert message.count(" there") <= 1  # no consequences of the first difference


def test_one_parameter_is_enough_to_differ(tmp_path):
    model = make_model()
    bias = model.blocks[1].mlp.hidden.bias
    bias[...] = bias[...].at[3].set(1e-6)
    assert "but other parameters" in refused(save(tmp_path / "s"), model)


def test_a_mode_may_have_gained_an_option_since(tmp_path, monkeypatch):
    path = save(tmp_path / "s")
    now = state_file.fingerprint
    monkeypatch.setattr(state_file, "fingerprint", lambda model: now(model) | {"model.modes.chunked.new": "0"})
    assert state_file.load(path, make_model()).position == 5


def test_the_number_format_of_the_products_may_differ(tmp_path):
    model = make_model(dtype="bfloat16")
    Sampler(model)  # keeps its own weights in it
    assert state_file.load(save(tmp_path / "s"), model).position == 5


def test_cut_short_or_damaged_is_noticed_wherever(tmp_path):
    path = save(tmp_path / "s")
    content = path.read_bytes()
    for size in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert "damaged" in refused(path)
    metadata = content.index(b"runs/first")
    for place in (metadata, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
        assert "damaged" in refused(path)


def test_other_files_are_no_states(tmp_path):
    save_file({"weight": np.zeros(3)}, tmp_path / "w")
    assert "no format version; this version of lineargpt reads state files" in refused(tmp_path / "w")
    save_file({"weight": np.zeros(3)}, tmp_path / "w", {state_file.METADATA: '{"format": 2}'})
    assert "format 2; this version of lineargpt reads state files of format 1; save it again" in refused(tmp_path / "w")
    about = {"format": 1, "origin": "a run", "model": {"parameters": "0"}, "sha256": "00"}
    for changes, message in (({"model": []}, "model is a list of 0, expected an object"),
                             ({"model": {"parameters": 5}}, "model.parameters is 5, expected a text"),
                             ({"origin": None}, "origin is null, expected a text"),
                             ({"sha256": 5}, "sha256 is 5, expected hexadecimal digits"),
                             ({"format": True}, "format is true, expected a whole number")):
        save_file({"weight": np.zeros(3)}, tmp_path / "w", {state_file.METADATA: json.dumps(about | changes)})
        with pytest.raises(JsonError, match=f"w is damaged: lineargpt-state.{message}; save it again"):
            state_file.load(tmp_path / "w", sampler().model)
    save_file({"weight": np.zeros(3)}, tmp_path / "w", {state_file.METADATA: "[1]"})
    with pytest.raises(JsonError, match="lineargpt-state is a list of 1, expected an object"):
        state_file.load(tmp_path / "w", sampler().model)


def test_a_state_without_a_part_of_this_model_is_refused(tmp_path):
    path = save(tmp_path / "s")
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()[state_file.METADATA])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lost = max(tensors)
    del tensors[lost], about["sha256"]
    about["sha256"] = state_file._checksum(tensors, about)
    save_file(tensors, path, {state_file.METADATA: json.dumps(about)})
    assert f"it has no {lost}, which a state of this model has; save it again" in refused(path)


def test_a_save_that_fails_leaves_the_file_before(tmp_path, monkeypatch):
    path = save(tmp_path / "s")
    content = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save(path, 600)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["s"]
