"""Random training steps in plain TensorFlow: what structure says about values, at random.

A program is a list of steps on matrices of ROWS x COLUMNS, a loss, and sizes of its data. Each step
keeps its values of about the size of its input, so that a program of any length stays in float32's
range. Weights are variables; other operands are activations, data and constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, COLUMNS = 128, 16
Draw = Any  # A `random.Random`, or one that Hypothesis shrinks.

# ---- Steps ---------------------------------------------------------------------------------------


def _unit(x: Any) -> Any:
    """Values of about 1."""
    return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x)) + 1e-12)


def _dense(x: Any, w: Any, n: int) -> Any:
    return tf.tanh(x @ w)


def _linear(x: Any, w: Any, n: int) -> Any:
    return x @ w


def _gram(x: Any, w: Any, n: int) -> Any:
    """Products of activations."""
    return _unit(x @ (tf.matmul(x, x, transpose_a=True) / ROWS))


def _attention(x: Any, w: Any, n: int) -> Any:
    scores = tf.matmul(x, x, transpose_b=True) / 4.0
    past = tf.range(ROWS)[:, None] >= tf.range(ROWS)[None]
    distance = tf.cast(tf.range(ROWS)[:, None] - tf.range(ROWS)[None], tf.float32)
    masks = (
        lambda: tf.where(past, scores, -1e9),
        lambda: scores + (1.0 - tf.cast(past, tf.float32)) * -1e9,
        lambda: scores - 0.25 * tf.abs(distance),  # ALiBi
        lambda: scores + tf.math.log(tf.cast(past, tf.float32) + 1e-20),
    )
    return tf.nn.softmax(masks[n % len(masks)]()) @ x


def _singular(x: Any, w: Any, n: int) -> Any:
    """Functions near the places where they, or their gradients, have none."""
    ways = (
        lambda: tf.math.log(tf.square(x) + 1e-6) * 0.1,
        lambda: tf.sqrt(tf.square(x) + 1e-12),
        lambda: tf.acos(tf.clip_by_value(tf.tanh(x), -1 + 1e-6, 1 - 1e-6)),
        lambda: x / (tf.reduce_max(tf.abs(x)) + 1e-15),
        lambda: tf.math.log1p(tf.exp(-tf.abs(x))) + tf.nn.relu(x),
        lambda: tf.math.l2_normalize(x, -1) * 4.0,
    )
    return ways[n % len(ways)]()


def _reduced(x: Any, w: Any, n: int) -> Any:
    """Sums over long axes."""
    ids = tf.range(ROWS) % 4
    ways = (
        lambda: x - tf.reduce_mean(x, 0),
        lambda: tf.cumsum(x, 0) / ROWS,
        lambda: tf.gather(tf.math.unsorted_segment_sum(x, ids, 4), ids) * (4 / ROWS),
        lambda: tf.gather(tf.math.segment_mean(x, tf.sort(ids)), ids),
        lambda: x + tf.reduce_sum(tf.abs(x), 0) / ROWS,
        lambda: tf.scatter_nd(ids[:, None], x, (ROWS, COLUMNS)) * (4 / ROWS) + x,
    )
    return ways[n % len(ways)]()


def _angles(x: Any, w: Any, n: int) -> Any:
    positions = tf.range(ROWS, dtype=tf.float32) * 8.0
    rates = 100.0 ** (-tf.range(COLUMNS, dtype=tf.float32) / COLUMNS)
    ways = (
        lambda: x * tf.cos(tf.einsum("i,j->ij", positions, rates)),
        lambda: x + tf.sin(tf.matmul(positions[:, None], rates[None])),
        lambda: tf.sin(16.0 * tf.tanh(x @ w)) + x,
    )
    return ways[n % len(ways)]()


def _indexes(x: Any, w: Any, n: int) -> Any:
    """Rows found by a rounded product of small integers, which float32 computes exactly."""
    places = tf.range(ROWS, dtype=tf.float32)[:, None] @ tf.ones((1, 3))
    found = tf.cast(tf.floor(tf.reduce_mean(places, -1) + 0.5), tf.int32)
    return tf.gather(tf.reverse(x, [0]), tf.clip_by_value(found, 0, ROWS - 1)) + x


def _decaying(x: Any, w: Any, n: int) -> Any:
    """A state over many iterations of a loop: a variable, in a branch, in an array, of a scan."""
    target = tf.tanh(x @ w)
    gate = tf.sigmoid(x) * 0.02
    rules = (
        lambda h: 0.99 * h + 0.01 * target,
        lambda h: (1.0 - gate) * h + gate * target,
        lambda h: h + 0.01 * (target - h),
    )
    # Float32, as the guide of autocast asks of a state: zeros like a low tensor are low there.
    rule, start = rules[n % len(rules)], tf.zeros(x.shape)

    def loop(body: Any, state: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 200, body, (0, state), maximum_iterations=200)[1]

    def array() -> Any:
        steps = tf.TensorArray(tf.float32, 201, clear_after_read=False, element_shape=x.shape)
        body = lambda i, a: (i + 1, a.write(i + 1, rule(a.read(i))))  # noqa: E731
        return loop(body, steps.write(0, start)).read(200)

    forms = (
        lambda: loop(lambda i, h: (i + 1, rule(h)), start),
        lambda: loop(lambda i, h: (i + 1, tf.cond(i % 4 < 3, lambda: rule(h), lambda: h)), start),
        lambda: tf.scan(lambda h, _: rule(h), tf.range(200), start)[-1],
        array,
    )
    return forms[n // len(rules) % len(forms)]()


def _fixed_point(x: Any, w: Any, n: int) -> Any:
    """A loop that ends at a tolerance; without convergence its result is 1,000."""

    def body(i: Any, z: Any, _: Any) -> Any:
        new = 0.5 * tf.tanh(z @ w + x)
        return i + 1, new, tf.reduce_max(tf.abs(new - z))

    start = 0, tf.zeros_like(x), tf.constant(1.0)
    more = lambda i, z, delta: (delta > 1e-5) & (i < 300)  # noqa: E731
    i, z, _ = tf.while_loop(more, body, start, maximum_iterations=300)
    return z + tf.where(i < 300, 0.0, 1000.0)


def _branch(x: Any, w: Any, n: int) -> Any:
    first, second = (_STEPS[_IN_FUNCTIONS[(n + k) % len(_IN_FUNCTIONS)]] for k in range(2))
    return tf.cond(tf.reduce_sum(w) > -1e9, lambda: first(x, w, n), lambda: second(x, w, n))


def _mapped(x: Any, w: Any, n: int) -> Any:
    blocks = tf.reshape(x, (4, ROWS // 4, COLUMNS))
    rows = tf.map_fn(lambda row: tf.tanh(row @ w) + tf.reduce_mean(row, 0), blocks)
    return tf.reshape(rows, (ROWS, COLUMNS))


def _called(x: Any, w: Any, n: int) -> Any:
    step = _STEPS[_IN_FUNCTIONS[n % len(_IN_FUNCTIONS)]]
    return tf.function(lambda x: step(x, w.read_value(), n), autograph=False)(x)


def _compiled(x: Any, w: Any, n: int) -> Any:
    step = _STEPS[_IN_FUNCTIONS[n % len(_IN_FUNCTIONS)]]
    run = tf.function(lambda x, w: step(x, w, n), autograph=False, jit_compile=True)
    return run(x, tf.convert_to_tensor(w))


def _convolved(x: Any, w: Any, n: int) -> Any:
    """Convolutions with kernels made of a weight."""
    taps = tf.stack([w, 0.5 * w, -w])
    image = tf.reshape(x, (1, ROWS // 8, 8, COLUMNS))
    ways = (
        lambda: tf.nn.conv1d(x[None], taps, 1, "SAME")[0],
        lambda: tf.reshape(tf.nn.conv2d(image, taps[None], 1, "SAME"), x.shape),
        lambda: tf.reshape(
            tf.nn.depthwise_conv2d(image, tf.reshape(w[:9], (3, 3, COLUMNS, 1)), (1,) * 4, "SAME"),
            x.shape,
        ),
        lambda: tf.nn.conv1d(x[None], taps, 1, "SAME", dilations=4)[0],
    )
    return tf.nn.gelu(ways[n % len(ways)]())


def _normalized(x: Any, w: Any, n: int) -> Any:
    ways = (
        lambda: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), 0.0, 1.0, 1e-3),
        lambda: (
            (x - tf.reduce_mean(x, -1, True))
            * tf.math.rsqrt(tf.math.reduce_variance(x, -1, True) + 1e-6)
        ),
        lambda: x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, True) + 1e-6),
        lambda: tf.nn.softmax(x * 8.0) * COLUMNS,
    )
    return ways[n % len(ways)]() @ w


def _looked_up(x: Any, w: Any, n: int) -> Any:
    """Rows of a weight by integers that come from values."""
    ids = tf.argmax(tf.stop_gradient(tf.round(x * 4.0)), -1)
    ways = (
        lambda: tf.gather(w, ids),
        lambda: tf.one_hot(ids, COLUMNS) @ w,
        lambda: tf.nn.embedding_lookup(w, tf.range(ROWS) % COLUMNS),
    )
    return 4.0 * ways[n % len(ways)]() + x


def _solved(x: Any, w: Any, n: int) -> Any:
    """Decompositions of a well conditioned matrix, and a spectrum."""
    square = tf.matmul(x, x, transpose_a=True) / ROWS + tf.eye(COLUMNS)
    ways = (
        lambda: tf.transpose(tf.linalg.solve(square, tf.transpose(x))),
        lambda: tf.transpose(
            tf.linalg.triangular_solve(tf.linalg.cholesky(square), tf.transpose(x))
        ),
        lambda: tf.abs(tf.signal.rfft(tf.transpose(x @ w))) / np.sqrt(ROWS),
    )
    solved = ways[n % len(ways)]()
    # A spectrum has half as many rows, and one more.
    return solved if solved.shape == x.shape else tf.tile(tf.transpose(solved)[:-1], (2, 1))


def _recomputed(x: Any, w: Any, n: int) -> Any:
    """A block that is computed again for its gradient, and its weight used once more."""
    block = tf.recompute_grad(lambda x: tf.tanh(x @ w))
    return block(x) + x @ w


def _custom(x: Any, w: Any, n: int) -> Any:
    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        y = x @ tf.eye(COLUMNS)
        return y, lambda dy: dy * 0.5 + tf.reduce_mean(dy, 0)

    return scaled(x)


_STEPS: Mapping[str, Callable[[Any, Any, int], Any]] = {
    "dense": _dense,
    "linear": _linear,
    "gram": _gram,
    "attention": _attention,
    "singular": _singular,
    "reduced": _reduced,
    "angles": _angles,
    "indexes": _indexes,
    "decaying": _decaying,
    "fixed point": _fixed_point,
    "branch": _branch,
    "mapped": _mapped,
    "called": _called,
    "compiled": _compiled,
    "recomputed": _recomputed,
    "custom": _custom,
    "convolved": _convolved,
    "normalized": _normalized,
    "looked up": _looked_up,
    "solved": _solved,
}
_IN_FUNCTIONS = (
    *("dense", "gram", "attention", "singular", "reduced", "angles"),
    *("convolved", "normalized"),
)

# ---- Losses --------------------------------------------------------------------------------------


def _distances(x: Any, y: Any) -> Any:
    """Squared distances by expansion."""
    squares = tf.reduce_sum(x * x, -1)[:, None] + tf.reduce_sum(y * y, -1)[None]
    return tf.nn.relu(squares - 2.0 * tf.matmul(x, y, transpose_b=True))


def _discrepancy(x: Any, y: Any) -> Any:
    def similarity(a: Any, b: Any) -> Any:
        return tf.reduce_mean(tf.exp(-_distances(a, b) / (2.0 * COLUMNS)))

    return similarity(x, x) + similarity(y, y) - 2.0 * similarity(x, y)


def _smoothed(x: Any, y: Any) -> Any:
    """The smoothing of SSIM: a convolution with a kernel that the graph computes."""
    window = tf.nn.softmax(-tf.square(tf.range(5, dtype=tf.float32) - 2.0))
    kernel = (window[:, None] * window[None])[:, :, None, None]
    image = lambda v: tf.nn.conv2d(v[None, ..., None], kernel, 1, "SAME")  # noqa: E731
    return tf.reduce_mean(image(x * y) - image(x) * image(y)) ** 2


LOSSES: Mapping[str, Callable[[Any, Any], Any]] = {
    "squares": lambda x, y: tf.reduce_mean(tf.square(x - y)),
    "absolute": lambda x, y: tf.reduce_mean(tf.abs(x - y)),
    "entropy": lambda x, y: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(ROWS) % COLUMNS, x)
    ),
    "style": lambda x, y: tf.reduce_mean(
        tf.square(tf.matmul(x, x, transpose_a=True) - tf.matmul(y, y, transpose_a=True))
    ),
    "distances": lambda x, y: tf.reduce_mean(tf.sqrt(_distances(x, y) + 1e-6)),
    "discrepancy": _discrepancy,
    "smoothed": _smoothed,
}

# ---- Programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Around:
    """Settings of a forward pass.

    Attributes:
        context: Returns a context that it runs in.
        rounded: Applied to the result of each step.
    """

    context: Callable[[], Any] = contextlib.nullcontext
    rounded: Callable[[Any], Any] = tf.identity


@dataclass(frozen=True)
class Program:
    """A training step.

    Attributes:
        steps: Kinds of steps, each with a number that chooses among its ways, and whether its input
            is added to its result.
        loss: A key of `LOSSES`.
        size: Of the inputs.
        target: Size of the targets.
        penalty: Whether the squared norm of a gradient is added to the loss.
        parts: Into how many parts of the batch the gradients are added up.
    """

    steps: tuple[tuple[str, int, bool], ...]
    loss: str
    size: float
    target: float
    penalty: bool = False
    parts: int = 1

    @property
    def multiplies_large_targets(self) -> bool:
        """Whether a penalty multiplies by targets that float16 does not have, whatever its scale.

        The loss itself keeps its products in float32; a gradient of its gradient does not.
        `find_nonfinite` names the op.
        """
        return self.penalty and self.target > 1e4 and self.loss in ("distances", "gram")

    def weights(self) -> list[np.ndarray]:
        """A matrix for each step, and one for the output."""
        random = np.random.default_rng(len(self.steps))
        shape = (len(self.steps) + 1, COLUMNS, COLUMNS)
        return [*(random.normal(size=shape) / np.sqrt(COLUMNS)).astype("float32")]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets; inputs far from 1 are scaled by the program."""
        random = np.random.default_rng(7)
        x, y = random.normal(size=(2, ROWS, COLUMNS))
        return (self.size * x).astype("float32"), (self.target * y).astype("float32")

    def outputs(self, x: Any, weights: Any, around: Around) -> Any:
        """The forward pass; the last product is with a weight."""
        with around.context():
            x = around.rounded(x * (1.0 / self.size))
            for (kind, number, adds), weight in zip(self.steps, weights, strict=False):
                new = around.rounded(_STEPS[kind](x, weight, number))
                x = around.rounded(x + new) if adds else new
            return tf.cast(around.rounded(x @ weights[-1]), tf.float32)

    def loss_of(self, x: Any, y: Any, weights: Any, around: Around) -> Any:
        """The loss, with the penalty."""
        if not self.penalty:
            return LOSSES[self.loss](self.outputs(x, weights, around), y)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = LOSSES[self.loss](self.outputs(x, weights, around), y)
        slope = tape.gradient(loss, x) * self.size
        return loss + tf.reduce_sum(tf.square(slope))

    def step(self, x: Any, y: Any, scale: Any, variables: Any, around: Around) -> Any:
        """The loss and the gradients, computed with a loss scale and divided by it.

        Args:
            x: The inputs.
            y: The targets.
            scale: The loss scale.
            variables: The weights, as variables.
            around: What is done to the forward pass.

        Returns:
            The loss, the gradients, and whether all of these are finite.
        """
        total: list[Any] = [0.0] * len(variables)
        for part in range(self.parts):
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y * (1.0 + 0.1 * part), variables, around)
                scaled = loss * scale
            gradients = tape.gradient(
                scaled, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            total = [a + g / scale for a, g in zip(total, gradients, strict=True)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in total])
        return loss, total, finite


def noise(eps: float, seed: int) -> Callable[[Any], Any]:
    """A function that rounds values and their gradients at random, without a limit of range."""

    def factor(x: Any, number: int) -> Any:
        signs = tf.random.stateless_uniform(tf.shape(x), (seed, number), 0, 2, tf.int32)
        return 1.0 + (2.0 * tf.cast(signs, tf.float32) - 1.0) * (eps / 2)

    @tf.custom_gradient
    def rounded(x: Any) -> Any:
        return x * factor(x, 1), lambda dy: dy * factor(dy, 2)

    return rounded


def draw(random: Draw, *, length: int = 4) -> Program:
    """Draws a program."""
    kinds = sorted(_STEPS)
    steps = tuple(
        (random.choice(kinds), random.randint(0, 11), bool(random.randint(0, 1)))
        for _ in range(random.randint(1, length))
    )
    # TensorFlow has no second derivative of these.
    twice = not {"fixed point", "recomputed", "compiled", "custom"} & {kind for kind, *_ in steps}
    return Program(
        steps,
        random.choice(sorted(LOSSES)),
        random.choice([1.0, 1e-6, 1e-3, 1e3, 1e5]),
        random.choice([1.0, 1e-3, 100.0, 1e5]),
        penalty=twice and random.randint(0, 5) == 5,
        parts=random.choice([1, 1, 2]),
    )
