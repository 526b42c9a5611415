"""The JSON files of a run: the types of their fields, reading and writing. This module does not import jax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from configs.schema import RunConfig, check_types, config_class
from data.token_files import ImageEntry
from support import json_files
from support.json_files import Count, Natural

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
EVALUATION = "evaluation.json"
TEST_EVALUATION = "evaluation-test.json"
TASK_EVALUATION = "evaluation-task.json"


class InitFrom(TypedDict):
    """The run whose parameters initialised another."""

    run: str
    step: NotRequired[Natural]
    reset: NotRequired[str | None]


class PublishedWeights(TypedDict):
    """What ``convert.py`` keeps of published weights."""

    source: str
    folder: NotRequired[str]
    dtypes: NotRequired[dict[str, str]]
    tokens: NotRequired[dict[str, Any]]


class Environment(TypedDict, total=False):
    """``environment.json``."""

    versions: dict[str, str | None] | None
    commit: str | None
    devices: list[str]
    processor: str
    cores: Count
    device_count: Count
    process_count: Count
    command: list[str]
    corpus_checksum: str | None
    tokenizer: str | None
    vocabulary_size: Count | None
    parameters: Natural
    dtype: str
    implementations: dict[str, str] | None
    step_bytes: float | None
    peak_bytes: float | None
    peak_flops: float | None
    mesh: dict[str, int]
    image: ImageEntry | None
    init_from: InitFrom | None
    published_weights: PublishedWeights
    checkpointed: bool


class Positions(TypedDict):
    """The loss at some positions of the context."""

    first: Natural
    last: Natural
    loss: float | None


class Evaluation(TypedDict):
    """The evaluation of a corpus at a context."""

    corpus: str
    context: Count
    positions: list[Positions]
    windows: NotRequired[Natural]
    windows_checksum: NotRequired[str]
    loss: NotRequired[float | None]


class Evaluations(TypedDict):
    """``evaluation.json``, of eval.py."""

    step: NotRequired[Natural | None]
    evaluations: list[Evaluation]


class AtPlaces(TypedDict):
    """The accuracy of answers that stood between two places."""

    first: Natural
    last: Natural
    tokens: Natural
    accuracy: float
    loss: float | None


class AtLength(TypedDict):
    """The accuracy on a synthetic task at a length."""

    length: Count
    documents: Count
    tokens: Natural
    accuracy: float
    loss: float | None
    accuracy_last: float
    loss_last: float | None
    depth: NotRequired[list[AtPlaces]]
    distance: NotRequired[list[AtPlaces]]


class TaskEvaluation(TypedDict):
    """``evaluation-task.json``, of eval.py --length."""

    step: NotRequired[Natural | None]
    task: str
    settings: str
    lengths: list[AtLength]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The contents of ``config.json``; fields that this version lacks are not checked.

    Raises:
        RunError: it is damaged, or of another format.
        OSError: it cannot be read.
    """
    values = json_files.read(path := run_dir / CONFIG, dict[str, Any])
    check_types(values, path)
    return values


def load_config(run_dir: Path) -> RunConfig:
    """Reads the config in ``run_dir/config.json``; the options of modes are dicts.

    Raises:
        RunError: the file is damaged, or of another format.
        ConfigError: it has an unknown field.
        OSError: it cannot be read.
    """
    values = read_config(run_dir)
    return config_class(values).from_dict(values, run_dir / CONFIG)


def read_environment(run_dir: Path) -> dict[str, Any]:
    """The contents of ``environment.json``.

    Raises:
        JsonError: it is damaged.
        OSError: it cannot be read.
    """
    return json_files.read(run_dir / ENVIRONMENT, Environment)


def read_evaluations(run_dir: Path, name: str = EVALUATION) -> dict[str, Any]:
    """The contents of ``evaluation.json``, or of ``evaluation-test.json``.

    Raises:
        JsonError: it is damaged.
        OSError: it cannot be read.
    """
    return json_files.read(run_dir / name, Evaluations, remedy="run eval.py again")


def read_task_evaluation(run_dir: Path) -> dict[str, Any]:
    """The contents of ``evaluation-task.json``.

    Raises:
        JsonError: it is damaged.
        OSError: it cannot be read.
    """
    return json_files.read(run_dir / TASK_EVALUATION, TaskEvaluation, remedy="run eval.py --length again")


def write_run_files(run_dir: Path, config: RunConfig, environment: Mapping[str, Any]) -> None:
    """Writes ``config.json`` and ``environment.json``.

    Raises:
        OSError: a file cannot be written.
    """
    json_files.write(run_dir / CONFIG, config.to_dict())
    json_files.write(run_dir / ENVIRONMENT, environment)
