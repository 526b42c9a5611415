"""nanoGPT's training step on torch, timed beside ours: in a process of its own, a step at each request.

``benchmarks.train_step --peer nanogpt=PATH`` starts it. The model, its initialisation, its AdamW and its clipping of
gradients are those of the ``model.py`` that PATH leads to; the attention is torch's fused one.

What runs in that process imports nothing of this project: the Python that has torch may be older than ours.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from support.errors import BenchmarkError, ConfigError

if TYPE_CHECKING:
    from configs.schema import Config


class PeerError(BenchmarkError):
    """The peer cannot be timed; the message says why."""


def find(peer: str) -> Path:
    """The ``model.py`` that ``nanogpt=PATH`` leads to.

    Raises:
        ConfigError: another name, or no such file.
    """

    name, _, path = peer.partition("=")
    found = Path(path, "model.py") if Path(path).is_dir() else Path(path)
    if name != "nanogpt" or not path or not found.is_file():
        raise ConfigError(f"--peer {peer}: expected nanogpt=PATH, nanoGPT's model.py or the folder "
                          "that has it")
    return found.absolute()


class Peer:
    """A process with nanoGPT's step in it: :meth:`start` it, then a call makes one update and returns when it is made.

    Args:
        model: path of nanoGPT's ``model.py``.
        config: of our step; sizes, context, batch, number format and the optimizer's settings are taken from it.
        vocabulary_size: V.
        python: the Python that has torch.
    """

    def __init__(self, model: Path, config: "Config", vocabulary_size: int, python: str = sys.executable):
        case = {"model": str(model), "layers": config.model.layers, "heads": config.model.heads,
                "width": config.model.width, "context": config.model.context, "vocabulary": vocabulary_size,
                "batch": config.train.batch_size, "dtype": config.model.dtype,
                "learning_rate": config.optimizer.learning_rate, "weight_decay": config.optimizer.weight_decay,
                "betas": [config.optimizer.beta1, config.optimizer.beta2], "clip_norm": config.optimizer.clip_norm}
        self._process = subprocess.Popen([python, "-m", "benchmarks.nanogpt", json.dumps(case)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> Self:
        """Makes the first update; raises :class:`PeerError` where torch is not installed, or the model does not run."""
        self()
        return self

    def __call__(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # where it has ended it said why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            raise PeerError(f"nanogpt: {answer or 'its process ended'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]


def make_step(case: dict[str, Any]) -> Callable[[], None]:
    """A function that makes one update of nanoGPT's model on random tokens."""
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.spec_from_file_location("nanogpt_model", case["model"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(block_size=case["context"], vocab_size=case["vocabulary"],
                                        n_layer=case["layers"], n_head=case["heads"], n_embd=case["width"],
                                        dropout=0.0, bias=True)).to(device)
    optimizer = model.configure_optimizers(case["weight_decay"], case["learning_rate"], tuple(case["betas"]), device)
    tokens = np.random.default_rng(0).integers(0, case["vocabulary"], (2, case["batch"], case["context"]))
    inputs, targets = torch.from_numpy(tokens).to(device)
    mixed = torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=case["dtype"] == "bfloat16")

    def step() -> None:
        with mixed:
            _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def serve() -> int:
    """Answers every line with ``done`` after an update, or with what went wrong."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # nanoGPT prints what it makes
    try:
        step = make_step(json.loads(sys.argv[1]))
        for _ in sys.stdin:
            step()
            print("done", file=answers, flush=True)
    except Exception as error:  # whatever it is, the parent names it
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", file=answers, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve())
