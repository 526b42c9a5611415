"""Calls of every op, from its ``cases``: for tests, ``make gpu-check``, tuning and the benchmarks.

An op is a folder of ``kernels`` with a file ``cases.py``, or a file that defines ``CASES``. :func:`find_cases` and
:func:`find_attentions` find them by listing the folder.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import device

User = Literal["tests", "gpu", "gpu-check", "tune"]
Arrays = dict[str, Any]
"""Arrays, or their shapes and dtypes, by name."""
LogDecay = Literal["mixed", "strong", "zero"]
"""``mixed``: from no decay to almost complete decay. ``strong``: a complete reset at one token, and little decay at
the others. ``zero``: no decay, given as zeros."""
REFERENCE = "reference"
WORSE_THAN_PLAIN = 1.5
"""Largest ratio of the error in bfloat16 to that of the plain JAX form, which rounds as often."""
ROUNDING_NOISE = 1e-6
"""Errors below this may exceed the ratio: float32 sums depend on the order of their terms, and those of the plain form
may be exact."""
TRUNCATION = 2**-24
"""Mean relative error of an addition on a GPU's matrix units, which truncate a float32 sum (Fasi et al., 2021,
Numerical behavior of NVIDIA tensor cores). All have one sign, so that they add up."""
TERMS_ADDED = 16
"""Terms of a sum that the matrix units add at a time."""


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call of an op. Each op has a subclass with its sizes and options."""

    tolerance: float
    """Largest RMS(error) / RMS(reference) of each output and gradient. State the reason for its value."""
    dtype: str = "float32"
    """The dtype of the inputs."""
    implementations: tuple[str | None, ...] = (None,)
    """Arguments of :meth:`call`; None: the op's choice. ``tests`` run all of them on a CPU."""
    used_by: tuple[User, ...] = ("tests",)
    """``tests`` and, on a GPU, ``gpu`` compare with the reference, ``gpu-check`` compiles, ``tune`` times (linear
    attention only)."""
    title: str = ""
    """Purpose of the case; its name if given."""
    gradients: bool = True
    """Whether to differentiate the call."""
    gpu_tolerance: float | None = None
    """``tolerance`` on a GPU, if it is another."""
    plain: str | None = None
    """The plain JAX implementation that bounds the others' bfloat16 errors, by ``WORSE_THAN_PLAIN``."""
    less_rounded: tuple[str, ...] = ()
    """Outputs and gradients that ``plain`` rounds less often, so that it does not bound their errors."""
    expected_from: str = REFERENCE
    """The implementation that computes the expected results in float64. Not the reference where that takes too much
    memory; it is then tested against the reference elsewhere."""
    gpu_kernels: tuple[str, ...] = ()
    """Prefixes of our kernels that the compiled program for a GPU must contain. Tests run such a case on a GPU too."""
    constants: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    """Values of module constants, by full name in a clone, with which small inputs take the code path of large ones."""
    device_kind: str | None = None
    """The only kind of device for the case, by its name in jax."""
    slow: bool = False
    """Takes seconds on a CPU, where other cases cover most of it: left to ``make test-thorough``."""

    @property
    def op(self) -> str:
        """Name of the folder or file in ``kernels``."""
        return type(self).__module__.split(".")[1]

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.title or self.sizes

    @property
    @abstractmethod
    def sizes(self) -> str:
        """Sizes, dtype and options, in words."""

    @property
    def noise(self) -> float:
        """Errors below this may exceed ``WORSE_THAN_PLAIN`` times those of the plain form."""
        return ROUNDING_NOISE

    @abstractmethod
    def make_shapes(self) -> Arrays:
        """Shape and dtype of every input."""

    @abstractmethod
    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        """The outputs by name. ``reference`` is the definition; None: the op's choice."""

    def make_inputs(self) -> dict[str, np.ndarray]:
        """Random inputs: standard normal, unless an op needs others."""
        generator = np.random.default_rng(0)
        return {name: generator.normal(size=x.shape).astype(x.dtype) for name, x in self.make_shapes().items()}

    def make_cotangents(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """Random gradients of the outputs. No two elements are alike, and all are exact in bfloat16, so that rounding
        adds no error."""
        generator = np.random.default_rng(1)
        return {name: generator.normal(size=x.shape).astype(jnp.bfloat16).astype(x.dtype)
                for name, x in outputs.items()}


@dataclass(frozen=True)
class AttentionCase(Case):
    """A call of an attention: queries and keys of width M, values of width D."""

    B: int
    T: int
    H: int
    M: int
    D: int
    _: KW_ONLY
    segments: bool = False
    state: bool = False
    """Whether there is an initial state."""
    log_decay: LogDecay | None = None
    channels: bool = False
    """Whether the log decay is that of each channel."""
    chunk_size: int | None = None

    @property
    def extras(self) -> dict[str, bool]:
        """Options in words, and whether each applies."""
        return {"segments": self.segments,
                f"{self.log_decay} decay" + " per channel" * self.channels: self.log_decay is not None,
                f"C{self.chunk_size}": self.chunk_size is not None}

    @property
    def sizes(self) -> str:
        lengths = (f"{letter}{getattr(self, letter)}" for letter in "BTHMD")
        return " ".join([*lengths, self.dtype, *(name for name, applies in self.extras.items() if applies)])

    @property
    def noise(self) -> float:
        """On a GPU that of a sum over all tokens, such as the final state, too."""
        sums = self.T / TERMS_ADDED * TRUNCATION if device.platform() == "gpu" else 0.0
        return max(ROUNDING_NOISE, sums)

    @property
    def sums_dtype(self) -> Any:
        """The dtype of states and log decays."""
        return jnp.promote_types(jnp.float32, self.dtype)

    def make_state_shapes(self) -> Arrays:
        """Shapes of the initial state."""
        return {}

    def make_shapes(self) -> Arrays:
        of_tokens = self.B, self.T, self.H
        shapes: Arrays = {name: jax.ShapeDtypeStruct((*of_tokens, width), self.dtype)
                          for name, width in (("q", self.M), ("k", self.M), ("v", self.D))}
        if self.state:
            shapes |= self.make_state_shapes()
        if self.log_decay is not None:
            shapes["log_decay"] = jax.ShapeDtypeStruct((*of_tokens, self.M) if self.channels else of_tokens,
                                                       self.sums_dtype)
        if self.segments:
            shapes["segment_ids"] = jax.ShapeDtypeStruct((self.B, self.T), jnp.int32)
        return shapes

    def decay_argument(self, inputs: Arrays) -> Arrays:
        """The log decay by the name that it has as an argument of the op."""
        return {"channel_log_decay_BTHM" if self.channels else "log_decay_BTH": inputs.get("log_decay")}

    def adapt(self, inputs: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        """Make random inputs, in float64, those that the op is for."""

    def make_inputs(self) -> dict[str, np.ndarray]:
        generator, shapes = np.random.default_rng(0), self.make_shapes()
        inputs = {name: generator.normal(size=shape.shape) for name, shape in shapes.items()
                  if name not in ("log_decay", "segment_ids")}
        self.adapt(inputs, generator)
        if self.log_decay is not None:
            inputs["log_decay"] = draw_log_decay(self.log_decay, shapes["log_decay"], generator)
        inputs = {name: x.astype(shapes[name].dtype) for name, x in inputs.items()}
        return inputs | ({"segment_ids": make_segments(self.B, self.T)} if self.segments else {})


def state_shapes(case: AttentionCase, features: int) -> Arrays:
    """Shapes of a state with its normaliser."""
    states = case.B, case.H, features
    return {"s": jax.ShapeDtypeStruct((*states, case.D), case.sums_dtype),
            "z": jax.ShapeDtypeStruct(states, case.sums_dtype)}


@dataclass(frozen=True)
class TimedForm:
    """An implementation of an attention, as timed by ``benchmarks.attention``."""

    parts: tuple[str, ...] = ()
    """Parts of the benchmark that measure it by default."""
    gpu_only: bool = False
    """Left out by default on other devices."""
    quadratic: bool = False
    """Whether it is quadratic in the context."""


@dataclass(frozen=True)
class TimedAttention:
    """An attention of ``benchmarks.attention``: ``NAME``, or ``NAME:FORM``."""

    name: str
    call: Callable[..., jax.Array]
    """(q_BTHD, k_BTHD, v_BTHD, *, chunk_size, implementation) ↦ y_BTHD, with a causal mask."""
    forms: Mapping[str, TimedForm]
    """By the name of the implementation."""
    pick: Callable[..., str | None] | None = None
    """(x_BTHD, *, chunk_size) ↦ the form that the name alone stands for; None if unknown. Without ``pick`` a
    form must be named."""
    pick_chunk_sizes: Callable[..., tuple[int, int] | None] | None = None
    """(form, x_BTHD) ↦ chunk lengths of the forward and the backward pass; only for attentions in chunks."""
    published_shapes: tuple[tuple[int, int, int, int], ...] = ()
    """B, T, H, D of ``benchmarks/published.json``, in order of work."""


@functools.cache
def ops() -> dict[str, ModuleType]:
    """The module with the cases of every op, by the op's name."""
    folder = Path(__file__).parent
    names = {path.parent.name: f".{path.parent.name}.cases" for path in folder.glob("*/cases.py")}
    names |= {path.stem: f".{path.stem}" for path in folder.glob("[!_]*.py")}
    modules = {name: importlib.import_module(names[name], __package__) for name in sorted(names)}
    return {name: module for name, module in modules.items() if hasattr(module, "CASES")}


def find_cases(user: User) -> list[Case]:
    """The cases of all ops for one of their users."""
    return [case for module in ops().values() for case in module.CASES if user in case.used_by]


def find_attentions() -> dict[str, TimedAttention]:
    """The attentions of all ops, by name."""
    return {attention.name: attention for module in ops().values() for attention in getattr(module, "ATTENTIONS", ())}


def outputs_and_gradients(case: Case, implementation: str | None) -> Callable[[Arrays, Arrays], Arrays]:
    """(inputs, cotangents) ↦ outputs by name and, for a case with gradients, gradients of inputs as ``dNAME``.

    Args:
        case: the call.
        implementation: as in :meth:`Case.call`.
    """

    def compute(inputs: Arrays, cotangents: Arrays) -> Arrays:
        if not case.gradients:
            return case.call(implementation, **inputs)
        smooth = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in inputs.items() if name not in smooth}
        outputs, backward = jax.vjp(lambda smooth: case.call(implementation, **smooth, **others), smooth)
        (gradients,) = backward({name: cotangents[name].astype(x.dtype) for name, x in outputs.items()})
        return outputs | {f"d{name}": gradient for name, gradient in gradients.items()}

    return compute


def run(case: Case, implementation: str | None) -> Callable[[], dict[str, np.ndarray]]:
    """A function that computes outputs and gradients of the case's inputs on the default device, compiled once."""
    inputs = case.make_inputs()
    compute = jax.jit(outputs_and_gradients(case, implementation))
    cotangents = case.make_cotangents(output_shapes(case))
    return lambda: {name: np.asarray(x) for name, x in compute(inputs, cotangents).items()}


def output_shapes(case: Case) -> Arrays:
    """Shapes and dtypes of the outputs of every implementation."""
    return _output_shapes(case, jax.config.jax_enable_x64)


@functools.cache
def _output_shapes(case: Case, x64: bool) -> Arrays:  # x64 is part of the key: dtypes depend on it
    return jax.eval_shape(lambda inputs: case.call(REFERENCE, **inputs), case.make_shapes())


def run_reference(case: Case) -> dict[str, np.ndarray]:
    """The expected outputs and gradients, for the same rounded inputs, in float64 on the CPU."""
    inputs = {name: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
              for name, x in case.make_inputs().items()}
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        shapes = jax.eval_shape(lambda inputs: case.call(REFERENCE, **inputs), inputs)
        found = jax.jit(outputs_and_gradients(case, case.expected_from))(inputs, case.make_cotangents(shapes))
        return {name: np.asarray(x) for name, x in found.items()}


def run_plain(case: Case) -> dict[str, np.ndarray] | None:
    """Outputs and gradients of ``case.plain`` in bfloat16; None if it bounds no errors.

    On the CPU, which rounds where the program says. XLA on a GPU may keep an array in float32.
    """
    if case.plain is None or case.dtype != "bfloat16":
        return None
    with jax.default_device(jax.devices("cpu")[0]):
        return run(case, case.plain)()


def make_segments(batch: int, tokens: int) -> np.ndarray:
    """Ids (B, T). Rows alternate: segments with padding before, inside, between and after them; one segment to the end;
    only padding."""
    generator = np.random.default_rng(tokens)
    ids_BT = np.full((batch, tokens), -1, np.int32)
    for b in range(batch):
        if b % 3 == 0:
            cuts = np.sort(generator.choice(np.arange(1, tokens), 4, replace=False))
            ids_BT[b, 1:] = np.repeat([7, 3, 7, 0, 2], np.diff([0, *cuts, tokens]))[1:]
            ids_BT[b, generator.random(tokens) < 0.1] = -1
        elif b % 3 == 1:
            ids_BT[b, tokens // 3:] = 0
    return ids_BT


def draw_log_decay(kind: LogDecay, of: jax.ShapeDtypeStruct, generator: np.random.Generator) -> np.ndarray:
    """Log decays (B, T, H) or (B, T, H, M)."""
    if kind == "mixed":
        return (-np.logaddexp(0, generator.normal(-3, 2, of.shape))).astype(of.dtype)
    if kind == "zero":
        return np.zeros(of.shape, of.dtype)
    log_decay = np.full(of.shape, -0.01, of.dtype)
    log_decay[:, of.shape[1] // 3] = -1e4
    return log_decay


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """RMS(error) / RMS(reference); infinite if anything is not finite."""
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    size = float(np.sqrt(np.mean(expected**2)))
    error = float(np.sqrt(np.mean((found - expected) ** 2)))
    return error / size if size else error


def faults_of(case: Case, errors: Mapping[str, float], plain_errors: Mapping[str, float] | None) -> list[str]:
    """Outputs and gradients whose error exceeds its bound.

    Args:
        case: the call.
        errors: of an implementation, by output and gradient.
        plain_errors: those of ``case.plain``, if it bounds them.
    """
    tolerance = case.tolerance
    if case.gpu_tolerance is not None and device.platform() == "gpu":
        tolerance = case.gpu_tolerance
    faults = [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    return faults + [f"{name}: {error:.1e}, the plain form {plain_errors[name]:.1e}"
                     for name, error in errors.items() if plain_errors is not None and name not in case.less_rounded
                     and not error <= max(WORSE_THAN_PLAIN * plain_errors[name], case.noise)]
