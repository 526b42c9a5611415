"""GPT-2 small, 124,439,808 parameters, on a folder of GPT-2 tokens, as published: 2¹⁹ tokens per update.

    python -m data.prepare TEXT_OR_DATASET --tokenizer gpt2 --out data/corpus
    python train.py configs/gpt2_124m.py --attention chunked --data.dir data/corpus --run-dir runs/124m-chunked

The batch adapts to the context, up to 65,536, so that an update keeps its tokens: --model.context 8192 has 64
sequences. On fewer or smaller devices, raise --train.accumulate. The learning rate is that of this size in Brown et
al., "Language Models are Few-Shot Learners", 2020, table 2.1. There is no complete run of this version yet, hence no
time and no loss.
"""

from configs.gpt2 import gpt2
from configs.schema import Config


def get_config(attention: str = "chunked") -> Config:
    return gpt2(attention, layers=12, heads=12, width=768, learning_rate=6e-4, accumulate=16)
