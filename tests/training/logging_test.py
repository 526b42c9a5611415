"""TensorBoard and W&B get every line of metrics.jsonl once, also over resumptions, and never end a run."""

import importlib.machinery
import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, LoggingConfig, ModelConfig
from tests import small_run
from training.logging import Logs
from training.metrics import MetricsWriter

CONFIG = Config(model=ModelConfig(layers=9), logging=LoggingConfig(tensorboard=True, wandb=True))


def start(run_dir: Path, *, after: int, through: int) -> None:
    """A start of a run as logged by the loop, up to a step after which nothing was saved."""
    with (Logs(CONFIG, run_dir, step=after) as logs,
          MetricsWriter(run_dir / "metrics.jsonl", keep_through=after) as writer):
        for step in range(after + 1, through + 1):
            for split in ("train", "val") if step % 2 == 0 else ("train",):
                record = {"step": step, "tokens": 8 * step, "split": split, "loss": 1 / step}
                writer.write(record)
                logs.write(record)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run that reached step 4, and resumed from its checkpoint of step 2 up to step 5."""
    import wandb

    folder = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        start(folder, after=0, through=4)
        start(folder, after=2, through=5)
        wandb.teardown()  # waits for its process, which may still write after the runs are finished
    return folder


def expected(run_dir: Path) -> dict[tuple[int, str], float]:
    """Every value of metrics.jsonl by step and split/name."""
    return {(line["step"], f"{line['split']}/{name}"): value for line in small_run.lines(run_dir)
            for name, value in line.items() if name not in ("step", "split")}


def events(run_dir: Path) -> list[Any]:
    """The events of all files, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # length, its checksum, the event, its checksum
            found.append(Event.FromString(data[12:12 + length]))
            data = data[16 + length:]
    return found


def test_tensorboard_shows_the_lines_that_metrics_jsonl_has(resumed):
    shown: dict[tuple[int, str], float] = {}
    config = None
    for event in events(resumed):
        if event.HasField("session_log"):  # a start: TensorBoard drops what it has from this step on
            shown = {key: value for key, value in shown.items() if key[0] < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                assert (event.step, value.tag) not in shown
                shown[event.step, value.tag] = value.simple_value
            else:
                config = json.loads(value.tensor.string_val[0])
    assert {step for step, _ in shown} == {1, 2, 3, 4, 5}
    assert shown == pytest.approx(expected(resumed), rel=1e-6)  # TensorBoard has float32
    assert config == CONFIG.to_dict()


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run: a log as LevelDB's, of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found = path.read_bytes(), 7, []
    while at < len(data):
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        if kind == 1:  # whole, as every short one in the first block is
            found.append(Record.FromString(data[at + 7:at + 7 + length]))
        at += 7 + length
    return found


def test_wandb_has_each_step_once_in_one_run(resumed):
    identity = (resumed / "wandb" / "id.txt").read_text().strip()
    files = sorted((resumed / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2
    logged: dict[tuple[int, str], float] = {}
    for record in [record for path in files for record in wandb_records(path)]:
        if record.WhichOneof("record_type") == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert config["model"]["layers"] == 9
        elif record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    assert (row["_step"], name) not in logged
                    logged[row["_step"], name] = value
    assert logged == expected(resumed)


def write_lines(run_dir: Path) -> None:
    with Logs(Config(logging=LoggingConfig(tensorboard=True)), run_dir, step=0) as logs:
        for step in (1, 2):
            logs.write({"step": step, "split": "train", "loss": 2.0})
            logs.flush()


def test_a_log_that_fails_is_told_once_and_left(tmp_path, monkeypatch):
    from tensorboardX import record_writer

    monkeypatch.setattr(record_writer, "open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.warns(UserWarning, match="logging.tensorboard: OSError: .*No space left on device. Training continues"
                      ) as told:
        write_lines(tmp_path)
    assert len(told) == 1


def test_where_wandb_fails_its_offline_mode_is_named(tmp_path, monkeypatch):
    import wandb

    def init(**_):
        raise wandb.errors.CommError("Network error")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.warns(UserWarning, match="logging.wandb: CommError: Network error. Training continues without it; .* "
                      "Without a network, set WANDB_MODE=offline$") as told:
        Logs(Config(logging=LoggingConfig(wandb=True)), tmp_path, step=0)
    assert len(told) == 1


def test_a_log_that_cannot_begin_is_told_once_and_left(tmp_path):
    (tmp_path / "tensorboard").write_text("a file in the place of the folder")
    with pytest.warns(UserWarning, match="logging.tensorboard: FileExistsError: .* Training continues") as told:
        write_lines(tmp_path)
    assert len(told) == 1


@pytest.mark.parametrize(("flag", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_stops_before_any_work_and_is_named(tmp_path, monkeypatch, capsys, flag, package):
    # Used if there is only a folder of that name, such as W&B's own.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    with small_run.settings():
        assert small_run.run(small_run.ROOT / "configs" / "quickstart.py", "--run-dir", tmp_path / "run", "--data.dir",
                             tmp_path / "nowhere", f"--logging.{flag}") == 2
    message = capsys.readouterr().err
    assert f"logging.{flag} is True, but the package {package} " in message
    assert f"(--logging.{flag})" in message
    assert not (tmp_path / "run").exists()
