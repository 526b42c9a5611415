"""Linear attention and the delta rule with a decay per channel, beyond what ``op_contract_test.py`` compares."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels.channel_decay import channel_decays
from kernels.delta_rule import delta_rule
from kernels.linear_attention import State, linear_attention

B, T, H, M, D = 3, 40, 2, 5, 7
FORMS = ("chunked", "recurrent")


def make_inputs(op: str, dtype: type = np.float64) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    k_BTHM = generator.normal(size=(B, T, H, M))
    inputs = {"q_BTHM": np.abs(generator.normal(size=(B, T, H, M))), "v_BTHD": generator.normal(size=(B, T, H, D)),
              "channel_log_decay_BTHM": -np.logaddexp(0, generator.normal(-3, 2, (B, T, H, M)))}
    if op == "delta_rule":
        inputs |= {"k_BTHM": k_BTHM / np.linalg.norm(k_BTHM, axis=-1, keepdims=True),
                   "beta_BTH": generator.uniform(0, 2, (B, T, H))}
    else:
        inputs["k_BTHM"] = np.abs(k_BTHM)
    return {name: x.astype(dtype) for name, x in inputs.items()}


def make_state(op: str) -> jax.Array | State:
    generator = np.random.default_rng(1)
    s_BHMD = jnp.asarray(generator.normal(size=(B, H, M, D)))
    return s_BHMD if op == "delta_rule" else State(s_BHMD, jnp.asarray(generator.uniform(1, 2, (B, H, M))))


OPS = {"linear_attention": linear_attention, "delta_rule": delta_rule}
with_ops = pytest.mark.parametrize("op", OPS)
with_forms = pytest.mark.parametrize("implementation", FORMS)


def call(op: str, implementation: str | None = None, chunk_size: int | None = 8, **inputs):
    inputs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, inputs)
    return OPS[op](**inputs, implementation=implementation, chunk_size=chunk_size)


def check_equal(found, expected) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), found, expected)


@with_ops
def test_the_reference_is_the_definition(op):
    x, (b, h) = make_inputs(op), (1, 1)
    q, k, v = (x[name][b, :, h] for name in ("q_BTHM", "k_BTHM", "v_BTHD"))
    s, z, expected = np.zeros((M, D)), np.zeros(M), []
    for t in range(T):
        factor = np.exp(x["channel_log_decay_BTHM"][b, t, h])
        s, z = factor[:, None] * s, factor * z + k[t]
        s = s + (np.outer(k[t], v[t]) if op == "linear_attention" else
                 x["beta_BTH"][b, t, h] * np.outer(k[t], v[t] - s.T @ k[t]))
        expected.append(s.T @ q[t] / (q[t] @ z + 1e-6 if op == "linear_attention" else 1))
    with jax.enable_x64(True):
        y, _ = call(op, "reference", **x)
    np.testing.assert_allclose(y[b, :, h], expected, rtol=1e-10, atol=1e-12)


@with_ops
@with_forms
def test_equal_decays_of_all_channels_are_a_decay_of_the_head(op, implementation):
    x = make_inputs(op)
    log_decay_BTH = x.pop("channel_log_decay_BTHM")[..., 0]
    with jax.enable_x64(True):
        channels = np.repeat(log_decay_BTH[..., None], M, axis=-1)
        check_equal(call(op, implementation, **x, channel_log_decay_BTHM=channels),
                    call(op, "reference", **x, log_decay_BTH=log_decay_BTH))


@with_ops
@with_forms
def test_a_sequence_resumed_from_its_state_is_the_unsplit_one(op, implementation):
    x = make_inputs(op) | {"segment_ids_BT": np.zeros((B, T), np.int32)}
    x["segment_ids_BT"][0, 15:20], x["segment_ids_BT"][1, 25:] = -1, 4

    def run(cuts, x, state):
        parts = []
        for start, end in zip((0, *cuts), (*cuts, T), strict=True):
            part = {name: array[:, start:end] for name, array in x.items()}
            y, state = call(op, implementation, **part, initial_state=state)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), state

    with jax.enable_x64(True):
        resumed, unsplit = (jax.jit(functools.partial(run, cuts))(x, make_state(op)) for cuts in ((17, 18), ()))
    check_equal(resumed, unsplit)


@with_ops
@with_forms
def test_padding_is_left_alone_whatever_it_holds(op, implementation):
    x, ids = make_inputs(op), np.zeros((B, T), np.int32)
    ids[:, 12:19] = -1
    short = {name: array[:, ids[0] >= 0] for name, array in x.items()}
    x["channel_log_decay_BTHM"][ids < 0] = -3.0
    with jax.enable_x64(True):
        y, end = call(op, implementation, **x, segment_ids_BT=ids, initial_state=make_state(op))
        expected_y, expected_end = call(op, implementation, **short, initial_state=make_state(op))
    check_equal((y[:, ids[0] >= 0], end), (expected_y, expected_end))
    assert not np.any(np.asarray(y)[ids < 0])


@with_ops
@with_forms
def test_after_a_decay_of_everything_comes_a_new_sequence(op, implementation):
    x, start = make_inputs(op), 11
    x["channel_log_decay_BTHM"][:, start] = -np.inf
    after = {name: array[:, start:] for name, array in x.items()}
    with jax.enable_x64(True):
        y, end = call(op, implementation, **x, initial_state=make_state(op))
        check_equal((y[:, start:], end), call(op, implementation, **after))
        gradient = jax.grad(lambda g: jnp.sin(call(op, implementation, **(x | {"channel_log_decay_BTHM": g}))[0]).sum()
                            )(jnp.asarray(x["channel_log_decay_BTHM"]))
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[:, start])


@with_ops
def test_a_decay_of_one_channel_leaves_the_others(op):
    x = make_inputs(op)
    x["channel_log_decay_BTHM"] = np.zeros_like(x["channel_log_decay_BTHM"])
    x["channel_log_decay_BTHM"][..., 2] = -np.inf
    others = [0, 1, 3, 4]
    with jax.enable_x64(True):
        end = jax.tree.leaves(call(op, **x)[1])[0]
        if op == "linear_attention":  # the rows of a state do not meet
            plain = {name: x[name] for name in ("q_BTHM", "k_BTHM", "v_BTHD")}
            check_equal(end[:, :, others], call(op, **plain)[1].s_BHMD[:, :, others])
        last_BHD = x["v_BTHD"][:, -1]
        if op == "delta_rule":
            state = call(op, **{name: array[:, :-1] for name, array in x.items()})[1].at[:, :, 2].set(0)
            last_BHD = x["beta_BTH"][:, -1, :, None] * (last_BHD - np.einsum("bhm,bhmd->bhd", x["k_BTHM"][:, -1],
                                                                            state))
        check_equal(end[:, :, 2], x["k_BTHM"][:, -1, :, 2, None] * last_BHD)


@with_ops
def test_memory_of_a_gradient_grows_with_the_sequence(op):
    def temporary_bytes(tokens):
        shape = 1, tokens, 1, 64
        x = {name: jax.ShapeDtypeStruct(shape, jnp.float32)
             for name in ("q_BTHM", "k_BTHM", "v_BTHD", "channel_log_decay_BTHM")}
        if op == "delta_rule":
            x["beta_BTH"] = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
        gradient = jax.grad(lambda x: call(op, "chunked", None, **x)[0].sum())
        planned = jax.jit(gradient).lower(x).compile().memory_analysis()
        assert planned is not None
        return planned.temp_size_in_bytes

    assert temporary_bytes(8192) / temporary_bytes(4096) == pytest.approx(2, rel=0.1)


def test_no_factor_overflows_where_running_sums_would():
    """exp(−G) of the running sums of a chunk would be e^6,400."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, M)), jnp.float32)
    gradient = jax.grad(lambda g: sum(jnp.sum(y) for y in jax.tree.leaves(channel_decays((x,), x, g))))
    assert np.isfinite(gradient(jnp.full((64, M), -100.0))).all()


class TestBadInput:
    """One clear error, raised by the op itself: the tests' shape checks would come first."""

    @pytest.fixture(autouse=True)
    def _as_users_run_it(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    @with_ops
    @pytest.mark.parametrize(("change", "message"), [
        ({"log_decay_BTH": np.zeros((B, T, H))},
         "log_decay_BTH and channel_log_decay_BTHM are given; expected at most one of them"),
        ({"channel_log_decay_BTHM": np.zeros((B, T, H))},
         r"channel_log_decay_BTHM has shape \(3, 40, 2\); expected \(3, 40, 2, 5\)"),
        ({"channel_log_decay_BTHM": np.full((B, T, H, M), 0.5)},
         "channel_log_decay_BTHM is 0.5 somewhere; expected 0 or less"),
    ])
    def test_a_value_error_names_the_argument(self, op, change, message):
        with pytest.raises(ValueError, match=message):
            call(op, **(make_inputs(op, np.float32) | change))

    @with_ops
    @pytest.mark.parametrize("implementation", ["decode", "pallas_gpu"])
    def test_a_form_without_it_says_so(self, op, implementation):
        with pytest.raises(NotImplementedError, match="it does not support channel_log_decay_BTHM"):
            call(op, implementation, **make_inputs(op, np.float32))

    def test_a_decay_cannot_look_ahead(self):
        with pytest.raises(NotImplementedError, match="channel_log_decay_BTHM requires causal=True"):
            call("linear_attention", **make_inputs("linear_attention", np.float32), causal=False)
