"""What fits a card, and how long a launch takes there."""

import pytest

from compilation import cards
from compilation.launches import Launch, Work

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("work", "in_graph", "seconds"), [
    (Work(3_000_000_000, 1_000_000_000, 4_000_000_000), False, 1e-3),
    (Work(4_000, 0, 11_000_000_000), False, 2e-3), (Work(0, 0, 0, {"bf16": 650 * 10**9, "f32x3": 325 * 10**9}), False,
                                                   4e-3),
    (Work(), False, 3e-6), (Work(), True, 1.5e-6),
])
def test_a_launch_takes_what_is_longest(work: Work, in_graph: bool, seconds: float):
    assert cards.RATES["h200"].seconds(Launch("x", "x", 5, work, in_graph)) == pytest.approx(seconds)


def test_an_instruction_for_a_tpu_takes_its_cycles_and_a_kernel_what_is_longest():
    rates = cards.RATES["v5e"]
    assert rates.seconds(Launch("x", "x", 1, Work(10**9, 0, 0, cycles=1_500_000), False)) == pytest.approx(1e-3)
    assert rates.seconds(Launch("x", "x", 1, Work(8190, 0, 0, {"bf16": 197 * 10**9}), False)) == pytest.approx(1e-3)


@pytest.mark.parametrize(("card", "share", "said"), [
    ("h200", 0.74, "fits"), ("h200", 0.9, "fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment"),
    ("h200", 0.96, "does not fit"), ("v5e", 0.9, "fits"), ("v5e", 0.96, "does not fit")])
def test_verdicts(card, share, said):
    assert cards.verdict(int(share * cards.memory_of(card)), card) == said


def test_a_program_fits_some_cards():
    assert cards.verdicts(2**30, "v5e") == "fits: v5e"
    assert cards.verdicts(60 * 2**30, "h200") == (
        "fits: h200, a100-80gb; fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: h100-80gb; "
        "does not fit: a100-40gb, rtx4090, l4")
