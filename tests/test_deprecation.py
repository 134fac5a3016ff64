"""Old names go on working and say what to write; mistakes in a renaming show when it is made."""

import inspect
import warnings

import pytest

import tfamp
from tfamp.deprecation import renamed_arguments, renamed_function


@renamed_arguments(removed_in="9.9", factor="growth_factor", steps="growth_steps")
def grow(scale, *, growth_factor=2.0, growth_steps=1):
    """Grows a scale."""
    return scale * growth_factor**growth_steps


class Rule:
    @renamed_arguments(removed_in="9.9", factor="growth_factor")
    def __init__(self, growth_factor=2.0):
        self.growth_factor = growth_factor


def test_an_old_argument_is_passed_on_with_a_warning():
    with pytest.warns(
        tfamp.TfampDeprecationWarning,
        match=r"^grow\(factor=\.\.\.\) is now grow\(growth_factor=\.\.\.\); .* in tfamp 9\.9\.$",
    ):
        assert grow(1.0, factor=4.0, growth_steps=2) == 16.0


def test_each_old_argument_has_a_warning_of_its_own():
    with pytest.warns(tfamp.TfampDeprecationWarning) as caught:
        assert grow(1.0, factor=4.0, steps=3) == 64.0
    assert len(caught) == 2


def test_the_warning_is_attributed_to_the_caller():
    with pytest.warns(tfamp.TfampDeprecationWarning) as caught:
        grow(1.0, factor=4.0)
        line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_new_names_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grow(1.0, growth_factor=4.0) == 4.0
        assert Rule(3.0).growth_factor == 3.0


def test_both_names_of_one_argument_are_an_error():
    with pytest.raises(TypeError, match=r"grow got 'factor' and 'growth_factor'"):
        grow(1.0, factor=4.0, growth_factor=4.0)


def test_a_class_is_called_by_its_own_name():
    with pytest.warns(tfamp.TfampDeprecationWarning, match=r"Rule\(factor=\.\.\.\) is now Rule\("):
        assert Rule(factor=3.0).growth_factor == 3.0


def test_documentation_and_signature_are_the_functions():
    assert grow.__doc__ == "Grows a scale."
    assert list(inspect.signature(grow).parameters) == ["scale", "growth_factor", "growth_steps"]


@pytest.mark.parametrize("names", [{"old": "missing"}, {"scale": "growth_factor"}])
def test_a_renaming_that_fits_no_argument_is_refused(names):
    with pytest.raises(TypeError, match="must have an argument"):
        renamed_arguments(removed_in="9.9", **names)(lambda scale, growth_factor: None)


def test_an_old_function_does_what_the_new_one_does():
    enlarge = renamed_function("enlarge", grow, removed_in="9.9")
    with pytest.warns(
        tfamp.TfampDeprecationWarning, match=r"^enlarge is now grow; the old name goes in tfamp 9"
    ) as caught:
        assert enlarge(1.0, growth_factor=4.0) == 4.0
    assert caught[0].filename == __file__
    assert enlarge.__name__ == "enlarge"
    assert "grow" in enlarge.__doc__


def test_deprecations_are_shown_to_programs_and_found_by_both_filters():
    assert issubclass(tfamp.TfampDeprecationWarning, tfamp.TfampWarning)
    assert issubclass(tfamp.TfampDeprecationWarning, DeprecationWarning)
