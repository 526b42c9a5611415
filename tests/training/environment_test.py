"""Contents of environment.json."""

import json
import random
import shutil
import subprocess
import warnings

import jax
import pytest
from flax import nnx

from configs.schema import EncoderConfig, ModelConfig
from models import gpt
from models.encoder import Encoder, resolve_config
from models.gpt import GPT
from support.errors import RunError
from training import environment


@pytest.fixture(scope="module")
def model():
    config = gpt.resolve_config(ModelConfig(layers=3, heads=2, width=8, context=16, dtype="float32",
                                            attention=("softmax", "linear"), modes={"linear": {"form": "cumsum"}}))
    with jax.numpy_rank_promotion("allow"):
        return nnx.eval_shape(lambda: GPT(config, 257, rngs=nnx.Rngs(0)))


def test_it_says_what_a_run_was_made_with(model, monkeypatch):
    found = environment.environment(model, parameters=123, checksum="abc", command=["train.py", "x"])
    assert found["versions"]["jax"] == jax.__version__
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"} == set(found["versions"])
    assert found["devices"] == sorted({device.device_kind for device in jax.devices()})
    assert found["device_count"] == jax.device_count()
    assert found["command"] == ["train.py", "x"]
    assert found["corpus_checksum"] == "abc"
    assert found["vocabulary_size"] == 257
    assert found["parameters"] == 123
    assert found["dtype"] == "float32"
    # Which form computes each mode: a page must not call the materialised softmax a flash kernel.
    assert found["implementations"] == {"softmax": "blockwise", "linear": "cumsum"}
    assert json.loads(json.dumps(found)) == found
    monkeypatch.setenv("LINEARGPT_SHARED_DEVICE", "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 4, 5}, raising=False)
    shared = environment.environment(model, parameters=123, checksum="abc")
    assert (found["shared_device"], shared["shared_device"], shared["cores"]) == (False, True, 3)


def test_the_form_is_that_of_the_mask_and_the_rows_there_are(model, monkeypatch):
    """cuDNN supports neither segments nor padding, and bidirectional attention has its own products."""
    monkeypatch.setattr("kernels.device.platform", lambda: "gpu")
    encoder = nnx.eval_shape(lambda: Encoder(resolve_config(EncoderConfig(
        layers=3, heads=2, width=16, mlp_width=8, context=16, dtype="bfloat16", pooling="mean",
        attention=("softmax", "linear", "chunked"))), 5, rngs=nnx.Rngs(0)))
    made = {segments: environment.environment(encoder, parameters=1, checksum="", segments=segments)
            for segments in (False, True)}
    products = {"linear": "two products", "chunked": "two products"}
    assert made[False]["implementations"] == {"softmax": "cudnn"} | products
    assert made[True]["implementations"] == {"softmax": "blockwise"} | products


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_says_when_files_differ_from_it(tmp_path, monkeypatch):
    (tmp_path / "training").mkdir()
    file = tmp_path / "training" / "environment.py"
    file.write_text("one")
    monkeypatch.setattr(environment, "__file__", str(file))

    def git(*arguments):
        return subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments],
                              check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    git("tag", "-a", "v1", "-m", "a tag must not take the place of the commit")
    assert environment.git_commit() == git("rev-parse", "HEAD")
    file.write_text("two")
    assert environment.git_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_without_git_the_commit_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_commit() is None


def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(RunError, match=r"environment\.json is damaged \(.*\); restore the file"):
        environment.add_to_environment(tmp_path, step_bytes=3)


def test_a_compilation_cache_that_cannot_be_written_is_noted_once_and_left(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    before = jax.config.jax_compilation_cache_dir
    try:
        environment.configure_jax()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert capsys.readouterr().err == (
        f"note: programs are compiled at every start: the compilation cache {cache} cannot be written (Not a "
        "directory); set JAX_COMPILATION_CACHE_DIR to another folder\n")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert environment.compilation_cache() == "gs://bucket/cache"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "new"))
    assert environment.compilation_cache() == str(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_under_the_compilation_cache_is_no_warning_for_every_program(tmp_path, monkeypatch):
    from jax._src import compilation_cache

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment.configure_jax()
        jax.config.update("jax_compilation_cache_dir", before)
        puts = []
        monkeypatch.setattr(compilation_cache, "put_executable_and_time",
                            lambda *_, **__: (puts.append(1), 1 / 0))
        unique = random.random()
        jax.jit(lambda x: x * unique)(1.0)
    assert (len(puts), caught) == (1, [])
