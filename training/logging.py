"""Logs the lines of ``metrics.jsonl`` to TensorBoard and Weights & Biases.

    python train.py configs/quickstart.py --logging.tensorboard
    WANDB_MODE=offline python train.py configs/quickstart.py --logging.wandb

``metrics.jsonl`` never depends on them: if one fails, training continues without it, with one warning. Every number of
a line is a curve ``SPLIT/NAME`` over the step, and the config is logged too. A resumed run continues its curves. Event
files tell TensorBoard to drop repeated steps. Weights & Biases cannot drop steps, so it receives only new ones and
keeps the first values of repeated steps.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from configs.schema import LoggingConfig, RunConfig
from support.errors import ConfigError
from training.metrics import last_step

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package of each flag; the extra that installs it has the name of the flag."""
HINTS = {"wandb": ". Without a network, set WANDB_MODE=offline"}
"""Hints for failed logs."""


def check(config: LoggingConfig) -> None:
    """Raises :class:`ConfigError` if the package of a flag is not installed."""
    for flag, package in PACKAGES.items():
        if not getattr(config, flag):
            continue
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # without origin it is a folder of that name, such as W&B leaves
            raise ConfigError(f"logging.{flag} is True, but the package {package} is not installed; install the extra "
                              f"{flag}: pip install -e '.[{flag}]'")


class Logs:
    """The loggers of a run besides ``metrics.jsonl``.

    Create it before :class:`training.metrics.MetricsWriter` shortens that file.

    Args:
        config: the run's config; ``config.logging`` selects the loggers.
        run_dir: run folder.
        step: the step that the run resumes from.
    """

    def __init__(self, config: RunConfig, run_dir: Path, *, step: int):
        self._logs: dict[str, _Log] = {}
        for flag, make in (("tensorboard", _TensorBoard), ("wandb", _WandB)):
            if getattr(config.logging, flag):
                with self._warned_once(flag):
                    self._logs[flag] = make(config, run_dir, step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a line of ``metrics.jsonl``."""
        values = {f"{record['split']}/{name}": float(value) for name, value in record.items()
                  if name not in ("step", "split")}
        self._each(lambda log: log.write(record["step"], values))

    def flush(self) -> None:
        """Write pending records to disk."""
        self._each(lambda log: log.flush())

    def _each(self, act: Callable[["_Log"], None]) -> None:
        for flag, log in list(self._logs.items()):
            with self._warned_once(flag):
                act(log)

    @contextlib.contextmanager
    def _warned_once(self, flag: str) -> Any:
        try:
            yield
        except Exception as error:  # errors of loggers, disks and networks must not end a run
            log = self._logs.pop(flag, None)
            if log is not None:
                with contextlib.suppress(Exception):
                    log.close(failed=True)
            warnings.warn(f"logging.{flag}: {type(error).__name__}: {str(error).rstrip('.')}. Training continues "
                          f"without it; metrics.jsonl is complete{HINTS.get(flag, '')}", stacklevel=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._each(lambda log: log.close(failed=kind is not None))


class _Log(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    """The event file of this start of the run.

    ``tensorboardX.SummaryWriter`` writes in a thread and hangs after that dies, for example on a full disk; this class
    writes the same records synchronously.
    """

    def __init__(self, config: RunConfig, run_dir: Path, step: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import text

        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{step:08}.{socket.gethostname()}"
        self._event, self._writer = Event, RecordWriter(str(folder / name))
        self._write(file_version="brain.Event:2")
        # Drops the steps from here on in earlier files.
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        code = textwrap.indent(json.dumps(config.to_dict(), indent=2), "    ")  # as Markdown has it
        self._write(step=step, summary=text("config", code))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step=step, summary={"value": [{"tag": tag, "simple_value": x} for tag, x in values.items()]})

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _write(self, **contents: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **contents).SerializeToString())


class _WandB:
    """A run of Weights & Biases, with its id in ``RUN/wandb/id.txt``, so that a resumed run continues it."""

    def __init__(self, config: RunConfig, run_dir: Path, step: int):
        import wandb

        folder = run_dir / "wandb"
        folder.mkdir(exist_ok=True)
        id_file = folder / "id.txt"
        # Lines after the step that a run resumes from were logged before a crash.
        self._logged = max(step, last_step(run_dir / "metrics.jsonl")) if id_file.exists() else step
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8) + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lineargpt"), name=os.environ.get("WANDB_NAME", run_dir.name),
            id=id_file.read_text().strip(), resume="allow", dir=run_dir, config=config.to_dict(), allow_val_change=True,
            settings=wandb.Settings(console="off"))  # leave standard output and error alone

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._logged:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing to do: it writes by itself."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
