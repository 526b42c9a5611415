"""Generated utterances."""

import numpy as np
import pytest

from data.utterances import frames_needed
from speech import synthetic
from support.errors import ConfigError


def load(**changed):
    return synthetic.load(**{"context": 128, "train_utterances": 30, "val_utterances": 4, "seed": 0} | changed)


def test_utterances_fit_and_can_be_transcribed():
    dataset = load()
    for split in dataset.splits.values():
        for row, (length, symbols_L) in enumerate(zip(split.lengths_N, split.symbols_NL, strict=True)):
            frames_TK, symbols_L = split.frames[row], symbols_L[symbols_L > 0]
            assert frames_TK.shape == (length, dataset.features)
            assert frames_TK.dtype == np.float32
            assert 64 <= length <= 128
            assert frames_needed(symbols_L) <= length
    assert set(np.unique(dataset.splits["train"].symbols_NL)) == set(range(21))
    assert len(dataset.symbols) == 20


def test_a_letter_is_where_the_tone_is_and_equal_letters_are_apart():
    """The loudest bin of the first frame of a letter names it."""
    tones = synthetic.Tones(0, 0, 256)
    repeated = 0
    for row in range(20):
        symbols_P, lengths_P = tones.parts(row)
        frames_TK, starts_P = tones[row], np.cumsum(lengths_P) - lengths_P
        letters = symbols_P > 0
        loudest_P = frames_TK[starts_P[letters]].argmax(axis=1)
        right = np.abs(loudest_P - (2 + 1.8 * (symbols_P[letters] - 1))) <= 1.5
        assert right.mean() > 0.95
        assert not ((symbols_P[1:] == symbols_P[:-1]) & letters[1:]).any()
        said = symbols_P[letters]
        repeated += (said[1:] == said[:-1]).sum()
    assert repeated > 0


def test_utterances_depend_on_seed_split_and_number_alone():
    first, again, longer, other = load(), load(), load(train_utterances=60), load(seed=1)
    train = first.splits["train"]
    np.testing.assert_array_equal(train.frames[7], again.splits["train"].frames[7])
    np.testing.assert_array_equal(train.frames[7], longer.splits["train"].frames[7])
    assert first.checksum == again.checksum
    assert first.checksum not in (longer.checksum, other.checksum, load(context=100).checksum)
    assert not np.array_equal(train.symbols_NL[:4], first.splits["val"].symbols_NL)


def test_the_shortest_utterances_have_a_letter():
    assert (load(context=52).splits["train"].symbols_NL > 0).any(axis=1).all()
    with pytest.raises(ConfigError, match=r"model\.context is 51; expected at least 52 for synthetic"):
        load(context=51)
