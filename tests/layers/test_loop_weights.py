"""Recurrent layers cast their weights before the loop over the steps of a sequence."""

import gc
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.tolerances import assert_all_close
from tfamp.layers.model_calls import plan_of

STEPS, WIDTH, UNITS = 24, 16, 32
X = np.random.default_rng(0).normal(size=(4, STEPS, WIDTH)).astype("float32")
MASK = np.arange(STEPS) < np.array([[STEPS], [STEPS], [7], [1]])
MAKE = {
    "LSTM": lambda: layers.LSTM(UNITS),
    "LSTM, sequences, backwards": lambda: layers.LSTM(
        UNITS, return_sequences=True, go_backwards=True
    ),
    "GRU": lambda: layers.GRU(UNITS),
    "GRU, reset before": lambda: layers.GRU(UNITS, reset_after=False),
    "SimpleRNN": lambda: layers.SimpleRNN(UNITS),
    "dropout": lambda: layers.LSTM(UNITS, dropout=0.5, recurrent_dropout=0.5, seed=1),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(UNITS)),
    "stacked": lambda: layers.RNN([layers.LSTMCell(UNITS), layers.GRUCell(UNITS)]),
    "unrolled": lambda: layers.LSTM(UNITS, unroll=True),
}


def made(make, policy="float32"):
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(policy):
        layer = make()
        layer.build(X.shape)
    return layer


def gradient_of(layer, training=False, **options):
    """A function of a layer's results, the gradient of their squares by weights, and by x."""

    @tf.function(**options)
    def gradient(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = tf.cast(layer(x, mask=mask, training=training), tf.float32)
            loss = tf.reduce_mean(results**2)
        return results, *tape.gradient(loss, [*layer.trainable_weights, x])

    return gradient


def reads(function, inside):
    """The names of what reads variables, in the loops of a function or outside of them."""
    concrete = function.get_concrete_function(tf.constant(X), tf.constant(MASK))
    graph_def = concrete.graph.as_graph_def()
    bodies = graph_def.library.function
    nodes = [node for body in bodies for node in body.node_def] if inside else graph_def.node
    return [node.name for node in nodes if node.op == "ReadVariableOp"]


@pytest.mark.parametrize("compiled", [False, True], ids=["ops", "XLA"])
@pytest.mark.parametrize("name", MAKE)
def test_results_and_gradients_are_close_to_float32s(low, name, compiled):
    make = MAKE[name]
    layer, exact = made(make, f"mixed_{low}"), made(make)
    args = tf.constant(X), tf.constant(MASK)
    training = name == "dropout"
    found = gradient_of(layer, training, jit_compile=compiled)(*args)
    expected = gradient_of(exact, training, jit_compile=compiled)(*args)
    assert {each.dtype for each in found} == {tf.float32}
    if training and compiled:
        return  # XLA draws other numbers.
    assert_all_close(found, expected, low, depth=STEPS)


def test_weights_are_cast_once_before_the_loop(low):
    layer, exact = made(MAKE["LSTM"], f"mixed_{low}"), made(MAKE["LSTM"])
    assert reads(gradient_of(exact), inside=True)
    assert reads(gradient_of(layer), inside=True) == []
    assert len(reads(gradient_of(layer), inside=False)) >= 3
    assert plan_of(layer).to_text() == "hidden; exact sums; weights cast once"


def test_gradients_of_many_steps_are_added_up_in_float32(low):
    steps = 4096
    with tfamp.policy_scope(f"mixed_{low}"):
        low_layer = layers.SimpleRNN(
            1,
            activation="linear",
            kernel_initializer="zeros",
            recurrent_initializer="ones",
        )
        low_layer.build((1, steps, 1))
    x = tf.ones((1, steps, 1))

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            result = tf.reduce_sum(tf.cast(low_layer(x), tf.float32))
        return tape.gradient(result, low_layer.cell.kernel.value)

    # The sum of equal terms: in bfloat16 it would stop at 256.
    assert float(tf.squeeze(gradient())) == steps


class Halving(layers.Layer):
    """A cell that halves its weight at each step."""

    state_size = output_size = 1

    def build(self, _):
        self.weight = self.add_weight(shape=(1, 1), initializer="ones")

    def call(self, x, states):
        product = keras.ops.matmul(x, self.weight)
        self.weight.assign(keras.ops.cast(self.weight / 2, "float32"))
        return product, [product]


def test_a_cell_that_assigns_its_weight_reads_it_at_each_step(low):
    with tfamp.policy_scope(f"mixed_{low}"):
        layer = layers.RNN(Halving(), return_sequences=True)
        layer.build((1, 4, 1))
    found = tf.function(layer)(tf.ones((1, 4, 1)))
    # Keras calls the cell once before the loop.
    np.testing.assert_array_equal(np.ravel(found), [0.5, 0.25, 0.125, 0.0625])


def test_fit_learns_and_a_file_is_keras_own(low, tmp_path):
    with tfamp.policy_scope(f"mixed_{low}"):
        model = keras.Sequential([keras.Input(X.shape[1:]), layers.GRU(8), layers.Dense(1)])
    model.compile("adam", "mse")
    y = X.mean((1, 2))[:, None]
    losses = model.fit(X, y, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    before = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    with tfamp.policy_scope("float32"):
        again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), before, atol=0.02)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(X), before, atol=0.02)


def test_second_gradients_and_maps(low):
    layer = made(lambda: layers.SimpleRNN(4), f"mixed_{low}")
    exact = made(lambda: layers.SimpleRNN(4))

    def second(layer):
        @tf.function
        def run(x):
            with tf.GradientTape() as outer, tf.GradientTape() as inner:
                outer.watch(x), inner.watch(x)
                loss = tf.reduce_sum(tf.cast(layer(x), tf.float32) ** 2)
                gradient = inner.gradient(loss, x)
                total = tf.reduce_sum(gradient**2)
            return outer.gradient(total, layer.trainable_weights)

        return run(tf.constant(X[:, :5]))

    assert_all_close(second(layer), second(exact), low, depth=4 * STEPS)


def test_graphs_are_released(low):
    layer = made(MAKE["LSTM"], f"mixed_{low}")
    args = tf.constant(X), tf.constant(MASK)

    def graph():
        gradient = gradient_of(layer)
        gradient(*args)
        return weakref.ref(gradient.get_concrete_function(*args).graph)

    held = [graph() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


class Chunked(layers.LSTM):
    """A stateful layer that runs its loop several times, from a state that it resets."""

    def call(self, x, **options):
        self.reset_state()
        call = super().call
        start = tf.zeros((len(X), UNITS), self.compute_dtype)
        return tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, call(x[:, :2])), (0, start))[
            1
        ]


class Adapting(layers.SimpleRNN):
    """A layer that differentiates its own loop, and changes its weights between runs of it."""

    def build(self, shape):
        super().build(shape)
        self.held = [weight.value for weight in self.trainable_weights]

    def call(self, x, **options):
        call = super().call

        def body(i, total):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(call(x), tf.float32) ** 2)
            gradient = tape.gradient(loss, list(self.held))
            self.cell.bias.assign(tf.fill((UNITS,), 0.1))
            return i + 1, total + sum(map(tf.norm, gradient))

        total = tf.while_loop(lambda i, _: i < 2, body, (0, 0.0))[1]
        return call(x) + tf.cast(total, self.compute_dtype)


class OfItsOwn(layers.LSTM):
    """A layer with a function of its own, which each trace of the layer calls."""

    def build(self, shape):
        super().build(shape)
        call = super().call
        self.run = tf.function(lambda x: call(x))

    def call(self, x, **options):
        return self.run(x) + 0 * keras.ops.sum(self.cell.kernel)


class Counting(layers.Layer):
    """An activation with a state."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * 0 + keras.ops.cast(self.count, x.dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chunked(UNITS, stateful=True),
        lambda: Adapting(UNITS),
        lambda: OfItsOwn(UNITS),
        lambda: layers.SimpleRNN(UNITS, activation=Counting(), return_sequences=True),
    ],
    ids=["loops over its loop", "changes weights", "function of its own", "activation counts"],
)
def test_layers_of_a_users_own_compute_as_in_float32(low, make):
    def results(policy):
        layer = made(make, policy)
        runs = [tf.function(lambda x: tf.cast(layer(x), tf.float32)) for _ in range(2)]
        return [run(tf.constant(X)) for run in runs]

    assert_all_close(results(f"mixed_{low}"), results("float32"), low, depth=STEPS)


def test_a_loaded_function_has_its_gradients_where_no_tfamp_is(low, tmp_path):
    layer = made(MAKE["GRU"], f"mixed_{low}")
    module = tf.Module()
    module.held = [weight.value for weight in layer.trainable_weights]
    module.run = tf.function(
        lambda x: tf.cast(layer(x), tf.float32), input_signature=[tf.TensorSpec(X.shape)]
    )
    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        loss = tf.reduce_sum(module.run(x) ** 2)
    expected = float(tf.norm(tape.gradient(loss, x)))
    tf.saved_model.save(module, tmp_path / "saved")
    np.save(tmp_path / "x.npy", X)
    code = (
        "import numpy as np, sys, tensorflow as tf\n"
        "model = tf.saved_model.load(sys.argv[1] + '/saved')\n"
        "x = tf.constant(np.load(sys.argv[1] + '/x.npy'))\n"
        "with tf.GradientTape(persistent=True) as tape:\n"
        "    tape.watch(x)\n"
        "    loss = tf.reduce_sum(model.run(x) ** 2)\n"
        "gradients = tape.gradient(loss, model.held)\n"
        "assert len(gradients) == 3 and all(g is not None for g in gradients)\n"
        "assert 'tfamp' not in sys.modules\n"
        "print(float(tf.norm(tape.gradient(loss, x))))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(expected, rel=0.02)
