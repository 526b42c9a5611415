"""nanoGPT's training step on torch, for ``benchmarks.train_step --peer nanogpt=PATH``.

The model, its initialisation, AdamW and the clipping of gradients are those of nanoGPT's ``model.py``; the attention is
torch's fused one.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from support.errors import ConfigError


def find(peer: str) -> Path:
    """The ``model.py`` of ``nanogpt=PATH``.

    Raises:
        ConfigError: another name, or there is no such file.
    """
    name, _, path = peer.partition("=")
    found = Path(path, "model.py") if Path(path).is_dir() else Path(path)
    if name != "nanogpt" or not path or not found.is_file():
        raise ConfigError(f"--peer {peer}: expected nanogpt=PATH, where PATH is nanoGPT's model.py or its folder")
    return found.absolute()


def make_step(path: Path, config: Config, vocabulary_size: int) -> Callable[[], None]:
    """A function that makes one update of nanoGPT's model on random tokens and waits for it; it has run once.

    Args:
        path: nanoGPT's ``model.py``.
        config: of our step, with the sizes, the dtype and the settings of the optimizer.
        vocabulary_size: V.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    sizes, optimization = config.model, config.optimizer
    with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints what it makes
        spec.loader.exec_module(module)
        model = module.GPT(module.GPTConfig(
            block_size=sizes.context, vocab_size=vocabulary_size, n_layer=sizes.layers, n_head=sizes.heads,
            n_embd=sizes.width, dropout=0.0, bias=True)).to(device)
        optimizer = model.configure_optimizers(optimization.weight_decay, optimization.learning_rate,
                                               (optimization.beta1, optimization.beta2), device)
    tokens = np.random.default_rng(0).integers(0, vocabulary_size, (2, config.train.batch_size, sizes.context))
    inputs, targets = torch.from_numpy(tokens).to(device)
    mixed = torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=sizes.dtype == "bfloat16")

    def step() -> None:
        with mixed:
            _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimization.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    return step
