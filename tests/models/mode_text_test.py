"""Modes as text: names, forms and options, and what is wrong with them."""

import pytest

from models.mode_text import mode_config
from support.errors import ConfigError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("text", "name", "expected"), [
    ("softmax", "softmax", {"form": None}),
    ("softmax:materialised", "softmax", {"form": "materialised"}),
    ("chunked:pallas_gpu:chunk-size=32", "chunked", {"kernel": "pallas_gpu", "chunk_size": 32}),
    ("reformer:rounds=4", "reformer", {"rounds": 4, "chunk_size": 64}),
    ("linear:feature_map=taylor:order=1:normalize=False", "linear",
     {"feature_map": "taylor", "order": 1, "normalize": False}),
    ("chunked:chunk_size=None:normalize=None", "chunked", {"chunk_size": None, "normalize": None}),
])
def test_a_mode_has_the_form_and_the_options_of_its_text(text, name, expected):
    found, config = mode_config(text)
    assert found == name
    assert {option: getattr(config, option) for option in expected} == expected


def test_options_of_the_text_replace_defaults_and_a_mode_ignores_those_that_it_lacks():
    defaults = {"feature_map": "softplus", "rounds": 3}
    assert mode_config("linear", defaults=defaults)[1].feature_map == "softplus"
    assert mode_config("linear:feature_map=relu", defaults=defaults)[1].feature_map == "relu"
    assert mode_config("reformer", defaults=defaults)[1].rounds == 3


@pytest.mark.parametrize(("text", "message"), [
    ("sotfmax", "--rows sotfmax: expected one of softmax, linear, reformer$"),
    ("gated", "--rows gated: expected one of softmax, linear, reformer$"),
    ("softmax:flash", "--rows softmax:flash: softmax has no form 'flash'; it has cudnn, blockwise, materialised$"),
    ("reformer:fast", "--rows reformer:fast: reformer has no form 'fast'; it has only one$"),
    ("reformer:round=4", "--rows reformer:round=4: reformer has no option 'round'; it has rounds, chunk_size, "),
    ("reformer:rounds=4:fast", "reformer has no option 'fast'; it has rounds, "),
    ("reformer:rounds=four", "--rows reformer:rounds=four: rounds is four; expected a whole number$"),
    ("reformer:rounds=", "rounds is empty; expected a whole number$"),
    ("reformer:rounds=0", "--rows reformer:rounds=0: model.modes.reformer.rounds is 0; expected at least 1$"),
    ("linear:feature_map=tanh", "feature_map is tanh; expected elu, relu, softplus, "),
    ("reformer:rounds=4:rounds=8", "reformer:rounds=4:rounds=8: rounds is given twice$"),
    ("softmax:materialised:form=blockwise", "softmax:materialised:form=blockwise: form is given twice$"),
    ("linear:normalize=maybe", "normalize is maybe; expected True, False or None$"),
])
def test_what_is_wrong_with_a_mode_is_told(text, message):
    with pytest.raises(ConfigError, match=message):
        mode_config(text, flag="--rows", known=("softmax", "linear", "reformer"))
