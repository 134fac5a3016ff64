"""After `tfamp.tune`, however it ends, a program goes on bit for bit as if it was not called."""

import functools
import random
import signal
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each
from helpers.seeds import set_random_seed
from tfamp.rewriting import measured_runs

CANDIDATES = ("float32", "lists", "min_cut")
WIDTH = 4
# Those that keep something different: slots, counters, factors, averages, scales, sums.
OPTIMIZERS = {
    "scaled": lambda: scaled(keras.optimizers.Adam(0.1)),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: tfamp.GradientAccumulator(scaled(keras.optimizers.SGD(0.1)), steps=3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, gradient_accumulation_steps=2),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
}


def scaled(optimizer):
    return tfamp.LossScaleOptimizer(optimizer, dynamic_growth_steps=1)


class Program:
    """A train step that changes whatever a step can change, begun in a known state."""

    def __init__(self, optimizer):
        set_random_seed(5)
        layers = [keras.layers.Dense(WIDTH, "relu"), keras.layers.Dropout(0.5)]
        self.model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH)])
        self.optimizer = OPTIMIZERS[optimizer]()
        self.generator = tf.random.Generator.from_seed(7)
        self.given = tf.reshape(tf.range(1.0, 1.0 + WIDTH * WIDTH), (WIDTH, WIDTH))
        self.traced = []
        self.step = tf.function(self.written_step, autograph=False)

    def written_step(self, x):
        self.traced.append((random.random(), np.random.random()))
        x += self.generator.normal((WIDTH, WIDTH))
        x += keras.random.normal((WIDTH, WIDTH)) + tf.random.normal((WIDTH, WIDTH))
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        scale = getattr(inner, "get_scaled_loss", lambda loss: loss)
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(x, training=True) ** 2)
            to_lower = scale(loss)
        gradients = tape.gradient(to_lower, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    def bits(self):
        owners = (self.model, self.optimizer, getattr(self.optimizer, "optimizer", self.model))
        variables = [each for owner in owners for each in owner.variables]
        return [np.asarray(each).tobytes() for each in (*variables, self.generator.state)]

    def what_follows(self):
        """Everything that can be seen of a program from here on: it draws, and takes a step."""
        now = self.bits()
        drawn = [random.random(), np.random.random()]
        drawn += [float(draw(())) for draw in (keras.random.uniform, tf.random.uniform)]
        loss = float(self.step(self.given))
        return now, drawn, loss, self.bits(), float(self.generator.normal(()))


@functools.cache
def without_tuning(optimizer):
    program = Program(optimizer)
    program.step(program.given)
    return program.what_follows()


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C does what it does in a terminal, also where a shell runs this in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    """Interrupts as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def as_it_is(program, monkeypatch):
    del program, monkeypatch


def in_a_trace(program, monkeypatch):
    """Ctrl-C while the program is traced for tuning, when gradients are computed."""
    normal, begun = program.generator.normal, len(program.traced)

    def stopped(shape):
        if len(program.traced) == begun + 1:
            interrupt()
        return normal(shape)

    monkeypatch.setattr(program.generator, "normal", stopped)


def in_a_run(program, monkeypatch):
    """Ctrl-C in a turn of the last candidate."""
    stop_a_run(program, monkeypatch, interrupt)


def in_a_failing_run(program, monkeypatch):
    """A candidate's kernel fails in its turn."""

    def fail():
        raise tf.errors.ResourceExhaustedError(None, None, "no memory is left")

    stop_a_run(program, monkeypatch, fail)


def stop_a_run(program, monkeypatch, stop):
    together, turns, before = measured_runs.together, [], program.bits()

    def stopped(call, count):
        together(call, count)
        turns.append(1.0)
        if len(turns) == 2:  # Of the low candidates, which have the same graph.
            assert program.bits() != before, "a step was taken"
            stop()
        return turns[-1]

    monkeypatch.setattr(measured_runs, "together", stopped)


ENDS = {
    as_it_is: None,
    in_a_trace: KeyboardInterrupt,
    in_a_run: KeyboardInterrupt,
    in_a_failing_run: tf.errors.ResourceExhaustedError,
}


@pytest.mark.parametrize(("optimizer", "end"), one_of_each(OPTIMIZERS, ENDS, quick=1))
def test_the_program_goes_on_as_if_nothing_had_been_tuned(optimizer, end, monkeypatch):
    expected = without_tuning(optimizer)
    program = Program(optimizer)
    program.step(program.given)
    error = ENDS[end]
    with monkeypatch.context() as patches, pytest.raises(error) if error else nullcontext():
        end(program, patches)
        options = {"dtype": "float16", "candidates": CANDIDATES, "rounds": 2}
        report = tfamp.tune(program.step, program.given, **options)
        assert [row.low_nodes > 0 for row in report.rows] == [False, True, True]
    assert len(program.traced) > 1, "it was traced to tune it"
    assert program.what_follows() == expected
