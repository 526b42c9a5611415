"""From a call of an op to one of its implementations: checks, choice, and inputs in the form that all of them take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from . import checks, decay, device
from .gpu import has_kernel, triton
from .segments import runs_of


class Call(NamedTuple):
    """What the choice of an implementation depends on."""

    heads: Mapping[str, Any]
    """Queries, keys and values by the names of the arguments: arrays, or shapes and dtypes."""
    causal: bool = True
    chunk_size: int | None = None
    segments: bool = False
    log_decay: bool = False
    """Whether there is a decay, of heads or of channels."""
    channel_decay: bool = False
    window: int | None = None

    @property
    def tokens(self) -> int:
        """T of the queries."""
        return next(iter(self.heads.values())).shape[1]


class Implementation(NamedTuple):
    """One form of an op."""

    compute: Callable[..., Any]
    refuses: Callable[[Call], str | None] = lambda call: None
    """Why it does not support a call; None if it does."""
    backend: Literal["triton", "mosaic_gpu", "mosaic_tpu"] | None = None
    """What lowers its Pallas kernels, if it consists of them. On other devices these are interpreted, for tests."""
    with_channels: Callable[..., Any] | None = None
    """Computes calls with ``channel_log_decay_BTHM``, in place of ``compute``; None: it does not support them."""

    def is_here(self) -> bool:
        """Whether it may be picked on the device that is traced for."""
        if self.backend == "triton":
            return has_kernel()
        return self.backend is None or (self.backend == "mosaic_tpu" and device.platform() == "tpu")

    def refusal(self, call: Call) -> str | None:
        """Why it cannot compute a call; None if it can."""
        if self.backend == "triton" and triton.MISSING is not None:
            return triton.MISSING
        if call.channel_decay and self.with_channels is None:
            return "it does not support channel_log_decay_BTHM"
        return self.refuses(call)


class Chosen(NamedTuple):
    """An implementation, and segments and decays in the form that all implementations take."""

    name: str
    compute: Callable[..., Any]
    runs_BT: Array | None
    log_decay: Array | None
    """(B, T, H), or (B, T, H, M) of channels."""


class Dispatcher(NamedTuple):
    """The implementations of an op, and the order of their speed."""

    implementations: Mapping[str, Implementation]
    fastest: Callable[[Call], Sequence[str]]
    """call ↦ names, the fastest first. The last supports every call on every device."""
    notes_refusals: bool = False
    """Whether a warning says why a kernel of this device is not picked; for ops whose other forms are much slower."""

    def pick(self, call: Call) -> str:
        """The implementation that None stands for, on the device that is traced for."""
        *faster, plain = self.fastest(call)
        for name in faster:
            form = self.implementations[name]
            if not form.is_here():
                continue
            refusal = form.refusal(call)
            if refusal is None:
                return name
            if self.notes_refusals and form.backend is not None:
                device.note(f"implementation={name!r}: {refusal}; {plain!r} takes its place, which takes longer")
        return plain

    def choose(self, call: Call, named: str | None) -> str:
        """The implementation of a call.

        Raises:
            ValueError: there is none of this name.
            NotImplementedError: the named implementation does not support the call.
        """
        name = self.pick(call) if named is None else named
        if name not in self.implementations:
            raise ValueError(f"implementation={name!r}: expected one of {', '.join(self.implementations)}")
        refusal = self.implementations[name].refusal(call)
        if refusal is not None:
            raise NotImplementedError(f"implementation={name!r}: {refusal}")
        return name

    def start(self, named: str | None, dtype: jnp.dtype, heads: Mapping[str, Array],
              others: Mapping[str, tuple[Array | None, str]] | None = None, *, causal: bool = True,
              segment_ids_BT: Array | None, log_decay_BTH: Array | None,
              channel_log_decay_BTHM: Array | None = None, chunk_size: int | None = None,
              window: int | None = None, **sizes: int) -> Chosen:
        """Checks the inputs of a call, chooses its implementation and prepares segments and decays.

        Args:
            named: the requested implementation; None picks the fastest.
            dtype: that of the sums, which decays get.
            heads: queries, keys and values by name.
            others: other arrays, or None, and the letters of their dimensions.
            causal: as in the call, like the five that follow.
            segment_ids_BT: see ``segments``.
            log_decay_BTH: see ``decay``.
            channel_log_decay_BTHM: see ``channel_decay``.
            chunk_size: None picks the fastest.
            window: as in the call.
            sizes: by letter, those that are not sizes of heads.

        Raises:
            ValueError, TypeError: see ``checks``.
            NotImplementedError: the named implementation does not support the call.
        """
        log_decays = {"log_decay_BTH": log_decay_BTH, "channel_log_decay_BTHM": channel_log_decay_BTHM}
        checks.check_sequence(heads, others or {}, segment_ids_BT, log_decays, chunk_size, sizes)
        per_channel = channel_log_decay_BTHM is not None
        log_decay = channel_log_decay_BTHM if per_channel else log_decay_BTH
        name = self.choose(Call(heads, causal, chunk_size, segment_ids_BT is not None, log_decay is not None,
                                per_channel, window), named)
        runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
        if log_decay is not None:
            log_decay = decay.prepare(log_decay, dtype, None if runs_BT is None else runs_BT < 0)
        form = self.implementations[name]
        compute = form.with_channels if per_channel else form.compute
        assert compute is not None
        return Chosen(name, compute, runs_BT, log_decay)


def refuses_heads(call: Call, widest: Mapping[str, int], condition: str = "") -> str | None:
    """Why a kernel for heads of up to these widths, by dtype, does not support a call; None if it does.

    ``condition``: what the widths depend on, in words.
    """
    for name, x in call.heads.items():
        if x.dtype.name not in widest:
            return f"{name} is {x.dtype}; it supports {', '.join(widest)}"
        if not 1 <= x.shape[3] <= widest[x.dtype.name]:
            return f"{name} has width {x.shape[3]}; {condition}it supports widths of 1 to {widest[x.dtype.name]}"
    return None


def hide_padding(y_BTHD: Array, runs_BT: Array | None) -> Array:
    """y, 0 on padding."""
    return y_BTHD if runs_BT is None else jnp.where((runs_BT >= 0)[:, :, None, None], y_BTHD, 0)
