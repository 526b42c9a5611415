"""The training loop: dispatches steps, reads their metrics one step late, evaluates, saves and stops."""

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.schema import Config, RunConfig
from data.verification import Verification
from support import interrupts
from support.command import error_stream, message, note, status
from support.errors import CheckpointError, TrainingError
from support.json_files import Duration, Natural, check
from training import autotuning, processes
from training import step as steps
from training.accounting import Timing, flops_per_token, peak_flops
from training.checkpoint import JSON_FILE, JSON_ITEM, Checkpoints
from training.environment import add_to_environment, note_checkpoint, peak_bytes
from training.logging import Logs
from training.metrics import MetricsWriter
from training.objectives import Objective, Samples
from training.optimizer import decay_mask, global_norm, learning_rate, make_optimizer
from training.run_files import CONFIG, ENVIRONMENT, read_environment
from training.sharding import batch_sharding, make_mesh, on_one_device, state_shardings
from training.stall import StallWatch

POLL_SECONDS = 0.2
"""Between two looks for a signal while the run waits."""


@dataclass
class Position:
    """Progress of a run; saved with every checkpoint."""

    step: Natural = 0
    batches: Natural = 0
    """Global batches consumed."""
    train_seconds: Duration = 0.0
    """Time spent on updates, excluding compilation, evaluation and checkpoints."""
    wall_seconds: Duration = 0.0
    """Total time."""
    evaluation_due: bool = False
    """Whether a signal ended the evaluation of this step; a resumed run begins with it."""


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


class _OutOfPlaceError(Exception):
    """The run folder or its metrics file was deleted, renamed or replaced; raised on all processes."""


class _Decision(NamedTuple):
    """What happens next; process 0 decides for all."""

    finished: bool
    signal: int | None
    """The signal that stops the run, if any."""
    learning_rate: float
    """Of the next step."""
    in_place: bool
    """Whether the run folder and its metrics file still have their names."""


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

    def split(self, *, trains: bool = True) -> float:
        """Seconds since the last split; ``trains``: whether they are training time."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if trains:
            self.position.train_seconds += seconds
        self.read()
        return seconds

    def read(self) -> None:
        self.position.wall_seconds = self._before + time.perf_counter() - self.started


def train(config: RunConfig, objective: Objective, run_dir: Path, *, started: float,
          step: int | None = None, quiet: bool = False, verification: Verification | None = None,
          stall_seconds: float | None = None) -> Outcome:
    """Train in ``run_dir`` from a checkpoint, or from the start, to the end set by the config.

    With several processes, all call it with the same arguments. Process 0 decides what happens next, and writes.

    Args:
        config: validated config.
        objective: model and data, such as :class:`training.objectives.LanguageModelling`.
        run_dir: run folder.
        started: ``time.perf_counter()`` at the start of the command, for the wall clock.
        step: of the checkpoint to resume from, known to be intact; None: from the start.
        quiet: no progress bar.
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
    transform = make_optimizer(config.optimizer, decay_mask(objective.model))

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
        if restored is None:
            state, position = jax.jit(initial, out_shardings=shardings)(), Position()
        else:
            state, position = restored
        timing.enter("other")
        logs = writer = samples = None
        if first:
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
        timing.enter("other")
        peak = peak_flops(config.model.dtype, mesh.size)
        if first:
            autotuning.keep(run_dir)
            add_to_environment(run_dir, step_bytes=peak_bytes(update), peak_flops=peak, mesh=dict(mesh.shape))
        per_token = flops_per_token(config.to_dict(), read_environment(run_dir))
        records = {name: (run_dir / name).read_bytes() for name in (CONFIG, ENVIRONMENT) if first}
        signals = stack.enter_context(_signals())
        bar = stack.enter_context(_progress(config, position, quiet or not first))
        watch = StallWatch(timing, stall_seconds, processes.fail)
        if processes.several() or stall_seconds is not None:
            stack.enter_context(watch)
        run = _Run(config, objective.model, mesh, clock, timing, per_token, peak, writer, logs, samples, checkpoints,
                   run_dir, records, evaluate, jax.jit(global_norm), bar, verification, signals, watch)

        pending: _Pending | None = None
        stack.enter_context(run.saved_elsewhere(lambda: (state, pending)))
        if position.evaluation_due:  # it was ended by a signal
            run.evaluate(state)
            if config.train.sample_every and position.step % config.train.sample_every == 0:
                run.sample(state)
            if not position.evaluation_due:  # in place of the checkpoint without the evaluation
                run.save(state)
        run.resume()
        while True:
            decision = run.decide()
            if decision.finished or decision.signal is not None:
                break
            timing.enter("input")
            batch = next(data)
            timing.enter("step")
            state, metrics = update(state, batch, jnp.float32(decision.learning_rate))
            position.step += 1
            position.batches += 1
            if pending is not None:  # write the previous step while the device computes this one
                run.record(pending, position.step - 1)
            pending = _Pending(metrics, decision.learning_rate)
            evaluates, samples_text, saves = (every > 0 and position.step % every == 0 for every in (
                config.train.eval_every, config.train.sample_every, config.checkpoint.every_steps))
            # Not at the next save, which may be hundreds of updates away.
            saves = run.must_save_again() or saves
            if evaluates or samples_text or saves:
                run.record(pending, position.step)
                pending = None
                # Before the save, so that a run with its last checkpoint also has its last val line and sample.
                finished = processes.from_first(lambda: _finished(config, position))
                if evaluates or finished:
                    run.evaluate(state)
                if samples_text or finished:
                    run.sample(state)
                if saves:
                    run.save(state)
                run.resume()
        if pending is not None:
            run.record(pending, position.step)
            pending = None
        finished = processes.from_first(lambda: _finished(config, position))
        if finished:
            run.evaluate(state)
            run.sample(state)
            timing.enter("other")
            if verification is not None:
                run.complete_verification(verification)
        run.save(state)
        timing.enter("checkpoint")
        run.complete_save(state)  # while only a second signal ends the process
        run.check_in_place()
        timing.enter("other")
        stopped = run.stop_signal()
        return Outcome(position, run.val_loss, None if finished and not position.evaluation_due else stopped, timing)


@dataclass
class _Run:
    """The work of the loop between steps."""

    config: RunConfig
    model: Any
    """The abstract model."""
    mesh: jax.sharding.Mesh
    clock: _Clock
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
    figures: Callable[[steps.TrainState, Callable[[], bool]], dict[str, float] | None]
    """Computes the figures of a val line, unless it is to stop."""
    parameter_norm: Any
    bar: Any
    verification: Verification | None
    signals: "_Signals"
    watch: StallWatch
    val_loss: float | None = None
    evaluated_at: int = -1
    sampled_at: int = -1
    saved_at: int = -1
    save_failed: bool = False
    """Whether the last save has failed."""

    def decide(self) -> _Decision:
        """What happens next, the same on all processes; raises as :meth:`check_in_place`."""
        decision = _Decision(*processes.from_first(self._decision))
        if not decision.in_place:
            raise _OutOfPlaceError
        return decision

    def _decision(self) -> _Decision:
        config, position = self.config, self.clock.position
        return _Decision(_finished(config, position), self.signals.first, next_learning_rate(config, position),
                         self._is_in_place())

    def _is_in_place(self) -> bool:
        return self.writer is None or self.writer.is_in_place()

    def check_in_place(self) -> None:
        """Raises :class:`_OutOfPlaceError` on all processes if the run folder was deleted, renamed or replaced."""
        if not processes.from_first(self._is_in_place):
            raise _OutOfPlaceError

    @contextmanager
    def saved_elsewhere(self, latest: Callable[[], tuple[steps.TrainState, _Pending | None]]) -> Iterator[None]:
        """Within, a run whose folder was deleted or renamed is saved where the folder went, or else beside its name.

        Args:
            latest: the state of the current step, and its metrics unless they are written.

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
            before, (state, pending) = self.run_dir, latest()
            if noticed and pending is not None:
                self.record(pending, self.clock.position.step)
            with suppress(CheckpointError):  # of a save to the old folder
                self.checkpoints.wait()
            step = self.clock.position.step
            try:
                folder, happened, remedy = processes.from_first(self._prepare_elsewhere)
                self.run_dir, self.saved_at = Path(folder), -1
                with _open_checkpoints(Path(folder), self.checkpoints.keep) as self.checkpoints:
                    self.save(state)
                    self.complete_save(state)
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
        go_on = f"repeat the command with --run-dir {folder} to resume"
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

    def complete_verification(self, verification: Verification) -> None:
        """Wait until the data are verified on all processes, or a signal arrives."""
        while not processes.from_first(lambda: verification.wait(POLL_SECONDS) or self.signals.first is not None):
            pass
        if self.stop_signal() is None:
            verification.wait()

    def stop_signal(self) -> int | None:
        """The signal that has stopped the run, if any, the same on all processes."""
        return processes.from_first(lambda: self.signals.first)

    def resume(self) -> None:
        """Go on with steps: from now on, time is of training."""
        self.signals.was_continued()
        self.clock.resume()
        self.timing.enter("step")

    def record(self, pending: _Pending, step: int) -> None:
        """Wait for a step and write its line.

        Raises:
            TrainingError: its loss or gradient is not finite.
        """
        loss, norm = (float(x) for x in jax.device_get(pending.metrics))
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
        self.bar.update(step, loss, tokens / seconds, self.clock.position)

    def evaluate(self, state: steps.TrainState) -> None:
        """Write the val line of the current step, unless it exists, or a signal arrives."""
        if self.evaluated_at == self.clock.position.step:
            return
        self.timing.enter("evaluation")
        values = self.figures(state, self._evaluation_stops)
        self.clock.position.evaluation_due = values is None
        if values is None:
            return
        self.val_loss = values["loss"]
        self.evaluated_at = self.clock.position.step
        self.clock.read()
        self._check(self.evaluated_at, **{"val loss": self.val_loss})
        self._write(self.clock.position.step, split="val", **values)
        self.bar.evaluated(self.clock.position, self.val_loss)
        self.timing.enter("other")

    def _evaluation_stops(self) -> bool:
        """Between two batches of an evaluation: whether it ends here, the same on all processes."""
        self.watch.evaluated()
        return self.stop_signal() is not None

    def sample(self, state: steps.TrainState) -> None:
        """Write a text sample at the current step, if configured, unless it exists, or the evaluation is still due."""
        position = self.clock.position
        if not self.config.train.sample_every or self.sampled_at == position.step or position.evaluation_due:
            return
        self.check_in_place()
        with on_one_device(self.mesh, (state.parameters, state.variables)) as (parameters, variables):
            if self.samples is not None:
                self.samples.write(position.step, steps.build(self.model, parameters, variables))
        self.sampled_at = position.step
        processes.from_first(lambda: None)  # wait for process 0

    def save(self, state: steps.TrainState) -> None:
        """Save a checkpoint of the current step, unless it exists. A save that fails is tried once more, unless the run
        has several processes: they could not go on together.

        Raises:
            CheckpointError: the save, or the one before, has failed, and is not tried again.
            TrainingError: the parameters or their norm are not finite.
            DataError: the data are damaged.
        """
        position = self.clock.position
        if self.saved_at == position.step or position.step == 0:
            return
        self.check_in_place()
        if self.verification is not None:
            self.verification.check()
        self.timing.enter("checkpoint")
        self._check(position.step, **{"parameters' norm": float(self.parameter_norm(state.parameters))})
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
            self._start_save(state)
        except CheckpointError as error:
            self._save_has_failed(error)
            self._start_save(state)
        self.saved_at = position.step
        self.timing.enter("other")

    def must_save_again(self) -> bool:
        """Whether the last save has failed since it was started; raises as :meth:`save`."""
        error = self.checkpoints.failure()
        if error is not None:
            self._save_has_failed(error)
        return error is not None

    def complete_save(self, state: steps.TrainState) -> None:
        """Waits for the last save; tries and raises as :meth:`save`."""
        self._complete_save()
        self.save(state)  # if it has failed
        self.checkpoints.wait()

    def _start_save(self, state: steps.TrainState) -> None:
        position = self.clock.position
        self.checkpoints.save(position.step, {
            "parameters": state.parameters, "variables": state.variables, "optimizer": state.optimizer,
            "position": dict(vars(position))}, loss=self.val_loss if self.evaluated_at == position.step else None)

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
                + "; try a lower --optimizer.learning-rate, more --optimizer.warmup-steps, or --model.dtype float32 "
                  "in a new --run-dir")

    def _write(self, step: int, **values: Any) -> None:
        if self.writer is None or self.logs is None:
            return
        position = self.clock.position
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
    abstract = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes,
                            shardings)
    items = checkpoints.load(step, {"parameters": abstract.parameters, "variables": abstract.variables,
                                    "optimizer": abstract.optimizer, "position": None})
    return (steps.TrainState(items["parameters"], items["variables"], items["optimizer"]),
            read_position(items["position"], checkpoints.directory / str(step)))


def read_position(values: dict[str, Any], checkpoint: Path) -> Position:
    """The position of a checkpoint, without what later versions may have added.

    Raises:
        JsonError: the position, in a file of the checkpoint, is damaged.
    """
    check(values, Position, checkpoint / JSON_ITEM / JSON_FILE)
    return Position(**{one.name: values[one.name] for one in fields(Position) if one.name in values})


def is_finished(config: RunConfig, position: Position) -> bool:
    """Whether a run at this position is complete."""
    return _finished(config, position) and not position.evaluation_due


def _finished(config: RunConfig, position: Position) -> bool:
    steps_done = config.train.steps is not None and position.step >= config.train.steps
    return steps_done or (config.train.minutes is not None and position.train_seconds >= 60 * config.train.minutes)


def next_learning_rate(config: RunConfig, position: Position) -> float:
    """The learning rate of the update after a position."""
    return learning_rate(config.optimizer, position.step, _share(config, position))


def _share(config: RunConfig, position: Position) -> float:
    """The completed fraction of the run: of its steps if given, else of its minutes."""
    if config.train.steps is not None:
        return position.step / config.train.steps
    assert config.train.minutes is not None
    return position.train_seconds / (60 * config.train.minutes)


@dataclass
class _Signals:
    """The signals that a run has received: this process's, and on process 0 those of all."""

    stops: list[int] = field(default_factory=list)
    """Those of :func:`support.interrupts.stop_signals`."""
    continued: bool = False
    """Whether SIGCONT has arrived."""

    def receive(self, number: int) -> None:
        """Takes note of a signal."""
        if number == signal.SIGCONT:
            self.continued = True
        else:
            self.stops.append(number)

    def was_continued(self) -> bool:
        """Whether a process was continued since the last call."""
        self._hear()
        continued, self.continued = self.continued, False
        return continued

    def _hear(self) -> None:
        for number in processes.signals_of_others():
            self.receive(number)

    @property
    def first(self) -> int | None:
        """The first signal that stops the run, if any."""
        self._hear()
        return self.stops[0] if self.stops else None


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Collects signals. The first one that stops the loop lets it save; a second SIGTERM or Ctrl-C acts immediately."""
    received = _Signals()
    before: dict[int, Any] = {}

    def on_stop(number: int, _frame: FrameType | None) -> None:
        received.receive(number)
        if number != signal.SIGHUP:  # the system and the shell may both send that at the end of a terminal
            signal.signal(number, before[number])
        interrupts.write_word(b"\nStopping after this step; saving.\n")

    for number in interrupts.stop_signals():
        before[number] = signal.signal(number, on_stop)
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, lambda number, _: received.receive(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(config: RunConfig, position: Position, quiet: bool) -> Iterator[Any]:
    """A progress bar on a terminal; otherwise a line at each evaluation."""
    bar = _Bar(config)
    stream = error_stream()
    if quiet or not stream.isatty():
        yield replace(bar, lines=not quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
               TextColumn("val {task.fields[val]}"), TextColumn("{task.fields[rate]:,.0f} tokens/s"),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), speed_estimate_period=120) as progress:
        task = progress.add_task("", total=1.0, step=position.step, loss=math.nan, val="–", rate=0.0)
        progress.update(task, completed=_share(config, position))
        yield replace(bar, progress=progress, task=task)


@dataclass
class _Bar:
    config: RunConfig
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


