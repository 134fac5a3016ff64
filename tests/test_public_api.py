"""Every public name exists, is documented and shows an example; the docstrings' examples run."""

from __future__ import annotations

import difflib
import doctest
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
import re
import types
from pathlib import Path

import pytest

import tfamp
from helpers.cases import tiers
from helpers.public_api import SNAPSHOT, describe, function_of, own_members, public_values

PUBLIC_NAMES = dict(public_values())
PUBLIC_CALLABLES = {
    name: value for name, value in PUBLIC_NAMES.items() if not isinstance(value, types.ModuleType)
}
API_PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
ALL_MODULES = [
    "tfamp",
    *(
        info.name
        for info in pkgutil.walk_packages(tfamp.__path__, "tfamp.")
        if not info.name.endswith("__main__")
    ),
]
# Their own tests show quicker what these do.
SLOW_EXAMPLES = ["tfamp.diagnostics.monitor", "tfamp.machine.profile_measure"]


def _summary(value):
    return (inspect.getdoc(value) or "").strip()


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_and_method_is_documented_and_shows_an_example(name):
    value = PUBLIC_NAMES[name]
    assert _summary(value), f"{name} has no docstring"
    if name in PUBLIC_CALLABLES:
        # A subclass that shows none would otherwise be taken to show its parent's.
        assert ">>> " in (value.__doc__ or ""), f"{name} has no >>> example"
    members = own_members(value) if inspect.isclass(value) else ()
    bare = [each for each, own in members if not each.startswith("_") and not _summary(own)]
    assert not bare, f"{name} has methods without a docstring"


@pytest.mark.parametrize("name", PUBLIC_CALLABLES)
def test_every_public_argument_and_result_is_typed(name):
    value = PUBLIC_CALLABLES[name]
    if inspect.isclass(value) and issubclass(value, BaseException):
        return
    functions = {name: value}
    if inspect.isclass(value):
        members = {f"{name}.{member}": each for member, each in own_members(value)}
        functions |= {member: function_of(each) for member, each in members.items()}
    for where, function in functions.items():
        signature = inspect.signature(function)
        arguments = [each for each in signature.parameters.values() if each.name not in _RECEIVERS]
        untyped = [each.name for each in arguments if each.annotation is each.empty]
        assert not untyped, f"{where} has arguments without a type"
        # What a constructor returns needs no saying.
        assert inspect.isclass(function) or signature.return_annotation is not signature.empty, (
            f"{where} does not say what it returns"
        )


_RECEIVERS = ("self", "cls")


def test_every_public_class_and_function_is_on_an_api_page():
    if not API_PAGES.is_dir():
        pytest.skip("the pages are not beside the tests")
    pages = "\n".join(page.read_text("utf-8") for page in API_PAGES.glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    homes = {name: _names_of(name, value) for name, value in PUBLIC_CALLABLES.items()}
    missing = [name for name, names in homes.items() if not names & shown]
    assert not missing, "give them a ::: line in docs/api/"


def _names_of(public, value):
    return {public, f"{value.__module__}.{value.__qualname__}"}


def test_public_names_and_signatures_are_those_of_the_snapshot():
    found, expected = describe(), SNAPSHOT.read_text("utf-8")
    difference = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "snapshot", "code", lineterm="", n=0
    )
    assert found == expected, "\n".join(
        ["The public API changed. If so intended: python tests/helpers/public_api.py", *difference]
    )


@pytest.mark.parametrize(
    "module", tiers([each for each in ALL_MODULES if each not in SLOW_EXAMPLES], SLOW_EXAMPLES)
)
def test_docstring_examples_run(module):
    results = doctest.testmod(
        importlib.import_module(module),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert results.failed == 0, "see the captured output"


def test_dir_and_a_star_import_give_the_public_names_and_an_unknown_one_is_an_error():
    namespace = {}
    exec("from tfamp import *", namespace)
    assert set(tfamp.__all__) <= set(namespace) & set(dir(tfamp))
    with pytest.raises(AttributeError, match=r"module 'tfamp' has no attribute 'Polcy'"):
        tfamp.Polcy  # noqa: B018


def test_version_is_the_installed_distributions():
    assert tfamp.__version__ == importlib.metadata.version("tfamp")


def test_mixed_precision_names_are_the_top_level_ones():
    for name in tfamp.mixed_precision.__all__:
        assert getattr(tfamp.mixed_precision, name) is getattr(tfamp, name)


def test_the_package_ships_its_types():
    assert (importlib.resources.files("tfamp") / "py.typed").is_file()
