"""Copied models continue where the given ones are: random states, metrics, names, settings."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.seeds import set_random_seed

O3 = {"level": "O3", "dtype": "bfloat16", "master_weights": False}
MASTERS = {"level": "O2", "dtype": "bfloat16", "master_weights": True}


class Noise(layers.Layer):
    """A user's layer that draws from generators in a list, and makes another in `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generators = [keras.random.SeedGenerator(), keras.random.SeedGenerator(3)]

    def build(self, shape):
        self.own = keras.random.SeedGenerator()

    def call(self, x, training=False):
        for generator in (*self.generators, self.own):
            x = x + keras.random.normal(keras.ops.shape(x), seed=generator, dtype=x.dtype)
        return x


class TensorFlowNoise(layers.Layer):
    """A user's layer that draws from a generator of TensorFlow's and counts its calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = tf.random.Generator.from_seed(1)
        self.calls = tf.Variable(0.0)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x + self.calls * self.generator.normal(tf.shape(x), dtype=x.dtype)


VECTORS, SEQUENCES, IMAGES = (8,), (4, 8), (8, 8, 3)
RANDOM = {
    "dropout": (layers.Dropout, (0.5,), VECTORS),
    "spatial": (layers.SpatialDropout1D, (0.5,), SEQUENCES),
    "alpha": (layers.AlphaDropout, (0.5,), VECTORS),
    "gaussian": (layers.GaussianDropout, (0.5,), VECTORS),
    "noise": (layers.GaussianNoise, (1.0,), VECTORS),
    "lstm": (lambda **kw: layers.LSTM(4, dropout=0.5, recurrent_dropout=0.5, **kw), (), SEQUENCES),
    "both": (lambda **kw: layers.Bidirectional(layers.GRU(4, dropout=0.5), **kw), (), SEQUENCES),
    "cell": (lambda **kw: layers.RNN(layers.SimpleRNNCell(4, dropout=0.5), **kw), (), SEQUENCES),
    "flip": (layers.RandomFlip, (), IMAGES),
    "rotation": (layers.RandomRotation, (0.5,), IMAGES),
    "contrast": (layers.RandomContrast, (0.9,), IMAGES),
    "own": (Noise, (), VECTORS),
    "tensorflow": (TensorFlowNoise, (), VECTORS),
}


def random_model(kind, **kwargs):
    make, args, shape = RANDOM[kind]
    set_random_seed(4)
    layer = make(*args, name="random", **kwargs)
    model = keras.Sequential(
        [keras.Input(shape), layer, layers.Flatten(), layers.Dense(4), layers.Dense(2)]
    )
    x = np.random.default_rng(0).uniform(0.5, 1.0, (4, *shape)).astype("float32")
    return model, x


def drawn(model, x, count=2):
    """Results of the random layer in float32, whose bits show what it drew."""
    layer = model.get_layer("random")
    return [np.asarray(_call(layer, tf.constant(x))) for _ in range(count)]


def _call(layer, x):
    return layer(x) if isinstance(layer, TensorFlowNoise) else layer(x, training=True)


def states(model):
    """Variables of a model that are not weights: the states of its random generators."""
    weights = {id(each) for each in model.weights}
    return [np.asarray(each) for each in model.variables if id(each) not in weights]


@pytest.mark.parametrize(("kind", "arguments"), one_of_each([*RANDOM], [O3, MASTERS], quick=5))
def test_random_layers_of_a_copy_continue_the_sequence(kind, arguments):
    model, x = random_model(kind)
    drawn(model, x)
    made, _ = tfamp.prepare(model, keep_float32="random", **arguments)
    assert made is not model
    back, _ = tfamp.prepare(made, level="O0")
    expected = drawn(model, x)
    assert not np.array_equal(*expected), "each call draws other numbers"
    for copy in (made, back):
        np.testing.assert_array_equal(drawn(copy, x), expected)


class Given(layers.Layer):
    """A user's layer that draws from a given generator."""

    def __init__(self, generator, **kwargs):
        super().__init__(**kwargs)
        self.generator = generator

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator, dtype=x.dtype)

    def get_config(self):
        generator = keras.saving.serialize_keras_object(self.generator)
        return {**super().get_config(), "generator": generator}

    @classmethod
    def from_config(cls, config):
        config["generator"] = keras.saving.deserialize_keras_object(config["generator"])
        return cls(**config)


def test_layers_that_share_a_generator_share_one_in_a_copy():
    generator = keras.random.SeedGenerator(5)
    noise = [Given(generator), Given(generator)]
    model = keras.Sequential([keras.Input((8,)), *noise, layers.Dense(4), layers.Dense(2)])
    made, _ = tfamp.prepare(model, keep_float32=Given, **O3)
    x = np.zeros((2, 8), "float32")
    expected, drawn = ([np.asarray(each(x)) for each in m.layers[:2] * 2] for m in (model, made))
    np.testing.assert_array_equal(drawn, expected)
    assert len(np.unique(drawn)) == np.size(drawn), "no layer repeats another one's noise"


@pytest.mark.parametrize("arguments", [O3, MASTERS])
def test_copies_draw_by_their_seeds_and_each_layer_its_own(arguments):
    def dropped(of_all, **kwargs):
        set_random_seed(of_all)
        random = [layers.Dropout(0.5, **kwargs) for _ in range(2)]
        model = keras.Sequential([keras.Input((64,)), *random, layers.Dense(2)])
        made, _ = tfamp.prepare(model, **arguments)
        assert [layer.compute_dtype for layer in made.layers[:2]] == ["bfloat16"] * 2
        ones = np.ones((8, 64), "float32")
        return [np.asarray(layer(ones, training=True)) == 0 for layer in made.layers[:2]]

    first, second = dropped(1)
    assert 0.3 < first.mean() < 0.7
    assert not np.array_equal(first, second), "two layers drop different values"
    np.testing.assert_array_equal(dropped(1), [first, second])
    assert not np.array_equal(dropped(2)[0], first), "set_random_seed decides"
    chosen = dropped(1, seed=7)
    np.testing.assert_array_equal(dropped(2, seed=7), chosen)
    assert not np.array_equal(chosen[0], first), "seed= decides"


class Late(keras.Model):
    """A model that has all its weights before it is built, and a random layer after."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)
        self.dense.build((None, 8))
        self.seen = keras.metrics.Mean(name="seen")
        self.lowest = _Lowest(name="lowest")

    def build(self, shape):
        self.dropout = layers.Dropout(0.5)

    def call(self, x, training=False):
        self.seen.update_state(x)
        self.lowest.update_state(x)
        return self.dropout(self.dense(x), training=training)


class _Lowest(keras.metrics.Metric):
    """A metric whose state does not start at 0."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        infinite = keras.initializers.Constant(np.inf)
        self.value = self.add_variable((), infinite, name="value")

    def update_state(self, x):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(x)))

    def result(self):
        return self.value


@pytest.mark.parametrize("arguments", first_of([O3, MASTERS]))
def test_what_a_model_makes_late_and_its_metrics_continue_too(arguments):
    keras.utils.set_random_seed(0)
    model, x = Late(), np.full((2, 8), 3.0, "float32")
    model(x, training=True)
    made, _ = tfamp.prepare(model, **arguments)
    assert [value.tolist() for value in states(made)] == [value.tolist() for value in states(model)]
    assert states(made)[0][1] == 1, "it was called once"
    assert float(made.seen.result()) == 3.0
    assert float(made.lowest.result()) == 3.0


def test_what_has_no_counterpart_is_initialized():
    class Helped(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.helper = Helper()  # nothing that Keras tracks

        def call(self, x):
            return x * self.helper.factor

    class Helper:
        def __init__(self):
            self.factor = keras.Variable("ones", shape=())

    model = keras.Sequential(
        [keras.Input((64,)), layers.Dropout(0.0), Helped(), layers.Dense(2, use_bias=False)]
    )
    model.layers[0].rate = 0.5  # a generator is made for it in the copy
    made, _ = tfamp.prepare(model, **O3)
    assert float(made.layers[1].helper.factor) == 1.0
    x = np.ones((2, 64), "float32")
    np.testing.assert_allclose(made(x), model(x), rtol=0.05, atol=0.05)
    first, second = (np.asarray(made.layers[0](x, training=True)) for _ in range(2))
    assert not np.array_equal(first, second)
    assert states(made)[0][0] != 0


class Named(keras.Model):
    """A model whose own code names its layers, and whose constructor takes no name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(8, activation="tanh"), Block()
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(self.second(self.first(x)))


class Head(layers.Layer):
    """A layer that makes another one when it is built."""

    def build(self, shape):
        self.inner = layers.Dense(8)
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


class Block(Head):
    """The same with a regularizer of its own, whose constructor takes nothing."""

    def __init__(self):
        super().__init__(activity_regularizer="l2")


@pytest.mark.parametrize("arguments", [O3, MASTERS])
def test_names_paths_and_dtypes_are_those_of_the_model(arguments):
    model, x = Named(), np.ones((2, 8), "float32")
    before = np.asarray(model(x))
    kept = {"keep_float32": [model.first.name, model.second.name]}
    made, _ = tfamp.prepare(model, **arguments, **kept)
    assert made.name == model.name
    assert [each.name for each in made.layers] == [each.name for each in model.layers]
    assert [each.path for each in made.weights] == [each.path for each in model.weights]
    assert {each.dtype for each in made.weights[:4]} == {"float32"}
    np.testing.assert_allclose(made(x), before, atol=0.05)
    again, _ = tfamp.prepare(made, **arguments, **kept)
    assert again is made, "the same names mean the same layers"
    made, _ = tfamp.prepare(model, **O3)
    assert {each.dtype for each in made.weights} == {"bfloat16"}


def test_plain_attributes_that_were_added_are_copied_and_those_of_other_objects_are_not():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2, name="head")])
    model.class_names, model.threshold = ["ripe", "raw"], {"ripe": np.float32(0.5)}
    model.get_layer("head").scale = 3
    model.callback = keras.callbacks.History()
    made, _ = tfamp.prepare(model, **O3)
    assert (made.class_names, made.threshold) == (["ripe", "raw"], {"ripe": 0.5})
    assert made.get_layer("head").scale == 3
    assert not hasattr(made, "callback")
    made.class_names.append("new")
    assert model.class_names == ["ripe", "raw"]


def test_names_of_outputs_are_kept_for_the_losses_that_are_given_by_them():
    class Own(keras.Model):
        def __init__(self):
            inputs = keras.Input((8,))
            super().__init__(inputs, [layers.Dense(2)(inputs), layers.Dense(2)(inputs)])

        def get_config(self):
            return {}

    model, x, y = Own(), np.ones((4, 8), "float32"), np.ones((4, 2), "float32")
    first, second = model.output_names
    model.compile("sgd", {first: "mse", second: "mae"})
    expected = model.evaluate(x, [y, y], verbose=0, return_dict=True)
    made, _ = tfamp.prepare(model, **O3)
    assert made.output_names == [first, second]
    found = made.evaluate(x, [y, y], verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=0.02)


def test_losses_constraints_and_casts_set_since_are_carried_over():
    casting = layers.Dense(8, autocast=False, kernel_regularizer="l1")
    model = keras.Sequential([keras.Input((8,)), casting, layers.Dense(2)])
    first, last = model.layers
    first.kernel.regularizer = None  # the configuration still has it
    last.kernel.regularizer = keras.regularizers.L2(1e6)
    last.kernel.constraint = keras.constraints.NonNeg()
    last.activity_regularizer = keras.regularizers.L2(1.0)
    x, made = np.ones((2, 8), "float32"), tfamp.prepare(model, **O3)[0]
    assert not made.layers[0].autocast
    constrained = made.layers[1].kernel.constraint(keras.ops.convert_to_tensor([[-1.0], [2.0]]))
    assert np.asarray(constrained).tolist() == [[0.0], [2.0]]
    for each in (model, made):
        each(x)
    expected, found = (sum(map(float, each.losses)) for each in (model, made))
    assert found == pytest.approx(expected, rel=0.02)
    back, _ = tfamp.prepare(made, level="O0")
    assert back.layers[1].kernel.regularizer is last.kernel.regularizer
    assert back.layers[1].kernel.constraint is last.kernel.constraint
    assert back.layers[0].kernel.regularizer is None


def test_constraints_of_low_weights_compute_in_float32():
    constraint = keras.constraints.MaxNorm(500.0)
    limited = layers.Dense(4, kernel_constraint=constraint)
    model = keras.Sequential([keras.Input((8,)), limited, layers.Dense(2)])
    limited.kernel.assign(np.full((8, 4), 120.0))  # float16 cannot hold the squares' sum
    model.compile(keras.optimizers.SGD(0.0), "mse")
    made, _ = tfamp.prepare(model, level="O3", dtype="float16", master_weights=False)
    made.fit(np.zeros((4, 8)), np.zeros((4, 2)), verbose=0)
    np.testing.assert_array_equal(np.asarray(made.layers[0].kernel, "float32"), limited.kernel)


def test_layers_made_in_the_build_of_a_kept_layer_are_kept_too():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, Head()(layers.Dense(8)(inputs)))
    for arguments in (O3, MASTERS):
        made, _ = tfamp.prepare(model, keep_float32=Head, **arguments)
        assert [each.dtype for each in made.weights] == ["bfloat16"] * 2 + ["float32"] * 2


def test_what_was_set_since_it_was_compiled_holds_for_a_copy():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=True)
    model.run_eagerly, model.jit_compile, model.steps_per_execution = True, False, 2
    made, _ = tfamp.prepare(model, **O3)
    assert (made.run_eagerly, made.jit_compile, made.steps_per_execution) == (True, False, 2)


def test_a_copy_is_distributed_as_the_model_is():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.Dense(2)])
        model.compile("sgd", "mse")
    made, _ = tfamp.prepare(model, **O3)
    assert made.distribute_strategy is strategy
    for variable in made.variables:
        assert isinstance(variable.value, tf.distribute.DistributedValues)
    x = np.ones((8, 8), "float32")
    made.fit(x, x[:, :2], verbose=0)
    assert states(made)[0][1] == 1


class Counted(layers.Layer):
    """A layer that counts its calls with values."""

    calls = 0

    def call(self, x):
        Counted.calls += not tf.is_symbolic_tensor(x)
        return keras.ops.tanh(x)


def test_layers_that_rematerialize_do_so_in_a_copy():
    with keras.RematScope("full"):
        counted = Counted()
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), counted, layers.Dense(2)])
    made, _ = tfamp.prepare(model, **O3)
    for each in (model, made):
        Counted.calls = 0
        with tf.GradientTape() as tape:
            loss = keras.ops.sum(each(np.ones((2, 8), "float32")))
        tape.gradient(loss, each.layers[0].kernel.value)
        assert Counted.calls == 2, "in the forward pass, and again for the gradient"
