"""How many bits per dimension does each attention need for images, pixel by pixel?

    python sweep.py studies/images.py --out runs/images --quick
    python sweep.py studies/images.py --out runs/images

The images of "Transformers are RNNs" (Katharopoulos et al., 2020, section 4.2): MNIST for 250 epochs, and CIFAR-10 for
a week each, with the paper's sizes and its mixture of logistics; softmax, linear attention (elu + 1) and the Reformer
with 1 and 4 rounds of hashing into 64 buckets, in chunks of 32; one seed. Softmax and linear attention also have the
tied head, with a logit for each level. The paper's bits per dimension are drawn beside ours. The blocks are ours, as in
studies/copy.py. The 12 runs have not been made; their first downloads the images from the Hugging Face Hub.

The quick form has configs/digits.py, the 8 × 8 digits of scikit-learn: softmax, linear and gated linear attention, for
three minutes of training each on two CPU cores, with three seeds. Where MNIST is given, it has MNIST instead:

    python sweep.py studies/images.py --out runs/mnist --quick --data.dir mnist

in models that two cores train in three minutes, 4 layers of width 64 and batches of 8 images, with AdamW and a cosine:
softmax, chunked, gated, kda, and three layers of kda to one of softmax, all with a short convolution and an output
gate. Four learning rates are tried with one seed, and higher ones while the highest is the best; the best has two more
seeds. The bits per dimension are of 2,000 test images. The folder has the IDX files, or token files; in the full form
too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from comparison.figures import Axis, Figure, Line, Point, loss_against, loss_curves
from comparison.published import Published, published
from comparison.runs import Run, group_by
from comparison.statistics import mean_interval
from comparison.study import Variation, mode_fields
from data.token_files import has_token_files
from studies._arms import RATE

BITS = "bits_per_dimension"
IMAGES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
"""The name of each recipe in the figures."""
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}), "linear": ("linear", {}), "gated": ("gated", {}),
    **{f"lsh-{rounds}": ("reformer", {"rounds": rounds, "chunk_size": 32, "buckets": 64}) for rounds in (1, 4)}}
"""Attention and options of its mode, by the paper's names."""
PARTS = {"short_conv": 4, "output_gate": "sigmoid"}
SMALL_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", PARTS), "chunked": ("chunked", PARTS), "gated": ("gated", {}), "kda": ("kda", {}),
    "hybrid-kda": ("kda,kda,kda,softmax", PARTS)}
"""The same of the small models of MNIST. chunked is linear attention in its fastest form, as time is what they have in
common; gated and kda have a convolution and a gate by default."""
SMALL = {"model.layers": 4, "model.width": 64, "model.heads": 4, "model.initial_scale": 0.125,
         "optimizer.name": "adamw", "optimizer.schedule": "cosine", "optimizer.warmup_steps": 20,
         "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0, "train.steps": None, "train.minutes": 3.0,
         "train.batch_size": 8, "train.eval_every": 50, "train.eval_batches": 12, "train.sample_every": 10_000}
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Of the small models: the first ``FIRST_RATES`` are tried, and further ones while the highest tried is the best."""
FIRST_RATES = 4
SEEDS = 3
ON_TEST = ("--split", "test", "--batches", "250")
PAPER = published("bits-per-dimension")
PUBLISHED = replace(PAPER, lines=tuple(replace(line, attention=ARMS[line.attention][0]) for line in PAPER.lines))


def get_runs(quick: bool, data_dir: str | None = None, finished: Sequence[Run] = ()) -> list[Variation]:
    if quick and data_dir is not None:
        tried, best = _tried(finished), best_rates(finished)
        rates = {arm: _rates(tried.get(arm, {})) for arm in SMALL_ARMS}
        return [*(_small(data_dir, arm, rate, 0) for rate in RATES for arm in SMALL_ARMS if rate in rates[arm]),
                *(_small(data_dir, arm, best[arm], seed) for seed in range(1, SEEDS) for arm in SMALL_ARMS
                  if arm in best)]
    if quick:
        return [_run("digits", arm, "tied", seed, {"train.minutes": 3.0})
                for arm in ("softmax", "linear", "gated") for seed in (0, 1, 2)]
    return [_run(images, arm, head, 0, _data(data_dir) if images == "mnist" else {}) for images in ("mnist", "cifar10")
            for head, arms in (("logistics", ("softmax", "linear", "lsh-1", "lsh-4")), ("tied", ("softmax", "linear")))
            for arm in arms]


def _data(folder: str | None) -> dict[str, Any]:
    """The fields of a folder of token files, or of images."""
    if folder is None:
        return {}
    return {"data.dir" if has_token_files(Path(folder)) else "data.source": folder}


def _small(data_dir: str, arm: str, rate: float, seed: int) -> Variation:
    attention, options = SMALL_ARMS[arm]
    return Variation(f"mnist-{arm}-{rate:g}-seed-{seed}", "configs/mnist.py", attention, {
        **_data(data_dir), **SMALL, RATE: rate, "train.seed": seed, **mode_fields(attention, **options)},
        evaluation=ON_TEST)


def best_rates(runs: Sequence[Run]) -> dict[str, float]:
    """The learning rate with the fewest bits per dimension on val, by arm, where it has been found."""
    return {arm: min(bits, key=bits.__getitem__) for arm, bits in _tried(runs).items() if bits.keys() >= _rates(bits)}


def _tried(runs: Sequence[Run]) -> dict[str, dict[float, float]]:
    """Bits per dimension on val of the runs with seed 0, by arm and learning rate."""
    tried: dict[str, dict[float, float]] = {}
    for run in runs:
        if run.seed == 0 and (bits := run.final(BITS)) is not None:
            tried.setdefault(arm_of(run), {})[run.config["optimizer"]["learning_rate"]] = (
                bits if math.isfinite(bits) else math.inf)
    return tried


def _rates(bits: Mapping[float, float]) -> set[float]:
    """The learning rates to try, by what those that have been tried gave."""
    count = FIRST_RATES
    while count < len(RATES) and bits.keys() >= set(RATES[:count]) and min(
            RATES[:count], key=bits.__getitem__) == RATES[count - 1]:
        count += 1
    return set(RATES[:count])


def _run(images: str, arm: str, head: str, seed: int, fields: dict[str, Any] | None = None) -> Variation:
    attention, options = ARMS[arm]
    return Variation(f"{images}-{arm}-{head}-seed-{seed}", f"configs/{images}.py", attention, {
        **(fields or {}), "model.head": head, "train.seed": seed, **mode_fields(attention, **options)})


def arm_of(run: Run) -> str:
    """Its name in ``ARMS`` or ``SMALL_ARMS``, and its head if that is the paper's."""
    model = run.config["model"]
    modes = list(dict.fromkeys(model["attention"]))
    arm = f"lsh-{model['modes']['reformer']['rounds']}" if modes == ["reformer"] else "+".join(modes)
    return f"{arm}, logistics" if model["head"] == "logistics" else arm.replace("kda+softmax", "hybrid-kda")


def images_of(run: Run) -> str:
    """The images of a run."""
    return IMAGES[run.name.partition("-")[0]]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    small = [run for run in runs if run.test_evaluations]
    if small:
        best = best_rates(small)
        chosen = [run for run in small if run.config["optimizer"]["learning_rate"] == best.get(arm_of(run))]
        return [loss_against(small, RATE, quantity=BITS, arm=arm_of, title="Bits per dimension against learning rate"),
                *_curves(chosen), _published_mnist().beside(on_test(chosen))]
    last = loss_against(runs, "data.source", of=images_of, called="images", quantity=BITS, arm=arm_of,
                        title="Bits per dimension")
    if any(images_of(run) != "digits" for run in runs):
        last = PUBLISHED.beside(last)
        last = replace(last, remarks=(*last.remarks, "Ours are of val, the last tenth of the training images."))
    return [*_curves(runs), last]


def _published_mnist() -> Published:
    lines = (replace(line, points=tuple(point for point in line.points if point.x == "MNIST"))
             for line in PUBLISHED.lines)
    return replace(PUBLISHED, lines=tuple(lines))


def _curves(runs: Sequence[Run]) -> list[Figure]:
    shown = []
    for images, image_runs in group_by(runs, images_of).items():
        for axis in ("step", "train_seconds"):
            figure = loss_curves(image_runs, quantity=BITS, axis=axis, arm=arm_of)
            shown.append(replace(figure.named(images), title=f"{figure.title}, {images}"))
    return shown


def on_test(runs: Sequence[Run]) -> Figure:
    """Bits per dimension of test images, with intervals over the seeds."""
    lines, rows = [], []
    for arm, arm_runs in group_by(runs, arm_of).items():
        bits = [run.test_evaluations[0][BITS] for run in arm_runs]
        interval, steps = mean_interval(bits), sorted(run.final("step") or 0 for run in arm_runs)
        lines.append(Line(arm, arm_runs[0].attention, (
            Point(images_of(arm_runs[0]), float(np.mean(bits)), interval, tuple(run.name for run in arm_runs)),)))
        rows.append((arm, str(len(bits)), f"{arm_runs[0].config['optimizer']['learning_rate']:g}",
                     f"{steps[0]:,.0f} to {steps[-1]:,.0f}", f"{np.mean(bits):.4f}",
                     "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"))
    return Figure("test", "Bits per dimension of test images", Axis("images", "category"), "bits per dimension",
                  tuple(lines), ("attention", "seeds", "learning rate", "updates", "bits per dimension",
                                 "95 % interval"), tuple(rows),
                  ("Ours are models of 4 layers of width 64, after three minutes on two CPU cores.",))
