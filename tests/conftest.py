"""Set-up shared by all tests: a small, deterministic TensorFlow and no policy left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

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
import keras
import pytest
import tensorflow as tf

import tfamp

gc.disable()  # Until all tests are collected: pytest_collection_finish.

# The same examples in every run, so that a change is what made a test fail; slow forms draw again.
# How long an example takes says nothing on a machine that others use too.
hypothesis.settings.register_profile("tfamp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tfamp")


def _configure_tensorflow() -> None:
    # All of this must come before the first op. Two logical CPUs let MirroredStrategy run anywhere;
    # ops that name no device stay on the first.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    # Under xdist every worker has a TensorFlow of its own: one thread per op each.
    tf.config.threading.set_intra_op_parallelism_threads(
        1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    )
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.experimental.enable_tensor_float_32_execution(False)


_configure_tensorflow()


def pytest_report_header() -> str:
    return (
        f"tfamp {tfamp.__version__} from {os.path.dirname(tfamp.__file__)}, "
        f"tensorflow {tf.__version__}, keras {keras.__version__}"
    )


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
    if config.getoption("on_cpu", default=False) or tf.config.list_physical_devices("GPU"):
        return
    skip = pytest.mark.skip(reason="needs a GPU, or --on-cpu for a try at toy size")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _isolated():
    """Starts every test from the same seeds, and undoes what it set for the whole process."""
    keras.utils.set_random_seed(0)
    yield
    if "tfamp.layers.policy_state" in sys.modules:
        tfamp.set_global_policy("float32")
    # Layer names count from zero again, and Keras's own global policy is back at float32.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="session")
def two_replicas() -> tf.distribute.MirroredStrategy:
    """A MirroredStrategy over two logical CPU devices.

    One for the whole session: the collectives of a second strategy in the same process reuse the
    first one's instance numbers, and TensorFlow then aborts with "Shape mismatch in the collective
    instance".
    """
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def without_tfamp() -> Iterator[Callable[..., None]]:
    """Runs programs in a process of their own that has no tfamp, with names given to them.

    One process for all: starting TensorFlow takes seconds.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda program, **names: pool.submit(exec, program, names).result(timeout=600)
