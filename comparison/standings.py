"""The protocol of the standings, S1: its ladder of sizes, its arms and its runs.

docs/standings.md explains it. A change of any number here, or in configs/standings.py, makes another version.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from comparison.runs import Run
from comparison.study import Variation, mode_fields
from models import attention
from support.errors import ConfigError

VERSION = "S1"
RECIPE = "configs/standings.py"
CONTEXT = 1024
LENGTHS = (0.25, 0.5, 1.0)
"""Fractions of a run at which it is annealed: 5, 10 and 20 tokens a parameter."""
TOKENS_PER_PARAMETER = 20
REFERENCE = "softmax-parts"
"""The arm whose FLOPs at the second of ``LENGTHS`` are the equal compute of a size."""
WINDOWS = 128
"""Val windows of ``CONTEXT`` tokens in an evaluation."""
LONGER = (4096, 16384)
"""Longer contexts at which runs are evaluated."""
FIRST_RATES = (4e-3, 8e-3, 1.6e-2)
"""Learning rates tried at XS first; the grid grows by factors of two until the best is inside."""
FIRST_FACTORS = (0.5, 1.0, 2.0)
"""Rates tried at S first, as multiples of the one carried over from XS; the grid grows in the same way."""
RATE_SCALE = 0.5
"""The learning rate of a size over that of the size before: inverse to the width."""


class Corpus(NamedTuple):
    """The text of standings: all rows of a table have the same."""

    checksum: str
    """Checksum of its token files."""
    bytes_per_token: float
    """Bytes of text for a token of the val windows; below 1, because the separators of documents are tokens too."""
    windows: str
    """Checksum of the val windows of eval.py."""


PYTHON_PACKAGES = Corpus("ddc6b5ab8de30c1b586be3a0eef59e709d2438669c9b2b770a4428fb2d93a320", 131_064 / 131_072,
                         "8526924250261a1e")
"""The text of S1; standings of another, S1-NAME, have that of their first row."""


@dataclass(frozen=True)
class Rung:
    """A size of the ladder: heads of 64 channels, a layer for each but at least four."""

    name: str
    width: int
    batch_size: int
    """Sequences in a step."""
    seeds: int

    @property
    def layers(self) -> int:
        return max(4, self.width // 64)

    @property
    def parameters(self) -> int:
        """Number of parameters of a GPT-2 of this size, outside of the embedding."""
        return 12 * self.layers * self.width**2

    @property
    def steps(self) -> int:
        return TOKENS_PER_PARAMETER * self.parameters // (self.batch_size * CONTEXT)

    def fields(self, length: float = 1.0) -> dict[str, Any]:
        """Fields of the config of a run, or of one of a fraction of the length."""
        steps = round(self.steps * length)
        return {"model.width": self.width, "model.layers": self.layers, "model.heads": self.width // 64,
                "model.initial_scale": float(f"{self.width**-0.5:.3g}"), "train.batch_size": self.batch_size,
                "train.steps": steps, "train.eval_every": steps // 2, "train.eval_batches": WINDOWS // self.batch_size,
                "optimizer.warmup_steps": self.steps // 40, "checkpoint.every_steps": max(1, steps // 4),
                **({} if length == 1 else {"train.anneal_at": "1"})}


RUNGS = {rung.name: rung for rung in (Rung("XS", 64, 4, 3), Rung("S", 128, 8, 3), Rung("M", 256, 16, 1))}

PARTS: dict[str, Any] = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "rms", "output_norm": "rms",
                         "output_gate": "silu"}
"""The small parts of the recurrences, for softmax."""


@dataclass(frozen=True)
class Arm:
    """An attention with its options, and the arm of softmax with the same parts that it is compared with."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its mode; of a hybrid, of the last."""
    baseline: str = "softmax-parts"
    of_width: Mapping[str, int] = field(default_factory=dict)
    """Options that are the width of the rung divided by a number, with that number."""
    abilities: str = ""
    """Its name in studies/abilities.py, if that is another: every attention has a convolution there."""


ARMS: dict[str, Arm] = {
    "softmax": Arm("softmax", baseline="softmax", abilities="none"),
    "softmax-parts": Arm("softmax", PARTS, abilities="softmax"),
    "softmax-forget": Arm("softmax", PARTS | {"forget_gate": True}),
    "chunked": Arm("chunked", baseline="softmax"),
    "gated": Arm("gated"),
    "gated_delta": Arm("gated_delta"),
    "kda": Arm("kda"),
    "power": Arm("power", baseline="softmax"),
    "hybrid-kda": Arm("kda,kda,kda,softmax", PARTS),
}
VARIANTS: dict[str, Arm] = {
    "kda-equal": Arm("kda", of_width={"rank": 4}),
    "window-equal": Arm("window", PARTS | {"window": 32}),
    "chunked-parts": Arm("chunked", PARTS),
}
"""kda with the parameters of gated_delta, to a thousandth; softmax over a window with the state of the recurrences; and
linear attention with their small parts."""
_NAME = re.compile(r"(?P<rung>[A-Z]+)(?P<check>_check)?-(?P<arm>.+?)-(?P<rate>\d+(\.\d+)?(e-\d+)?)-seed-(?P<seed>\d+)")


@dataclass(frozen=True)
class Place:
    """A run of the protocol; its name has all fields."""

    rung: str
    arm: str
    rate: float
    seed: int
    check: bool = False
    """Whether it tries a rate at S, at a quarter of the length."""

    @classmethod
    def of(cls, name: str) -> "Place | None":
        """The place of a run by its name; None for other runs."""
        found = _NAME.fullmatch(name)
        return None if found is None or found["rung"] not in RUNGS else cls(
            found["rung"], found["arm"], float(found["rate"]), int(found["seed"]), found["check"] is not None)

    @property
    def name(self) -> str:
        return f"{self.rung}{'_check' * self.check}-{self.arm}-{self.rate:g}-seed-{self.seed}"

    def variation(self, data: Mapping[str, str] | None = None) -> Variation:
        """The run, as sweep.py starts it, on another text if ``data`` has fields that name one."""
        arm, rung = arm_of(self.arm), RUNGS[self.rung]
        options = {**arm.options, **{name: rung.width // divisor for name, divisor in arm.of_width.items()}}
        fields = rung.fields(LENGTHS[0] if self.check else 1.0)
        evaluation = () if self.check else (
            "--context", ",".join(map(str, (CONTEXT, *LONGER))), "--windows", "", "--by-token-class")
        return Variation(self.name, RECIPE, arm.attention, {
            **fields, **(data or {}), "optimizer.learning_rate": self.rate, "train.seed": self.seed,
            **mode_fields(arm.attention, **options)}, evaluation=evaluation, rung=self.rung)


def arm_of(name: str) -> Arm:
    """An arm by its name, or a mode with its own options.

    Raises:
        ConfigError: there is neither.
    """
    if (arm := (ARMS | VARIANTS).get(name)) is not None:
        return arm
    options = attention.load(name, "row").Config()
    return Arm(name, baseline="softmax-parts" if getattr(options, "short_conv", 0) else "softmax")


def is_known(name: str) -> bool:
    """Whether :func:`arm_of` has an arm of this name."""
    return name in ARMS | VARIANTS or name in attention.modes()


def places(arms: Iterable[str], rungs: Sequence[str], losses: Mapping[Place, float]) -> list[Place]:
    """The runs of arms at rungs, as far as they follow from the losses of those that are finished.

    At XS the rates are tried with seed 0, then the best is run with the other seeds. At S the rate that is carried over
    and those around it are tried at a quarter of the length, then the best is run with all seeds. At both the search
    goes on until the best rate is inside of those tried. M has one run.

    Raises:
        ConfigError: there is no such rung, or an arm has not finished the one before.
    """
    arms, rungs = list(arms), list(rungs)
    for rung in rungs:
        if rung not in RUNGS:
            raise ConfigError(f"rungs: no rung {rung!r}; expected {', '.join(RUNGS)}")
    found: list[Place] = []
    for before, name in itertools.pairwise([None, *RUNGS]):
        if name not in rungs:
            continue
        mine = [place for arm in arms for place in _tried(name, arm, losses)]
        mine += [Place(name, arm, rate, seed) for seed in range(RUNGS[name].seeds) for arm in arms
                 if (rate := best_rate(name, arm, losses)) is not None]
        waiting = [arm for arm in arms if arm not in {place.arm for place in mine}]
        if waiting and before not in rungs:
            raise ConfigError(f"rungs: {name} follows from the rungs before, which {', '.join(waiting)} "
                              f"{'has' if len(waiting) == 1 else 'have'} not finished; run these first, or name them "
                              "too")
        found += mine
    return list(dict.fromkeys(found))


def expected(arms: Iterable[str], rungs: Sequence[str], losses: Mapping[Place, float]) -> list[Place]:
    """The runs of :func:`places` and the fewest that can follow from them: those if the middle rate is the best where
    no better one is known."""
    arms, losses = list(arms), dict(losses)
    while waiting := [place for place in places(arms, rungs, losses) if place not in losses]:
        middle = [tried[len(tried) // 2] for place in waiting if (tried := _tried(place.rung, place.arm, losses))]
        # The middle rate is the best. Each later one is worse, so that the search ends, but finite: it is better than
        # one that diverged.
        losses |= {place: -math.inf if place in middle else 1e6 + len(losses) for place in waiting}
    return places(arms, rungs, losses)


def best_rate(rung: str, arm: str, losses: Mapping[Place, float]) -> float | None:
    """The rate of an arm at a rung; None until it has been found."""
    if rung == "M":
        before = best_rate("S", arm, losses)
        return None if before is None else _scaled(before, RATE_SCALE)
    tried = _tried(rung, arm, losses)
    if not tried or not losses.keys() >= {*tried}:
        return None
    return min(tried, key=losses.__getitem__).rate


def _tried(rung: str, arm: str, losses: Mapping[Place, float]) -> list[Place]:
    """The runs that find the rate of an arm at a rung."""
    if rung == "XS":
        rates = [*FIRST_RATES]
    elif rung == "S" and (carried := best_rate("XS", arm, losses)) is not None:
        rates = [_scaled(carried, RATE_SCALE * factor) for factor in FIRST_FACTORS]
    else:
        return []
    check = rung == "S"
    while all(Place(rung, arm, rate, 0, check) in losses for rate in rates):
        best = min(rates, key=lambda rate: losses[Place(rung, arm, rate, 0, check)])
        if best not in (rates[0], rates[-1]):
            break
        rates = [_scaled(best, 0.5), *rates] if best == rates[0] else [*rates, _scaled(best, 2.0)]
    return [Place(rung, arm, rate, 0, check) for rate in rates]


def _scaled(rate: float, factor: float) -> float:
    return float(f"{rate * factor:g}")


def losses_of(runs: Iterable[Run]) -> dict[Place, float]:
    """The final losses of the finished runs of the protocol; infinite if not finite, as of a run that diverged."""
    found = {}
    for run in runs:
        place, loss = Place.of(run.name), run.final()
        if place is not None and loss is not None and run.is_finished:
            found[place] = loss if math.isfinite(loss) else math.inf
    return found


def unfinished(rung: str, arm: str, losses: Mapping[Place, float]) -> str:
    """Why a rung of an arm is not finished; empty if it is."""
    if best_rate(rung, arm, losses) is None:
        before = [*RUNGS][:[*RUNGS].index(rung)]
        waits = next((name for name in before if unfinished(name, arm, losses)), None)
        return f"rung {rung} is not finished: " + (f"it follows from {waits}" if waits else
                                                   "its rate has not been found")
    missing = [place.name for place in places([arm], [rung], losses) if place not in losses]
    return f"rung {rung} is not finished: {', '.join(missing)} missing" if missing else ""
