"""What the recipes of Long Range Arena share; a recipe is ``configs/lra/TASK.py``, this file is none.

``paper``: the sizes of the paper's appendix (Tay et al., 2021); what it leaves open is as in the released code.
``released``: the released code's, which differ from mode to mode on Image and Pathfinder. ``tuned``: ours, the same for
every mode: rotary positions where a mode has queries and keys of single tokens, mean over valid tokens or, where the
place of a token counts, a CLS token.

The modes are what their papers say, with Long Range Arena's block sizes; in ``released`` also its 16 sums of the
Linformer and its features of the Performer. Three things are not as there: attention weights have no dropout, weights
decay in matrices only, and where no layer leaves its blocks, so that a CLS token would see the first one alone, every
recipe takes the mean, as there local attention does on Image and Pathfinder.
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
"""Modes that mix tokens by parameters of their places."""
SEPARATE = {"local"}
"""Modes whose blocks never see each other."""
EVALUATED = 2048
"""Examples of a large val split in an evaluation."""


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
    """Adam as for the images."""
    return OptimizerConfig(learning_rate=peak, warmup_steps=warmup, final_fraction=0.0, weight_decay=weight_decay,
                           beta2=0.98, epsilon=1e-9, clip_norm=clip_norm)


def published(task: str, attention: str, preset: Preset, sizes: Sizes, optimizer: OptimizerConfig, *, context: int,
              classes: int, batch: int, steps: int, dropout: float = 0.1, towers: int = 1, learned: bool = False,
              block: int = 50, max_length: int | None = None, **modes: Any) -> LraConfig:
    """A recipe as published.

    Args:
        learned: positions, in place of sinusoids.
        block: tokens in a block of local and Sinkhorn attention.
        modes: options of modes in ``released`` that are the task's own.
    """
    options: dict[str, Any] = {"local": {"block_size": block}, "sinkhorn": {"block_size": block},
                               "sparse": {"block_size": 50, "summary": 10}}
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
    """A recipe of our own, small enough for a CPU where the task is shortened."""
    modes = tuple(attention.split(","))
    return _recipe(EncoderConfig(
        layers=layers, heads=4, width=width, mlp_width=2 * width, context=context,
        positions="sinusoidal" if NOT_ROTATED & {*modes} else "rotary", pooling=_pooling(pooling, modes),
        towers=towers, classes=classes, dropout=dropout, attention=modes), TaskConfig(task=task),
        OptimizerConfig(learning_rate=learning_rate, warmup_steps=500, final_fraction=0.05, weight_decay=0.05,
                        beta2=0.98), batch, steps)


def _pooling(wanted: Pooling, modes: tuple[str, ...]) -> Pooling:
    """The mean where a CLS token would see its own block alone."""
    return "mean" if {*modes} <= SEPARATE else wanted


def _recipe(model: EncoderConfig, data: TaskConfig, optimizer: OptimizerConfig, batch: int, steps: int) -> LraConfig:
    """Evaluated, and saved, twenty times."""
    return LraConfig(
        model=model, data=data, optimizer=optimizer,
        train=TrainConfig(steps=steps, batch_size=batch, eval_every=steps // 20, eval_batches=EVALUATED // batch),
        checkpoint=CheckpointConfig(every_steps=steps // 20))
