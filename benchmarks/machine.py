"""What this machine computes per second in each dtype: the source of tfamp's built-in CPU profiles.

    python -m benchmarks.machine [--rounds N] [--json]

Matmuls, convolutions and their gradients, elementwise ops and Casts of the size of a small training
step, the dtypes by turns, so that a busy machine slows all of them; best of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tfamp.graph.machine import KINDS, MachineProfile

DTYPES = ("float32", "bfloat16", "float16")
MATMULS = ((256, 2048, 2048), (2048, 512, 512))
# Batch, height and width, channels in, channels out, kernel.
CONVOLUTIONS = ((8, 32, 64, 64, 3), (8, 16, 256, 64, 1), (8, 8, 256, 256, 3))
ELEMENTS = 1 << 24  # larger than most caches, as the activations of a training step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each thing is timed")
    parser.add_argument("--json", action="store_true", help="print a profile as JSON")
    args = parser.parse_args()
    profile = measure(args.rounds)
    if args.json:
        print(profile.to_json())
        return
    print(f"{'':14}" + "".join(f"{dtype:>12}" for dtype in DTYPES) + "   bf16/f32  f16/f32")
    for kind in KINDS:
        peaks = profile.peaks[kind]
        row = "".join(f"{peaks[dtype] / 1e9:12.1f}" for dtype in DTYPES)
        ratios = [peaks[dtype] / peaks["float32"] for dtype in DTYPES[1:]]
        print(f"{kind:14}{row}{ratios[0]:11.2f}{ratios[1]:9.2f}   10^9 per second")
    print(f"bandwidth {profile.bandwidth / 1e9:.1f} GB/s, Casts {profile.cast_bandwidth / 1e9:.1f}")
    print(f"overhead of an op {profile.op_overhead * 1e6:.1f} us")


def measure(rounds: int) -> MachineProfile:
    """Measures a profile of this machine's CPU."""
    peaks: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    with tf.device("CPU:0"):
        for kind, works in _works().items():
            times = [_interleaved(work, rounds) for work in works]
            for dtype in DTYPES:
                mean = statistics.geometric_mean(each[dtype] for each in times)
                peaks[kind][dtype] = 1 / mean
        return MachineProfile(
            name="measured",
            peaks=peaks,
            bandwidth=_bandwidth(rounds),
            cast_bandwidth=_cast_bandwidth(rounds),
            op_overhead=_overhead(rounds),
        )


Work = Callable[[str], Callable[[], object]]


def _works() -> Mapping[str, list[Work]]:
    """For each kind what to time, as the time of one FLOP."""
    return {
        "matmul": [lambda dtype, s=shape: _matmul(dtype, *s) for shape in MATMULS],
        "conv": [lambda dtype, s=shape: _conv(dtype, *s)[0] for shape in CONVOLUTIONS],
        "conv_input": [lambda dtype, s=shape: _conv(dtype, *s)[1] for shape in CONVOLUTIONS],
        "conv_filter": [lambda dtype, s=shape: _conv(dtype, *s)[2] for shape in CONVOLUTIONS],
        "elementwise": [lambda dtype, i=i: _elementwise(dtype)[i] for i in range(5)],
        "special": [lambda dtype, i=i: _special(dtype)[i] for i in range(7)],
    }


def _matmul(dtype: str, rows: int, depth: int, columns: int) -> tuple[Callable, float]:
    a, b = tf.ones((rows, depth), dtype), tf.ones((depth, columns), dtype)
    return (lambda: tf.raw_ops.MatMul(a=a, b=b)), 2.0 * rows * depth * columns


def _conv(dtype: str, batch: int, size: int, channels: int, out: int, kernel: int) -> list:
    image = tf.ones((batch, size, size, channels), dtype)
    weights = tf.ones((kernel, kernel, channels, out), dtype) * tf.cast(1 / channels, dtype)
    common = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    result = tf.raw_ops.Conv2D(input=image, filter=weights, **common)
    flops = 2.0 * batch * size * size * channels * out * kernel * kernel
    return [
        ((lambda: tf.raw_ops.Conv2D(input=image, filter=weights, **common)), flops),
        (
            lambda: tf.raw_ops.Conv2DBackpropInput(
                input_sizes=image.shape, filter=weights, out_backprop=result, **common
            ),
            flops,
        ),
        (
            lambda: tf.raw_ops.Conv2DBackpropFilter(
                input=image, filter_sizes=weights.shape, out_backprop=result, **common
            ),
            flops,
        ),
    ]


def _elementwise(dtype: str) -> list[tuple[Callable, float]]:
    # In the cache of most machines: it is the arithmetic that is timed and not the memory.
    x = tf.random.stateless_uniform((1 << 20,), (1, 2), 0.1, 1.0)
    x = tf.cast(x, dtype)
    works = [
        lambda: tf.raw_ops.AddV2(x=x, y=x),
        lambda: tf.raw_ops.Mul(x=x, y=x),
        lambda: tf.raw_ops.Relu(features=x),
        lambda: tf.raw_ops.ReluGrad(gradients=x, features=x),
        lambda: tf.raw_ops.Tanh(x=x),
    ]
    return [(work, float(1 << 20)) for work in works]


def _special(dtype: str) -> list[tuple[Callable, float]]:
    image = tf.random.stateless_uniform((16, 32, 32, 64), (1, 2), 0.1, 1.0)
    image, ones = tf.cast(image, dtype), tf.ones((64,))
    rows = tf.reshape(image, (1024, -1))
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    small = image[:, ::2, ::2]
    raw = tf.raw_ops
    works = [
        lambda: raw.Sigmoid(x=rows),
        lambda: raw.Softmax(logits=rows),
        lambda: raw.Log(x=rows),
        lambda: raw.MaxPool(input=image, **pool),
        lambda: raw.MaxPoolGrad(orig_input=image, orig_output=small, grad=small, **pool),
        lambda: raw.FusedBatchNormV3(x=image, scale=ones, offset=ones, mean=ones, variance=ones),
        lambda: raw.FusedBatchNormGradV3(
            y_backprop=image,
            x=image,
            scale=ones,
            reserve_space_1=ones,
            reserve_space_2=ones,
            reserve_space_3=ones,
        ),
    ]
    return [(work, float(tf.size(image))) for work in works]


def _interleaved(make: Work, rounds: int) -> dict[str, float]:
    """Seconds per unit of work, by dtype; the best of the rounds."""
    works = {dtype: make(dtype) for dtype in DTYPES}
    best = dict.fromkeys(DTYPES, float("inf"))
    for _ in range(rounds + 1):
        for dtype, (work, amount) in works.items():
            best[dtype] = min(best[dtype], _seconds(work) / amount)
    return best


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    first = tf.nest.flatten(work())[0]
    tf.reshape(first, [-1])[:1].numpy()  # waits for it
    return time.perf_counter() - start


def _bandwidth(rounds: int) -> float:
    # Each Add reads two tensors and writes one.
    x, y = tf.ones((ELEMENTS,)), tf.ones((ELEMENTS,))
    best = min(_seconds(lambda: tf.raw_ops.AddV2(x=x, y=y)) for _ in range(rounds + 1))
    return 3 * 4 * ELEMENTS / best


def _cast_bandwidth(rounds: int) -> float:
    x = tf.ones((ELEMENTS,))
    low = tf.cast(x, "bfloat16")
    down = min(_seconds(lambda: tf.cast(x, "bfloat16")) for _ in range(rounds + 1))
    up = min(_seconds(lambda: tf.cast(low, "float32")) for _ in range(rounds + 1))
    return 2 * 6 * ELEMENTS / (down + up)


def _overhead(rounds: int) -> float:
    """Seconds one more small op costs in a traced function."""

    def chain(length: int) -> Callable[[], object]:
        def function(x: tf.Tensor) -> tf.Tensor:
            for _ in range(length):
                x = tf.raw_ops.Cast(x=tf.raw_ops.Cast(x=x, DstT=tf.bfloat16), DstT=tf.float32)
            return x

        traced = tf.function(function).get_concrete_function(tf.TensorSpec((8,)))
        return lambda: traced(tf.ones((8,)))

    short, long = chain(10), chain(210)
    seconds = [min(_seconds(each) for _ in range(10 * rounds)) for each in (short, long)]
    return (seconds[1] - seconds[0]) / 400


if __name__ == "__main__":
    main()
