"""Random programs with loops, conditionals, calls, TensorLists, variables and casts.

A program is a block of steps on 4 x 4 matrices. Of every value the absolute values of a row add up
to one at most, whatever the steps: errors of low precision stay small without a look at values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

SIZE = 4
# What one step does to its operands a and b.
_ELEMENTARY = {
    "matmul": lambda a, b: a @ b,
    "add": lambda a, b: (a + b) * 0.5,
    "multiply": lambda a, b: a * b,
    "concat": lambda a, b: tf.concat([a[:2], b[2:]], 0),
    "tanh": lambda a, _: tf.tanh(a),
    "sigmoid": lambda a, _: tf.sigmoid(a) * 0.25,
    "exp": lambda a, _: tf.exp(a) * 0.09,
    "softmax": lambda a, _: tf.nn.softmax(a),
    "softplus": lambda a, _: tf.nn.softplus(a) * 0.19,
    "sin": lambda a, _: tf.sin(a),
    "reverse": lambda a, _: tf.reverse(a, [0]),
    "low_cast": lambda a, _: tf.cast(tf.cast(a, tf.bfloat16), tf.float32),
    "integer_cast": lambda a, _: a * tf.cast(tf.shape(a)[0], tf.float32) * 0.25,
}
_WITH_BLOCKS = ("loop", "conditional", "call", "call_kept", "call_compiled", "map", "list_in_loop")
_WITH_STATE = ("list", "identities", "read", "assign", "wait")


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kind: What it does.
        operands: Positions of two values among those made so far.
        blocks: What is run inside.
    """

    kind: str
    operands: tuple[int, int]
    blocks: tuple[tuple[Step, ...], ...] = ()

    def ops(self) -> set[str]:
        """The kinds of it and of all steps inside."""
        return {self.kind}.union(*(step.ops() for block in self.blocks for step in block))


def draw(random, *, values=1, depth=2, length=5) -> tuple[Step, ...]:
    """Draws a block that starts with `values` values; `random` is a `random.Random`."""
    steps = []
    for _ in range(random.randint(1, length)):
        kinds = ("matmul",) * 5 + tuple(_ELEMENTARY) + _WITH_STATE
        if depth:
            kinds += _WITH_BLOCKS
        kind = random.choice(kinds)
        # Late values more often, so that programs are deep.
        low = max(0, values - 3) if random.randint(0, 2) else 0
        operands = (random.randint(low, values - 1), random.randint(0, values - 1))
        blocks = ()
        if kind in _WITH_BLOCKS:
            # What XLA compiles has no loops: TensorFlow cannot differentiate those from outside.
            inner = 0 if kind == "call_compiled" else depth - 1
            number = 2 if kind == "conditional" else 1
            blocks = tuple(
                draw(random, values=2, depth=inner, length=length - 2) for _ in range(number)
            )
        steps.append(Step(kind, operands, blocks))
        values += 1
    return tuple(steps)


class Program:
    """A callable of one matrix, with variables of its own."""

    def __init__(self, block: Sequence[Step]) -> None:
        self.block = block
        self.ops = set().union(*(step.ops() for step in block))
        random = np.random.default_rng(4)
        self._values = [_matrix(random), _matrix(random)]
        self.variables = [tf.Variable(value) for value in self._values]
        self.example = tf.constant(_matrix(random))

    def __repr__(self) -> str:
        return f"Program({self.block})"

    def reset(self) -> None:
        """Gives the variables the values they started with."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)

    def __call__(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The last value, and the mean of all in float64."""
        values = self._values_of(self.block, [x])
        return values[-1], tf.add_n([tf.reduce_mean(tf.cast(v, tf.float64)) for v in values])

    def concrete(self):
        """The traced program; it keeps the variables alive."""
        function = tf.function(self.__call__, autograph=False)
        traced = function.get_concrete_function(tf.TensorSpec((SIZE, SIZE)))
        traced.graph.program = self
        return traced

    def _run(self, block, values):
        return self._values_of(block, values)[-1]

    def _values_of(self, block, values):
        values = list(values)
        for step in block:
            a, b = (values[i] for i in step.operands)
            if step.kind in _ELEMENTARY:
                values.append(_ELEMENTARY[step.kind](a, b))
            else:
                values.append(getattr(self, f"_{step.kind}")(a, b, *step.blocks))
        return values

    def _loop(self, a, b, block):
        def body(i, a, b):
            return i + 1, self._run(block, [a, b]), a

        return tf.while_loop(lambda i, *_: i < 2, body, (0, a, b), maximum_iterations=3)[1]

    def _conditional(self, a, b, block, other):
        # Not of a and b: where they are equal, rounding would choose the branch.
        return tf.cond(
            self.variables[0][0, len(block) % SIZE] > 0.0,
            lambda: self._run(block, [a, b]),
            lambda: self._run(other, [b, a]),
        )

    def _call(self, a, b, block, **options):
        def called(a, b):
            return self._run(block, [a, b])

        function = tf.function(called, autograph=False, **options)
        return (function(a, b) + function(b, a)) * 0.5

    def _call_kept(self, a, b, block):
        return self._call(a, b, block, experimental_attributes={"_noinline": True})

    def _call_compiled(self, a, b, block):
        return self._call(a, b, block, jit_compile=True)

    def _map(self, a, b, block):
        rows = tf.stack([a, b])
        return tf.map_fn(lambda row: self._run(block, [row, b]), rows)[1]

    def _list_in_loop(self, a, b, block):
        def body(i, value, rows):
            value = self._run(block, [value, b])
            return i + 1, value, rows.write(i, value)

        rows = tf.TensorArray(tf.float32, size=2, element_shape=(SIZE, SIZE))
        _, value, rows = tf.while_loop(
            lambda i, *_: i < 2, body, (0, a, rows), maximum_iterations=2
        )
        return (rows.stack()[0] + value) * 0.5

    def _list(self, a, b):
        rows = tf.TensorArray(tf.float32, size=2, clear_after_read=False)
        rows = rows.write(0, a).write(1, b)
        return rows.read(0) @ rows.stack()[1]

    def _identities(self, a, b):
        a, b, two = tf.identity_n([a, b, tf.constant(2)])
        return (a + b) / tf.cast(two, tf.float32)

    def _read(self, a, _):
        return a @ self.variables[0]

    def _assign(self, a, b):
        self.variables[1].assign(a)
        self.variables[1].assign_add(b)
        return self.variables[1].read_value() * 0.5

    def _wait(self, a, b):
        with tf.control_dependencies([b]):
            return tf.identity(a)


def _matrix(random) -> np.ndarray:
    matrix = random.uniform(-1, 1, (SIZE, SIZE))
    return (matrix / np.abs(matrix).sum(1, keepdims=True)).astype("float32")
