"""XLA's autotuning results survive to the next start of a run, whatever became of the compilation cache."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests import small_run
from training import autotuning, environment

NAMES = ["gemm_fusion.txt", "other_fusion.txt"]


@pytest.fixture(autouse=True)
def settings():
    with small_run.settings():
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """XLA's part of a compilation cache on a fake GPU; nothing is compiled for one."""
    monkeypatch.setattr("training.autotuning.device.platform", lambda: "gpu")
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    folder = autotuning.cache_folder()
    assert folder is not None
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)


def fill(folder: Path, text: str, names: list[str] = NAMES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_jax_has_xla_keep_what_it_tunes_where_a_run_looks_for_it(cache, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache.parent))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    environment.configure_jax()
    from jax._src.compiler import get_compile_options
    options = get_compile_options(num_replicas=1, num_partitions=1)
    found = options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir
    assert Path(found) == cache


def test_what_was_tuned_comes_back_into_a_cache_that_was_cleared(cache, tmp_path):
    run = tmp_path / "run"
    autotuning.restore(run)  # a new run has none
    fill(cache, "tuned")
    (cache / "tmp").mkdir()  # XLA writes there first
    autotuning.keep(run)
    shutil.rmtree(cache)
    autotuning.restore(run)
    assert read(cache) == dict.fromkeys(NAMES, "tuned")


def test_a_run_keeps_what_it_began_with_and_a_cache_what_it_has(cache, tmp_path):
    run = tmp_path / "run"
    fill(cache, "first", NAMES[:1])
    autotuning.keep(run)
    fill(cache, "second")
    autotuning.keep(run)
    assert read(run / autotuning.FOLDER) == {NAMES[0]: "first", NAMES[1]: "second"}
    autotuning.restore(run)
    assert read(cache) == dict.fromkeys(NAMES, "second")


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(cache, tmp_path, capsys):
    fill(tmp_path / "run" / autotuning.FOLDER, "tuned")
    cache.parent.write_text("a file where the folder should be")
    autotuning.restore(tmp_path / "run")
    assert "may round differently" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_nothing_is_kept_of_other_devices(cache, platform, tmp_path, monkeypatch):
    fill(cache, "tuned")
    monkeypatch.setattr("training.autotuning.device.platform", lambda: platform)
    autotuning.keep(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_what_was_tuned_and_gives_it_back_when_it_goes_on(cache, tmp_path, monkeypatch):
    recipe = small_run.make(tmp_path)
    monkeypatch.setattr(autotuning, "cache_folder", lambda: cache)
    monkeypatch.setattr("training.autotuning.device.platform", jax.default_backend)  # it trains on this machine
    fill(cache, "tuned")
    assert small_run.run(recipe, "--run-dir", tmp_path / "run") == 0
    shutil.rmtree(cache)
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--train.steps", 3) == 0
    assert read(cache) == dict.fromkeys(NAMES, "tuned")
