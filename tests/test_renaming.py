"""Former names of arguments: accepted by keyword, refused beside the present name."""

import inspect

import pytest

from joma.arguments import InputError
from joma.renaming import old_names


@old_names(t="times", s="scale")
def product(times, scale=2):
    """Multiply."""
    return times * scale


def test_former_names_are_accepted_and_the_signature_has_the_present_ones():
    assert product(t=3) == product(times=3) == product(3) == 6
    assert product(3, s=5) == product(t=3, s=5) == 15
    assert list(inspect.signature(product).parameters) == ["times", "scale"]
    assert product.__doc__ == "Multiply."


def test_both_names_at_once_are_refused():
    with pytest.raises(InputError, match="`t` must be left out where `times` is given, got both; give `times` alone"):
        product(t=3, times=3)
