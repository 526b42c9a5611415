"""The typed configuration of a run: plain frozen dataclasses, one group a concern.

A recipe (``configs/NAME.py``) returns a :class:`Config`, one of Long Range Arena (``configs/lra/NAME.py``) an
:class:`LraConfig`; every field becomes a flag of ``train.py`` or ``lra.train``; the resolved config is written to
``RUN/config.json`` and read back from there. This module imports nothing of the project but its errors.
"""

import dataclasses
import importlib.util
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from support.errors import ConfigError, RunError

FORMAT = 1
"""Number of the format of ``config.json``: count it up where an older file would be misread."""


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 model: sizes, positions, number format and the attention mode of each layer."""

    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads; divides the width where head_width is not given."""
    width: int = 256
    """Width E of the residual stream; the MLP is 4 E wide."""
    head_width: int | None = None
    """Width of a head; None: width / heads."""
    context: int = 1024
    """Tokens the model is trained on at once, and the number of learned positions."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """How the model knows where a token stands."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the products and of what lies between them; parameters stay float32. auto: bfloat16 where the
    device is fast at it."""
    initial_scale: float = 0.02
    """Standard deviation of the initial weights: GPT-2's. Small models learn sooner with 1 / sqrt(width)."""
    attention: tuple[str, ...] = ("chunked",)
    """Attention modes, a pattern over layers repeated to the depth; --attention A,B is the short way to say it."""
    modes: dict[str, Any] = field(default_factory=dict)
    """Options of each mode in use; a recipe may give a dict of overrides."""


@dataclass(frozen=True)
class EncoderConfig:
    """A bidirectional encoder with a classifier: sizes, positions, pooling, and the attention mode of each layer."""

    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads; divides the width where head_width is not given."""
    width: int = 256
    """Width E of the residual stream."""
    head_width: int | None = None
    """Width of a head; None: width / heads."""
    mlp_width: int = 1024
    """Width F of the MLPs, and of the classifier's hidden layer."""
    context: int = 1024
    """Tokens of a sequence at most."""
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    """How the model knows where a token stands."""
    pooling: Literal["cls", "mean"] = "cls"
    """What the classifier reads. cls: a learned token put before the sequence; mean: the mean over valid tokens."""
    towers: int = 1
    """Sequences of an example: 2 share the encoder."""
    classes: int = 2
    """Classes to choose from."""
    dropout: float = 0.0
    """Share of the embeddings, and of what a layer adds to the residual stream, that training leaves out."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the products and of what lies between them; parameters stay float32. auto: bfloat16 where the
    device is fast at it."""
    attention: tuple[str, ...] = ("softmax",)
    """Attention modes, a pattern over layers repeated to the depth."""
    modes: dict[str, Any] = field(default_factory=dict)
    """Options of each mode in use; a recipe may give a dict of overrides."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "python-stdlib"
    """What to prepare when there are no token files yet: python-stdlib, a text file or folder, or a dataset id."""
    dir: str | None = None
    """Folder of token files; by default one in the user's cache folder, prepared on first use."""
    tokenizer: str = "bytes"
    """bytes, or the name of a tiktoken encoding such as gpt2."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: windows of the token stream, across document borders. documents: whole documents side by side that do not
    see each other, and padding where none fits (softmax is then blockwise: cuDNN's kernel is used without segments)."""
    mixture: tuple[tuple[str, float], ...] = ()
    """Several corpora and their shares of training, in place of dir and source: a folder of token files or a source,
    its weight, the next, its weight, …"""


@dataclass(frozen=True)
class TaskConfig:
    """A task of Long Range Arena, and how much of it."""

    task: str = "listops"
    """Name of the task; the recipe's."""
    dir: str | None = None
    """Folder of its files, such as the official release's; None: generated, or fetched. --data-dir is the short way to
    say it."""
    max_length: int | None = None
    """Tokens of a sequence at most, to which the model's context is shortened too; None: the task's own length."""
    train_examples: int | None = None
    """Examples to train on; None: the task's own number."""
    val_examples: int | None = None
    """Examples to validate on, and to test on; None: the task's own numbers."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a decay of the learning rate."""

    learning_rate: float = 1e-3
    """Peak learning rate; with inverse_sqrt, the factor of the schedule."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """After the warm-up. cosine: to final_fraction at the end of the run; inverse_sqrt: one over the root of the step,
    which peaks at one over the root of warmup_steps, and ends nowhere."""
    final_fraction: float = 0.1
    """Learning rate at the end of a cosine, as a fraction of the peak."""
    warmup_steps: int = 100
    """Steps of linear warm-up; with cosine shortened, with a note, to a tenth of a run given in steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices, biases of heads left out."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    epsilon: float = 1e-8
    """Added to the root of the squared gradient's mean, which divides."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None: never."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and how often to look."""

    steps: int | None = 1000
    """Stop after this many updates. None: only --train.minutes bounds the run."""
    minutes: float | None = None
    """Stop after this many minutes of training time."""
    batch_size: int = 8
    """Sequences per update, over all devices; 0: as many as --train.batch-tokens gives."""
    batch_tokens: int | None = None
    """Tokens per update, for a batch that follows the context: batch_size 0 becomes this many / --model.context."""
    accumulate: int = 1
    """Parts an update's batch is split into, one after the other, to save memory."""
    remat: Literal["none", "block"] = "none"
    """block: recompute each transformer block in the backward pass instead of keeping its activations."""
    deterministic: bool = True
    """On a GPU, sum in one order, so that a run that goes on from a checkpoint is the run that was never stopped."""
    seed: int = 0
    """Seed of initial parameters and of the data order."""
    eval_every: int = 100
    """Updates between evaluations."""
    eval_batches: int = 8
    """Batches of the val split in an evaluation, always the same ones; that of a task of Long Range Arena is taken
    whole where it has no more than 2,000 examples."""
    sample_every: int = 0
    """Updates between samples of text, RUN/samples/STEP.txt, with one at the end; 0: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on disk."""

    every_steps: int = 500
    """Updates between checkpoints."""
    keep: int = 2
    """Newest checkpoints kept, beside the best by val loss."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; data = -1 takes all that remain."""

    data: int = -1
    """Copies of the model, each on its share of the batch."""
    fsdp: int = 1
    """Shards of parameters and optimizer state; also splits the batch."""
    tensor: int = 1
    """Shards of heads and MLP width."""
    context: int = 1
    """Shards of the sequence."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where the lines of metrics.jsonl go besides."""

    tensorboard: bool = False
    """Event files for TensorBoard too, in RUN/tensorboard; needs tensorboardX."""
    wandb: bool = False
    """A run of Weights & Biases too, with its files in RUN/wandb; needs wandb, and WANDB_MODE=offline without a
    network. Its own variables, such as WANDB_PROJECT, count."""


@dataclass(frozen=True)
class _Run:
    """A whole run; what is trained, and on what, is the subclass's."""

    COMMAND: ClassVar[str]
    """What trains it."""

    model: Any = None
    data: Any = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def to_dict(self) -> dict[str, Any]:
        """The number of the format and plain dicts, lists and numbers, as in ``config.json``."""
        return {"format": FORMAT} | json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: object = "config") -> Self:
        """The inverse of :meth:`to_dict`, but that ``model.modes`` stays a dict of dicts until the modes are known.

        Args:
            values: all of them.
            source: what they are called in the messages of a ``RunError``.

        Raises:
            RunError: another format, or a group that is no dict.
            ConfigError: a group or field that this version does not know.
        """
        check_format(values, source)
        if not all(isinstance(group, dict) for name, group in values.items() if name != "format"):
            raise RunError(f"{source}: not a config that train.py writes")
        groups = {group.name: group.default_factory for group in dataclasses.fields(cls)}
        built = {}
        for name, fields in values.items():
            if name == "format":
                continue
            if name not in groups:
                raise ConfigError(f"config: unknown group {name!r}; expected one of {', '.join(groups)}")
            known = {f.name for f in dataclasses.fields(groups[name])}  # pyright: ignore[reportArgumentType]
            unknown = set(fields) - known
            if unknown:
                raise ConfigError(f"config: unknown field {name}.{sorted(unknown)[0]}; this version of lineargpt has "
                                  f"{', '.join(sorted(known))}")
            built[name] = groups[name](  # pyright: ignore[reportCallIssue]
                **{field: _tuples(value) for field, value in fields.items()})
        return cls(**built)


def _tuples(value: Any) -> Any:
    """JSON has lists where a config has tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Config(_Run):
    """A whole run of a language model."""

    COMMAND: ClassVar[str] = "train.py"

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class LraConfig(_Run):
    """A whole run of a classifier on a task of Long Range Arena."""

    COMMAND: ClassVar[str] = "lra.train"

    model: EncoderConfig = field(default_factory=EncoderConfig)
    data: TaskConfig = field(default_factory=TaskConfig)


def check_format(values: dict[str, Any], source: object) -> None:
    """Checks the format number of what was read from a ``config.json``.

    Args:
        values: all of it.
        source: what it is called in the message.

    Raises:
        RunError: this version reads another format.
    """
    found = values.get("format")
    if found != FORMAT:
        what = "no format number" if found is None else f"format {json.dumps(found)}"
        raise RunError(f"{source}: it has {what}, and this version of lineargpt reads format {FORMAT}; use the version "
                       "that wrote it, or train the run again")


def config_class(values: dict[str, Any]) -> type[Config] | type[LraConfig]:
    """The kind of run that a ``config.json`` is of."""
    data = values.get("data")
    return LraConfig if isinstance(data, dict) and "task" in data else Config


def load_recipe[C: (Config, LraConfig)](path: str | Path, attention: str | None = None, kind: type[C] = Config,
                                        **given: Any) -> C:
    """The config that a recipe file returns, for an attention mode or a comma-separated pattern of modes.

    Args:
        path: the file.
        attention: None: the recipe's own.
        kind: what it has to return.
        given: other arguments of its ``get_config``.

    Raises:
        ConfigError: there is no such file, it has no ``get_config``, it fails, or is one of another command.
    """
    path = Path(path)
    if not path.is_file():
        root = Path(__file__).parent
        recipes = ", ".join(f"configs/{p.relative_to(root)}" for p in sorted(root.rglob("*.py"))
                            if "\ndef get_config(" in (text := p.read_text())
                            and ("LraConfig" in text) == (kind is LraConfig))
        raise ConfigError(f"{path}: no such recipe. There are: {recipes}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a recipe; a recipe is a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path}: a recipe defines get_config(attention) -> Config; this file does not")
        if unknown := given.keys() - inspect.signature(module.get_config).parameters.keys():
            raise ConfigError(f"{path}: not a recipe of {kind.COMMAND}: its get_config takes no {', '.join(unknown)}")
        config = module.get_config(**given) if attention is None else module.get_config(attention, **given)
    except ConfigError:
        raise
    except Exception as error:  # a recipe is the user's own code
        raise ConfigError(f"{path}: the recipe fails: {type(error).__name__}: {error}") from error
    if not isinstance(config, kind):
        command = getattr(config, "COMMAND", None)
        raise ConfigError(f"{path}: not a recipe of {kind.COMMAND}, "
                          + (f"but of {command}" if command else f"whose get_config returns a {kind.__name__}"))
    return config
