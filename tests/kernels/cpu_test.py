"""Workarounds for XLA's CPU backend equal the plain forms, and set up the process."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import cpu, device
from kernels.gelu import gelu
from kernels.layer_norm import layer_norm
from kernels.mixed_precision import product
from kernels.projection import project
from kernels.softmax_attention import softmax_attention
from sampling.sampler import Settings, sample_token


def numbers(*shapes, dtype=jnp.float32):
    return [jax.random.normal(jax.random.key(seed), shape).astype(dtype) for seed, shape in enumerate(shapes)]


def gradients(function, arguments):
    """The output, and its gradients for a gradient that is a cosine."""
    y, pull = jax.vjp(function, *arguments)
    return y, *pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


def drawn(sampling, logits_BV):
    keys_B = jax.random.split(jax.random.key(0), len(logits_BV))
    return sample_token(logits_BV, logits_BV > 9, keys_B, Settings(*map(jnp.asarray, sampling)))


# The function with a workaround, which returns its outputs and gradients; its arguments; and the error allowed for
# rounding: sums in another order, or ties of bfloat16 in the other direction.
CASES = {
    cpu.product: (functools.partial(gradients, functools.partial(product, "bte,ef->btf")),
                  [numbers((2, 5, 8), (8, 12), dtype=jnp.bfloat16)], 6e-3),
    cpu.product_with_gradients: (lambda q, k, v: gradients(lambda q, k, v: product(
        "bhts,bhsd->bhtd", product("bhtd,bhsd->bhts", q, k).astype(jnp.bfloat16), v), (q, k, v)),
                                 numbers((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), dtype=jnp.bfloat16), 6e-3),
    cpu.rounded: (functools.partial(gradients, gelu), [numbers((2, 5, 8), dtype=jnp.bfloat16)], 6e-3),
    cpu.project: (functools.partial(gradients, project), [numbers((2, 5, 8), (8, 12), (12,))], 1e-6),
    cpu.compute_once: (functools.partial(gradients, functools.partial(softmax_attention, implementation="blockwise")),
                       [numbers(*3 * [(1, 6, 2, 4)])], 1e-6),
    cpu.weighted_sum: (functools.partial(gradients, lambda *x: layer_norm(*x, 1e-5, jnp.float32)),
                       [numbers((2, 5, 8), (8,), (8,))], 1e-6),
    cpu.sort_descending: (functools.partial(drawn, (1.0, 3, 0.9, 0.0, 1.0)), numbers((4, 11)), 0),
    cpu.zeros_unless: (functools.partial(drawn, (0.0, 0, 1.0, 0.0, 1.0)), numbers((4, 11)), 0),
}


@pytest.mark.parametrize("workaround", cpu.WORKAROUNDS, ids=lambda workaround: workaround.__name__)
def test_a_workaround_computes_what_the_plain_form_does(workaround, monkeypatch):
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: True)
    function, arguments, tolerance = CASES[workaround]
    fast = jax.jit(lambda *x: function(*x)).lower(*arguments)
    with cpu.without(workaround):
        assert not cpu.applies(workaround)
        plain = jax.jit(lambda *x: function(*x)).lower(*arguments)
    assert cpu.applies(workaround)
    assert fast.as_text() != plain.as_text()
    found, expected = (jax.tree.leaves(lowered.compile()(*arguments)) for lowered in (fast, plain))
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == reference.dtype
        x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
        assert np.sqrt(np.mean((x - reference) ** 2)) <= tolerance * np.sqrt(np.mean(reference**2))


def test_numbers_are_sorted_whatever_they_are():
    x = np.array([[0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, np.inf, -np.inf, 3e38, -3e38, 1 + 2**-23]], np.float32)
    np.testing.assert_array_equal(cpu.sort_descending(jnp.asarray(x)), -np.sort(-x))


def test_other_devices_have_no_workarounds(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert not any(map(cpu.applies, cpu.WORKAROUNDS))
    x = jnp.ones(3)
    assert cpu.compute_once(x) is x


def test_a_process_is_set_up_without_what_is_left_out(monkeypatch):
    called = []
    workarounds = [lambda: called.append("first"), lambda: called.append("second")]
    monkeypatch.setattr(cpu, "PROCESS_WORKAROUNDS", workarounds)
    with cpu.without(workarounds[0]):
        cpu.configure_process()
    assert called == ["second"]
    cpu.configure_process()
    assert called == ["second", "first", "second"]


FILL_TWICE = """
import resource, sys
import numpy as np
from kernels import cpu

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    cpu.configure_process()
for _ in range(2):
    before = faults()
    block = np.ones(1 << 26, np.uint8)
    del block
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc, which other systems do not have")
def test_memory_that_was_freed_is_kept():
    """Filling 64 MiB a second time touches new pages, unless the first were kept."""
    pages = [int(subprocess.run([sys.executable, "-c", FILL_TWICE, how], check=True, capture_output=True).stdout)
             for how in ("keep", "leave")]
    assert pages[0] < 100 < pages[1]


COMPILE = """
from kernels import cpu
cpu.configure_process()
import jax, jax.numpy as jnp
jax.jit(jnp.exp).lower(jnp.ones(1000)).compile()
"""


@pytest.mark.parametrize(("asked", "width"), [("", 512), ("--xla_cpu_prefer_vector_width=128", 128)])
def test_vectors_are_as_wide_as_the_cpu_has_them_or_as_asked(asked, width, tmp_path):
    if not device.has_fast_bfloat16():
        pytest.skip("this CPU may be slower with wide vectors")
    flags = f"{asked} --xla_dump_to={tmp_path}"
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**os.environ, "XLA_FLAGS": flags})
    (options,) = (path.read_text() for path in tmp_path.glob("*jit_exp*debug_options"))  # what the compiler was told
    assert f"xla_cpu_prefer_vector_width: {width}" in options
