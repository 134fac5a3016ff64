"""Random products with chains of constants between them, which compilers merge and reorder.

Op by op, the values of such a chain are in float16's range, and two of its constants merged may not
be: 300 * 300, 3000 * 3000. Where they are not in range, `op_by_op` is not near `exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

SIZE = 8
Rounded = Callable[[Any], Any]  # Applied to the value and the gradient of each op.
Draw = Any  # A `random.Random`, or one that Hypothesis shrinks.
# Constants that programs have, drawn as often as others.
_SPECIAL = (2.0**-10, 1 / 64, 1 / 3, 16.0, 64.0, 300.0, 3000.0, 16384.0)


def _filtered(x: Any, c: float, r: Rounded, scale: float = 1.0) -> Any:
    """A filter of one tap, on columns, of a scaled image: compilers move scales into filters."""
    image = tf.reshape(x, (1, 1, SIZE, SIZE))
    image = image if scale == 1.0 else r(image * scale)
    taps = np.float32(c) * np.eye(SIZE, dtype="float32")[None, None]
    return tf.reshape(tf.nn.conv2d(image, tf.constant(taps), 1, "SAME"), (SIZE, SIZE))


# What a step does with a value and a constant; the last argument rounds values between its ops.
# Each changes the size of values by a power of the constant, so that constants can undo others.
_STEPS: Mapping[str, Callable[[Any, float, Rounded], Any]] = {
    "times": lambda x, c, r: x * c,
    "of times": lambda x, c, r: c * x,
    "over": lambda x, c, r: x / c,
    "negative, then times": lambda x, c, r: r(-x) * c,
    "times a row": lambda x, c, r: x * tf.constant([c] * SIZE),
    "filter": _filtered,
    "scale and filter": lambda x, c, r: _filtered(x, c, r, c),
    "matrix": lambda x, c, r: x @ tf.constant(np.float32(c) * np.eye(SIZE, dtype="float32")),
    "reshape": lambda x, c, r: tf.reshape(x, (-1, SIZE)),
    "blocks": lambda x, c, r: tf.reshape(tf.reshape(x, (2, -1, SIZE // 2)) * c, (-1, SIZE)),
    "transpose": lambda x, c, r: tf.transpose(x),
    "negative": lambda x, c, r: -x,
    "relu": lambda x, c, r: tf.nn.leaky_relu(x),
    "root of absolute": lambda x, c, r: tf.sqrt(r(tf.abs(x))),
    "quotients multiplied": lambda x, c, r: r(x / c) * r(x / (c / 4.0)),
    "identity": lambda x, c, r: tf.identity(x),
    "sum": lambda x, c, r: r(x * c) + r(x * (2.0 * c)),
}
# The power, where it is not 1; a root and a square change more.
_POWERS = {
    **dict.fromkeys(("over", "quotients multiplied"), -1.0),
    **dict.fromkeys(("reshape", "transpose", "negative", "relu", "identity"), 0.0),
    "scale and filter": 2.0,
}
_PRODUCTS = ("matrix", "filter", "scale and filter")
# The sizes of values.
_LOW, _HIGH = 1e-3, 1e4


def _as_it_is(x: Any) -> Any:
    """Unlike `tf.identity` no op, which would keep compilers from merging its neighbours."""
    return x


class Values(NamedTuple):
    """Results of a program, as vectors of float64.

    Attributes:
        output: Its output.
        slope: The gradient of a weighted sum of the output, with respect to the input.
    """

    output: np.ndarray
    slope: np.ndarray


@dataclass(frozen=True)
class Chain:
    """A program of an input.

    Attributes:
        parts: After a product with a weight each, steps: a kind and a constant.
        size: Of the input.
        seed_size: Of the output's gradient.
    """

    parts: tuple[tuple[tuple[str, float], ...], ...]
    size: float
    seed_size: float = 1.0

    def weights(self) -> list[np.ndarray]:
        """Orthogonal matrices with no small entries; the first is the identity."""
        random = np.random.default_rng(len(self.parts))
        rows = [np.linalg.qr(random.normal(size=(SIZE, SIZE)))[0] for _ in self.parts]
        return [matrix.astype("float32") for matrix in (np.eye(SIZE), *rows)]

    def data(self) -> np.ndarray:
        """An input of one size: each value within a factor of 2."""
        random = np.random.default_rng(7)
        signs = random.choice([-1.0, 1.0], (SIZE, SIZE))
        return (self.size * signs * random.uniform(0.5, 1.0, (SIZE, SIZE))).astype("float32")

    def output(self, x: Any, weights: Any, rounded: Rounded = _as_it_is) -> Any:
        """The forward pass; the last product is with a weight."""
        for weight, steps in zip(weights, (*self.parts, ()), strict=True):
            x = rounded(x @ weight)
            for kind, constant in steps:
                x = rounded(_STEPS[kind](x, constant, rounded))
        return x

    def run(self, x: Any, weights: Any, rounded: Rounded = _as_it_is) -> Any:
        """The output, and the gradient with respect to the input."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.output(x, weights, rounded)
            total = tf.reduce_sum(y * self.seed_size)
        return y, tape.gradient(total, x)


def values(result: Any) -> Values:
    """The results of `Chain.run` as vectors."""
    return Values(*(np.ravel(np.float64(each)) for each in result))


def exact(chain: Chain) -> Values:
    """The values op by op in float32."""
    return values(chain.run(tf.constant(chain.data()), list(map(tf.constant, chain.weights()))))


def op_by_op(chain: Chain, dtype: str, seed: int | None = None) -> Values:
    """The values if each op's result and gradient is rounded to a dtype, within half its range.

    With a seed each is rounded up or down at random.
    """
    largest, eps = float(ml_dtypes.finfo(dtype).max) / 2, float(ml_dtypes.finfo(dtype).eps)
    random = np.random.default_rng(seed)

    def low(x: Any) -> Any:
        if seed is not None:
            x *= (1 + eps * random.uniform(-0.5, 0.5, x.shape)).astype("float32")
        kept = tf.cast(tf.cast(x, dtype), tf.float32)
        return tf.where(tf.abs(x) > largest, np.float32("inf"), kept)

    @tf.custom_gradient
    def rounded(x: Any) -> Any:
        return low(x), low

    weights = [low(tf.constant(weight)) for weight in chain.weights()]
    return values(chain.run(low(tf.constant(chain.data())), weights, rounded))


# Chains of float16 that constants merged by a compiler change, by what they do with a product.
KNOWN = {
    "3e4 / 3000 / 3000": Chain(((("over", 3000.0), ("over", 3000.0)),), 3e4),
    "3e4 / 16 / 64 / 3000": Chain(((("over", 16.0), ("over", 64.0), ("over", 3000.0)),), 3e4),
    "2e-3 * 300 * 300": Chain(((("times", 300.0), ("times", 300.0)),), 2e-3),
    "(16384 / 16384) * (16384 / 4096)": Chain(((("quotients multiplied", 16384.0),),), 16384.0),
    "sqrt(2e-3 * 300 * 300)": Chain(
        ((("times", 300.0), ("times", 300.0), ("root of absolute", 1.0)),), 2e-3
    ),
    "-(2e-3 * 400) * 400": Chain(((("times", 400.0), ("negative, then times", 400.0)),), 2e-3),
    "2e-3 * 300, filtered by 300": Chain(((("scale and filter", 300.0),),), 2e-3),
    "transposed between": Chain(((("over", 3000.0), ("transpose", 1.0), ("over", 3000.0)),), 3e4),
    "reshaped between": Chain(((("times", 300.0), ("blocks", 300.0)),), 2e-3),
}


def draw(random: Draw) -> Chain:
    """Draws a program whose values stay in range, but for its gradients."""
    size = 10.0 ** random.uniform(-3, 4)
    parts, now = [], size
    for _ in range(random.randint(1, 2)):
        steps = []
        for _ in range(random.randint(2, 6)):
            kind = random.choice(sorted(_STEPS))
            constant, new = _constant(random, kind, now)
            steps.append((kind, constant))
            now = new
        parts.append(tuple(steps))
    return Chain(tuple(parts), size, 10.0 ** random.randint(-2, 2))


def _constant(random: Draw, kind: str, now: float) -> tuple[float, float]:
    """A constant that leaves values in range, if one is found soon, and their size after it."""
    # Operands of a product are rounded, and so in range too.
    reach = 3.0 if kind in _PRODUCTS else 5.0
    for _ in range(20):
        constant = random.choice([10.0 ** random.uniform(-reach, reach), random.choice(_SPECIAL)])
        constant = float(f"{constant:.2g}")
        if kind == "root of absolute":
            new = now**0.5
        elif kind == "quotients multiplied":
            new = 4.0 * (now / constant) ** 2
        else:
            new = now * constant ** _POWERS.get(kind, 1.0)
        if _LOW <= new <= _HIGH:
            return constant, new
    return 1.0, new if _LOW <= new <= _HIGH else now
