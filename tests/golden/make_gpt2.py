"""Makes the golden files: a small GPT-2 as saved by transformers, and its logits.

    pip install torch==2.13.0 transformers==5.23.0    # in an environment of its own; nothing else here needs them
    python tests/golden/make_gpt2.py

It writes gpt2/config.json and gpt2/model.safetensors, and gpt2_logits.safetensors with tokens (B, T) and logits
(B, T, V). Every parameter is random, biases and norms too, so that one that is mapped to a wrong place shows.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=96, eos_token_id=96)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            # Wide enough that attention is far from uniform and the GELU far from linear.
            parameter.copy_(1 + 0.2 * noise if ".ln_" in name and name.endswith("weight") else 0.3 * noise)
        tokens = torch.randint(config.vocab_size, (2, config.n_positions))
        logits = model(tokens).logits
    model.save_pretrained(FOLDER / "gpt2")
    (FOLDER / "gpt2" / "generation_config.json").unlink()
    save_file({"tokens": tokens.int(), "logits": logits}, FOLDER / "gpt2_logits.safetensors")


if __name__ == "__main__":
    main()
