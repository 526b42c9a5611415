"""Runs and positions of packed segments, for an explicit row."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.segments import positions_of, runs_of

pytestmark = pytest.mark.fast

IDS = jnp.array([[-1, 7, 7, 7, 3, -1, 3, 7, -1, -1], [0, 0, 1, 1, 1, 0, 0, 0, 2, -1], [-1] * 10])


def test_runs_are_numbered_in_order_of_appearance():
    np.testing.assert_array_equal(runs_of(IDS), [[-1, 0, 0, 0, 1, -1, 1, 2, -1, -1], [0, 0, 1, 1, 1, 2, 2, 2, 3, -1],
                                                 [-1] * 10])


def test_positions_are_those_of_a_document_alone():
    valid = np.asarray(IDS) >= 0
    np.testing.assert_array_equal(np.asarray(positions_of(IDS))[valid], [0, 1, 2, 0, 1, 0, 0, 1, 0, 1, 2, 0, 1, 2, 0])
    assert (np.asarray(positions_of(IDS)) >= 0).all()
