"""State that a layer updates in its call stays float32, by every way to low precision."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import tiers

CALLS = 400
EAGER_CALLS = 20  # the last ones
FEATURES = 4
NOISE = np.random.default_rng(0).uniform(-0.2, 0.2, (8, FEATURES)).astype("float32")
BATCH = np.float32([1, 1, 2, 3, 3, 3, 2, 1])[:, np.newaxis] + NOISE
CODES = np.float32([[1.1], [1.9], [3.2]]) * np.ones((1, FEATURES), "float32")


class Stateful(keras.layers.Layer):
    """Has a counter, averages, sums and a metric, and multiplies by a weight."""

    def build(self, shape):
        def state(name, shape=()):
            return self.add_weight(shape=shape, initializer="zeros", trainable=False, name=name)

        self.weight = self.add_weight(shape=(FEATURES, FEATURES), initializer="ones")
        self.counter, self.down = state("counter"), state("down")
        self.average, self.total = state("average"), state("total", (FEATURES,))
        self.read_total = state("read_total", (FEATURES,))
        self.raw_counter = tf.Variable(0.0, trainable=False)
        self.raw_average = tf.Variable(0.0, trainable=False)
        self.metric = keras.metrics.Mean()

    def call(self, x):
        self.counter.assign_add(1.0)
        self.down.assign_sub(0.5)
        self.average.assign(0.999 * self.average + 0.001 * 2.0)
        self.total.assign_add(tf.reduce_sum(x, axis=0))
        self.read_total.assign(self.read_total + keras.ops.sum(x, axis=0))
        self.raw_counter.assign_add(1.0)
        self.raw_average.assign(0.999 * self.raw_average + 0.001 * 2.0)
        self.metric.update_state(x)
        return keras.ops.matmul(x, self.weight)


class Codebook(keras.layers.Layer):
    """The codes of a VQ-VAE, averages of the inputs that are nearest to them."""

    def build(self, shape):
        def state(name, value):
            return self.add_weight(
                shape=value.shape,
                initializer=lambda shape, dtype: tf.constant(value, dtype),
                trainable=False,
                name=name,
            )

        self.codes, self.sums = state("codes", CODES), state("sums", CODES)
        self.sizes = state("sizes", np.ones(len(CODES), "float32"))

    def call(self, x):
        codes = keras.ops.convert_to_tensor(self.codes)
        products = keras.ops.matmul(x, keras.ops.transpose(codes))
        nearest = keras.ops.argmin(keras.ops.sum(codes**2, axis=1) - 2 * products, axis=1)
        chosen = keras.ops.one_hot(nearest, len(CODES), dtype=x.dtype)
        sizes = keras.ops.cast(keras.ops.sum(chosen, axis=0), "float32")
        sums = keras.ops.cast(keras.ops.matmul(keras.ops.transpose(chosen), x), "float32")
        self.sizes.assign(0.999 * self.sizes + 0.001 * sizes)
        self.sums.assign(0.999 * self.sums + 0.001 * sums)
        self.codes.assign(self.sums / keras.ops.expand_dims(self.sizes, 1))
        return keras.ops.take(codes, nearest, axis=0)


class MixedAverage(keras.layers.Layer):
    """Adds low values to its average, which TensorFlow cannot do in float32."""

    def build(self, shape):
        self.average = self.add_weight(shape=(), trainable=False, initializer="zeros", name="avg")

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x))
        return x


class Normalized(keras.layers.Layer):
    """Averages in training only, and returns what its average is subtracted from."""

    def build(self, shape):
        self.average = self.add_weight(
            shape=(FEATURES,), trainable=False, initializer="zeros", name="average"
        )

    def call(self, x, training=False):
        if training:
            mean = keras.ops.mean(keras.ops.cast(x, "float32"), axis=0)
            self.average.assign(0.999 * self.average + 0.001 * mean)
        return x * 2


def state_of(layer):
    values = {
        name: np.float64(value.numpy())
        for name, value in vars(layer).items()
        if isinstance(value, keras.Variable | tf.Variable)
    }
    for variable in layer.metric.variables if hasattr(layer, "metric") else ():
        values[f"metric's {variable.name}"] = np.float64(variable.numpy())
    return values


def prepared(layer, level, dtype="bfloat16", loss=None):
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model, optimizer = tfamp.prepare(model, keras.optimizers.SGD(0.0), level=level, dtype=dtype)
    if loss is not None:
        model.compile(optimizer, loss=loss)
    return model


def layer_and_call(layer_class, way):
    """Returns a layer that computes low in some way, and a function that calls it."""
    name, _, dtype = way.partition(" ")
    if name == "policy":
        with tfamp.policy_scope(f"mixed_{dtype}"):
            layer = layer_class()
        return layer, layer
    layer = layer_class()
    if name == "autocast":
        return layer, tfamp.autocast(dtype)(lambda x: layer(x))
    return layer, prepared(layer, name, dtype)


@functools.cache
def expected(layer_class, calls=CALLS):
    layer = layer_class()
    step = tf.function(lambda x: layer(x))
    for _ in range(calls):
        step(tf.constant(BATCH))
    return state_of(layer)


def start_at(layer, values):
    variables = dict(vars(layer))
    for variable in layer.metric.variables if hasattr(layer, "metric") else ():
        variables[f"metric's {variable.name}"] = variable
    for name, value in values.items():
        variables[name].assign(value)


WAYS = [
    f"{name} {dtype}"
    for name in ("policy", "O1", "O2", "autocast")
    for dtype in ("bfloat16", "float16")
]
RUNS = {
    "eager": lambda call: call,
    "function": lambda call: tf.function(lambda x: call(x)),
    "compiled": lambda call: tf.function(lambda x: call(x), jit_compile=True),
}


@pytest.mark.parametrize("layer_class", [Stateful, Codebook])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", tiers(WAYS[::2], WAYS[1::2]))
def test_state_has_the_values_of_float32(way, run, layer_class):
    layer, call = layer_and_call(layer_class, way)
    step = RUNS[run](call)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        step(tf.constant(BATCH))
        done = 1 if run != "eager" else CALLS - EAGER_CALLS
        start_at(layer, expected(layer_class, done))
        for _ in range(done, CALLS):
            step(tf.constant(BATCH))
    got = state_of(layer)
    for name, value in expected(layer_class).items():
        # The inputs and their sums are low, each rounded once.
        np.testing.assert_allclose(got[name], value, rtol=5e-3, err_msg=name)
    for name in {
        "counter",
        "raw_counter",
        "metric's count",
        "down",
        "average",
        "raw_average",
    } & set(got):
        np.testing.assert_allclose(got[name], expected(layer_class)[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fit_updates_the_state_in_float32(level):
    layer = Stateful()
    model = prepared(layer, level, loss="mse")
    data = tf.data.Dataset.from_tensors((BATCH, BATCH[:, :1])).repeat(CALLS)
    model.fit(data, verbose=0)
    assert layer.counter.numpy() == layer.metric.count.numpy() / len(BATCH) == CALLS
    np.testing.assert_allclose(layer.average, expected(Stateful)["average"], rtol=1e-5)
    np.testing.assert_allclose(layer.total, expected(Stateful)["total"], rtol=5e-3)


@pytest.mark.parametrize("run", ["eager", "function"])
def test_state_that_low_values_are_added_to_is_read_low_with_one_warning(run):
    layer, call = layer_and_call(MixedAverage, "policy bfloat16")
    step = RUNS[run](call)
    with pytest.warns(tfamp.TfampWarning, match=f"{layer.name} .*avg.*autocast=False") as caught:
        for _ in range(3):
            step(tf.constant(BATCH))
    assert len(caught) == 1
    mean = BATCH.mean()
    np.testing.assert_allclose(layer.average.numpy(), mean * (1 - 0.9**3), rtol=2e-2)


def test_autocast_promotes_low_values_that_are_added_to_state():
    layer, call = layer_and_call(MixedAverage, "autocast bfloat16")
    for _ in range(3):
        call(tf.constant(BATCH))
    np.testing.assert_allclose(layer.average.numpy(), BATCH.mean() * (1 - 0.9**3), rtol=1e-5)


def test_state_that_only_training_updates_is_found_after_a_call_without_training():
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = Normalized()
    assert layer(BATCH, training=False).dtype == tf.bfloat16
    for _ in range(CALLS):
        outputs = layer(BATCH, training=True)
    assert outputs.dtype == tf.bfloat16
    np.testing.assert_allclose(
        layer.average.numpy(), BATCH.mean(axis=0) * (1 - 0.999**CALLS), rtol=5e-3
    )


def test_tracing_for_state_adds_no_losses_and_keeps_random_numbers():
    class Noisy(Normalized):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, x, training=True):
            self.add_loss(keras.ops.mean(x))
            noise = keras.random.uniform((FEATURES,), seed=self.seeds, dtype="float32")
            self.average.assign(0.5 * self.average + noise)
            return x

    def run(policy):
        with tfamp.policy_scope(policy):
            layer = Noisy()
        layer(BATCH)
        layer(BATCH)
        return layer

    low, exact = run("mixed_bfloat16"), run("float32")
    assert len(low.losses) == len(exact.losses) == 1
    np.testing.assert_array_equal(low.average.numpy(), exact.average.numpy())


def test_a_frozen_weight_is_read_low():
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = keras.layers.Dense(2)
        layer.trainable = False
    assert layer(BATCH).dtype == tf.bfloat16
    assert layer(BATCH).dtype == tf.bfloat16


class MeanGap(keras.metrics.Metric):
    """Subtracts as TensorFlow does, which rejects mixed dtypes."""

    def __init__(self, name="gap"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))
        self.count.assign_add(tf.cast(tf.size(y_true), tf.float32))

    def result(self):
        return self.total / self.count


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_metric_with_variables_is_computed_at_o3(is_compiled, optimizer):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    if is_compiled:
        model.compile(optimizer, loss="mse", metrics=[MeanGap()])
    model, new_optimizer = tfamp.prepare(
        model, None if is_compiled else optimizer, level="O3", dtype="bfloat16"
    )
    if not is_compiled:
        model.compile(new_optimizer, loss="mse", metrics=[MeanGap()])
    labels = BATCH[:, :1]
    gap = np.abs(labels - np.float32(model(BATCH))).mean()
    logs = model.evaluate(BATCH, labels, verbose=0, return_dict=True)
    np.testing.assert_allclose(logs["gap"], gap, rtol=1e-2)
    model.fit(BATCH, labels, verbose=0)


def test_a_compiled_metric_that_cannot_be_copied_is_named():
    class Weighted(MeanGap):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", metrics=[Weighted(2.0)])
    with pytest.raises(ValueError, match="metric 'gap' .Weighted. cannot be copied.*get_config"):
        tfamp.prepare(model, level="O3", dtype="bfloat16")
    assert model.layers[0].compute_dtype == "float32"


class Averaged(keras.layers.Layer):
    """An average that the layer around it updates."""

    def __init__(self):
        super().__init__()
        self.average = self.add_weight(shape=(), trainable=False, initializer="zeros", name="avg")

    def update(self, value):
        self.average.assign(0.999 * self.average + 0.001 * value)

    def call(self, x):
        return x


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.averaged, self.dense = Averaged(), keras.layers.Dense(4)

    def call(self, x):
        self.averaged.update(2.0)
        return self.dense(self.averaged(x))


class Counted(keras.Model):
    def __init__(self):
        super().__init__()
        self.counter = self.add_weight(shape=(), trainable=False, initializer="zeros", name="n")
        self.block, self.head = Block(), keras.layers.Dense(1)

    def call(self, x):
        self.counter.assign(self.counter + 1.0)
        return self.head(self.block(x))


def test_state_of_models_and_of_sublayers_whose_methods_are_called():
    with tfamp.policy_scope("mixed_bfloat16"):
        model = Counted()
    step = tf.function(lambda x: model(x))
    for _ in range(CALLS):
        step(tf.constant(BATCH))
    assert model.counter.numpy() == CALLS
    np.testing.assert_allclose(
        model.block.averaged.average.numpy(), 2 * (1 - 0.999**CALLS), rtol=1e-5
    )


def test_state_under_a_strategy_and_a_tape():
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope(), tfamp.policy_scope("mixed_bfloat16"):
        model = Counted()
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
    model.fit(tf.data.Dataset.from_tensors((BATCH, BATCH[:, :1])).repeat(CALLS), verbose=0)
    assert model.counter.numpy() == CALLS
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(BATCH))
    assert None not in tape.gradient(loss, model.trainable_variables)


def test_state_of_a_call_that_only_eager_mode_runs_is_read_low_with_a_warning():
    class Eager(Averaged):
        def call(self, x):
            if float(tf.reduce_sum(x)) > 0:
                self.average.assign(self.average + 1.0)
            return x

    with tfamp.policy_scope("mixed_bfloat16"):
        layer = Eager()
    with pytest.warns(
        tfamp.TfampWarning, match="avg.*cannot run without effects.*autocast=False"
    ) as caught:
        layer(BATCH)
        layer(BATCH)
    assert len(caught) == 1
    assert layer.average.numpy() == 2


# ---- The trace that looks for state --------------------------------------------------------------


class WithEffects(keras.layers.Layer):
    """Updates a counter, and does in `call` what users' Python code does."""

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.center = self.add_weight(shape=(3,), initializer="zeros", trainable=False)
        self.calls, self.cache, self.history, self.first = 0, None, [], True

    def call(self, x, factors=None):
        self.n.assign(self.n + 1.0)
        self.calls += 1
        self.history.append(x)
        if self.cache is None:
            self.cache = tf.range(tf.shape(x)[1])
        if self.first:  # an initialization by the first batch
            self.center.assign(keras.ops.mean(keras.ops.cast(x, "float32"), 0))
            self.first = False
        if factors is not None:
            x = x * next(factors)
        noise = np.random.rand()
        self.noise = noise
        return x + tf.cast(self.cache, x.dtype) - keras.ops.cast(self.center, x.dtype)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_python_code_of_a_call_runs_as_if_once(policy):
    tfamp.set_global_policy(policy)
    layer, x = WithEffects(), np.full((2, 3), 5.0, "float32")
    layer.build(x.shape)
    np.random.seed(3)
    results = [layer(x) for _ in range(300)]
    assert (layer.calls, len(layer.history), float(layer.n)) == (300, 300, 300.0)
    np.testing.assert_array_equal(results[0], [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(layer.center, [5, 5, 5])
    np.random.seed(3)
    assert layer.noise == np.random.rand(300)[-1]


def test_an_argument_that_a_call_uses_up_is_used_once():
    tfamp.set_global_policy("mixed_bfloat16")
    layer, x = WithEffects(), np.full((2, 3), 5.0, "float32")
    layer.build(x.shape)
    with pytest.warns(tfamp.TfampWarning, match="cannot run without effects"):
        result = layer(x, factors=iter([2.0]))
    np.testing.assert_array_equal(result, [[5, 6, 7]] * 2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_weight_that_a_layer_only_reads_is_left_alone(policy):
    class Offset(keras.layers.Layer):
        def build(self, shape):
            self.offset = self.add_weight(shape=(3,), initializer="ones", trainable=False)
            self.calls = 0

        def call(self, x):
            self.calls += 1
            return x + self.offset

    tfamp.set_global_policy(policy)
    layer = Offset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = layer(np.ones((1, 3), "float32"))
    assert (layer.calls, result.dtype.name) == (1, policy.removeprefix("mixed_"))


def test_many_averages_are_named_in_one_warning_after_few_traces():
    class Averages(keras.layers.Layer):
        def build(self, shape):
            new = functools.partial(self.add_weight, shape=(3,), trainable=False)
            self.averages = [new(name=f"average_{i}") for i in range(40)]
            self.traces = []

        def call(self, x):
            count.append(None)
            for average in self.averages:
                average.assign(average * 0.9 + 0.1 * keras.ops.mean(x, 0))
            return x

    count = []
    tfamp.set_global_policy("mixed_bfloat16")
    layer = Averages()
    layer.build((2, 3))
    with pytest.warns(tfamp.TfampWarning, match="and 37 others") as found:
        layer(np.ones((2, 3), "float32"))
    assert len([w for w in found if "computes the next value" in str(w.message)]) == 1
    assert len(count) <= 5
