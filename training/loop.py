"""The training loop: dispatches steps, reads their metrics one step late, evaluates, saves and stops."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.schema import Config, LraConfig
from data.verification import Verification
from support.command import note, status
from support.errors import RunError, TrainingError
from support.files import read_json
from training import autotuning
from training import step as steps
from training.accounting import Timing, flops_per_token, peak_flops
from training.checkpoint import Checkpoints
from training.environment import add_to_environment, peak_bytes
from training.logging import Logs
from training.metrics import MetricsWriter
from training.objectives import Objective, Samples
from training.optimizer import decay_mask, global_norm, learning_rate, make_optimizer
from training.sharding import batch_sharding, make_mesh, report_mesh, state_shardings


@dataclass
class Position:
    """Progress of a run; saved with every checkpoint."""

    step: int = 0
    batches: int = 0
    """Global batches consumed."""
    train_seconds: float = 0.0
    """Time spent on updates, excluding compilation, evaluation and checkpoints."""
    wall_seconds: float = 0.0
    """Total time."""


class Outcome(NamedTuple):
    """Result of :func:`train`."""

    position: Position
    val_loss: float | None
    """Val loss of the last evaluation, if any."""
    signal: int | None
    """The signal that stopped it, if any."""
    timing: Timing
    """Wall time by part, over all starts of the run."""


class _Pending(NamedTuple):
    """A dispatched step."""

    metrics: steps.StepMetrics
    learning_rate: float


@dataclass
class _Clock:
    """Wall and training clock; the latter runs from :meth:`resume` to the last :meth:`split`."""

    position: Position
    started: float = field(default_factory=time.perf_counter)
    _before: float = 0.0
    _mark: float = 0.0

    def __post_init__(self) -> None:
        self._before = self.position.wall_seconds

    def resume(self) -> None:
        self._mark = time.perf_counter()

    def split(self) -> float:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self.position.train_seconds += seconds
        self.read()
        return seconds

    def read(self) -> None:
        self.position.wall_seconds = self._before + time.perf_counter() - self.started


def train(config: Config | LraConfig, objective: Objective, run_dir: Path, *, started: float,
          quiet: bool = False, verification: Verification | None = None) -> Outcome:
    """Train in ``run_dir`` from its newest intact checkpoint, or from the start, to the end set by the config.

    Args:
        config: validated config.
        objective: model and data, such as :class:`training.objectives.LanguageModelling`.
        run_dir: run folder.
        started: ``time.perf_counter()`` at the start of the command, for the wall clock.
        quiet: no progress bar.
        verification: of the data; the run ends with its error, without another checkpoint.

    Raises:
        ConfigError: the config does not fit the data or devices.
        DataError: the data are damaged.
        CheckpointError: the checkpoints are of another model, or all damaged.
        TrainingError: a loss, gradient or parameter is not finite.
        OSError: the disk is full or cannot be written.
        RunError: ``environment.json`` is damaged.
    """
    mesh = make_mesh(config)
    report_mesh(mesh, config.train.batch_size // config.train.accumulate)
    transform = make_optimizer(config.optimizer, decay_mask(objective.model))

    def initial() -> steps.TrainState:
        return objective.initial(transform)

    shapes = jax.eval_shape(initial)
    shardings = state_shardings(mesh, objective.model, shapes)
    timing = Timing.of_run(run_dir, started)
    with ExitStack() as stack:
        stack.enter_context(timing)  # writes last, also on an error
        stack.enter_context(jax.set_mesh(mesh))
        timing.enter("checkpoint")
        checkpoints = stack.enter_context(Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep))
        restored = _restore(checkpoints, shapes, shardings)
        timing.enter("compile")
        autotuning.restore(run_dir)
        if restored is None:
            state, position = jax.jit(initial, out_shardings=shardings)(), Position()
        else:
            state, position = restored
        timing.enter("other")
        logs = stack.enter_context(Logs(config, run_dir, step=position.step))
        writer = stack.enter_context(MetricsWriter(run_dir / "metrics.jsonl", keep_through=position.step))
        samples = objective.samples(run_dir / "samples", keep_through=position.step)
        clock = _Clock(position, started)
        data_sharding = batch_sharding(mesh)
        data = stack.enter_context(objective.batches(start=position.batches, sharding=data_sharding))
        evaluate = objective.evaluator(data_sharding)
        timing.enter("compile")
        update = steps.jit_step(objective.update(transform), objective.model, deterministic=config.train.deterministic,
                                segments=isinstance(config, Config) and config.data.packing == "documents",
                                out_shardings=(shardings, None))
        update = update.lower(state, objective.batch_shape(data_sharding), jnp.float32(0)).compile()
        autotuning.keep(run_dir)
        timing.enter("other")
        peak = peak_flops(config.model.dtype, mesh.size)
        add_to_environment(run_dir, step_bytes=peak_bytes(update), peak_flops=peak, mesh=dict(mesh.shape))
        per_token = flops_per_token(config.to_dict(), read_json(run_dir / "environment.json", RunError))
        stop = stack.enter_context(_stop_signals())
        bar = stack.enter_context(_progress(config, position, quiet))
        run = _Run(config, objective.model, clock, timing, per_token, peak, writer, logs, samples, checkpoints,
                   evaluate, jax.jit(global_norm), bar, verification)

        pending: _Pending | None = None
        clock.resume()
        timing.enter("step")
        while not _finished(config, position) and not stop:
            by_steps = config.train.steps is not None
            rate = learning_rate(config.optimizer, position.step, _share(config, position), by_steps=by_steps)
            timing.enter("input")
            batch = next(data)
            timing.enter("step")
            state, metrics = update(state, batch, jnp.float32(rate))
            position.step += 1
            position.batches += 1
            if pending is not None:  # write the previous step while the device computes this one
                run.record(pending, position.step - 1)
            pending = _Pending(metrics, rate)
            evaluates, samples_text, saves = (every > 0 and position.step % every == 0 for every in (
                config.train.eval_every, config.train.sample_every, config.checkpoint.every_steps))
            # Not at the next save, which may be hundreds of updates away.
            saves = run.must_save_again() or saves
            if evaluates or samples_text or saves:
                run.record(pending, position.step)
                pending = None
                # Before the save, so that a run with its last checkpoint also has its last val line and sample.
                if evaluates or _finished(config, position):
                    run.evaluate(state)
                if samples_text or _finished(config, position):
                    run.sample(state)
                if saves:
                    run.save(state)
                clock.resume()
                timing.enter("step")
        if pending is not None:
            run.record(pending, position.step)
        if not stop or _finished(config, position):
            run.evaluate(state)
            run.sample(state)
        if verification is not None and not stop:
            verification.check(wait=True)
        run.save(state)
        timing.enter("checkpoint")
        checkpoints.wait()  # while only a second signal ends the process
        timing.enter("other")
        return Outcome(position, run.val_loss, stop[0] if stop else None, timing)


@dataclass
class _Run:
    """The work of the loop between steps."""

    config: Config | LraConfig
    model: Any
    """The abstract model."""
    clock: _Clock
    timing: Timing
    flops_per_token: float | None
    """Of forward and backward pass; None if unknown."""
    peak_flops: float | None
    """Peak of all devices of the mesh, per second; None if unknown."""
    writer: MetricsWriter
    logs: Logs
    samples: Samples | None
    checkpoints: Checkpoints
    figures: Callable[[steps.TrainState], dict[str, float]]
    """Computes the figures of a val line."""
    parameter_norm: Any
    bar: Any
    verification: Verification | None
    val_loss: float | None = None
    evaluated_at: int = -1
    sampled_at: int = -1
    saved_at: int = -1
    saved_again_at: int = -2
    """Step of the last second attempt to save."""

    def record(self, pending: _Pending, step: int) -> None:
        """Wait for a step and write its line.

        Raises:
            TrainingError: its loss or gradient is not finite.
        """
        loss, norm = (float(x) for x in jax.device_get(pending.metrics))
        seconds = self.clock.split()
        tokens = self.config.train.batch_size * self.config.model.context
        utilisation = {} if self.flops_per_token is None or self.peak_flops is None else {
            "mfu": tokens * self.flops_per_token / seconds / self.peak_flops}
        self._write(step, split="train", loss=loss, learning_rate=pending.learning_rate, gradient_norm=norm,
                    tokens_per_second=tokens / seconds, **utilisation)
        self._check(step, loss=loss, gradient=norm)
        self.bar.update(step, loss, tokens / seconds, self.clock.position)

    def evaluate(self, state: steps.TrainState) -> None:
        """Write the val line of the current step, unless it exists."""
        if self.evaluated_at == self.clock.position.step:
            return
        self.timing.enter("evaluation")
        values = self.figures(state)
        self.val_loss = values["loss"]
        self.evaluated_at = self.clock.position.step
        self.clock.read()
        self._check(self.evaluated_at, **{"val loss": self.val_loss})
        self._write(self.clock.position.step, split="val", **values)
        self.bar.evaluated(self.clock.position, self.val_loss)
        self.timing.enter("other")

    def sample(self, state: steps.TrainState) -> None:
        """Write a text sample at the current step, if configured, unless it exists."""
        step = self.clock.position.step
        if self.samples is not None and self.config.train.sample_every and self.sampled_at != step:
            self.samples.write(step, steps.build(self.model, state.parameters, state.variables))
            self.sampled_at = step

    def save(self, state: steps.TrainState) -> None:
        """Save a checkpoint of the current step, unless it exists.

        Raises:
            TrainingError: the parameters or their norm are not finite.
            DataError: the data are damaged.
        """
        position = self.clock.position
        if self.saved_at == position.step or position.step == 0:
            return
        if self.verification is not None:
            self.verification.check()
        self.timing.enter("checkpoint")
        self._check(position.step, **{"parameters' norm": float(self.parameter_norm(state.parameters))})
        self.logs.flush()
        self.clock.read()
        self.checkpoints.save(position.step, {
            "parameters": state.parameters, "variables": state.variables, "optimizer": state.optimizer,
            "position": dict(vars(position))}, loss=self.val_loss if self.evaluated_at == position.step else None)
        self.timing.write()  # with every checkpoint, in case the process is killed
        self.saved_at = position.step
        self.timing.enter("other")

    def must_save_again(self) -> bool:
        """Whether the last save has failed; prints its error.

        Raises:
            CheckpointError: it was the second attempt.
        """
        error = self.checkpoints.failure()
        if error is None:
            return False
        if self.saved_at == self.saved_again_at:
            raise error
        self.saved_again_at = self.clock.position.step
        note(f"{error} Trying once more.")
        return True

    def _check(self, step: int, **values: float) -> None:
        broken = [name for name, value in values.items() if not math.isfinite(value)]
        if broken:
            self.checkpoints.wait()
            saved = self.checkpoints.steps()
            raise TrainingError(
                f"step {step}: the {broken[0]} is not finite. "
                + (f"The last good checkpoint is step {saved[-1]}" if saved else "There is no checkpoint yet")
                + "; try a lower --optimizer.learning-rate, more --optimizer.warmup-steps, or --model.dtype float32 "
                  "in a new --run-dir")

    def _write(self, step: int, **values: Any) -> None:
        position = self.clock.position
        tokens = step * self.config.train.batch_size * self.config.model.context
        flops = {} if self.flops_per_token is None else {"flops": tokens * self.flops_per_token}
        record = {"step": step, "tokens": tokens, "train_seconds": position.train_seconds,
                  "wall_seconds": position.wall_seconds, **values, **flops}
        self.writer.write(record)
        self.logs.write(record)


def _restore(checkpoints: Checkpoints, shapes: Any, shardings: Any) -> tuple[Any, Position] | None:
    abstract = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes,
                            shardings)
    found = checkpoints.resume({"parameters": abstract.parameters, "variables": abstract.variables,
                                "optimizer": abstract.optimizer, "position": None})
    if found is None:
        return None
    _, items = found
    return (steps.TrainState(items["parameters"], items["variables"], items["optimizer"]),
            Position(**items["position"]))


def is_finished(config: Config | LraConfig, position: dict[str, Any]) -> bool:
    """Whether a run at this position is complete."""
    return _finished(config, Position(**position))


def _finished(config: Config | LraConfig, position: Position) -> bool:
    steps_done = config.train.steps is not None and position.step >= config.train.steps
    return steps_done or (config.train.minutes is not None and position.train_seconds >= 60 * config.train.minutes)


def _share(config: Config | LraConfig, position: Position) -> float:
    """The completed fraction of the run: of its steps if given, else of its minutes."""
    if config.train.steps is not None:
        return position.step / config.train.steps
    assert config.train.minutes is not None
    return position.train_seconds / (60 * config.train.minutes)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects the first SIGTERM or Ctrl-C in a list, at which the loop stops; a second one acts immediately."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[number])
        os.write(2, b"\nStopping after this step; saving.\n")  # print could fail inside a print it interrupts

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(config: Config | LraConfig, position: Position, quiet: bool) -> Iterator[Any]:
    """A progress bar on a terminal; otherwise a line at each evaluation."""
    bar = _Bar(config)
    if quiet or not sys.stderr.isatty():
        yield replace(bar, lines=not quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
               TextColumn("val {task.fields[val]}"), TextColumn("{task.fields[rate]:,.0f} tokens/s"),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=120) as progress:
        task = progress.add_task("", total=1.0, step=position.step, loss=math.nan, val="–", rate=0.0)
        progress.update(task, completed=_share(config, position))
        yield replace(bar, progress=progress, task=task)


@dataclass
class _Bar:
    config: Config | LraConfig
    progress: Any = None
    task: Any = None
    lines: bool = False

    def update(self, step: int, loss: float, rate: float, position: Position) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=_share(self.config, position), step=step, loss=loss, rate=rate)

    def evaluated(self, position: Position, val_loss: float) -> None:
        if self.progress is not None:
            self.progress.update(self.task, val=f"{val_loss:.4f}")
        elif self.lines:
            status(f"step {position.step}: val loss {val_loss:.4f} after {position.train_seconds:.1f} s of training")


