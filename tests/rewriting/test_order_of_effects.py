"""Random programs that read and assign variables, in calls, branches and loops, rewritten."""

import random

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import op_dtypes

WIDTH, ROWS = 4, 64
PLAIN = ("read", "add", "blend", "replace", "product")
NESTED = ("call", "branch", "loop", "weight")


class Program:
    """Statements drawn from a seed, and the variables that they read and assign."""

    def __init__(self, seed):
        source = random.Random(seed)
        self._values = [tf.fill((WIDTH,), 1.0 + number) for number in range(3)]
        self.vectors = [tf.Variable(value) for value in self._values]
        self.weight = tf.Variable(tf.eye(WIDTH))
        self._statements = self._drawn(source, depth=2)

    @property
    def variables(self):
        return [*self.vectors, self.weight]

    def reset(self):
        for variable, value in zip(self.variables, [*self._values, tf.eye(WIDTH)], strict=True):
            variable.assign(value)

    def __call__(self, x):
        return tf.matmul(self._run(self._statements, x), self.weight)

    def _drawn(self, source, depth):
        statements = []
        for _ in range(source.randint(3, 7)):
            kind = source.choice(PLAIN + NESTED if depth else PLAIN)
            inner = self._drawn(source, depth - 1) if kind in ("call", "branch", "loop") else None
            first, second = source.choices(self.vectors, k=2)
            statements.append((kind, first, second, source.choice([0.5, 1.0, 2.0]), inner))
        return statements

    def _run(self, statements, x):
        for kind, first, second, number, inner in statements:
            if kind == "read":
                x = x * 0.5 + first * 0.25
            elif kind == "add":
                first.assign_add(tf.fill((WIDTH,), number * 0.25))
            elif kind == "blend":
                first.assign(first * 0.5 + second * 0.25)
            elif kind == "replace":
                first.assign(first * 0.5 + number)
            elif kind == "product":
                x = tf.matmul(x, self.weight)
            elif kind == "weight":
                self.weight.assign(tf.eye(WIDTH) * (0.5 + number * 0.5))
            elif kind == "call":
                x = tf.function(lambda x, inner=inner: self._run(inner, x), autograph=False)(x)
            elif kind == "branch":
                x = tf.cond(
                    tf.reduce_sum(first) > 2.0,
                    lambda x=x, inner=inner: self._run(inner, x),
                    lambda x=x: tf.identity(x),
                )
            else:
                _, x = tf.while_loop(
                    lambda count, _: count < 2,
                    lambda count, x, inner=inner: (count + 1, self._run(inner, x)),
                    (0, x),
                )
        return x


def results(function, program):
    """The results of three calls, and the variables after each."""
    program.reset()
    found = []
    for call in range(3):
        found.append(function(tf.fill((ROWS, WIDTH), 1.0 + call * 0.5)).numpy())
        found += [variable.numpy() for variable in program.variables]
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("placement", ["lists", "fused"])
def test_reads_and_assignments_happen_in_the_order_of_the_program(seed, placement):
    program = Program(seed)
    exact = results(tf.function(program.__call__, autograph=False), program)
    fast = tfamp.rewrite(
        tf.function(program.__call__, autograph=False),
        dtype="bfloat16",
        placement=placement,
        profile="builtin",
    )
    actual = results(fast, program)
    if placement == "lists":
        assert "bfloat16" in op_dtypes(fast.concrete(tf.ones((ROWS, WIDTH))))["MatMul"]
    for value, wanted in zip(actual, exact, strict=True):
        # A few roundings of bfloat16, 0.4 % each. Without control inputs 11 of these 16 cases fail.
        np.testing.assert_allclose(value, wanted, rtol=0, atol=0.02 * max(1, np.abs(wanted).max()))
