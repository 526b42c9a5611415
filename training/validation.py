"""What can be run: a config is resolved and checked here, once."""

import dataclasses
import math
from typing import Any

from configs.schema import Config, LraConfig
from kernels import device
from models import encoder, gpt
from support.command import note
from support.errors import ConfigError


def validate_config[C: (Config, LraConfig)](config: C) -> C:
    """The config as it will run: the attention modes and the number format are resolved, and what is too long is
    shortened, with a note.

    Raises:
        ConfigError: a combination that cannot be run; the message names the field and what was expected.
    """
    train = config.train
    if isinstance(config, LraConfig) and train.sample_every:
        raise ConfigError(f"train.sample_every is {train.sample_every}: a classifier writes no text; expected 0")
    model: Any = (gpt.resolve_config(config.model) if isinstance(config, Config) else
                  encoder.resolve_config(config.model))
    if train.batch_tokens is not None:
        sequences = train.batch_tokens // model.context
        if sequences < 1:
            raise ConfigError(f"train.batch_tokens is {train.batch_tokens}; expected at least model.context, "
                              f"{model.context}")
        if train.batch_size == 0:
            train = dataclasses.replace(train, batch_size=sequences)
        elif train.batch_size != sequences:
            note(f"train.batch_size is {train.batch_size}, and train.batch_tokens {train.batch_tokens} does not count; "
                 "for a batch that follows the context give --train.batch-size 0")
            train = dataclasses.replace(train, batch_tokens=None)
    if train.steps is None and train.minutes is None:
        raise ConfigError("train.steps and train.minutes are both None: give one of them")
    for name, value, least in (
            ("train.steps", train.steps, 1), ("train.batch_size", train.batch_size, 1),
            ("train.accumulate", train.accumulate, 1), ("train.eval_every", train.eval_every, 1),
            ("train.eval_batches", train.eval_batches, 1), ("train.sample_every", train.sample_every, 0),
            ("optimizer.warmup_steps", config.optimizer.warmup_steps, 0),
            ("checkpoint.every_steps", config.checkpoint.every_steps, 1),
            ("checkpoint.keep", config.checkpoint.keep, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; expected at least {least}")
    for name, value in (("train.minutes", train.minutes), ("optimizer.learning_rate", config.optimizer.learning_rate),
                        ("optimizer.epsilon", config.optimizer.epsilon),
                        ("optimizer.clip_norm", config.optimizer.clip_norm)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; expected a number above 0")
    for name, value, most in (("optimizer.beta1", config.optimizer.beta1, 1 - 1e-9),
                              ("optimizer.beta2", config.optimizer.beta2, 1 - 1e-9),
                              ("optimizer.final_fraction", config.optimizer.final_fraction, 1),
                              ("optimizer.weight_decay", config.optimizer.weight_decay, math.inf)):
        if not (0 <= value <= most and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; expected 0 to {most:g}")
    if not 0 <= train.seed < 2**32:
        raise ConfigError(f"train.seed is {train.seed}; expected 0 to {2**32 - 1}")
    if model.dtype == "bfloat16" and not device.has_fast_bfloat16():
        note("model.dtype is float32: this CPU has no fast products of bfloat16")
        model = dataclasses.replace(model, dtype="float32")
    if train.batch_size % train.accumulate:
        parts = max(n for n in range(1, train.accumulate) if train.batch_size % n == 0)
        note(f"train.accumulate is {parts}, not {train.accumulate}, which does not divide train.batch_size")
        train = dataclasses.replace(train, accumulate=parts)
    optimizer = config.optimizer
    # The warm-up of inverse_sqrt sets its peak as well.
    if optimizer.schedule == "cosine" and train.steps is not None and optimizer.warmup_steps > max(
            1, train.steps // 10):
        warmup = max(1, train.steps // 10)
        note(f"optimizer.warmup_steps is {warmup}, not {optimizer.warmup_steps}: a tenth of the run")
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    for name, mode in model.modes.items():
        kernel = getattr(mode, "kernel", None) or ""
        if kernel.startswith("pallas_gpu") and device.platform() != "gpu":
            note(f"model.modes.{name}.kernel {kernel} is interpreted on a {device.platform()}: slow, and there "
                 "for tests")
        for option in ("chunk_size", "block_size", "window"):
            size = getattr(mode, option, None)
            if size is not None and size > model.context:
                note(f"model.modes.{name}.{option} is {model.context}, not {size}: the sequence is no longer")
                mode = dataclasses.replace(mode, **{option: model.context})
                model = dataclasses.replace(model, modes=model.modes | {name: mode})
    return dataclasses.replace(config, model=model, train=train, optimizer=optimizer)
