"""Every public name exists, is documented and shows an example; the docstrings' examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
import types

import pytest

import tfamp

PUBLIC_MODULES = {
    "tfamp": tfamp.__all__,
    "tfamp.mixed_precision": (
        "LossScaleOptimizer",
        "Policy",
        "global_policy",
        "set_global_policy",
    ),
}
PUBLIC_NAMES = [
    (module, name)
    for module, names in PUBLIC_MODULES.items()
    for name in names
    if name != "__version__"
]
ALL_MODULES = [
    "tfamp",
    *(
        info.name
        for info in pkgutil.walk_packages(tfamp.__path__, "tfamp.")
        if not info.name.endswith("__main__")
    ),
]


@pytest.mark.parametrize(("module", "name"), PUBLIC_NAMES)
def test_every_public_name_resolves_and_is_documented(module, name):
    value = getattr(importlib.import_module(module), name)
    assert (inspect.getdoc(value) or "").strip(), f"{module}.{name} has no docstring"


@pytest.mark.parametrize(("module", "name"), PUBLIC_NAMES)
def test_every_public_class_and_function_shows_an_example(module, name):
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, types.ModuleType):
        pytest.skip("a module's names have examples of their own")
    # A subclass that shows none would otherwise be taken to show its parent's.
    assert ">>> " in (value.__doc__ or ""), f"{module}.{name} has no >>> example"


@pytest.mark.parametrize("module", ALL_MODULES)
def test_docstring_examples_run(module):
    results = doctest.testmod(
        importlib.import_module(module),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert results.failed == 0, "see the captured output"


def test_dir_lists_every_public_name():
    assert set(tfamp.__all__) <= set(dir(tfamp))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'tfamp' has no attribute 'Polcy'"):
        tfamp.Polcy  # noqa: B018


def test_star_import_gives_the_public_names():
    namespace = {}
    exec("from tfamp import *", namespace)
    assert set(tfamp.__all__) <= set(namespace)


def test_version_is_the_installed_distributions():
    assert tfamp.__version__ == importlib.metadata.version("tfamp")


@pytest.mark.parametrize("name", PUBLIC_MODULES["tfamp.mixed_precision"])
def test_mixed_precision_names_are_the_top_level_ones(name):
    assert getattr(tfamp.mixed_precision, name) is getattr(tfamp, name)


def test_the_package_ships_its_types():
    assert (importlib.resources.files("tfamp") / "py.typed").is_file()
