"""Published weights in and out: parity with ``transformers``, exact round trips, and refusals.

``golden/`` holds a small GPT-2 as ``transformers`` saved it, its logits, and the script that made both.
"""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
import sample
from configs.schema import Config, ModelConfig
from convert import import_weights
from models import gpt2_format
from models.gpt import GPT, resolve_config
from support.errors import CheckpointError, ConfigError, RunError, WeightsError
from tests import small_run
from training.checkpoint import Checkpoints
from training.loading import load_model

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A run of the golden model, only to be read."""
    run = tmp_path_factory.mktemp("imported") / "run"
    import_weights(str(GOLDEN / "gpt2"), run)
    return run


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the golden model."""
    return Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "source"))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def save(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, changes: dict, file: str = "config.json") -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def logits_of(run: Path, tokens_BT: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(load_model(run).model)
    return np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens_BT))


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Names, shapes, dtypes and every bit."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert actual[name].tobytes() == tensor.tobytes(), name


def refused(capsys, code: int, *arguments: object) -> str:
    """The message of a command that stops with ``code``."""
    capsys.readouterr()
    assert convert.main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    return err


# In


def test_logits_are_those_of_transformers(imported):
    expected = load_file(GOLDEN / "gpt2_logits.safetensors")
    logits = logits_of(imported, expected["tokens"])
    assert logits.dtype == np.float32
    assert np.std(expected["logits"]) > 1  # the error is small beside them
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


def test_an_imported_run_says_what_it_is(imported):
    config = json.loads((imported / "config.json").read_text())
    assert {name: config["model"][name] for name in ("layers", "heads", "width", "context", "positions", "dtype")} == {
        "layers": 2, "heads": 4, "width": 32, "context": 64, "positions": "learned", "dtype": "float32"}
    assert config["model"]["attention"] == ["softmax"]
    assert config["data"]["tokenizer"] == "gpt2"
    environment = json.loads((imported / "environment.json").read_text())
    assert environment["vocabulary_size"] == 97
    assert environment["published_weights"]["source"] == str(GOLDEN / "gpt2")
    with Checkpoints(imported / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [0]


def test_every_parameter_of_the_model_has_one_published_name():
    model = nnx.eval_shape(lambda: GPT(gpt2_format.read_config(GOLDEN / "gpt2")[0], 97, rngs=nnx.Rngs(0)))
    ours = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    mapped = [part for parts in gpt2_format.published_names(2).values() for part in parts]
    assert sorted(mapped) == sorted(ours)


def test_names_without_transformer_masks_and_a_tied_head_are_taken(source, tmp_path, imported):
    """The published files of 2019 have masks and no prefix; other programs write the head out."""
    tensors = {name.removeprefix("transformer."): x for name, x in tensors_of(source).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    save(source, tensors | {"lm_head.weight": tensors["wte.weight"]})
    assert convert.main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    tokens_BT = load_file(GOLDEN / "gpt2_logits.safetensors")["tokens"]
    np.testing.assert_array_equal(logits_of(tmp_path / "run", tokens_BT), logits_of(imported, tokens_BT))


@pytest.mark.thorough
def test_shards_are_put_together(source, tmp_path, imported):
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, source / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    import_weights(str(source), tmp_path / "run")
    tokens_BT = load_file(GOLDEN / "gpt2_logits.safetensors")["tokens"]
    np.testing.assert_array_equal(logits_of(tmp_path / "run", tokens_BT), logits_of(imported, tokens_BT))
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names the file model-00002-of-00002\.safetensors, which does not exist"):
        import_weights(str(source), tmp_path / "other")


# Out


def test_import_then_export_gives_every_tensor_back(imported, tmp_path, capsys):
    assert convert.main(["export", str(imported), "--out", str(tmp_path / "out")]) == 0
    assert_same(tensors_of(tmp_path / "out"), tensors_of(GOLDEN / "gpt2"))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    theirs = json.loads((GOLDEN / "gpt2" / "config.json").read_text())
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in (*gpt2_format.COMPUTED, *gpt2_format.SIZES, *convert.END_TOKENS, "n_inner", "architectures",
                 "tie_word_embeddings"):
        assert ours[name] == theirs[name], name
    assert ours["eos_token_id"] == 96


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_comes_back_as_it_was(source, tmp_path, dtype):
    tensors = {name: x.astype(dtype) if "ln_" not in name else x for name, x in tensors_of(source).items()}
    save(source, tensors)
    import_weights(str(source), tmp_path / "run")
    parameters = nnx.state(load_model(tmp_path / "run").model, nnx.Param)
    assert {x.dtype for x in jax.tree.leaves(parameters)} == {np.dtype("f4")}
    convert.export_weights(tmp_path / "run", tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors)


@pytest.mark.thorough
def test_a_trained_softmax_run_goes_out_and_comes_back(tmp_path, capsys):
    recipe = small_run.make(tmp_path)
    run = tmp_path / "run"
    assert small_run.run(recipe, "--attention", "softmax", "--run-dir", run) == 0
    assert convert.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 257
    assert config["eos_token_id"] == 256
    assert convert.main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 0
    tokens_BT = np.arange(32, dtype=np.int32)[None]
    np.testing.assert_array_equal(logits_of(tmp_path / "back", tokens_BT), logits_of(run, tokens_BT))

    # A vocabulary of 257 is bytes, so that the run can be sampled from and initialise others.
    assert sample.main([str(tmp_path / "back"), "--prompt", "1 times", "--max-new-tokens", "4"]) == 0
    assert small_run.run(recipe, "--run-dir", tmp_path / "linear", "--init-from", tmp_path / "back") == 0
    # Killed before the first checkpoint: without the flag the run would not match its environment.json.
    shutil.rmtree(tmp_path / "linear" / "checkpoints")
    (tmp_path / "linear" / "metrics.jsonl").unlink()
    before = (tmp_path / "linear" / "environment.json").read_bytes()
    assert small_run.run(recipe, "--run-dir", tmp_path / "linear") == 2
    assert f"was started with init_from {tmp_path / 'back'} and has no intact" in capsys.readouterr().err
    assert (tmp_path / "linear" / "environment.json").read_bytes() == before
    assert small_run.run(recipe, "--attention", "softmax", "--run-dir", tmp_path / "back") == 2
    assert f"{tmp_path / 'back'} holds published weights" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention": ("softmax", "chunked")}, "model.attention has chunked; GPT-2's format supports only softmax"),
    ({"head": "logistics"}, "model.head is logistics; GPT-2's format supports only tied"),
    ({"positions": "rotary"}, "model.positions is rotary; GPT-2's format supports only learned"),
])
def test_what_the_format_cannot_say_is_not_exported(tmp_path, capsys, changes, message):
    config = ModelConfig(**{"layers": 2, "heads": 2, "width": 16, "context": 8, "attention": ("softmax",)} | changes)
    model = GPT(resolve_config(config), 97, rngs=nnx.Rngs(0))
    run = tmp_path / "run"
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(1, {"parameters": nnx.to_pure_dict(nnx.state(model, nnx.Param))})
    (run / "config.json").write_text(json.dumps(Config(model=model.config).to_dict()))
    (run / "environment.json").write_text(json.dumps({"vocabulary_size": 97}))
    assert message in refused(capsys, 2, "export", run, "--out", tmp_path / "no", "--format", "gpt2")
    assert not (tmp_path / "no").exists()


# Every mode


@pytest.fixture(scope="module")
def performer(tmp_path_factory) -> Path:
    """A run with parameters and variables."""
    folder = tmp_path_factory.mktemp("performer")
    assert small_run.run(small_run.make(folder), "--attention", "performer,gated", "--run-dir", folder / "run") == 0
    return folder / "run"


def test_a_model_of_any_mode_goes_out_and_is_opened_like_its_run(performer, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert.main(["export", str(performer), "--out", str(out)]) == 0
    there, here = load_model(performer), load_model(out)
    assert (here.step, here.config) == (there.step, there.config)
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644  # for others to read
    pairs = zip(*(jax.tree.leaves_with_path(nnx.state(one.model)) for one in (there, here)), strict=True)
    for (path, expected), (same, found) in pairs:
        assert path == same
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), path
    assert jax.tree.leaves(nnx.state(here.model, nnx.Not(nnx.Param)))  # random features are there too
    card = (out / "README.md").read_text()
    last = json.loads([line for line in (performer / "metrics.jsonl").read_text().splitlines() if '"val"' in line][-1])
    for text in ("tags: [jax, performer, gated]", f"| val loss | {last['loss']:.4f} nats a token |",
                 "S_t = exp(g_t)", f'open_run("{performer.name}")'):
        assert text in card
    assert "--run-dir" not in card
    assert str(tmp_path) not in (out / "environment.json").read_text()
    assert sample.main([str(out), "--prompt", "1 times", "--max-new-tokens", "4"]) == 0
    same = performer.parent / "tiny.py", "--attention", "performer,gated"
    assert small_run.run(*same, "--init-from", out, "--run-dir", tmp_path / "more") == 0
    capsys.readouterr()
    assert small_run.run(*same, "--run-dir", out) == 2
    assert f"{out} holds published weights; to train from them, give init_from {out}" in capsys.readouterr().err


def test_exported_weights_that_do_not_fit_are_refused(performer, tmp_path):
    out = tmp_path / "out"
    assert convert.main(["export", str(performer), "--out", str(out), "--format", "lineargpt"]) == 0
    step, tensors = load_model(out).step, tensors_of(out)
    with pytest.raises(ConfigError, match=rf"has the weights of step {step} alone; there are none of step 7"):
        load_model(out, 7)
    name = "token_embedding.embedding"
    width = tensors[name].shape[1]
    for changed, message in (
            ({name: tensors[name][:5]}, rf"{name} of shape \(5, {width}\) and dtype float32, where the model has "),
            ({"more": np.zeros(3)}, "more, which the model does not have; it is of another model than config.json")):
        save_file(tensors | changed, out / "model.safetensors", metadata={"format": "lineargpt", "step": "1"})
        with pytest.raises(CheckpointError, match=message):
            load_model(out)
    save(out, tensors)
    with pytest.raises(CheckpointError, match=r"its metadata has no step; expected a file of convert\.py export"):
        load_model(out)
    (out / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged .*; restore a copy"):
        load_model(out)


def test_a_damaged_checkpoint_is_named_and_never_exported_for_another(tmp_path, capsys):
    config = ModelConfig(layers=1, heads=2, width=16, context=8, positions="learned", attention=("softmax",))
    model = GPT(resolve_config(config), 257, rngs=nnx.Rngs(0))
    run = tmp_path / "run"
    with Checkpoints(run / "checkpoints") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"parameters": nnx.to_pure_dict(nnx.state(model, nnx.Param))})
    (run / "config.json").write_text(json.dumps(Config(model=model.config).to_dict()))
    (run / "environment.json").write_text(json.dumps({"vocabulary_size": 257}))
    (run / "checkpoints" / "20" / "parameters" / "_METADATA").write_text("{}")
    assert convert.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    skipped, exported = capsys.readouterr().err.splitlines()
    assert skipped == (f"note: skipping the damaged checkpoint {run}/checkpoints/20: parameters/_METADATA does not "
                       "match its checksum: it is truncated or altered")
    assert exported.endswith(f"of {run}, step 10")
    assert "20 is damaged" in refused(capsys, 1, "export", run, "--out", tmp_path / "no", "--step", 20)
    assert not (tmp_path / "no").exists()


# Bad input


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "llama"}, 'model_type is "llama", which is not supported; expected "gpt2"'),
    ({"activation_function": "relu"}, 'activation_function is "relu", which is not supported; expected "g'),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, which is not supported; expected 1e-05"),
    ({"scale_attn_weights": False}, "scale_attn_weights is false"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is true"),
    ({"add_cross_attention": True}, "add_cross_attention is true"),
    ({"n_inner": 100}, "n_inner is 100, which is not supported; expected null or 128"),
    ({"n_layer": "two"}, 'n_layer is "two"; expected a whole number of at least 1'),
    ({"n_head": 5}, "n_head is 5, which does not divide n_embd, 32"),
])
def test_a_config_that_this_model_does_not_compute_is_refused_by_field(source, tmp_path, capsys, changes, message):
    edit(source, changes)
    assert message in refused(capsys, 2, "import", source, "--out", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"n_layer": 10**9}, "config.json: n_layer is 1000000000, and that of the tensors beside it is 2; restore the fil"),
    ({"vocab_size": 10**12}, "config.json: vocab_size is 1000000000000, and that of the tensors beside it is 97"),
    ({"n_positions": 10**9}, "config.json: n_positions is 1000000000, and that of the tensors beside it is 64"),
    ({"n_embd": 4 * 10**9, "n_head": 10**9}, "config.json: n_embd is 4000000000, and that of the tensors beside it is"),
    ({"n_layer": 10**4000}, f"config.json: n_layer is 1{'0' * 79}…, and that of the tensors beside it is 2;"),
])
def test_sizes_beyond_those_of_the_tensors_are_refused_before_anything_is_built(source, tmp_path, capsys, monkeypatch,
                                                                                changes, message):
    monkeypatch.setattr(convert, "GPT", None)
    edit(source, changes)
    assert message in refused(capsys, 1, "import", source, "--out", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def without(name: str):
    return lambda tensors: {n: x for n, x in tensors.items() if n != name}


def swapped_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors | {"lm_head.weight": tensors["transformer.wte.weight"][::-1].copy()}


@pytest.mark.parametrize(("change", "message"), [
    (without("transformer.h.1.mlp.c_fc.bias"), "missing tensors: h.1.mlp.c_fc.bias"),
    (lambda x: x | {"transformer.h.2.ln_1.bias": np.zeros(32, np.float32), "score.weight": np.zeros(3, np.float32)},
     "unexpected tensors: score.weight, h.2.ln_1.bias"),
    (lambda x: x | {"transformer.h.0.ln_1.bias": np.zeros(31, np.float32)},
     "h.0.ln_1.bias has shape (31,), expected (32,)"),
    (lambda x: x | {"transformer.h.0.attn.c_attn.weight": x["transformer.h.0.attn.c_attn.weight"].T.copy()},
     "h.0.attn.c_attn.weight has shape (96, 32), expected (32, 96)"),
    (without("transformer.wpe.weight"), "missing tensors: wpe.weight"),
    (lambda x: x | {"transformer.wte.weight": np.zeros(32, np.float32)},
     "wte.weight has shape (32,), expected two dimensions"),
    (lambda x: x | {"transformer.ln_f.bias": np.zeros(32, np.int8)}, "ln_f.bias has dtype I8, expected F32, F16, BF16"),
    (lambda x: x | {"ln_f.bias": x["transformer.ln_f.bias"]}, "ln_f.bias is also in"),
    (swapped_head, "lm_head.weight differs from wte.weight"),
    (lambda x: x | {"transformer.h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)},
     "h.0.attn.bias is not a causal mask"),
])
def test_a_missing_extra_or_misshapen_tensor_is_named(source, tmp_path, capsys, change, message):
    save(source, change(tensors_of(source)))
    assert message in refused(capsys, 1, "import", source, "--out", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_head_of_its_own_has_to_be_there(source, tmp_path, capsys):
    edit(source, {"tie_word_embeddings": False})
    assert "missing tensors: lm_head.weight" in refused(capsys, 1, "import", source, "--out", tmp_path / "run")


def test_damaged_files_are_named(source, tmp_path, capsys):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert f"{file} is damaged" in refused(capsys, 1, "import", source, "--out", tmp_path / "run")
    (source / "config.json").write_text("{")
    message = refused(capsys, 1, "import", source, "--out", tmp_path / "run")
    assert f"{source / 'config.json'} is damaged" in message


def test_pickled_weights_are_not_read(source, tmp_path, capsys):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    message = refused(capsys, 2, "import", source, "--out", tmp_path / "run")
    assert "no model.safetensors" in message
    assert "pytorch_model.bin may be pickled and is not read" in message


@pytest.mark.parametrize(("name", "message"), [
    ("no/such/folder", "no such folder; expected a folder, or NAME or OWNER/NAME of a model on the Hugging Face Hub"),
    ("./nowhere", "no such folder; expected a folder, or NAME"),
    (str(GOLDEN / "make_gpt2.py"), "is a file; expected a folder with config.json and model.safetensors"),
    (str(GOLDEN), "no config.json"),
])
def test_a_source_that_is_not_there_is_told(tmp_path, capsys, name, message):
    assert message in refused(capsys, 2, "import", name, "--out", tmp_path / "run")


def test_a_hub_that_cannot_be_reached_is_one_message(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = refused(capsys, 1, "import", "openai-community/gpt2", "--out", tmp_path / "run")
    assert message == ("convert.py: openai-community/gpt2: no such folder, and the download from the "
                       "Hugging Face Hub failed (no connection)\n")


def test_a_model_of_the_hub_is_imported_from_where_it_was_downloaded_to(source, tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_weights("openai-community/gpt2", tmp_path / "run")
    assert asked["name"] == "openai-community/gpt2"
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["patterns"])
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["published_weights"]["source"] == "openai-community/gpt2"


def test_nothing_is_overwritten(imported, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for command in (["import", GOLDEN / "gpt2"], ["export", imported]):
        message = refused(capsys, 2, *command, "--out", tmp_path / "out")
        assert "exists already; choose another folder" in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_told(imported, tmp_path, capsys):
    (tmp_path / "file").touch()
    message = refused(capsys, 1, "export", imported, "--out", tmp_path / "file" / "out")
    assert "Not a directory" in message
    assert message.startswith("convert.py: cannot write")


def test_what_is_no_run_cannot_be_loaded(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_model(tmp_path / "run")
    (tmp_path / "run").mkdir()
    for name, content in (("config.json", '{"format": 1}'), ("environment.json", "{}")):
        (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RunError, match="no vocabulary_size"):
        load_model(tmp_path / "run")


def test_a_vocabulary_too_small_for_the_tokenizer_is_noted(source, tmp_path, capsys):
    assert convert.main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    assert "a vocabulary of 97 is too small for the tokenizer gpt2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no tokenizer 'gpt3'"):
        import_weights(str(source), tmp_path / "other", tokenizer="gpt3")
