"""How slow float16 is on a CPU that only emulates it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfamp.machine import hardware

_ROUNDS = 5
# Below this ratio the difference may be noise.
_SLOWER = 1.2


def is_emulated(machine: hardware.Hardware) -> bool:
    """Whether float16 would run on a CPU that converts it to float32 and back at every op."""
    return not (machine.cpu_float16 or machine.gpus or machine.tpu)


def warning() -> str | None:
    """What speaks against float16 on this machine, None if nothing does."""
    found = hardware.detect()
    if not is_emulated(found):
        return None
    slowdown = measure_slowdown()
    if slowdown < _SLOWER:
        return None
    alternative = (
        'Use "bfloat16", which this CPU multiplies natively.'
        if found.cpu_bfloat16
        else "Use float32 here, and float16 on a GPU."
    )
    return (
        "This CPU has no float16 arithmetic: matmuls and convolutions with their gradients took "
        f"{slowdown:.1f} times as long in float16 as in float32, as just measured. {alternative}"
    )


@functools.lru_cache(maxsize=1)
def measure_slowdown() -> float:
    """Times small matmuls and convolutions with their gradients; once per process, some ms.

    Returns:
        Time in float16 over time in float32.
    """
    import tensorflow as tf

    def measure() -> float:
        with tf.device("CPU:0"):
            return _slowdown(tf)

    # A thread of its own is eager wherever this is called: in a function that is being traced, and
    # under `tf.Graph().as_default()`, which `tf.init_scope` does not leave.
    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(measure).result()


def _slowdown(tf: Any) -> float:
    works = {dtype: _work(tf, dtype) for dtype in ("float32", "float16")}
    times: dict[str, list[float]] = {dtype: [] for dtype in works}
    for work in works.values():
        work()
    for _ in range(_ROUNDS):  # Interleaved, so that a busy machine slows down both.
        for dtype, work in works.items():
            start = time.perf_counter()
            work()
            times[dtype].append(time.perf_counter() - start)
    return statistics.median(times["float16"]) / statistics.median(times["float32"])


def _work(tf: Any, dtype: str) -> Callable[[], None]:
    matrix = tf.ones((256, 256), dtype)
    image, kernel = tf.ones((8, 16, 16, 16), dtype), tf.ones((3, 3, 16, 16), dtype)
    common = {"strides": [1, 1, 1, 1], "padding": "SAME"}

    def work() -> None:
        product = tf.raw_ops.MatMul(a=matrix, b=matrix)
        tf.raw_ops.MatMul(a=product, b=matrix, transpose_b=True)
        tf.raw_ops.MatMul(a=matrix, b=product, transpose_a=True)
        out = tf.raw_ops.Conv2D(input=image, filter=kernel, **common)
        filters = tf.raw_ops.Conv2DBackpropFilter(
            input=image, filter_sizes=[3, 3, 16, 16], out_backprop=out, **common
        )
        filters.numpy()

    return work
