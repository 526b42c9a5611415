"""Time per token of softmax GPT-2 in the package ``transformers`` on torch and a CPU, for
``benchmarks.sampling --peer transformers``.

The model has random float32 weights, as it loads them by default. ``generate`` draws from it with a cache of keys and
values.
"""

import time
from typing import Any

from configs.schema import ModelConfig

TOKENS_PER_SAMPLE = 16
PACKAGES = ("transformers", "torch")


def measure(sizes: ModelConfig, vocabulary: int, position: int, batch: int, samples: int) -> list[float]:
    """Seconds per token of every sequence, for each sample.

    Args:
        sizes: of the model.
        vocabulary: V.
        position: tokens of the prompt.
        batch: B.
        samples: number of samples.

    Raises:
        ModuleNotFoundError: one of ``PACKAGES`` is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    tokens = TOKENS_PER_SAMPLE + 1  # the first one reads the prompt
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=position + tokens, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt_BT = torch.randint(vocabulary, (batch, position))
    times: list[float] = []

    def note_time(tokens_BT: Any, *_: Any, **__: Any) -> Any:
        times.append(time.perf_counter())
        return torch.zeros(len(tokens_BT), dtype=torch.bool)  # nothing ends

    seconds = []
    with torch.inference_mode():
        for _ in range(samples + 1):  # the first one warms up
            times.clear()
            model.generate(prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=tokens, do_sample=True,
                           temperature=0.8, top_k=0, stopping_criteria=[note_time])
            seconds.append((times[-1] - times[0]) / TOKENS_PER_SAMPLE)
    return seconds[1:]
