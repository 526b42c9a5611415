"""Validation of configs."""

import dataclasses
import itertools
import math
from typing import Any

import jax

from configs.schema import (
    Config,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from data.tokenizers import PIXELS
from kernels import device
from models import attention as attentions
from models import encoder, gpt
from models.attention.layer_options import LayerOptions
from support.command import note
from support.errors import ConfigError
from support.ranges import check_options
from training.optimizer import MOST_WARMUP


def validate_config[C: RunConfig](config: C) -> C:
    """The config with modes and compute dtype resolved, and lengths that are too long shortened, with a note each.

    Raises:
        ConfigError: the config cannot be run; the message names the field and what was expected.
    """
    for group in dataclasses.fields(config):
        check_options(getattr(config, group.name), group.name)
    for name, expected in config.FIXED.items():
        group, field = name.split(".")
        if (value := getattr(getattr(config, group), field)) != expected:
            raise ConfigError(f"{name} is {value}; expected {expected} for a {config.KIND} run")
    if isinstance(config, Config) and config.model.head == "logistics" and (
            (config.data.tokenizer, config.data.packing) != (PIXELS, "rows")):
        raise ConfigError(f"model.head is logistics, data.tokenizer {config.data.tokenizer} and data.packing "
                          f"{config.data.packing}; expected images, with data.tokenizer {PIXELS} and data.packing rows")
    model: Any = (gpt.resolve_config(config.model) if isinstance(config, Config) else
                  encoder.resolve_config(config.model))
    train = _with_batch_size(config.train, model.context)
    _check_lengths(train, config.optimizer)
    train = _with_fitting_accumulation(_with_rows_per_device(train, config.mesh))
    optimizer = _with_fitting_warmup(config.optimizer, train)
    if train.anneal_at:
        _check_annealed_points(train, optimizer)
    return dataclasses.replace(config, model=_with_fitting_modes(model), train=train, optimizer=optimizer)


def _with_batch_size(train: TrainConfig, context: int) -> TrainConfig:
    """``batch_size`` from ``batch_tokens``, if the former is 0."""
    if train.batch_tokens is None:
        return train
    sequences = train.batch_tokens // context
    if sequences < 1 and train.batch_size == 0:
        raise ConfigError(f"train.batch_tokens is {train.batch_tokens}; expected at least model.context, {context}")
    if train.batch_size == 0:
        return dataclasses.replace(train, batch_size=sequences)
    if train.batch_size == sequences:
        return train
    note(f"train.batch_tokens {train.batch_tokens} is ignored, as train.batch_size is {train.batch_size}; to use it, "
         "set train.batch_size to 0")
    return dataclasses.replace(train, batch_tokens=None)


def _check_lengths(train: TrainConfig, optimizer: OptimizerConfig) -> None:
    if train.batch_size < 1:
        raise ConfigError("train.batch_size is 0; expected at least 1, or train.batch_tokens")
    if train.steps is None and train.minutes is None:
        raise ConfigError("train.steps and train.minutes are both None; expected at least one of them")
    if optimizer.adam_learning_rate is not None and optimizer.name != "muon":
        raise ConfigError(f"optimizer.adam_learning_rate is {optimizer.adam_learning_rate}, and optimizer.name "
                          f"{optimizer.name}; expected muon, or None")
    if optimizer.schedule == "drop":
        if optimizer.drop_step is None:
            raise ConfigError("optimizer.drop_step is None; expected a number of steps, as optimizer.schedule is drop")
        if train.steps is not None and optimizer.drop_step >= train.steps:
            note(f"optimizer.drop_step is {optimizer.drop_step}, and train.steps {train.steps}: the learning rate does "
                 "not drop")


def _check_annealed_points(train: TrainConfig, optimizer: OptimizerConfig) -> None:
    given = f"train.anneal_at is {', '.join(f'{fraction:g}' for fraction in train.anneal_at)}"
    if optimizer.schedule != "wsd":
        raise ConfigError(f"{given}, and optimizer.schedule {optimizer.schedule}; expected wsd")
    if train.anneal_at[-1] != 1 or any(before >= after for before, after in itertools.pairwise((0, *train.anneal_at))):
        raise ConfigError(f"{given}; expected increasing fractions of the run that end with 1")
    warm = MOST_WARMUP if train.steps is None else max(1, optimizer.warmup_steps) / train.steps
    ends = [("the warm-up", warm), *((f"the decay to {fraction:g}", fraction) for fraction in train.anneal_at)]
    for (before, end), (decay, fraction) in itertools.pairwise(ends):
        begin = fraction * (1 - optimizer.decay_fraction)
        if begin < end:
            raise ConfigError(f"{given}: {decay} begins at {begin:g} of the run, before {before} ends, at {end:g}; "
                              "expected fractions further apart, or a smaller optimizer.decay_fraction")


def _with_rows_per_device(train: TrainConfig, mesh: MeshConfig) -> TrainConfig:
    """``accumulate`` from ``rows_per_device``, if given."""
    if train.rows_per_device is None:
        return train
    others = max(1, mesh.tensor * mesh.context)  # a size of 0 is refused with the mesh
    replicas = max(1, jax.device_count() // others) if -1 in (mesh.data, mesh.fsdp) else mesh.data * mesh.fsdp
    rows = train.rows_per_device * replicas
    if rows < 1 or train.batch_size % rows:
        raise ConfigError(f"train.rows_per_device is {train.rows_per_device}, {rows} sequences on {replicas} devices; "
                          f"expected a divisor of train.batch_size, {train.batch_size}")
    return dataclasses.replace(train, accumulate=train.batch_size // rows)


def _with_fitting_accumulation(train: TrainConfig) -> TrainConfig:
    if train.batch_size % train.accumulate == 0:
        return train
    small = [n for n in range(1, math.isqrt(train.batch_size) + 1) if train.batch_size % n == 0]
    parts = max(n for pair in small for n in (pair, train.batch_size // pair) if n < train.accumulate)
    note(f"train.accumulate is {parts}, not {train.accumulate}, which does not divide train.batch_size")
    return dataclasses.replace(train, accumulate=parts)


def _with_fitting_warmup(optimizer: OptimizerConfig, train: TrainConfig) -> OptimizerConfig:
    # The warm-up of inverse_sqrt also sets its peak.
    if optimizer.schedule == "inverse_sqrt" or train.steps is None:
        return optimizer
    longest = train.steps // 10
    if optimizer.warmup_steps <= longest:
        return optimizer
    note(f"optimizer.warmup_steps is {longest}, not {optimizer.warmup_steps}: at most a tenth of the run")
    return dataclasses.replace(optimizer, warmup_steps=longest)


def _with_fitting_modes(model: Any) -> Any:
    """The model with a compute dtype that the device supports, and with mode lengths of at most the context."""
    if model.dtype == "bfloat16" and not device.has_fast_bfloat16():
        note("model.dtype is float32: this CPU has no hardware support for bfloat16")
        model = dataclasses.replace(model, dtype="float32")
    modes = {}
    for name, options in model.modes.items():
        layer = attentions.load(name).Attention
        if isinstance(options, LayerOptions):
            options = options.resolved()
        for field in layer.implementation_fields:
            if str(getattr(options, field)).startswith("pallas_gpu") and device.platform() != "gpu":
                note(f"model.modes.{name}.{field} {getattr(options, field)} runs in interpret mode on a "
                     f"{device.platform()}: slow, for tests only")
        for field in layer.length_fields:
            length = getattr(options, field)
            if length is not None and length > model.context:
                note(f"model.modes.{name}.{field} is {model.context}, not {length}: at most model.context")
                options = dataclasses.replace(options, **{field: model.context})
        modes[name] = options
    return dataclasses.replace(model, modes=modes)
