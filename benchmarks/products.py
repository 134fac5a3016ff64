"""The same products written in several ways, by turns: which way the kernels here are fastest.

    python -m benchmarks.products [--dtype bfloat16] [--rounds N] [--sizes 16 128 512 8]

The first way of each is what TensorFlow makes of a training step of Keras's layers.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks import results
from benchmarks.tables import Table, show

Way = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_HEADERS = ("product", "way", "ms", "times as fast", "quartiles")
_HEADS_FIRST = (0, 2, 1, 3)


@dataclass(frozen=True)
class Product:
    """A product: the shapes of its operands, and the ways to write it."""

    title: str
    left: Sequence[int]
    right: Sequence[int]
    ways: Mapping[str, Way]


def _rows(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, (-1, x.shape[-1]))


def _heads(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, _HEADS_FIRST)


# Those of scores and of values, and the gradients of both.
_ATTENTION: Mapping[str, Way] = {
    "BTNH,BSNH->BNTS": lambda a, b: tf.matmul(_heads(a), _heads(b), transpose_b=True),
    "BNTS,BSNH->BTNH": lambda a, b: _heads(tf.matmul(a, _heads(b))),
    "BNTS,BTNH->BSNH": lambda a, b: _heads(tf.matmul(a, _heads(b), transpose_a=True)),
    "BTNH,BNTS->BSNH": lambda a, b: _heads(tf.matmul(b, _heads(a), transpose_a=True)),
}


def operands(equation: str) -> list[str]:
    """The labels of what an Einsum multiplies."""
    return equation.partition("->")[0].split(",")


def products(batch: int, tokens: int, width: int, heads: int) -> list[Product]:
    """Those of a transformer's training step."""
    x, hidden = (batch, tokens, width), (batch * tokens, 4 * width)
    scores, each = (batch, heads, tokens, tokens), (batch, tokens, heads, width // heads)
    return [
        Product(
            "gradient by a projection's weight",
            x,
            x,
            {
                "a product for each, and a sum": lambda a, b: tf.reduce_sum(
                    tf.matmul(a, b, transpose_a=True), 0
                ),
                "one product": lambda a, b: tf.matmul(_rows(a), _rows(b), transpose_a=True),
            },
        ),
        Product(
            "projection",
            x,
            (width, width),
            {
                "BatchMatMulV2": tf.matmul,
                "one product": lambda a, b: tf.reshape(tf.matmul(_rows(a), b), (-1, *x[1:])),
            },
        ),
        Product(
            "gradient by a Dense's weight",
            (batch * tokens, width),
            hidden,
            {
                "transpose_a": lambda a, b: tf.matmul(a, b, transpose_a=True),
                "transposed before": lambda a, b: tf.matmul(tf.transpose(a), b),
                "exchanged": lambda a, b: tf.transpose(tf.matmul(b, a, transpose_a=True)),
            },
        ),
        Product(
            "gradient by a Dense's input",
            hidden,
            (width, 4 * width),
            {
                "transpose_b": lambda a, b: tf.matmul(a, b, transpose_b=True),
                "transposed before": lambda a, b: tf.matmul(a, tf.transpose(b)),
            },
        ),
        *(
            Product(
                f"attention, {equation}",
                *(scores if operand.startswith("BN") else each for operand in operands(equation)),
                {"Einsum": functools.partial(tf.einsum, equation), "BatchMatMulV2": way},
            )
            for equation, way in _ATTENTION.items()
        ),
    ]


def filter_gradients(batch: int, pixels: int, width: int) -> list[Product]:
    """Gradients by filters: of convolutions of one pixel, of patches, and of three by three."""
    small, few = (batch, pixels, pixels, width), (batch, pixels // 2, pixels // 2, width)
    return [
        _filter_gradient("1 x 1", small, small, 1, 1, _rows),
        _filter_gradient(
            "2 x 2 patches", small, few, 2, 2, lambda x: _rows(tf.nn.space_to_depth(x, 2))
        ),
        _filter_gradient("3 x 3", few, few, 3, 1, _shifted_side_by_side),
    ]


def _filter_gradient(
    title: str,
    image: Sequence[int],
    upstream: Sequence[int],
    taps: int,
    stride: int,
    seen: Callable[[tf.Tensor], tf.Tensor],
) -> Product:
    """That of a square filter; what it sees of each pixel is a row."""
    sizes = [taps, taps, image[-1], upstream[-1]]
    options = {"filter_sizes": sizes, "strides": [1, stride, stride, 1], "padding": "SAME"}
    return Product(
        f"gradient by a filter, {title}",
        image,
        upstream,
        {
            "Conv2DBackpropFilter": lambda x, y: tf.raw_ops.Conv2DBackpropFilter(
                input=x, out_backprop=y, **options
            ),
            "one product": lambda x, y: tf.matmul(seen(x), _rows(y), transpose_a=True),
        },
    )


def _shifted_side_by_side(x: tf.Tensor) -> tf.Tensor:
    padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
    shifted = [tf.slice(padded, [0, i, j, 0], x.shape) for i in range(3) for j in range(3)]
    return _rows(tf.concat(shifted, -1))


def measure(product: Product, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    operands = [
        tf.cast(tf.random.stateless_normal(shape, (1, 2)), dtype)
        for shape in (product.left, product.right)
    ]
    functions = {
        name: tf.function(way).get_concrete_function(*operands)
        for name, way in product.ways.items()
    }
    for function in functions.values():
        function(*operands)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function(*operands)
            tf.test.experimental.sync_devices()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def rows(product: Product, seconds: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    """One for each way, compared with the first."""
    first = next(iter(seconds.values()))
    found = []
    for name, taken in seconds.items():
        speed = results.ratio(first, taken)
        median = f"{1e3 * results.spread(taken).median:.2f}"
        spread = f"{speed.low:.2f} to {speed.high:.2f}"
        found.append((product.title, name, median, f"{speed.median:.2f}", spread))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--rounds", type=int, default=40, help="how often each way is timed")
    parser.add_argument(
        "--sizes",
        nargs=4,
        type=int,
        metavar=("BATCH", "TOKENS", "WIDTH", "HEADS"),
        default=(16, 128, 512, 8),
        help="of the transformer",
    )
    parser.add_argument(
        "--images",
        nargs=3,
        type=int,
        metavar=("BATCH", "PIXELS", "CHANNELS"),
        default=(16, 16, 256),
        help="of the convolutions",
    )
    parser.add_argument("--small", action="store_true", help="tiny ones, to see that all runs")
    args = parser.parse_args()
    sizes = (2, 8, 16, 2) if args.small else args.sizes
    found: list[tuple[str, ...]] = []
    images = (2, 4, 8) if args.small else args.images
    for each in [*products(*sizes), *filter_gradients(*images)]:
        found += rows(each, measure(each, args.dtype, args.rounds))
    show([Table(f"Products, {args.dtype}", _HEADERS, tuple(found), left=2)])


if __name__ == "__main__":
    main()
