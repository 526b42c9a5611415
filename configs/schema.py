"""The configuration of a run, as frozen dataclasses.

A recipe (``configs/NAME.py``) returns a :class:`Config` or a :class:`MaskedConfig`, a recipe of the Long Range Arena
(``configs/lra/NAME.py``) an :class:`LraConfig`, a recipe of speech (``configs/speech/NAME.py``) a
:class:`SpeechConfig`. Every field is a flag of ``train.py``, ``lra.train`` or ``speech.train``. The resolved config is
written to ``RUN/config.json``. Of the project, this module imports only from ``support``.
"""

import dataclasses
import importlib.util
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from support import json_files
from support.errors import ConfigError, RunError
from support.ranges import Count, Fraction, Natural, Positive, ProperFraction, Range, Seed

FORMAT = 2
"""Format version of ``config.json``. Increase it when older files would be misread; :func:`groups_of` reads those.

1: the learning-rate schedule ``cosine`` decayed from step 0, and the warm-up multiplied it. The first token of a
   packed document was not a target.
2: the cosine decays from the end of the warm-up. The separator predicts the first token of a packed document.
"""
EARLIER_COSINE = "cosine from step 0"
"""``optimizer.schedule`` of runs with cosine and warm-up in format 1."""
EARLIER_DOCUMENTS = "documents without their first tokens as targets"
"""``data.packing`` of runs with packed documents in format 1. They can be sampled and compared, but not resumed."""

Layers = Annotated[int, Range(1, 1000)]
"""Number of layers; compilation takes longer with each."""
Remat = Literal["none", "block", "names"]
"""What the backward pass recomputes."""


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 model: sizes, positions, dtype and the attention mode of each layer."""

    layers: Layers = 4
    """Number of transformer blocks."""
    heads: Count = 4
    """Number of attention heads. Divides the width unless head_width is given."""
    width: Count = 256
    """Width E of the residual stream. The MLP is 4 E wide."""
    head_width: Count | None = None
    """Width of a head. None: width / heads."""
    context: Count = 1024
    """Length of a training sequence, and the number of learned positions."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """Position encoding."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. Parameters are float32. auto: bfloat16 if the device has hardware support for it."""
    initial_scale: Positive = 0.02
    """Standard deviation of the initial weights. 0.02 is GPT-2's; small models learn faster with 1 / sqrt(width)."""
    head: Literal["tied", "logistics"] = "tied"
    """Head. tied: logits from the token embedding, as in GPT-2; logistics: for images, a mixture of 10 discretised
    logistics over the levels."""
    attention: tuple[str, ...] = ("chunked",)
    """Attention modes, a pattern repeated over the layers. Short form: --attention A,B."""
    modes: dict[str, Any] = field(default_factory=dict)
    """Options of each mode in use. A recipe may give a dict of overrides."""


@dataclass(frozen=True)
class EncoderConfig:
    """A bidirectional encoder: sizes, positions, pooling, and the attention mode of each layer."""

    layers: Layers = 4
    """Number of transformer blocks."""
    heads: Count = 4
    """Number of attention heads. Divides the width unless head_width is given."""
    width: Count = 256
    """Width E of the residual stream."""
    head_width: Count | None = None
    """Width of a head. None: width / heads."""
    mlp_width: Count = 1024
    """Width F of the MLPs and of the classifier's hidden layer."""
    context: Count = 1024
    """Maximum sequence length."""
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    """Position encoding."""
    pooling: Literal["cls", "mean", "none"] = "cls"
    """Output of the encoder. cls: that of a learned token before the sequence; mean: the mean over valid tokens; none:
    one per position, for speech and masked language models."""
    towers: Annotated[int, Range(1, 2)] = 1
    """Number of sequences in an example. With 2, both go through the same encoder."""
    classes: Count = 2
    """Number of classes of a classifier."""
    dropout: ProperFraction = 0.0
    """Dropout rate of the embeddings and of every layer's output."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. Parameters are float32. auto: bfloat16 if the device has hardware support for it."""
    attention: tuple[str, ...] = ("softmax",)
    """Attention modes, a pattern repeated over the layers."""
    modes: dict[str, Any] = field(default_factory=dict)
    """Options of each mode in use. A recipe may give a dict of overrides."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "python-stdlib"
    """Corpus to prepare if there are no token files yet: python-stdlib, python-packages, a text file or folder, a
    dataset id, or, with the tokenizer pixels, images. #column=NAME, #split=NAME and #encoding=NAME may follow the name
    of a text."""
    dir: str | None = None
    """Folder of token files. None: a folder in the user's cache, prepared on first use."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes, a tiktoken encoding such as gpt2, or pixels for images."""
    packing: Literal["stream", "documents", "rows"] = "stream"
    """stream: windows of the token stream, across document boundaries. documents: whole documents, each after a
    separator, packed into rows and padded at the end, without attention across documents (softmax then uses its
    blockwise form, not cuDNN's). rows: a document of exactly model.context tokens a row, after a separator; images
    require it."""
    mixture: tuple[tuple[str, float], ...] = ()
    """Mixture of corpora, in place of dir and source: pairs of a folder of token files or a source, and its weight."""
    verify: bool = True
    """Verify the checksums of the token files during a start of a run, unless they were since the files changed."""


@dataclass(frozen=True)
class TaskConfig:
    """A task of Long Range Arena, and how much of it."""

    task: str = "listops"
    """Name of the task."""
    dir: str | None = None
    """Folder of the task's files, such as the official release. None: generate or download them. Short form:
    --data-dir."""
    max_length: Count | None = None
    """Maximum sequence length; also bounds the model's context. None: the task's default."""
    train_examples: Count | None = None
    """Number of training examples. None: the task's default."""
    val_examples: Count | None = None
    """Number of validation and of test examples. None: the task's default."""


@dataclass(frozen=True)
class SpeechDataConfig:
    """Utterances and their transcripts."""

    corpus: Literal["synthetic", "audio", "features"] = "synthetic"
    """synthetic: generated tones; audio: a folder in the layout of LibriSpeech or LJSpeech, or with JSON lines of
    recordings and texts; features: a folder of arrays of features, with transcripts of any symbols, such as phones."""
    dir: str | None = None
    """Folder of the corpora audio and features. Short form: --data-dir."""
    train_utterances: Count | None = None
    """Number of training utterances, a random subset of a folder's. None: all of them, or 10,000 synthetic ones."""
    val_utterances: Count | None = None
    """Number of validation and of test utterances. None: all of them, or 200 synthetic ones."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "radam", "muon"] = "adamw"
    """adamw: Adam with decoupled weight decay; radam: the same with a rectified adaptive learning rate, which needs no
    warm-up; muon: orthogonalised momentum for the matrices of the blocks, adamw for embeddings, vectors and the
    head."""
    learning_rate: Positive = 1e-3
    """Peak learning rate. With inverse_sqrt, the factor of the schedule."""
    adam_learning_rate: Positive | None = None
    """With muon: peak learning rate of what adamw trains. None: learning_rate."""
    momentum: ProperFraction = 0.95
    """With muon: decay rate of the momentum of the matrices."""
    schedule: Literal["cosine", "wsd", "constant", "drop", "inverse_sqrt"] = "cosine"
    """Schedule after warm-up. cosine: decays from the peak to final_fraction over the rest of the run; wsd: stays at
    the peak and decays to final_fraction over the last decay_fraction of the run; constant: stays at the peak; drop:
    falls from the peak to final_fraction after --optimizer.drop-step; inverse_sqrt: proportional to 1 / sqrt(step),
    independent of the length of the run."""
    decay_fraction: Fraction = 0.2
    """With schedule wsd: the part of the run, at its end, in which the learning rate decays."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """With schedule wsd: linear, or sqrt, 1 − √ of the completed part of the decay."""
    drop_step: Count | None = None
    """With schedule drop: the last step at the peak learning rate."""
    final_fraction: Fraction = 0.1
    """Final learning rate of the schedules cosine, wsd and drop, as a fraction of the peak."""
    warmup_steps: Natural = 100
    """Steps of linear warm-up to the peak. Except with inverse_sqrt, at most a tenth of the run: of --train.steps or,
    without steps, of --train.minutes."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Decoupled weight decay, applied to weight matrices and embeddings."""
    beta1: ProperFraction = 0.9
    """Decay rate of the first moment."""
    beta2: ProperFraction = 0.95
    """Decay rate of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the denominator of the update."""
    clip_norm: Positive | None = 1.0
    """Maximum global norm of the gradients. None: no clipping."""


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, batch size, and how often to evaluate."""

    steps: Count | None = 1000
    """Number of updates. None: only --train.minutes bounds the run."""
    minutes: Positive | None = None
    """Minutes of training time, evaluation not included."""
    anneal_at: tuple[float, ...] = ()
    """With schedule wsd: fractions of the run, such as 0.25,0.5,1, that have a final loss each. At each but the last
    the run decays to it, is evaluated and saved in RUN/annealed, and goes on from the state before the decay."""
    batch_size: Natural = 8
    """Sequences per update, over all devices. 0: --train.batch-tokens / --model.context."""
    batch_tokens: Count | None = None
    """Tokens per update, where --train.batch-size is 0."""
    accumulate: Count = 1
    """Gradient accumulation: number of micro-batches per update."""
    rows_per_device: Count | None = None
    """Sequences per micro-batch on each device. Sets --train.accumulate for the devices there are."""
    remat: Remat = "none"
    """Rematerialisation. block: recompute each transformer block in the backward pass; names: the same, except for
    the results of its attention."""
    deterministic: bool = True
    """Deterministic operations on a GPU: a resumed run equals an uninterrupted one bit for bit, except with cuDNN's
    attention, whose gradients are summed in no fixed order."""
    seed: Seed = 0
    """Seed of the initial parameters and of the data order."""
    eval_every: Count = 100
    """Updates between evaluations."""
    eval_batches: Count = 8
    """Validation batches per evaluation, always the same ones. A task of Long Range Arena or a corpus of speech with at
    most 2,000 validation examples is evaluated on all of them."""
    sample_every: Natural = 0
    """Updates between samples, of text in RUN/samples/STEP.txt or of images in STEP.png. 0: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints kept on disk."""

    every_steps: Count = 500
    """Updates between checkpoints."""
    keep: Count = 2
    """Number of latest checkpoints kept, besides the one with the lowest val loss."""


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis. -1: all that remain; at most one axis."""

    data: Annotated[int, Range(-1)] = -1
    """Data parallelism: replicas of the model, each with a part of the batch."""
    fsdp: Annotated[int, Range(-1)] = 1
    """Fully sharded data parallelism: shards of parameters, optimizer state and batch."""
    tensor: Annotated[int, Range(-1)] = 1
    """Tensor parallelism: shards of heads and MLP width."""
    context: Annotated[int, Range(-1)] = 1
    """Context parallelism: shards of the sequence."""


@dataclass(frozen=True)
class LoggingConfig:
    """Loggers besides metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files to RUN/tensorboard. Requires tensorboardX."""
    wandb: bool = False
    """Log to Weights & Biases, with files in RUN/wandb. Requires wandb; set WANDB_MODE=offline without a network and
    WANDB_PROJECT to name the project."""


@dataclass(frozen=True)
class RunConfig:
    """Base class of the configs of a run."""

    COMMAND: ClassVar[str]
    """The command that trains it."""
    KIND: ClassVar[str]
    """What it trains."""
    FIXED: ClassVar[Mapping[str, Any]] = {}
    """Fields that can have only one value, by dotted name."""
    CORPUS: ClassVar[tuple[str, ...]] = ("tokenizer", "packing")
    """Fields of ``data`` that a resumed run must not change, besides those that the checksum of the data covers."""

    model: Any = None
    data: Any = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def to_dict(self) -> dict[str, Any]:
        """The format version, the kind, and the groups as plain dicts, lists and numbers, as in ``config.json``."""
        return {"format": FORMAT, "kind": self.KIND} | json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: object = "config") -> Self:
        """The inverse of :meth:`to_dict`, except that ``model.modes`` stays a dict of dicts.

        Args:
            values: contents of a ``config.json``.
            source: name of ``values`` in the messages of a ``RunError``.

        Raises:
            RunError: the format version is missing or unknown, or a field has another type.
            ConfigError: an unknown group or field.
        """
        check_types(values, source, cls)
        given = groups_of(values)
        groups = {group.name: group.default_factory for group in dataclasses.fields(cls)}
        built = {}
        for name, fields in given.items():
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
    """Converts the lists of JSON to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Config(RunConfig):
    """Config of a language-model run."""

    COMMAND: ClassVar[str] = "train.py"
    KIND: ClassVar[str] = "language-model"

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class MaskedConfig(RunConfig):
    """Config of a masked-language-model run."""

    COMMAND: ClassVar[str] = "train.py"
    KIND: ClassVar[str] = "masked-language-model"
    FIXED: ClassVar[Mapping[str, Any]] = {"train.sample_every": 0, "model.pooling": "none", "model.towers": 1}

    model: EncoderConfig = field(default_factory=EncoderConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class LraConfig(RunConfig):
    """Config of a classifier run on a task of the Long Range Arena."""

    COMMAND: ClassVar[str] = "lra.train"
    KIND: ClassVar[str] = "classifier"
    FIXED: ClassVar[Mapping[str, Any]] = {"train.sample_every": 0}
    CORPUS: ClassVar[tuple[str, ...]] = ("task",)

    model: EncoderConfig = field(default_factory=EncoderConfig)
    data: TaskConfig = field(default_factory=TaskConfig)


@dataclass(frozen=True)
class SpeechConfig(RunConfig):
    """Config of a run of speech recognition."""

    COMMAND: ClassVar[str] = "speech.train"
    KIND: ClassVar[str] = "speech-recognition"
    FIXED: ClassVar[Mapping[str, Any]] = MaskedConfig.FIXED
    CORPUS: ClassVar[tuple[str, ...]] = ("corpus",)

    model: EncoderConfig = field(default_factory=EncoderConfig)
    data: SpeechDataConfig = field(default_factory=SpeechDataConfig)


CONFIGS = (Config, MaskedConfig, LraConfig, SpeechConfig)
"""The configs of all runs."""


def check_format(values: dict[str, Any], source: object) -> None:
    """Checks the format version of a ``config.json``.

    Args:
        values: its contents.
        source: its name in the message.

    Raises:
        RunError: the format version is missing or unknown.
    """
    found = values.get("format")
    if type(found) is not int or not 1 <= found <= FORMAT:
        what = "no format version" if found is None else f"format {json.dumps(found)}"
        raise RunError(f"{source}: {what}; this version of lineargpt reads formats 1 to {FORMAT}: use the version that "
                       "wrote the file, or train the run again")


def check_types(values: dict[str, Any], source: object, kind: type[RunConfig] | None = None) -> None:
    """Checks the format version of a ``config.json`` and the types of the fields that this version knows.

    Args:
        values: its contents.
        source: its name in the message.
        kind: the class of the config. None: :func:`config_class`.

    Raises:
        RunError: the format version is missing or unknown, or a field has another type.
    """
    check_format(values, source)
    groups = _written_groups(values)
    json_files.check(groups, dict[str, dict[str, Any]], source)
    json_files.check(groups, kind or config_class(values), source)
    json_files.check(groups.get("model", {}).get("modes", {}), dict[str, dict[str, Any]], source, "model.modes")


def groups_of(values: dict[str, Any]) -> dict[str, Any]:
    """The groups of a ``config.json``, without format version, kind and checksum, as in the present format."""
    groups = _written_groups(values)
    if values.get("format") != 1:
        return groups
    if groups.get("data", {}).get("packing") == "documents":
        groups["data"] = groups["data"] | {"packing": EARLIER_DOCUMENTS}
    optimizer = groups.get("optimizer", {})
    if optimizer.get("schedule", "cosine") == "cosine" and optimizer.get("warmup_steps"):
        groups["optimizer"] = optimizer | {"schedule": EARLIER_COSINE}
    return groups


def _written_groups(values: dict[str, Any]) -> dict[str, Any]:
    return {name: group for name, group in values.items() if name not in ("format", "kind", json_files.CHECKSUM)}


def config_class(values: dict[str, Any]) -> type[RunConfig]:
    """The class of the config in a ``config.json``; by its fields, if it is older than the entry ``kind``."""
    for config in CONFIGS:
        if values.get("kind") == config.KIND:
            return config
    model, data = values.get("model"), values.get("data")
    if isinstance(data, dict) and ("task" in data or "corpus" in data):
        return LraConfig if "task" in data else SpeechConfig
    return MaskedConfig if isinstance(model, dict) and "pooling" in model else Config


def load_recipe[C: RunConfig](path: str | Path, attention: str | None = None,
                              kind: type[C] | tuple[type[C], ...] = Config, **given: Any) -> C:
    """The config of a recipe file.

    Args:
        path: the file.
        attention: attention mode, or a comma-separated pattern of modes. None: the recipe's default.
        kind: the class that it must return, or one of several of a command.
        given: other arguments of its ``get_config``.

    Raises:
        ConfigError: the file does not exist, has no ``get_config``, fails, or is a recipe of another command.
    """
    path = Path(path)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    command = kinds[0].COMMAND
    if not path.is_file():
        root = Path(__file__).parent
        recipes = ", ".join(f"configs/{p.relative_to(root)}" for p in sorted(root.rglob("*.py"))
                            if "\ndef get_config(" in (text := p.read_text())
                            and any(f"-> {one.__name__}:" in text for one in kinds))
        raise ConfigError(f"{path}: no such recipe; expected one of {recipes}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a recipe; a recipe is a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path}: not a recipe; expected a function get_config(attention) -> Config")
        if unknown := given.keys() - inspect.signature(module.get_config).parameters.keys():
            raise ConfigError(f"{path}: not a recipe of {command}: its get_config has no argument "
                              f"{', '.join(unknown)}")
        config = module.get_config(**given) if attention is None else module.get_config(attention, **given)
    except ConfigError:
        raise
    except Exception as error:  # a recipe is the user's own code
        raise ConfigError(f"{path}: the recipe failed: {type(error).__name__}: {error}") from error
    if not isinstance(config, kind):
        found = getattr(config, "COMMAND", None)
        if found == command:
            raise ConfigError(f"{path}: a {config.KIND} recipe; expected a {kinds[0].KIND} recipe")
        raise ConfigError(f"{path}: not a recipe of {command}, "
                          + (f"but of {found}" if found else f"whose get_config must return a {kinds[0].__name__}"))
    return config


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted names."""
    flat = {}
    for name, value in config.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
