"""The slope of step time over length."""

import pytest

from speech import scaling


@pytest.mark.fast
@pytest.mark.parametrize("power", [1, 2])
def test_the_slope_is_the_power_of_the_length(power):
    rows = [scaling.Row(mode="linear", frames=frames, milliseconds=3.0 * frames ** power) for frames in (8, 16, 64)]
    assert scaling.slope(rows) == pytest.approx(power)
    assert scaling.slope(rows[:1]) is None


@pytest.mark.thorough
def test_the_command_writes_rows_and_slopes(tmp_path, capsys):
    assert scaling.main(["--frames", "52,99", "--layers", "1", "--steps", "2", "--json", str(tmp_path / "a.json")]) == 0
    assert "linear: slope" in capsys.readouterr().out
