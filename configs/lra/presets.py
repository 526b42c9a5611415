"""The common part of the Long Range Arena recipes, ``configs/lra/TASK.py``.

``paper``: the sizes of the paper's appendix (Tay et al., 2021), with the rest from the released code. ``released``: the
released code's, which differ between modes on Image and Pathfinder. ``tuned``: ours, the same for every mode, with
rotary positions where a mode has queries and keys of single tokens, and the mean over valid tokens or, where a token's
position matters, a CLS token.

The modes follow their papers, with Long Range Arena's block sizes and the factorised Synthesizer with k = 32 that its
text config asks for; ``released`` also has its 16 sums of the Linformer and its features of the Performer. Other
differences from the released code, in every preset:

- Dropout: none of attention weights, and none between the GELU and the second projection of the MLP.
- Projections: those of queries, keys, values and the output of attention have biases.
- Head: one hidden layer also for pairs, where the released code has a second one of half the width, and the input
  [a, b, a · b, a − b], which the paper describes and the released code has as an option.
- Initialisation: kernels are normal with variance 1 / inputs, where those of the released blocks are Xavier-uniform;
  biases are 0, where those of its MLPs are normal with deviation 1e-6. The ε of LayerNorm is 1e-5, not 1e-6.
- Padding: is given by the lengths, where the released code takes the token 0 for padding, also a black pixel. The mean
  is over valid tokens only, and no mode attends to padding.
- Pooling: where no layer leaves its blocks, so that a CLS token would see only the first, every recipe takes the mean.
  The released code does so only on Image and Pathfinder, and has a CLS token for local attention on the other tasks.
- Weight decay applies only to matrices.
"""

from typing import Any, Literal, NamedTuple

from configs.schema import (
    CheckpointConfig,
    EncoderConfig,
    LraConfig,
    OptimizerConfig,
    TaskConfig,
    TrainConfig,
)

Preset = Literal["paper", "released", "tuned"]
Pooling = Literal["cls", "mean"]
NOT_ROTATED = {"linformer", "synthesizer"}
"""Modes that mix tokens by parameters of their positions."""
SEPARATE = {"local"}
"""Modes whose blocks never see each other."""
EVALUATED = 2048
"""Examples per evaluation of a large val split."""


class Sizes(NamedTuple):
    """In Long Range Arena's terms."""

    layers: int
    heads: int
    emb: int
    qkv: int
    """Width of all heads together."""
    mlp: int
    pooling: Pooling = "cls"
    dropout: float | None = None
    """None: the task's."""


def inverse_sqrt(factor: float, warmup: int) -> OptimizerConfig:
    """Adam as for ListOps, Text and Retrieval."""
    return OptimizerConfig(learning_rate=factor, schedule="inverse_sqrt", warmup_steps=warmup, weight_decay=0.1,
                           beta2=0.98, epsilon=1e-9, clip_norm=None)


def cosine(peak: float, warmup: int, *, weight_decay: float = 0.0, clip_norm: float | None = None) -> OptimizerConfig:
    """Adam as for the image tasks."""
    return OptimizerConfig(learning_rate=peak, warmup_steps=warmup, final_fraction=0.0, weight_decay=weight_decay,
                           beta2=0.98, epsilon=1e-9, clip_norm=clip_norm)


def published(task: str, attention: str, preset: Preset, sizes: Sizes, optimizer: OptimizerConfig, *, context: int,
              classes: int, batch: int, steps: int, dropout: float = 0.1, towers: int = 1, learned: bool = False,
              block: int = 50, max_length: int | None = None, **modes: Any) -> LraConfig:
    """A recipe as published.

    Args:
        learned: learned positions, in place of sinusoids.
        block: tokens per block of local and Sinkhorn attention.
        modes: the task's own options of modes in ``released``.
    """
    options: dict[str, Any] = {"local": {"block_size": block}, "sinkhorn": {"block_size": block},
                               "sparse": {"block_size": 50, "summary": 10},
                               "synthesizer": {"kind": "factorised", "k": 32}}
    if preset == "released":
        options |= {"linformer": {"k": 16}, "performer": {"phi": "performer_relu"}} | modes
    layers = tuple(attention.split(","))
    return _recipe(EncoderConfig(
        layers=sizes.layers, heads=sizes.heads, width=sizes.emb, head_width=sizes.qkv // sizes.heads,
        mlp_width=sizes.mlp, context=context, positions="learned" if learned else "sinusoidal",
        pooling=_pooling(sizes.pooling, layers), towers=towers, classes=classes,
        dropout=dropout if sizes.dropout is None else sizes.dropout, attention=layers, modes=options),
        TaskConfig(task=task, max_length=max_length), optimizer, batch, steps)


def tuned(task: str, attention: str, *, context: int, classes: int, steps: int, layers: int = 4, width: int = 128,
          batch: int = 32, towers: int = 1, learning_rate: float = 1e-3, dropout: float = 0.1,
          pooling: Pooling = "mean") -> LraConfig:
    """Our own recipe, small enough for a CPU with shortened tasks."""
    modes = tuple(attention.split(","))
    return _recipe(EncoderConfig(
        layers=layers, heads=4, width=width, mlp_width=2 * width, context=context,
        positions="sinusoidal" if NOT_ROTATED & {*modes} else "rotary", pooling=_pooling(pooling, modes),
        towers=towers, classes=classes, dropout=dropout, attention=modes), TaskConfig(task=task),
        OptimizerConfig(learning_rate=learning_rate, warmup_steps=500, final_fraction=0.05, weight_decay=0.05,
                        beta2=0.98), batch, steps)


def _pooling(wanted: Pooling, modes: tuple[str, ...]) -> Pooling:
    """The mean where a CLS token would see only its own block."""
    return "mean" if {*modes} <= SEPARATE else wanted


def _recipe(model: EncoderConfig, data: TaskConfig, optimizer: OptimizerConfig, batch: int, steps: int) -> LraConfig:
    """Evaluates and saves twenty times."""
    return LraConfig(
        model=model, data=data, optimizer=optimizer,
        train=TrainConfig(steps=steps, batch_size=batch, eval_every=steps // 20, eval_batches=EVALUATED // batch),
        checkpoint=CheckpointConfig(every_steps=steps // 20))
