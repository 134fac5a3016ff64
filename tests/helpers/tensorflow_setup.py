"""A small, deterministic TensorFlow for the tests, and no policy left behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import keras
import pytest
import tensorflow as tf

import tfamp

# All of this must come before the first op. Two logical CPUs let MirroredStrategy run anywhere; ops
# that name no device stay on the first.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
# Under xdist every worker has a TensorFlow of its own: one thread per op each.
threads = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.experimental.enable_tensor_float_32_execution(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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
    if "tfamp.layers.policy_in_force" in sys.modules:
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
