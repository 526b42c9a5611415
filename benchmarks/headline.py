"""The claim as one experiment: train softmax and chunked equally long on this device. Which has the lower loss?

    python -m benchmarks.headline --minutes 4 --context 16384 --out runs/headline

Both models are the quickstart's but for their size, on the Python standard library as bytes; on a GPU they are as
large as GPT-2 small. Minutes are of training, each run's own, without compilation, evaluation and checkpoints. The
folder keeps the runs, ``headline.json`` and the page. Where packages that ``train.py`` needs are missing, as on a bare
GPU machine, a plain loop makes such updates on the same text, writes the same metrics, keeps no checkpoint, and draws a
PNG where matplotlib is installed; ``compare.py`` makes the page of such folders elsewhere.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.train_step import implementation
from configs import quickstart
from configs.schema import Config
from data.loader import Batch
from data.sources import open_source
from kernels import device
from support.command import note, status
from support.errors import ConfigError
from support.files import write_json
from training import step as steps
from training.config_validation import validate_config
from training.optimizer import decay_mask, learning_rate, make_optimizer

NEEDED = ("datasets", "grain", "orbax", "orjson", "plotly", "rich", "tiktoken", "tyro")
"""Packages that ``train.py`` and ``compare.py`` need beside the bare machine's."""
VOCABULARY, SEPARATOR = 257, 256
"""Of the tokenizer ``bytes``."""
HEADINGS = ("mode", "steps", "tokens", "seconds", "tokens/s overall", "median of steps", "val loss")


@dataclass(frozen=True)
class Corpus:
    """The embedded corpus as bytes, a separator after each document."""

    train: np.ndarray
    val: np.ndarray
    checksum: str

    def windows(self, split: str, context: int) -> int:
        """Number of windows of ``context`` tokens, each with the token after it.

        Raises:
            ConfigError: there is not one.
        """
        count = (len(getattr(self, split)) - 1) // context
        if count < 1:
            raise ConfigError(f"--context {context}: expected less than the {len(getattr(self, split)):,} tokens of "
                              f"{split}")
        return count

    def batch(self, split: str, context: int, windows: Sequence[int]) -> Batch:
        """Windows side by side."""
        tokens_T = getattr(self, split)
        tokens_BT = np.stack([tokens_T[i * context:(i + 1) * context + 1] for i in windows]).astype(np.int32)
        return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:])


def read_corpus(source: str) -> Corpus:
    """All of a source, in memory.

    Raises:
        DataError: it cannot be read.
    """
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    checksum = hashlib.sha256()
    for document in open_source(source).documents():
        if document.text:
            checksum.update(document.text)
            parts[document.split] += [np.frombuffer(document.text, np.uint8).astype(np.uint16),
                                      np.array([SEPARATOR], np.uint16)]
    return Corpus(np.concatenate(parts["train"]), np.concatenate(parts["val"]), checksum.hexdigest())


def config_of(mode: str, options: argparse.Namespace) -> Config:
    """The run of a mode, validated.

    Raises:
        ConfigError: an unknown mode, or sizes that do not go together.
    """
    config, gpu = quickstart.get_config(mode), device.platform() != "cpu"
    sizes = {"layers": options.layers or (12 if gpu else 4), "heads": options.heads or (12 if gpu else 4),
             "width": options.width or (768 if gpu else 128)}
    rate = options.learning_rate or (6e-4 if gpu else config.optimizer.learning_rate)
    return validate_config(replace(
        config, model=replace(config.model, context=options.context, **sizes),
        optimizer=replace(config.optimizer, learning_rate=rate),
        train=replace(config.train, minutes=options.minutes, batch_size=options.batch, seed=options.seed,
                      eval_every=options.eval_every or (200 if gpu else 25)),
        checkpoint=replace(config.checkpoint, every_steps=10**9)))  # one, at the end


def train_with_everything(config: Config, run_dir: Path) -> int:
    """``train.py``'s own run."""
    import train

    return train.train(config, run_dir)


@dataclass
class _Log:
    """The lines of ``metrics.jsonl``, and both clocks."""

    path: Path
    tokens_per_step: int
    started: float = field(default_factory=time.perf_counter)
    train_seconds: float = 0.0

    def write(self, step: int, split: str, loss: float, **values: float) -> None:
        record = {"step": step, "tokens": step * self.tokens_per_step, "train_seconds": self.train_seconds,
                  "wall_seconds": time.perf_counter() - self.started, "split": split, "loss": loss} | values
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def train_plainly(config: Config, corpus: Corpus, run_dir: Path) -> int:
    """The same updates without grain, orbax and the rest: no checkpoint, no resuming; 1 where the loss diverges.

    Raises:
        ConfigError: the corpus is shorter than the context, or the folder holds something.
        OSError: the folder cannot be written.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds something; name another --out")
    context, batch_size = config.model.context, config.train.batch_size
    count, held_out = corpus.windows("train", context), corpus.windows("val", context)
    minutes = config.train.minutes
    assert minutes is not None
    model = steps.abstract_model(config, VOCABULARY)
    transform = make_optimizer(config.optimizer, decay_mask(model))
    state = jax.jit(lambda: steps.initial_state(config, VOCABULARY, transform))()
    chosen = np.unique(np.arange(config.train.eval_batches) * held_out // config.train.eval_batches)
    val = [jax.device_put(corpus.batch("val", context, [int(i)])) for i in chosen]
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "config.json", config.to_dict())
    write_json(run_dir / "environment.json", report.origin("benchmarks.headline", argparse.Namespace()) | {
        "devices": [jax.devices()[0].device_kind], "device_count": 1, "command": list(sys.argv),
        "corpus_checksum": corpus.checksum, "tokenizer": "bytes", "vocabulary_size": VOCABULARY,
        "parameters": sum(x.size for x in jax.tree.leaves(state.parameters)), "dtype": config.model.dtype,
        "implementations": {name: form for name in config.model.attention
                            if (form := implementation(config, VOCABULARY)) is not None}})
    log = _Log(run_dir / "metrics.jsonl", batch_size * context)
    data = _batches(corpus, count, config)
    evaluate = jax.jit(steps.make_eval_step(model))
    rate = jnp.float32(0)
    first = jax.device_put(next(data))
    update = steps.jit_step(steps.make_train_step(model, config, transform), model,
                            deterministic=config.train.deterministic)
    update = update.lower(state, first, rate).compile()
    jax.block_until_ready([evaluate(state.parameters, state.variables, val[0]), state])
    following, step, finite = first, 0, True
    evaluated = -1
    while finite and log.train_seconds < 60 * minutes:
        mark = time.perf_counter()
        share = log.train_seconds / (60 * minutes)
        chosen_rate = learning_rate(config.optimizer, step, share, by_steps=False)
        state, metrics = update(state, following, jnp.float32(chosen_rate))
        step += 1
        following = jax.device_put(next(data))  # while the device is at work
        loss, norm = (float(x) for x in jax.device_get(metrics))
        seconds = time.perf_counter() - mark
        log.train_seconds += seconds
        log.write(step, "train", loss, learning_rate=chosen_rate, gradient_norm=norm,
                  tokens_per_second=log.tokens_per_step / seconds)
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        if finite and (step % config.train.eval_every == 0 or log.train_seconds >= 60 * minutes):
            sums = jax.device_get([evaluate(state.parameters, state.variables, batch) for batch in val])
            val_loss = float(sum(total for total, _ in sums)) / int(sum(scored for _, scored in sums))
            log.write(step, "val", val_loss, bits_per_byte=val_loss / float(np.log(2)))
            evaluated = step
            print(f"{run_dir.name}: step {step:,}, {log.train_seconds:.0f} s, val loss {val_loss:.4f}", flush=True)
    if not finite or evaluated != step:
        status(f"{run_dir}: step {step}: the loss is not finite; try a lower --learning-rate")
        return 1
    return 0


def _batches(corpus: Corpus, count: int, config: Config) -> Iterator[Batch]:
    """Without end: each epoch a new order of all windows."""
    epoch, left = 0, np.zeros(0, np.int64)
    while True:
        while len(left) < config.train.batch_size:
            order = np.random.default_rng((config.train.seed, epoch)).permutation(count)
            left, epoch = np.concatenate([left, order]), epoch + 1
        windows, left = left[:config.train.batch_size], left[config.train.batch_size:]
        yield corpus.batch("train", config.model.context, [int(i) for i in windows])


def outcome(run_dir: Path) -> dict[str, Any]:
    """What a run's metrics say in the end, and its val curve against seconds of training."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train, val = ([line for line in lines if line["split"] == split] for split in ("train", "val"))
    last = train[-1]
    return {"steps": last["step"], "tokens": last["tokens"], "train_seconds": last["train_seconds"],
            "tokens_per_second": last["tokens"] / last["train_seconds"],
            "median_tokens_per_second": median(line["tokens_per_second"] for line in train),
            "val_loss": val[-1]["loss"], "val_curve": [[line["train_seconds"], line["loss"]] for line in val]}


def draw(path: Path, outcomes: dict[str, dict[str, Any]], title: str) -> None:
    """Val loss against seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for mode, found in outcomes.items():
        axes.plot(*zip(*found["val_curve"], strict=True), label=mode)
    axes.set(title=title, xlabel="training time (seconds)", ylabel="val loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def command(arguments: Sequence[str]) -> int:
    """Trains, compares and draws; returns the exit code of what failed."""
    options = _options(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if options.minutes <= 0:
        raise ConfigError(f"--minutes {options.minutes:g}: expected a number above 0")
    report.use_whole_device()
    configs = {mode: config_of(mode, options) for mode in options.modes}
    contents = report.origin("benchmarks.headline", options, ["--out", "DIR"])
    report.make_folder(options.out)
    report.kept(options.out, "the runs so far")
    corpus = None
    if missing:
        note(f"a plain loop trains, without checkpoints: {', '.join(missing)} not installed")
        corpus = read_corpus(next(iter(configs.values())).data.source)
    outcomes = {}
    for mode, config in configs.items():
        run_dir = options.out / mode.replace(",", "-")
        code = train_with_everything(config, run_dir) if corpus is None else train_plainly(config, corpus, run_dir)
        if code:
            return code
        outcomes[mode] = outcome(run_dir) | {"model": config.to_dict()["model"]}
        write_json(options.out / "headline.json", contents | {"plain_loop": bool(missing), "runs": outcomes})
    title = (f"{contents['device']}: context {options.context:,}, {options.minutes:g} minutes of training each")
    print(title)
    print(report.table(HEADINGS, [[
        mode, f"{found['steps']:,}", f"{found['tokens']:,}", f"{found['train_seconds']:.1f}",
        f"{found['tokens_per_second']:,.0f}", f"{found['median_tokens_per_second']:,.0f}",
        f"{found['val_loss']:.4f}"] for mode, found in outcomes.items()]))
    if missing:
        if report.has_matplotlib():
            draw(options.out / "headline.png", outcomes, title)
        return 0
    import compare

    return compare.main([*(str(options.out / mode.replace(",", "-")) for mode in outcomes),
                         "--out", str(options.out / "headline.html"), "--png", str(options.out / "headline.png"),
                         "--title", title])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, each run's own (%(default)g)")
    parser.add_argument("--context", type=report.positive, default=16_384, help="tokens in a sequence (%(default)s)")
    parser.add_argument("--batch", type=report.positive, default=1, help="sequences in a step (%(default)s)")
    parser.add_argument("--modes", type=report.names, default=("softmax", "chunked"),
                        help="modes, with commas between (softmax,chunked)")
    parser.add_argument("--out", type=Path, default=Path("runs/headline"), help="folder of the runs (%(default)s)")
    for name, meaning in (("layers", "transformer blocks (on a GPU 12, else 4)"),
                          ("heads", "attention heads (on a GPU 12, else 4)"),
                          ("width", "width of the model (on a GPU 768, else 128)"),
                          ("eval-every", "updates between evaluations (on a GPU 200, else 25)")):
        parser.add_argument(f"--{name}", type=report.positive, help=meaning)
    parser.add_argument("--learning-rate", type=float, help="its peak (on a GPU 6e-4, else 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.headline", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
