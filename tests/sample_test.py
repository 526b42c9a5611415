"""sample.py as a command, on runs with random parameters."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import sample
from configs.schema import Config, DataConfig, ModelConfig
from lineargpt import open_run
from models import attention as attentions
from models.gpt import GPT, resolve_config
from sampling import terminal
from support.errors import ConfigError
from tests import several_devices
from tests.edited import edited
from training.checkpoint import Checkpoints
from training.loading import load_model

ROOT = Path(sample.__file__).parent


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def write_run(path: Path, attention: str = "chunked", *, steps: tuple[int, ...] = (3,), positions="none",
              context: int = 32) -> Path:
    path.mkdir()
    model_config = resolve_config(ModelConfig(layers=1, heads=2, width=8, context=context, positions=positions,
                                              dtype="float32", attention=(attention,)))
    config = Config(model=model_config, data=DataConfig(tokenizer="bytes"))
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "environment.json").write_text(json.dumps({"vocabulary_size": 257}))
    with Checkpoints(path / "checkpoints", keep=9) as checkpoints:
        for step in steps:
            _, parameters, variables = nnx.split(GPT(model_config, 257, rngs=nnx.Rngs(step)), nnx.Param, ...)
            checkpoints.save(step, {"parameters": nnx.to_pure_dict(parameters),
                                    "variables": nnx.to_pure_dict(variables)})
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of runs, made once and read-only: chunked (steps 3 and 7), and learned (32 positions)."""
    folder = tmp_path_factory.mktemp("runs")
    with jax.numpy_rank_promotion("allow"):
        write_run(folder / "chunked", steps=(3, 7))
        write_run(folder / "learned", "softmax", positions="learned")
    return folder


def run(*arguments: object) -> int:
    return sample.main([str(argument) for argument in arguments])


def refused(capsys, code: int, *arguments: object) -> str:
    """The one line on standard error of a command that generates nothing and exits with ``code``."""
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_command_prints_the_generated_text_alone(runs, tmp_path):
    # From another folder, with a prompt that is not UTF-8, and without a compilation cache of the environment's.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, ROOT / "sample.py", runs / "chunked", "--prompt", b"def \xff", "--max-new-tokens", "40"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=120, check=False, env=environment)
    errors = done.stderr.decode()
    assert done.returncode == 0, errors
    text = done.stdout.decode()
    assert 0 < len(text) <= 40
    assert "def " not in text
    assert "prompt of 5 tokens" in errors
    assert "tokens/s" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
    assert any("jit_decode" in file.name for file in Path(os.environ["XDG_CACHE_HOME"], "lineargpt/jax").iterdir())


@pytest.mark.thorough
def test_seeds_decide_and_the_number_of_samples_does_not(runs, capsys):
    def text(*arguments: object) -> str:
        assert run(runs / "chunked", "--prompt", "x", "--max-new-tokens", 30, *arguments) == 0
        return capsys.readouterr().out

    one = text("--seed", 1)
    assert text("--seed", 1) == one != text("--seed", 2)
    two = text("--seed", 1, "--num-samples", 2)
    assert two.startswith(one + "\n\n")
    assert len(two) > len(one) + 2


def test_it_samples_the_checkpoint_asked_for(runs, capsys):
    notes = []
    for arguments in ([], ["--step", 7], ["--step", 3]):
        assert run(runs / "chunked", "--temperature", 1, "--max-new-tokens", 30, *arguments) == 0
        notes.append(capsys.readouterr())
    assert notes[0].out == notes[1].out != notes[2].out
    assert "step 7" in notes[0].err
    assert "step 3" in notes[2].err


def test_loaded_parameters_are_those_saved(runs):
    loaded = load_model(runs / "chunked")
    saved = GPT(loaded.config.model, 257, rngs=nnx.Rngs(7))
    assert (loaded.step, loaded.environment) == (7, {"vocabulary_size": 257})
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (loaded.model, saved)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_prompt_file_is_the_same_as_the_prompt(runs, tmp_path, capsys):
    (tmp_path / "prompt").write_bytes(b"class A:\n")
    for arguments in (["--prompt-file", tmp_path / "prompt"], ["--prompt", "class A:\n"]):
        assert run(runs / "learned", "--max-new-tokens", 9, *arguments) == 0
    assert capsys.readouterr().err.count("prompt of 9 tokens") == 2


@pytest.mark.thorough
def test_learned_positions_end_and_it_says_so(runs, capsys):
    assert run(runs / "learned", "--prompt", "x" * 20, "--max-new-tokens", 100, "--temperature", 0) == 0
    assert "stopped at position 32, the model's last" in capsys.readouterr().err
    assert run(runs / "learned", "--prompt", "x" * 20, "--max-new-tokens", 12, "--temperature", 0) == 0
    assert "stopped" not in capsys.readouterr().err
    message = refused(capsys, 2, runs / "learned", "--prompt", "x" * 33)
    assert "prompt has 33 tokens; expected at most 32, the model's number of positions" in message


def test_no_prompt_starts_after_end_of_text(runs, capsys):
    assert run(runs / "chunked", "--max-new-tokens", 5) == 0
    assert run(runs / "chunked", "--max-new-tokens", 5, "--prompt", "") == 0
    out, err = capsys.readouterr()
    assert err.count("prompt of 1 tokens") == 2
    assert out[:len(out) // 2] == out[len(out) // 2:]


@pytest.mark.parametrize("name", ["chunked", pytest.param("learned", marks=pytest.mark.thorough)])
def test_a_text_goes_on_from_its_state_as_if_nothing_had_been(runs, tmp_path, capsys, name):
    def out(*arguments: object) -> str:
        assert run(runs / name, "--temperature", 0.9, *arguments) == 0
        return capsys.readouterr().out

    state = tmp_path / "s.safetensors"
    whole = out("--prompt", "abcd", "--max-new-tokens", 20)
    assert out("--prompt", "ab", "--max-new-tokens", 0, "--save-state", state) == ""
    # To the same file, which is read before it is written.
    first = out("--load-state", state, "--prompt", "cd", "--max-new-tokens", 7, "--save-state", state)
    assert first + out("--load-state", state, "--max-new-tokens", 13) == whole
    assert out("--load-state", state, "--max-new-tokens", 13, "--num-samples", 2).startswith(whole[len(first):])


def test_a_state_of_another_run_is_refused(runs, tmp_path, capsys):
    state = tmp_path / "s"
    assert run(runs / "chunked", "--step", 3, "--max-new-tokens", 0, "--save-state", state) == 0
    capsys.readouterr()
    message = refused(capsys, 1, runs / "chunked", "--load-state", state)
    assert f"{state}: the state of another model, {runs / 'chunked'} step 3: the same sizes" in message
    state.write_bytes(state.read_bytes()[:-7])
    assert f"{state}: not a state file, or a damaged one" in refused(capsys, 1, runs / "chunked", "--load-state", state)


def test_a_stop_string_is_neither_in_the_text_nor_in_the_state(runs, tmp_path, capsys):
    def out(*arguments: object) -> str:
        assert run(runs / "chunked", "--temperature", 9, *arguments) == 0  # diverse
        return capsys.readouterr().out

    free = out("--max-new-tokens", 200, "--prompt", "x")
    at = next(at for at in range(5, len(free)) if free[at:at + 2].isascii() and free[at:at + 2].isprintable())
    stop = free[at:at + 2]
    state = tmp_path / "s"
    text = out("--max-new-tokens", 200, "--prompt", "x", "--stop", "never", stop, "--save-state", state)
    assert text == free[:free.index(stop)]
    # Two tokens later the stop string would be there.
    assert out("--load-state", state, "--max-new-tokens", 2) == stop


def converse(monkeypatch, lines: bytes, *arguments: object) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    return run(*arguments, "--interactive", "--max-new-tokens", 20)


def test_turns_of_a_conversation_are_one_text(runs, tmp_path, monkeypatch, capsys):
    one, turns = tmp_path / "one", tmp_path / "turns"
    assert converse(monkeypatch, b"ab\n\n", runs / "chunked", "--save-state", turns) == 0
    text = capsys.readouterr().out
    assert run(runs / "chunked", "--prompt", "ab", "--max-new-tokens", 40, "--save-state", one) == 0
    assert text.replace("\n", "") == capsys.readouterr().out.replace("\n", "")
    assert one.read_bytes() == turns.read_bytes()


def test_a_conversation_ends_where_the_positions_do(runs, monkeypatch, capsys):
    too_long = b"y" * 40
    assert converse(monkeypatch, b"\n".join([b"a\\", b"b", too_long, b"c", b"d"]), runs / "learned") == 0
    out, err = capsys.readouterr()
    assert "the prompt has 40 tokens after 23 others; expected at most 32, the model's number of positions" in err
    assert err.endswith("stopped: the model has only 32 positions\n")
    assert len(out.splitlines()) >= 2


def test_an_interrupt_ends_a_turn_and_the_next_goes_on(runs, monkeypatch, capsys):
    write = terminal.write

    def interrupting(text: str) -> None:
        write(text)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(terminal, "write", interrupting)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert run(runs / "chunked", "--interactive", "--max-new-tokens", 10**9) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert 2 * 16 <= len(out) < 100
    assert "Traceback" not in err


@pytest.mark.fast
def test_standard_input_is_read_where_asked_for(monkeypatch):
    reader, writer = os.pipe()  # stays open: to read all of it would wait for ever
    with os.fdopen(writer, "wb", buffering=0) as pipe, os.fdopen(reader) as stdin:
        pipe.write(b"runs/a\nruns/b\n")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert sample.read_prompt(sample.Options(run=Path("run"))) == b""
        assert os.read(reader, 7) == b"runs/a\n"  # of a shell's `while read run`, the rest is not taken
        assert sample.read_prompt(sample.Options(run=Path("run"), prompt="x")) == b"x"
        pipe.close()
        assert sample.read_prompt(sample.Options(run=Path("run"), prompt="-")) == b"runs/b\n"


@pytest.mark.thorough
def test_the_prompt_may_come_through_a_pipe(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompt").write_bytes(b"ab\xff\n")
    for arguments, tokens in (([], 1), (["--prompt", "-"], 4)):
        with (tmp_path / "prompt").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert run(runs / "chunked", "--max-new-tokens", 3, *arguments) == 0
        assert f"prompt of {tokens} tokens" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)  # it is closed
    assert run(runs / "chunked", "--max-new-tokens", 3) == 0
    assert "prompt of 1 tokens" in capsys.readouterr().err
    assert "--prompt -: standard input is closed" in refused(capsys, 2, runs / "chunked", "--prompt", "-")


def test_a_damaged_checkpoint_is_skipped_by_name(runs, tmp_path, capsys):
    shutil.copytree(runs / "chunked", tmp_path / "run")
    (tmp_path / "run/checkpoints/7/SHA256SUMS").unlink()
    assert run(tmp_path / "run", "--max-new-tokens", 3) == 0
    err = capsys.readouterr().err
    assert f"damaged checkpoint {tmp_path}/run/checkpoints/7" in err
    assert "step 3" in err
    assert "7 is damaged" in refused(capsys, 1, tmp_path / "run", "--step", 7)
    (tmp_path / "run/checkpoints/3/SHA256SUMS").unlink()
    assert run(tmp_path / "run") == 1
    assert "no intact checkpoint" in capsys.readouterr().err


def test_a_mode_without_decode_is_refused_by_name(runs, monkeypatch, capsys):
    monkeypatch.delattr(attentions.load("softmax").Attention, "init_cache")
    assert "'softmax' has no cached decode" in refused(capsys, 2, runs / "learned")


@pytest.mark.parametrize(("arguments", "name"), [
    (["--temperature", "-1"], "--temperature"), (["--top-p", "0"], "--top-p"), (["--top-p", "1.5"], "--top-p"),
    (["--top-k", "-2"], "--top-k"), (["--seed", "-1"], "--seed"), (["--max-new-tokens", "0"], "--max-new-tokens"),
    (["--min-p", "2"], "--min-p"), (["--repetition-penalty", "0"], "--repetition-penalty"),
    (["--temperature", "0", "--top-p", "0.5"], "--top-p"), (["--stop", ""], "--stop"),
    (["--num-samples", "2", "--interactive"], "--interactive"), (["--num-samples", "2", "--save-state", "s"], "--save"),
    (["--prompt", "-", "--interactive"], "--interactive"), (["--save-state", "/nowhere/s"], "--save-state /nowhere/s"),
    (["--load-state", "/nowhere/s"], "--load-state /nowhere/s: no such file"),
    (["--num-samples", "0"], "--num-samples"), (["--prompt", "a", "--prompt-file", "b"], "--prompt-file"),
    (["--prompt-file", "/nowhere/prompt"], "--prompt-file /nowhere/prompt: no such file"),
    (["--step", "5"], "no checkpoint at step 5; expected one of 3, 7")])
def test_impossible_options_are_named(runs, capsys, arguments, name):
    assert name in refused(capsys, 2, runs / "chunked", *arguments)


@pytest.mark.fast
def test_images_are_not_sampled_from_a_model_of_text(runs, tmp_path, capsys):
    message = refused(capsys, 2, runs / "chunked", "--images", 4, "--out", tmp_path / "grid.png")
    assert "chunked is a model of text; expected --prompt" in message
    with pytest.raises(ConfigError, match=r"chunked is a model of text; use Run\.sample"):
        open_run(runs / "chunked").sample_images()


def test_help_says_that_the_prompt_is_not_in_the_output(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    assert "The prompt is not repeated there" in " ".join(capsys.readouterr().out.split())


def test_folders_that_are_no_runs_are_named(runs, tmp_path, capsys):
    assert "there is no such folder" in refused(capsys, 2, tmp_path / "none")
    assert "it has no config.json" in refused(capsys, 2, tmp_path)
    copy = shutil.copytree(runs / "chunked", tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    assert f"{copy}: no checkpoints" in refused(capsys, 1, copy)
    (copy / "environment.json").write_text("{}")
    assert "environment.json: no vocabulary_size" in refused(capsys, 1, copy)
    (copy / "environment.json").write_text('{"vocab')
    assert "environment.json is damaged" in refused(capsys, 1, copy)
    shutil.copy(runs / "chunked/environment.json", copy)
    for content, message in (("[1]", "damaged"), ('{"format": 1, "model": 3}', "model is 3, expected an object"),
                             ('{"format": 1, "model": {"size": 3}}', "unknown field model.size"),
                             ('{"model": {}}', "config.json: no format version; this version of lineargpt"),
                             ('{"format": 3}', "config.json: format 3; this version of lineargpt")):
        (copy / "config.json").write_text(content)
        assert run(copy) in (1, 2)
        assert message in capsys.readouterr().err


def test_a_run_of_another_model_is_refused(runs, tmp_path, capsys):
    copy = shutil.copytree(runs / "chunked", tmp_path / "run")
    with edited(copy / "config.json") as config:
        config["model"]["width"] = 16
    assert "is a checkpoint of another model: parameter" in refused(capsys, 1, copy)


def test_a_reader_that_has_enough_ends_it_quietly(runs, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb")) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run(runs / "chunked", "--max-new-tokens", 20) == 0
    assert "Broken" not in capsys.readouterr().err


def test_an_interrupt_ends_it_quietly(runs, monkeypatch, capsys):
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "write", interrupted)
    assert run(runs / "chunked", "--max-new-tokens", 3) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.thorough
def test_devices_that_share_the_parameters_sample_the_text_of_one(runs):
    """No device reads more than its shards."""
    script = """
import sys
from pathlib import Path
import jax
import sample
from training.loading import load_model
from training.sharding import inference_mesh

model = load_model(Path(sys.argv[1]), mesh=inference_mesh(2)).model
leaves = [x for x in jax.tree.leaves(model) if x.ndim > 1 and any(n % 2 == 0 for n in x.shape)]
assert leaves and all(2 * x.addressable_shards[0].data.size == x.size for x in leaves)
sys.exit(sample.main([*sys.argv[1:], "--prompt", "abc", "--max-new-tokens", "20", "--seed", "3"]))
"""
    environment = os.environ | several_devices.environment(2)
    one, two = (subprocess.run([sys.executable, "-c", script, str(runs / "chunked"), "--devices", devices], check=False,
                               cwd=Path(__file__).parents[1], env=environment, capture_output=True) for devices in "12")
    assert (one.returncode, two.returncode) == (0, 0), two.stderr.decode()
    assert one.stdout == two.stdout != b""


def test_more_devices_than_there_are(runs, capsys):
    assert "devices is 99; expected 1 to" in refused(capsys, 2, runs / "chunked", "--devices", "99")
