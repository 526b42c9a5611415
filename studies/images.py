"""How many bits per dimension does each attention need for images, pixel by pixel?

    python sweep.py studies/images.py --out runs/images --quick
    python sweep.py studies/images.py --out runs/images

The images of "Transformers are RNNs" (Katharopoulos et al., 2020, section 4.2): MNIST for 250 epochs, and CIFAR-10 for
a week each, with the paper's sizes and its mixture of logistics; softmax, linear attention (elu + 1) and the Reformer
with 1 and 4 rounds of hashing into 64 buckets, in chunks of 32; one seed. Softmax and linear attention also have the
tied head, with a logit for each level. The paper's bits per dimension are drawn beside ours. The blocks are ours, as in
studies/copy.py. The 12 runs have not been made; their first downloads the images from the Hugging Face Hub.

The quick form has configs/digits.py, the 8 × 8 digits of scikit-learn: softmax, linear and gated linear attention, for
three minutes of training each on two CPU cores, with three seeds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comparison.figures import Figure, loss_against, loss_curves
from comparison.published import published
from comparison.runs import Run, group_by
from comparison.study import Variation, mode_fields

BITS = "bits_per_dimension"
IMAGES = {"digits": "digits", "ylecun/mnist": "MNIST", "uoft-cs/cifar10": "CIFAR-10"}
"""The name of each source in the figures."""
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}), "linear": ("linear", {}), "gated": ("gated", {}),
    **{f"lsh-{rounds}": ("reformer", {"rounds": rounds, "chunk_size": 32, "buckets": 64}) for rounds in (1, 4)}}
"""Attention and options of its mode, by the paper's names."""
PAPER = published("bits-per-dimension")
PUBLISHED = replace(PAPER, lines=tuple(replace(line, attention=ARMS[line.attention][0]) for line in PAPER.lines))


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        return [_run("digits", arm, "tied", seed, {"train.minutes": 3.0})
                for arm in ("softmax", "linear", "gated") for seed in (0, 1, 2)]
    return [_run(images, arm, head, 0) for images in ("mnist", "cifar10")
            for head, arms in (("logistics", ("softmax", "linear", "lsh-1", "lsh-4")), ("tied", ("softmax", "linear")))
            for arm in arms]


def _run(images: str, arm: str, head: str, seed: int, fields: dict[str, Any] | None = None) -> Variation:
    attention, options = ARMS[arm]
    return Variation(f"{images}-{arm}-{head}-seed-{seed}", f"configs/{images}.py", attention, {
        **(fields or {}), "model.head": head, "train.seed": seed, **mode_fields(attention, **options)})


def arm_of(run: Run) -> str:
    """Its name in ``ARMS``, and its head if that is the paper's."""
    model = run.config["model"]
    mode = model["attention"][0]
    arm = f"lsh-{model['modes'][mode]['rounds']}" if mode == "reformer" else mode
    return f"{arm}, logistics" if model["head"] == "logistics" else arm


def images_of(run: Run) -> str:
    """The images of a run."""
    source: str = run.config["data"]["source"]
    return IMAGES.get(source, source)


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    shown = []
    for images, image_runs in group_by(runs, images_of).items():
        for axis in ("step", "train_seconds"):
            figure = loss_curves(image_runs, quantity=BITS, axis=axis, arm=arm_of)
            shown.append(replace(figure.named(images), title=f"{figure.title}, {images}"))
    last = loss_against(runs, "data.source", of=images_of, called="images", quantity=BITS, arm=arm_of,
                        title="Bits per dimension")
    if any(images_of(run) != "digits" for run in runs):
        last = PUBLISHED.beside(last)
        last = replace(last, remarks=(*last.remarks, "Ours are of val, the last tenth of the training images."))
    return [*shown, last]
