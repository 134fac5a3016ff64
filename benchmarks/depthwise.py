"""Depthwise convolutions and their gradients in bfloat16 and in float32, by shape and by turns.

    python -m benchmarks.depthwise [--rounds N] [--small]

Processor time, which other work on the machine disturbs less than the time on the wall.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks import results
from benchmarks.tables import Table, show

_HEADERS = ("image", "filter", "stride", "op", "float32, ms", "bfloat16", "between Casts")
_LOW = "bfloat16"
_RUNS = 3


class Shape(NamedTuple):
    """A convolution: images are square, padded before where the stride is more than 1."""

    size: int
    channels: int
    kernel: int
    stride: int


# Those of efficientnet_b0 and convnext.
SHAPES = (
    Shape(64, 32, 3, 1),
    Shape(65, 96, 3, 2),
    Shape(32, 144, 3, 1),
    Shape(35, 144, 5, 2),
    Shape(16, 240, 5, 1),
    Shape(8, 480, 3, 1),
    Shape(4, 1152, 5, 1),
    Shape(24, 96, 7, 1),
    Shape(6, 384, 7, 1),
)


def functions(shape: Shape, batch: int) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """For each op its calls: in float32, in bfloat16, and in float32 between Casts."""
    raw: Any = tf.raw_ops
    padding = "SAME" if shape.stride == 1 else "VALID"
    options = {"strides": [1, shape.stride, shape.stride, 1], "padding": padding}
    x = tf.random.stateless_normal((batch, shape.size, shape.size, shape.channels), (1, 2))
    w = tf.random.stateless_normal((shape.kernel, shape.kernel, shape.channels, 1), (3, 4))
    y = raw.DepthwiseConv2dNative(input=x, filter=w, **options)
    sizes, weights = list(x.shape), list(w.shape)
    ops: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, y: raw.DepthwiseConv2dNative(input=x, filter=w, **options),
        "by input": lambda x, w, y: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=sizes, filter=w, out_backprop=y, **options
        ),
        "by filter": lambda x, w, y: raw.DepthwiseConv2dNativeBackpropFilter(
            input=x, filter_sizes=weights, out_backprop=y, **options
        ),
    }
    if shape.stride == 1:
        ops["by filter, as a convolution"] = lambda x, w, y: _by_convolution(x, y, shape.kernel)
    low = [tf.cast(each, _LOW) for each in (x, w, y)]
    for name, op in ops.items():
        yield (
            name,
            {
                "float32": _call(op, x, w, y),
                _LOW: _call(op, *low),
                "between Casts": _call(_between_casts(op), *low),
            },
        )


def _by_convolution(x: tf.Tensor, y: tf.Tensor, kernel: int) -> tf.Tensor:
    """The gradient by a filter: images are convolved with their upstream gradients, as channels."""
    batch, height, width, channels = x.shape
    edge = [(kernel - 1) // 2, kernel // 2]
    image = tf.reshape(tf.transpose(x, (1, 2, 0, 3)), (1, height, width, batch * channels))
    upstream = tf.reshape(tf.transpose(y, (1, 2, 0, 3)), (height, width, batch * channels, 1))
    found = tf.raw_ops.DepthwiseConv2dNative(
        input=tf.pad(image, [[0, 0], edge, edge, [0, 0]]),
        filter=upstream,
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    return tf.reduce_sum(tf.reshape(found, (kernel, kernel, batch, channels)), 2)


def _between_casts(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tf.cast(op(*(tf.cast(each, "float32") for each in args)), _LOW)


def _call(function: Callable[..., Any], *args: tf.Tensor) -> Callable[[], Any]:
    concrete = tf.function(function).get_concrete_function(*args)
    return lambda: concrete(*args)


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each call in each round."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(_RUNS):
                call()
            seconds[name].append((time.process_time() - start) / _RUNS)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="how often each op is timed")
    parser.add_argument("--small", action="store_true", help="tiny ones, to see that all runs")
    args = parser.parse_args()
    found = []
    for shape in (Shape(4, 2, 3, 1),) if args.small else SHAPES:
        about = (f"{shape.size} x {shape.size} x {shape.channels}", *map(str, shape[2:]))
        for name, calls in functions(shape, 16):
            seconds = measure(calls, args.rounds)
            median = f"{1e3 * results.spread(seconds['float32']).median:.2f}"
            low, cast = (
                f"{results.ratio(seconds[_LOW], seconds[each]).median:.2f}"
                for each in ("float32", "between Casts")
            )
            found.append((*about, name, median, low, cast))
    title = "Depthwise convolutions: bfloat16's time over float32's, and over that between Casts"
    show([Table(title, _HEADERS, tuple(found), left=4)])


if __name__ == "__main__":
    main()
