"""The training loop: dispatches steps, reads their metrics one step late, evaluates, saves and stops."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.schema import RunConfig
from data.verification import Verification
from sampling.samples import Samples
from support.command import message, note
from support.errors import CheckpointError, TrainingError
from training import autotuning, processes
from training import step as steps
from training.accounting import Timing, flops_per_token, peak_flops
from training.checkpoint import Checkpoints
from training.environment import add_to_environment, note_checkpoint, peak_bytes
from training.logging import Logs
from training.metrics import MetricsWriter
from training.objectives import Evaluator, Objective
from training.optimizer import global_norm, model_optimizer
from training.position import (
    Clock,
    Position,
    annealed_run,
    decay_begins,
    has_reached_end,
    next_learning_rate,
    read_position,
)
from training.progress import ProgressBar
from training.run_files import CONFIG, ENVIRONMENT, read_environment
from training.sharding import batch_sharding, create_sharded, make_mesh, on_one_device, state_shardings, with_shardings
from training.signals import Signals, collect_signals
from training.stall import StallWatch

POLL_SECONDS = 0.2
"""Between two looks for a signal while the run waits."""


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
    """A dispatched step whose line is not written."""

    step: int
    metrics: steps.StepMetrics
    learning_rate: float


class _OutOfPlaceError(Exception):
    """The run folder or its metrics file was deleted, renamed or replaced; raised on all processes."""


class _Decision(NamedTuple):
    """What happens next; process 0 decides for all."""

    finished: bool
    signal: int | None
    """The signal that stops the run, if any."""
    learning_rate: float
    """Of the next step."""
    decays: bool
    """Whether the decay to an annealed point begins."""
    in_place: bool
    """Whether the run folder and its metrics file still have their names."""


def train(config: RunConfig, objective: Objective, run_dir: Path, *, started: float, step: int | None = None,
          verification: Verification, stall_seconds: float | None = None) -> Outcome:
    """Train in ``run_dir`` from a checkpoint, or from the start, to the end set by the config.

    With several processes, all call it with the same arguments. Process 0 decides what happens next, and writes.

    Args:
        config: validated config.
        objective: model and data.
        run_dir: run folder.
        started: ``time.perf_counter()`` at the start of the command, for the wall clock.
        step: of the checkpoint to resume from, known to be intact; None: from the start.
        verification: of the data; the run ends with its error, without another checkpoint.
        stall_seconds: see :class:`training.processes.Distributed`.

    Raises:
        ConfigError: the config does not fit the data or devices.
        DataError: the data are damaged.
        CheckpointError: the checkpoint is of another model, or one could not be written.
        TrainingError: a loss, gradient or parameter is not finite.
        OSError: the disk is full or cannot be written.
        JsonError: ``environment.json`` is damaged.
    """
    mesh = make_mesh(config)
    transform = model_optimizer(config.optimizer, objective.model)

    def initial() -> steps.TrainState:
        return objective.initial(transform)

    shapes = jax.eval_shape(initial)
    shardings = state_shardings(mesh, objective.model, shapes)
    first = processes.is_first()
    timing = Timing.of_run(run_dir, started) if first else Timing(None, started)
    with ExitStack() as stack:
        stack.enter_context(timing)  # writes last, also on an error
        stack.enter_context(jax.set_mesh(mesh))
        timing.enter("checkpoint")
        checkpoints = stack.enter_context(_open_checkpoints(run_dir, config.checkpoint.keep))
        restored = None if step is None else _restore(checkpoints, step, shapes, shardings)
        timing.enter("compile")
        autotuning.restore(run_dir)
        state, position = restored or (create_sharded(initial, mesh, shardings), Position())
        timing.enter("other")
        logs = writer = samples = None
        if first:
            logs = stack.enter_context(Logs(config, run_dir, step=position.step))
            writer = stack.enter_context(MetricsWriter(run_dir / "metrics.jsonl", keep_through=position.step))
            samples = objective.samples(run_dir / "samples", keep_through=position.step)
        clock = Clock(position, started)
        sharding = batch_sharding(mesh)
        data = stack.enter_context(objective.batches(start=position.batches, sharding=sharding))
        evaluate = objective.evaluator(sharding)
        timing.enter("compile")
        update = steps.jit_step(objective.update(transform), deterministic=config.train.deterministic,
                                out_shardings=(shardings, None))
        update = update.lower(state, objective.batch_shape(sharding), jnp.float32(0)).compile()
        timing.enter("other")
        peak = peak_flops(config.model.dtype, mesh.size)
        if first:
            autotuning.keep(run_dir)
            add_to_environment(run_dir, step_bytes=peak_bytes(update), peak_flops=peak, mesh=dict(mesh.shape))
        per_token = flops_per_token(config.to_dict(), read_environment(run_dir))
        records = {name: (run_dir / name).read_bytes() for name in (CONFIG, ENVIRONMENT) if first}
        signals = stack.enter_context(collect_signals())
        bar = stack.enter_context(ProgressBar(config, position, show=first))
        watch = StallWatch(timing, stall_seconds, processes.fail)
        if processes.several() or stall_seconds is not None:
            stack.enter_context(watch)
        loop = _Loop(config, objective, shapes, shardings, sharding, mesh, state, clock, timing, per_token, peak,
                     writer, logs, samples, checkpoints, run_dir, records, evaluate, jax.jit(global_norm), bar,
                     verification, signals, watch)
        stack.enter_context(loop.saved_elsewhere())
        return loop.run(data, update)


@dataclass
class _Loop:
    """The loop and its work between steps."""

    config: RunConfig
    objective: Objective
    shapes: steps.TrainState
    """Of the state."""
    shardings: steps.TrainState
    batch_sharding: jax.sharding.NamedSharding
    mesh: jax.sharding.Mesh
    state: steps.TrainState
    clock: Clock
    timing: Timing
    flops_per_token: float | None
    """Of forward and backward pass; None if unknown."""
    peak_flops: float | None
    """Peak of all devices of the mesh, per second; None if unknown."""
    writer: MetricsWriter | None
    """None on processes that do not write, like the next two."""
    logs: Logs | None
    samples: Samples | None
    checkpoints: Checkpoints
    run_dir: Path
    records: dict[str, bytes]
    """Contents of ``config.json`` and ``environment.json``."""
    evaluator: Evaluator
    parameter_norm: Any
    bar: ProgressBar
    verification: Verification
    signals: Signals
    watch: StallWatch
    pending: _Pending | None = None
    val_loss: float | None = None
    evaluated_at: int = -1
    sampled_at: int = -1
    saved_at: int = -1
    save_failed: bool = False
    """Whether the last save has failed."""

    @property
    def position(self) -> Position:
        return self.clock.position

    def run(self, data: Iterator[Any], update: Callable[..., tuple[steps.TrainState, steps.StepMetrics]]) -> Outcome:
        """Train to the end or to a signal, and save."""
        config, position, timing = self.config, self.position, self.timing
        if position.evaluation_due:  # it was ended by a signal
            self.evaluate()
            if config.train.sample_every and position.step % config.train.sample_every == 0:
                self.sample()
            if not position.evaluation_due:  # in place of the checkpoint without the evaluation
                self.save()
        self.resume()
        while True:
            decision = self.decide()
            if decision.finished or decision.signal is not None:
                break
            if decision.decays:
                self.anneal(update)
                continue
            timing.enter("input")
            batch = next(data)
            timing.enter("step")
            self.state, metrics = update(self.state, batch, jnp.float32(decision.learning_rate))
            position.step += 1
            position.batches += 1
            before, self.pending = self.pending, _Pending(position.step, metrics, decision.learning_rate)
            if before is not None:  # write the previous step while the device computes this one
                self.record(before)
            evaluates, samples, saves = (every > 0 and position.step % every == 0 for every in (
                config.train.eval_every, config.train.sample_every, config.checkpoint.every_steps))
            # Not at the next save, which may be hundreds of updates away.
            saves = self.must_save_again() or saves
            if evaluates or samples or saves:
                self.record_pending()
                # Before the save, so that a run with its last checkpoint also has its last val line and sample.
                finished = self.is_finished()
                if evaluates or finished:
                    self.evaluate()
                if samples or finished:
                    self.sample()
                if saves:
                    self.save()
                self.resume()
        self.record_pending()
        finished = self.is_finished()
        if finished:
            self.evaluate()
            self.sample()
            timing.enter("other")
            self.complete_verification()
        self.save()
        timing.enter("checkpoint")
        self.complete_save()  # while only a second signal ends the process
        self.check_in_place()
        timing.enter("other")
        stopped = self.stop_signal()
        return Outcome(position, self.val_loss, None if finished and not position.evaluation_due else stopped, timing)

    def is_finished(self) -> bool:
        """Whether the steps or the time of the run are over, the same on all processes."""
        return processes.from_first(lambda: has_reached_end(self.config, self.position))

    def decide(self) -> _Decision:
        """What happens next, the same on all processes; raises as :meth:`check_in_place`."""
        decision = _Decision(*processes.from_first(self._decision))
        if not decision.in_place:
            raise _OutOfPlaceError
        return decision

    def _decision(self) -> _Decision:
        config, position = self.config, self.position
        return _Decision(has_reached_end(config, position), self.signals.first, next_learning_rate(config, position),
                         decay_begins(config, position), self._is_in_place())

    def _is_in_place(self) -> bool:
        return self.writer is None or self.writer.is_in_place()

    def check_in_place(self) -> None:
        """Raises :class:`_OutOfPlaceError` on all processes if the run folder was deleted, renamed or replaced."""
        if not processes.from_first(self._is_in_place):
            raise _OutOfPlaceError

    @contextmanager
    def saved_elsewhere(self) -> Iterator[None]:
        """Within, a run whose folder was deleted or renamed is saved where the folder went, or else beside its name.

        Raises:
            TrainingError: the folder is gone; the message says what is saved and how to go on.
            DataError: the folder is gone, and the data are damaged.
        """
        try:
            yield
        except (_OutOfPlaceError, OSError, CheckpointError) as error:
            noticed = isinstance(error, _OutOfPlaceError)
            # A write just after the folder has gone may fail before it is noticed.
            if not noticed and (processes.several() or self._is_in_place()):
                raise
            before = self.run_dir
            if noticed:
                self.record_pending()
            with suppress(CheckpointError):  # of a save to the old folder
                self.checkpoints.wait()
            step = self.position.step
            try:
                folder, happened, remedy = processes.from_first(self._prepare_elsewhere)
                self.run_dir, self.saved_at = Path(folder), -1
                with _open_checkpoints(Path(folder), self.checkpoints.keep) as self.checkpoints:
                    self.save()
                    self.complete_save()
            except (OSError, CheckpointError) as failure:
                raise TrainingError(f"{before} was deleted or renamed while it trained, and step {step:,} cannot be "
                                    f"saved elsewhere: {message(failure)}") from failure
            saved = f"Step {step:,} is saved in {folder}; {remedy}" if step else "No step had been made"
            raise TrainingError(f"{happened} while it trained. {saved}") from error

    def _prepare_elsewhere(self) -> tuple[str, str, str]:
        """On process 0: the folder to save in, made into a run folder; what happened; and how to go on."""
        assert self.writer is not None
        now, before, metrics = self.writer.folder(), self.run_dir, self.writer.path
        folder = _free_name(before.with_name(f"{before.name}.deleted-while-training")) if now is None else now
        if now is None:
            folder.mkdir(parents=True)
        self._write_missing_records(folder)
        lines, self.writer = self.writer.keep_in(folder), None
        self.timing.path = folder / "timing.json"
        go_on = f"repeat the command with run_dir {folder} to resume"
        if now is None:
            return str(folder), f"{before} was deleted, or moved to another file system,", go_on
        if not (before.is_dir() and before.samefile(now)):
            return str(folder), f"{before} was renamed to {folder}", go_on
        if lines.name == metrics.name:
            return str(before), f"{metrics} was deleted", "repeat the command to resume"
        return str(before), f"{metrics} was replaced", (
            f"rename {lines}, which has the lines of this run, to {metrics.name} and repeat the command to resume")

    def _write_missing_records(self, folder: Path) -> list[str]:
        """Writes ``config.json`` and ``environment.json`` where they were deleted; returns the names."""
        missing = [name for name in self.records if not (folder / name).exists()]
        for name in missing:
            (folder / name).write_bytes(self.records[name])
        return missing

    def complete_verification(self) -> None:
        """Wait until the data are verified on all processes, or a signal arrives."""
        while not processes.from_first(
                lambda: self.verification.wait(POLL_SECONDS) or self.signals.first is not None):
            pass
        if self.stop_signal() is None:
            self.verification.wait()

    def stop_signal(self) -> int | None:
        """The signal that has stopped the run, if any, the same on all processes."""
        return processes.from_first(lambda: self.signals.first)

    def resume(self) -> None:
        """Go on with steps: from now on, time is of training."""
        self.signals.was_continued()
        self.clock.resume()
        self.timing.enter("step")

    def record_pending(self) -> None:
        """:meth:`record` of the last step, unless its line is written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.record(pending)

    def record(self, pending: _Pending) -> None:
        """Wait for a step and write its line.

        Raises:
            TrainingError: its loss or gradient is not finite.
        """
        step, (loss, norm) = pending.step, (float(x) for x in jax.device_get(pending.metrics))
        was_continued = self.signals.was_continued()
        seconds = self.clock.split(trains=not was_continued)
        if not was_continued:
            self.watch.step(seconds)
        tokens = self.config.train.batch_size * self.config.model.context
        utilisation = {} if self.flops_per_token is None or self.peak_flops is None else {
            "mfu": tokens * self.flops_per_token / seconds / self.peak_flops}
        self._write(step, split="train", loss=loss, learning_rate=pending.learning_rate, gradient_norm=norm,
                    tokens_per_second=tokens / seconds, **utilisation)
        if was_continued:
            note(f"step {step}: the process was stopped and continued; its {seconds:.1f} s count as wall time, not as "
                 "training time")
        self._check(step, loss=loss, gradient=norm)
        self.bar.update(step, loss, tokens / seconds, self.position)

    def evaluate(self) -> None:
        """Write the val line of the current step, unless it exists, or a signal arrives."""
        if self.evaluated_at == self.position.step:
            return
        self.timing.enter("evaluation")
        values = self.evaluator(self.state, self._evaluation_stops)
        self.position.evaluation_due = values is None
        if values is None:
            return
        self.val_loss = values["loss"]
        self.evaluated_at = self.position.step
        self.clock.read()
        self._check(self.evaluated_at, **{"val loss": self.val_loss})
        self._write(self.position.step, split="val", **values)
        self.bar.evaluated(self.position, self.val_loss)
        self.timing.enter("other")

    def _evaluation_stops(self) -> bool:
        """Between two batches of an evaluation: whether it ends here, the same on all processes."""
        self.watch.evaluated()
        return self.stop_signal() is not None

    def anneal(self, update: Callable[..., tuple[steps.TrainState, steps.StepMetrics]]) -> None:
        """Decay to the next annealed point, write its line and its checkpoint, and go back to the state before.

        A run that is stopped meanwhile begins the decay again: its checkpoint is that of the step before it. A point
        that the run has passed, as by the clock in one long step, is left out.
        """
        position = self.position
        shorter, point = annealed_run(self.config, position), replace(position)
        assert shorter is not None
        if processes.from_first(lambda: has_reached_end(shorter, position)):
            fraction = self.config.train.anneal_at[position.annealed_points]
            note(f"train.anneal_at: step {position.step:,} is past {fraction:g} of the run, which gets no point")
            position.annealed_points += 1
            return
        self.record_pending()
        self.save()
        self.complete_save()
        began, before = time.perf_counter(), None
        self.timing.enter("step")
        with self.objective.batches(start=position.batches, sharding=self.batch_sharding) as data:
            while not self._evaluation_stops():
                finished, rate = processes.from_first(
                    lambda: (has_reached_end(shorter, point), next_learning_rate(shorter, point)))
                if finished:
                    break
                self.state, metrics = update(self.state, next(data), jnp.float32(rate))
                jax.block_until_ready(before)  # the step before, while the device computes this one
                before = metrics
                point.step += 1
                point.batches += 1
                point.train_seconds = position.train_seconds + time.perf_counter() - began
        jax.block_until_ready(self.state)
        point.train_seconds = position.train_seconds + time.perf_counter() - began
        self.timing.enter("evaluation")
        values = None if self.stop_signal() is not None else self.evaluator(self.state, self._evaluation_stops)
        if values is not None:
            self._check(point.step, **{"val loss": values["loss"]})
            self._write(point.step, split="annealed", begin=position.step, **values, train_seconds=point.train_seconds)
            self._save_annealed(point, values["loss"])
            position.annealed_points += 1
        self.timing.enter("checkpoint")
        self.state, _ = _restore(self.checkpoints, position.step, self.shapes, self.shardings)
        self.resume()

    def _save_annealed(self, point: Position, loss: float) -> None:
        """Save the state of an annealed point in a run folder of its own."""
        self.timing.enter("checkpoint")
        folder = self.run_dir / "annealed" / str(point.step)
        if processes.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            self._write_missing_records(folder)
        processes.from_first(lambda: None)  # wait for process 0
        with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(point.step, self._items(point), loss=loss)
            checkpoints.wait()

    def sample(self) -> None:
        """Write a text sample at the current step, if configured, unless it exists, or the evaluation is still due."""
        position = self.position
        if not self.config.train.sample_every or self.sampled_at == position.step or position.evaluation_due:
            return
        self.check_in_place()
        with on_one_device(self.mesh, (self.state.parameters, self.state.variables)) as (
                parameters, variables):
            if self.samples is not None:
                self.samples.write(position.step, steps.build(self.objective.model, parameters, variables))
        self.sampled_at = position.step
        processes.from_first(lambda: None)  # wait for process 0

    def save(self) -> None:
        """Save a checkpoint of the current step, unless it exists. A save that fails is tried once more, unless the run
        has several processes: they could not go on together.

        Raises:
            CheckpointError: the save, or the one before, has failed, and is not tried again.
            TrainingError: the parameters or their norm are not finite.
            DataError: the data are damaged.
        """
        position = self.position
        if self.saved_at == position.step or position.step == 0:
            return
        self.check_in_place()
        self.verification.check()
        self.timing.enter("checkpoint")
        self._check(position.step, **{"parameters' norm": float(self.parameter_norm(self.state.parameters))})
        if self.logs is not None:
            self.logs.flush()
        if self.writer is not None:
            self.writer.sync()  # before the checkpoint: no power loss leaves its step without lines
        if missing := self._write_missing_records(self.run_dir):
            note(f"{self.run_dir}: {' and '.join(missing)} {'were' if len(missing) > 1 else 'was'} deleted; a copy is "
                 "in its place")
        self.clock.read()
        self._complete_save()
        self.timing.write()  # with every checkpoint, in case the process is killed
        try:
            self._start_save()
        except CheckpointError as error:
            self._save_has_failed(error)
            self._start_save()
        self.saved_at = position.step
        self.timing.enter("other")

    def must_save_again(self) -> bool:
        """Whether the last save has failed since it was started; raises as :meth:`save`."""
        error = self.checkpoints.failure()
        if error is not None:
            self._save_has_failed(error)
        return error is not None

    def complete_save(self) -> None:
        """Waits for the last save; tries and raises as :meth:`save`."""
        self._complete_save()
        self.save()  # if it has failed
        self.checkpoints.wait()

    def _start_save(self) -> None:
        position = self.position
        self.checkpoints.save(position.step, self._items(position),
                              loss=self.val_loss if self.evaluated_at == position.step else None)

    def _items(self, position: Position) -> dict[str, Any]:
        """The items of a checkpoint."""
        return {**self.state._asdict(), "position": dict(vars(position))}

    def _complete_save(self) -> None:
        if not self.checkpoints.is_pending:
            return
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._save_has_failed(error)
        else:
            self.save_failed = False

    def _save_has_failed(self, error: CheckpointError) -> None:
        """Prints an error after which the save is tried again, or raises it."""
        if self.save_failed or processes.several():
            raise error
        self.save_failed, self.saved_at = True, -1
        note(f"{error} Trying once more.")

    def _check(self, step: int, **values: float) -> None:
        broken = [name for name, value in values.items() if not math.isfinite(value)]
        if broken:
            self.checkpoints.wait()
            saved = self.checkpoints.steps()
            raise TrainingError(
                f"step {step}: the {broken[0]} is not finite. "
                + (f"The last good checkpoint is step {saved[-1]}" if saved else "There is no checkpoint yet")
                + "; try a lower optimizer.learning_rate, more optimizer.warmup_steps, or model.dtype float32 in a new "
                  "run_dir")

    def _write(self, step: int, **values: Any) -> None:
        if self.writer is None or self.logs is None:
            return
        position = self.position
        tokens = step * self.config.train.batch_size * self.config.model.context
        flops = {} if self.flops_per_token is None else {"flops": tokens * self.flops_per_token}
        record = {"step": step, "tokens": tokens, "train_seconds": position.train_seconds,
                  "wall_seconds": position.wall_seconds, **values, **flops}
        self.writer.write(record)
        self.logs.write(record)


def _open_checkpoints(run_dir: Path, keep: int) -> Checkpoints:
    """The checkpoints of a run that notes in ``environment.json`` that it has some."""
    return Checkpoints(run_dir / "checkpoints", keep=keep, completed=lambda: note_checkpoint(run_dir))


def _free_name(path: Path) -> Path:
    """The path, with a number if it exists."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _restore(checkpoints: Checkpoints, step: int, shapes: Any, shardings: Any) -> tuple[Any, Position]:
    abstract = with_shardings(shapes, shardings)
    items = checkpoints.load(step, {"parameters": abstract.parameters, "variables": abstract.variables,
                                    "optimizer": abstract.optimizer, "position": None})
    return (steps.TrainState(items["parameters"], items["variables"], items["optimizer"]),
            read_position(items["position"], checkpoints.directory / str(step)))
