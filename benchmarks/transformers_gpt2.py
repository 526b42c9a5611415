"""Time of a token of softmax GPT-2 as the package ``transformers`` samples from it, on torch and a CPU.

``benchmarks.sampling --peer transformers`` starts it in a process of its own, for it needs torch and no jax. The model
has random float32 weights, as it loads them by default; ``generate`` draws from it, with keys and values cached.
"""

import argparse
import json
import time
from typing import Any

TOKENS_PER_SAMPLE = 16


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """``samples``, the milliseconds that a token of every sequence takes, and ``versions``.

    Args:
        case: ``layers``, ``heads``, ``width``, ``vocabulary``, ``position`` (tokens of the prompt),
            ``batch`` and ``samples``.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    tokens = TOKENS_PER_SAMPLE + 1  # the first one reads the prompt
    config = transformers.GPT2Config(
        vocab_size=case["vocabulary"], n_positions=case["position"] + tokens, n_embd=case["width"],
        n_layer=case["layers"], n_head=case["heads"], bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt_BT = torch.randint(case["vocabulary"], (case["batch"], case["position"]))
    times: list[float] = []

    def note_time(tokens_BT: Any, *_: Any, **__: Any) -> Any:
        times.append(time.perf_counter())
        return torch.zeros(len(tokens_BT), dtype=torch.bool)  # nothing ends

    samples = []
    with torch.inference_mode():
        for _ in range(case["samples"] + 1):  # the first one warms up
            times.clear()
            model.generate(prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=tokens, do_sample=True,
                           temperature=0.8, top_k=0, stopping_criteria=[note_time])
            samples.append(1e3 * (times[-1] - times[0]) / TOKENS_PER_SAMPLE)
    return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}, "samples": samples[1:]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    print(json.dumps(measure(json.loads(parser.parse_args().case))))
