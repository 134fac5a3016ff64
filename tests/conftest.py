"""Set-up shared by all tests: the environment, garbage collection and markers."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# TensorFlow's default depends on the CPU, and so does what its kernels can do.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Nothing is measured, and the user's cache stays as it is. Processes that tests start inherit it.
os.environ["TFAMP_PROFILE"] = "builtin"
os.environ["TFAMP_CACHE"] = "off"

import hypothesis
import numpy as np
import pytest

import tfamp

gc.disable()  # Until all tests are collected: pytest_collection_finish.

# The same examples in every run, so that a change is what made a test fail; slow forms draw again.
# How long an example takes says nothing on a machine that others use too.
hypothesis.settings.register_profile("tfamp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tfamp")


# By module: the state of its RANDOM before its first test.
_STATES = pytest.StashKey[dict[str, object]]()


@pytest.hookimpl(tryfirst=True)  # Before tests/gpu changes some of it.
def pytest_configure(config: pytest.Config) -> None:
    # The controller of xdist's workers runs no test, and starts them seconds earlier without it.
    if hasattr(config, "workerinput") or not getattr(config.option, "tx", None):
        config.pluginmanager.import_plugin("helpers.tensorflow_setup")


def _version(name: str, nightly: str) -> str:
    for distribution in (name, nightly):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{distribution} {importlib.metadata.version(distribution)}"
    return f"no {name}"


def pytest_report_header() -> str:
    found = [_version("tensorflow", "tf-nightly"), _version("keras", "keras-nightly")]
    return ", ".join([f"tfamp {tfamp.__version__} from {os.path.dirname(tfamp.__file__)}", *found])


def _set_apart_what_lives_on() -> None:
    """Collects garbage, and takes what is left out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    # Looked through again and again, what importing TensorFlow, Keras and the tests left, a million
    # objects that live to the end, would cost a quarter of a run.
    _set_apart_what_lives_on()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # So would what TensorFlow and Keras keep of each file's traces: Keras collects at every layer
    # that it quantizes.
    if nextitem is not None and nextitem.path != item.path:
        _set_apart_what_lives_on()


@pytest.hookimpl(tryfirst=True)  # Before -m chooses.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # A slow case of a slow test, or slow on two axes at once: CI meets what it is made of.
        if len(list(item.iter_markers("slow"))) > 1:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """Every test draws the same from its module's RANDOM, whichever tests ran before it."""
    generator = getattr(request.module, "RANDOM", None)
    if isinstance(generator, np.random.Generator):
        states = request.session.stash.setdefault(_STATES, {})
        start = states.setdefault(request.module.__name__, generator.bit_generator.state)
        generator.bit_generator.state = start


@pytest.fixture
def exact_kernels(monkeypatch):
    """Kernels of products count as exact, as oneDNN's are: another rule is tested."""
    from tfamp import kernel_guard
    from tfamp.machine import hardware

    for module in (hardware, kernel_guard):
        monkeypatch.setattr(module, "onednn_dtypes", lambda: frozenset(["bfloat16", "float16"]))
