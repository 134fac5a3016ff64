"""Subclassed models: the outermost call returns float32, a call inside another one does not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.graph_asserts import assert_has_low_precision
from helpers.tolerances import tolerance

pytestmark = pytest.mark.usefixtures("low")
X = np.linspace(-1, 1, 24, dtype="float32").reshape(3, 8)


@keras.saving.register_keras_serializable("tfamp_tests")
class Net(keras.Model):
    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = layers.Dense(8)
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(units)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Outer(keras.Model):
    """Holds another model and notes what it returned in here."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.seen = []

    def call(self, x):
        y = self.inner(x)
        self.seen.append(keras.backend.standardize_dtype(y.dtype))
        return y


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def spec_of(model):
    return dtype_of(model.compute_output_spec(keras.KerasTensor((None, 8))))


def test_every_way_to_call_it_returns_float32(low):
    model, late = Net(), Net()
    assert spec_of(model) == "float32"
    assert dtype_of(model(X)) == spec_of(model) == "float32"
    assert dtype_of(tf.function(model)(X)) == "float32"
    assert dtype_of(tf.function(model, jit_compile=True)(tf.constant(X))) == "float32"
    assert dtype_of(model.predict(X, verbose=0)) == "float32"
    assert dtype_of(model.call(tf.constant(X, low))) == "float32"
    assert [model.hidden.compute_dtype, model.norm.compute_dtype] == [low, "float32"]
    assert_has_low_precision(lambda x: model(x), tf.TensorSpec((3, 8)))
    tfamp.set_global_policy("float32")  # They go on as they are.
    for each in (model, late):
        assert dtype_of(each(X)) == spec_of(each) == "float32"


def test_a_functional_that_is_part_of_another_one_is_low_in_a_subclassed_model_too(low):
    inputs = keras.Input((8,))
    part = keras.Model(inputs, layers.Dense(6)(inputs))
    whole = keras.Model(inputs, layers.Dense(3)(part(inputs)))
    outer = Outer(part)
    result = outer(X)
    assert (outer.seen, dtype_of(result), dtype_of(whole(X))) == ([low], "float32", "float32")
    kernel, bias = part.layers[-1].get_weights()
    np.testing.assert_allclose(result, X @ kernel + bias, atol=tolerance(low, depth=8))


def test_without_float32_outputs_or_with_a_dtype_of_its_own_it_returns_that(low):
    with tfamp.policy_scope(tfamp.Policy(f"mixed_{low}", float32_outputs=False)):
        assert dtype_of(Net()(X)) == low
    assert dtype_of(Net(dtype=f"mixed_{low}")(X)) == low
    by_hand = Net()
    by_hand.dtype_policy = "float32"
    by_hand.head.dtype_policy = "float64"
    assert dtype_of(by_hand(X)) == "float64"


@pytest.mark.parametrize("traced", [False, True])
def test_inside_another_model_it_returns_low(low, traced):
    outer = Outer(Outer(Net()))
    assert spec_of(outer) == "float32"
    call = tf.function(outer) if traced else outer
    assert dtype_of(call(X)) == "float32"
    assert set(outer.seen) == set(outer.inner.seen) == {low}
    assert dtype_of(outer.inner(X)) == "float32"


class Trainer(keras.Model):
    """Trains models that it holds, as a GAN does, and adds up what they return in its call."""

    deferred = True

    def __init__(self):
        super().__init__()
        x = keras.Input((8,))
        self.parts = [
            keras.Model(x, layers.Dense(8)(layers.Dense(4)(x))),
            keras.Sequential([keras.Input((8,)), layers.Dense(8)]),
        ]
        if self.deferred:
            self.parts.append(keras.Sequential([layers.Dense(8)]))
        self.dense = layers.Dense(8)
        self.seen, self.trained_on = set(), set()

    def call(self, x):
        y = self.dense(x)
        for part in self.parts:
            y = y + part(y)  # TensorFlow does not add float32 to float16
            self.seen.add(dtype_of(y))
        return self.parts[0](y)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = [part(x) for part in self.parts]
            loss = sum(tf.reduce_mean(tf.square(y - each)) for each in outputs)
        variables = [each for part in self.parts for each in part.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.trained_on |= set(map(dtype_of, outputs))
        return {"loss": loss}


class BuiltTrainer(Trainer):
    deferred = False


FIRST = {
    "nothing": lambda model: None,
    "call": lambda model: model(X),
    "predict": lambda model: model.predict(X, verbose=0),
    "build": lambda model: model.build((None, 8)),
    "fit": lambda model: model.fit(X, X, verbose=0),
}


def prepared_trainer(low, first, **options):
    tfamp.set_global_policy("float32")
    model = BuiltTrainer() if options else Trainer()
    model.compile("sgd", jit_compile=False)
    (FIRST["build"] if options else first)(model)
    return tfamp.prepare(model, level="O2", dtype=low, **options).model


TRAINERS = {
    "policy": lambda low, first: Trainer(),
    "O2": prepared_trainer,
    "masters": lambda low, first: prepared_trainer(low, first, master_weights=True),
}


@pytest.mark.parametrize(("first", "way"), one_of_each(FIRST, TRAINERS, quick=1))
def test_held_models_have_the_same_dtypes_whatever_was_called_before(low, way, first):
    model = TRAINERS[way](low, FIRST[first])
    model.compile("sgd", jit_compile=False)
    model.seen.clear()
    FIRST[first](model)
    model.fit(X, X, verbose=0)
    assert model.trained_on == {"float32"}
    result = model(X)
    assert dtype_of(result) == spec_of(model) == "float32"
    assert model.seen == {low}
    if way != "masters":  # The exact result is not cast to low and back.
        assert np.any(result != tf.cast(tf.cast(result, low), "float32"))
    expected = low if way == "masters" else "float32"
    assert {part.layers[-1].compute_dtype for part in model.parts} == {expected}
    for part in model.parts:
        assert dtype_of(part(X)) == "float32"


def test_symbolic_call_is_low_and_the_functional_around_it_float32(low):
    model = Net()
    x = keras.Input((8,))
    y = model(x)
    assert y.dtype == low
    ends = keras.Model(x, y)
    contains = keras.Model(x, layers.Dense(2)(y))
    sequential = keras.Sequential([keras.Input((8,)), Net()])
    for outer in (ends, contains, sequential):
        assert outer.outputs[0].dtype == "float32"
        assert dtype_of(outer(X)) == spec_of(outer) == "float32"
    assert spec_of(model) == dtype_of(model(X)) == "float32"


def test_structured_outputs_masks_and_what_is_no_low_float():
    class Many(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(5, 3, mask_zero=True)
            self.lstm = layers.LSTM(2, return_sequences=True)

        def call(self, x):
            y = self.lstm(self.embedding(x))
            exact = keras.ops.cast(y, "float64")
            return {"low": (y, [y]), "label": keras.ops.argmax(y), "exact": exact, "none": None}

    outputs = Many()(np.array([[1, 2, 0]]))
    first, (second,) = outputs["low"]
    found = [dtype_of(each) for each in (first, second, outputs["label"], outputs["exact"])]
    assert found == ["float32", "float32", "int32", "float64"]
    assert first._keras_mask.numpy().tolist() == [[True, True, False]]
    assert outputs["none"] is None
    assert type(outputs["low"]) is tuple


class Confident(layers.Layer):
    """Computes probabilities from the logits 30 and 0."""

    def __init__(self, activation, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(
            2, kernel_initializer=lambda _, dtype: tf.constant([[30, 0]], dtype)
        )
        self.activation = keras.activations.get(activation)

    def call(self, x):
        return self.activation(self.dense(x))


class ConfidentModel(Confident, keras.Model):
    pass


def confident_functional(activation):
    x = keras.Input((1,))
    model = keras.Model(x, Confident(activation)(x))
    assert len(model.layers) == 3  # a cast was appended
    return model


@pytest.mark.parametrize("way", [ConfidentModel, confident_functional, "O2", "O1"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_loss_is_computed_from_the_logits(low, way, activation):
    x, wrong = np.ones((1, 1), "float32"), np.array([[0.0, 1.0]], "float32")
    if isinstance(way, str):
        tfamp.set_global_policy("float32")
        model, _ = tfamp.prepare(ConfidentModel(activation), level=way, dtype=low)
    else:
        model = way(activation)
    loss = "categorical_crossentropy" if activation == "softmax" else "binary_crossentropy"
    model.compile("sgd", loss, run_eagerly=True)
    with tf.GradientTape() as tape:
        outputs = model(x)
        assert dtype_of(outputs) == "float32"
        value = model.compute_loss(x, wrong, outputs)
    expected = 30.0 if activation == "softmax" else (30 + np.log(2)) / 2
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.abs(tape.gradient(value, model.trainable_variables[0].value)).max() >= 0.5


def test_saved_weights_checkpoints_and_files_come_back(tmp_path, low):
    model = Net()
    expected = model(X).numpy()
    model.save_weights(tmp_path / "w.weights.h5")
    tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    model.save(tmp_path / "model.keras")
    for restore in (
        lambda other: other.load_weights(tmp_path / "w.weights.h5"),
        lambda other: tf.train.Checkpoint(model=other).read(str(tmp_path / "checkpoint")),
    ):
        other = Net()
        other(X)
        restore(other)
        np.testing.assert_array_equal(other(X), expected)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.hidden.compute_dtype == low
    np.testing.assert_array_equal(loaded(X), tf.cast(expected, loaded.dtype_policy.compute_dtype))


@pytest.mark.parametrize("way", first_of(["export", "saved_model"]))
@pytest.mark.parametrize(
    "make", [Net, lambda: keras.Sequential([layers.Dense(4), layers.Dense(2)])]
)
def test_an_exported_model_takes_and_returns_float32(tmp_path, low, way, make):
    model = make()
    expected = model(X)
    if way == "export":
        model.export(str(tmp_path / "m"), verbose=False)
    else:
        tf.saved_model.save(model, str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    serve = loaded.serve if way == "export" else loaded.signatures["serving_default"]
    # TensorFlow's own way to save records the inputs as the model's code got them.
    given = low if way == "saved_model" and make is Net else "float32"
    (result,) = tf.nest.flatten(serve(tf.constant(X, given)))
    assert result.dtype == tf.float32
    np.testing.assert_allclose(result, expected, rtol=1e-2, atol=1e-3)


def test_an_export_has_the_signature_that_is_given(tmp_path, low):
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    expected = model(X)
    given = keras.InputSpec(shape=(2, 8), dtype="float64", name="rows")
    model.export(str(tmp_path / "m"), input_signature=[given], verbose=False)
    serving = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    (spec,) = serving.structured_input_signature[1].values()
    assert (spec.shape, spec.dtype) == ((2, 8), tf.float64)
    (result,) = serving(**{spec.name: tf.constant(X[:2], "float64")}).values()
    assert result.dtype == tf.float32
    np.testing.assert_allclose(result, expected[:2], rtol=1e-2, atol=1e-3)


def test_compile_still_scales_the_loss_of_float16_models(low):
    x = keras.Input((8,))
    models = [
        keras.Model(x, layers.Dense(1)(x)),
        keras.Sequential([keras.Input((8,)), layers.Dense(1)]),
        Net(1),
    ]
    for model in models:
        model.compile("sgd", "mse")
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert scaled == (low == "float16")


# Layers that prepare data

FEATURES = np.array([[1e6], [2e6], [3e6]], "float32")


def normalization():
    layer = layers.Normalization()
    layer.adapt(FEATURES)
    return layer


def head():
    return layers.Dense(1, kernel_initializer="ones")


class Preparing(keras.Model):
    def __init__(self):
        super().__init__()
        self.prepare, self.head = normalization(), head()

    def call(self, x):
        column = x["age"] if isinstance(x, dict) else x
        return self.head(self.prepare(keras.ops.expand_dims(column[:, 0], -1)))


class PreparingLayer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.prepare = normalization()

    def call(self, x):
        return self.prepare(x)


def in_a_functional(layer, *shape):
    inputs = keras.Input((*shape, 1))
    return keras.Model(inputs, head()(layer(inputs)))


PREPARING = {
    "sequential": lambda: keras.Sequential([keras.Input((1,)), normalization(), head()]),
    "sequential without an input": lambda: keras.Sequential([normalization(), head()]),
    "sequential in one": lambda: keras.Sequential([keras.Sequential([normalization()]), head()]),
    "functional": lambda: in_a_functional(normalization()),
    "functional with a layer of its own": lambda: in_a_functional(PreparingLayer()),
    "wrapped": lambda: in_a_functional(layers.TimeDistributed(normalization()), 3),
    "subclassed, of a dict": Preparing,
    "subclassed": Preparing,
    "subclassed around it": lambda: Outer(Preparing()),
}


@pytest.mark.parametrize("name", first_of(PREPARING))
def test_features_that_float16_has_not_reach_the_layer_that_prepares_them(low, name):
    model = PREPARING[name]()
    x = FEATURES[None] if name == "wrapped" else FEATURES
    x = {"age": x} if "dict" in name else x
    expected = np.array([-1.2247449, 0, 1.2247449])
    # The first call, which builds it, and one in a graph.
    for outputs in (model(x), model.predict(x, verbose=0)):
        np.testing.assert_allclose(np.ravel(outputs), expected, atol=tolerance(low))
    found = [x for x in model._flatten_layers() if isinstance(x, layers.Normalization)]
    assert [x.dtype_policy.name for x in found] == ["float32"]
    loss = keras.losses.MeanSquaredError()
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss)
    model.fit(x, np.zeros_like(FEATURES[None] if name == "wrapped" else FEATURES), verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_every_layer_of_keras_that_prepares_data_is_float32(low):
    found = [
        made
        for made in vars(layers).values()
        if isinstance(made, type) and ".layers.preprocessing." in made.__module__
    ]
    assert {layers.Normalization, layers.STFTSpectrogram, layers.TextVectorization} <= set(found)
    assert all(map(tfamp.Policy(f"mixed_{low}").keeps_float32, found))


# Layers that need exact values


class LooksUp(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = table()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.table(x)[..., 0] * self.scale + 0 * x  # x and the weight have the low dtype


def _row_numbers(shape, dtype=None):
    # Exact in both low dtypes: the row modulo 128.
    return keras.ops.cast(keras.ops.arange(shape[0]) % 128, dtype)[:, None]


def table():
    return layers.Embedding(4096, 1, embeddings_initializer=_row_numbers)


def functional_table():
    x = keras.Input((3,))
    return keras.Model(x, layers.Flatten()(table()(x)))


def sequential_table():
    return keras.Sequential([table(), layers.Flatten()])


LOOKING_UP = {
    "subclassed": LooksUp,
    "subclassed around it": lambda: Outer(LooksUp()),
    "around a functional": lambda: Outer(functional_table()),
    "around a sequential": lambda: Outer(sequential_table()),
    "sequential without an input": sequential_table,
    "sequential around it": lambda: keras.Sequential([LooksUp()]),
}


@pytest.mark.parametrize(
    ("name", "how"), one_of_each(LOOKING_UP, ["policy", "built", "O2"], quick=2)
)
def test_ids_given_as_floats_find_their_rows(low, name, how):
    ids = np.array([[257, 2049, 4095]], "float32")  # 257 is not a bfloat16, 2049 not a float16
    if how == "O2":
        tfamp.set_global_policy("float32")
        model = LOOKING_UP[name]()
        model(ids)
        tfamp.prepare(model, level="O2", dtype=low)
    else:
        model = LOOKING_UP[name]()
        if how == "built":
            model.build((None, 3))
    tables = [x for x in model._flatten_layers() if isinstance(x, layers.Embedding)]
    for outputs in (model(ids), model.predict(ids, verbose=0)):
        np.testing.assert_array_equal(outputs, [[1, 1, 127]])
    assert [table.compute_dtype for table in tables] == [low]


@pytest.mark.parametrize("how", ["policy", "O2", "O1"])
def test_ids_that_another_layer_rounds_are_warned_of_or_exact(low, how, recwarn):
    """A Reshape of the policy rounds them; at O1, in float32, or as integers they are exact."""
    ids = np.array([1, 257, 2049], "float32")

    def made(dtype=None, inputs_dtype="float32", rows=4096):
        table = layers.Embedding(rows, 1, embeddings_initializer=_row_numbers)
        inputs = keras.Input((), dtype=inputs_dtype)
        rows = table(layers.Reshape((1,), dtype=dtype)(inputs))
        model = keras.Model(inputs, layers.Flatten(dtype="float32")(rows))
        if how != "policy":
            model, _ = tfamp.prepare(model, level=how, dtype=low)
        return model

    def warned_in(model, ids):
        recwarn.clear()
        found = [np.ravel(model(ids)), model.predict(ids, verbose=0).ravel()]
        return found, [str(each.message) for each in recwarn if "looks up" in str(each.message)]

    with tfamp.policy_scope(f"mixed_{low}" if how == "policy" else "float32"):
        rounded = made()
        _, said = warned_in(rounded, ids)
        if how == "O1":
            assert not said
            np.testing.assert_array_equal(rounded.predict(ids, verbose=0).ravel(), ids % 128)
        else:
            (message,) = said
            assert f"4096 rows and is given ids in {low}" in message
            assert "dtype='float32'" in message
        if how == "policy":
            found, again = warned_in(made("float32"), ids)
            assert not again
            for each in found:
                np.testing.assert_array_equal(each, ids % 128)
            integers = made(inputs_dtype="int32")
            found, again = warned_in(integers, ids.astype("int32"))
            assert not again
            for each in found:
                np.testing.assert_array_equal(each, ids % 128)
            few = made(rows=256)
            assert not warned_in(few, np.array([1.0, 255.0], "float32"))[1]


class Scaled(layers.Embedding):
    """Takes a tensor and a flag next to its ids."""

    def call(self, inputs, scale=None, training=False):
        rows = super().call(inputs)
        return rows if scale is None else rows * keras.ops.cast(scale, rows.dtype)


class Positional(layers.Embedding):
    def call(self, *args, **kwargs):
        return super().call(*args, **kwargs)


class LooksUpByName(keras.Model):
    def __init__(self, layer_class=layers.Embedding, **arguments):
        super().__init__()
        self.table = layer_class(4096, 1, embeddings_initializer=_row_numbers)
        self.arguments = arguments

    def call(self, x):
        return self.table(inputs=x, **self.arguments)[..., 0]


@pytest.mark.parametrize(
    ("layer_class", "arguments", "factor"),
    [
        (layers.Embedding, {}, 1),
        (Positional, {}, 1),
        (Scaled, {"training": True}, 1),
        (Scaled, {"scale": [2.0], "training": True}, 2),
    ],
)
@pytest.mark.parametrize("way", first_of(["policy", "O1", "O2"]))
def test_ids_given_by_name_to_a_subclass_with_other_arguments_find_their_rows(
    low, layer_class, arguments, factor, way
):
    ids = np.array([[257, 2049, 4095]], "float32")
    arguments = {
        name: tf.constant(value) if name == "scale" else value for name, value in arguments.items()
    }
    if way == "policy":
        model = LooksUpByName(layer_class, **arguments)
    else:
        tfamp.set_global_policy("float32")
        model = LooksUpByName(layer_class, **arguments)
        model(ids)
        model, _ = tfamp.prepare(model, level=way, dtype=low)
    for outputs in (model(ids), model.predict(ids, verbose=0)):
        np.testing.assert_array_equal(outputs, np.array([[1, 1, 127]]) * factor)


def test_an_embedding_used_in_reverse_takes_low_features(low):
    layer = layers.ReversibleEmbedding(4, 2, embeddings_initializer="ones")
    features = layers.Dense(2, kernel_initializer="ones")(np.ones((1, 3), "float32"))
    for found in (layer(features, reverse=True), layer(inputs=features, reverse=True)):
        assert dtype_of(found) == low
        np.testing.assert_array_equal(found, np.full((1, 4), 6))


# Class, its arguments, the inputs, and the first numbers of the outputs.
FLOAT32_INSIDE = {
    "unit": (layers.UnitNormalization, {}, [[300.0, 400.0, 0, 0], [0, 0, 0, 0]], [0.6, 0.8]),
    "cosine": (layers.Dot, {"axes": 1, "normalize": True}, [[300.0, 400.0, 0, 0]], [1.0]),
    "mean of a mask": (layers.GlobalAveragePooling1D, {}, np.full((1, 9, 1), 3e4), [3e4]),
    "mask of a value": (layers.Masking, {"mask_value": 2049.0}, [[[2050.0], [2049.0]]], [2050, 0]),
    "mask of a huge value": (layers.Masking, {"mask_value": -1e9}, [[[1.0], [-1e9]]], [1, 0]),
}


def extended(layer_class):
    """A subclass with arguments of its own."""

    class Mine(layer_class):
        def call(self, inputs, offset=None, **kwargs):
            return super().call(inputs, **kwargs) + offset

    return Mine


KINDS = {
    "Keras's": lambda layer_class: layer_class,
    "a subclass": lambda layer_class: type("Mine", (layer_class,), {}),
    "a subclass with its own call": extended,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FLOAT32_INSIDE)
def test_layers_that_overflow_or_compare_compute_in_float32(low, name, kind):
    layer_class, options, x, expected = FLOAT32_INSIDE[name]
    layer, x = KINDS[kind](layer_class)(**options), np.array(x, "float32")
    arguments = {"mask": np.ones((1, 9), bool)} if "mean" in name else {}
    if "own" in kind:
        arguments["offset"] = tf.zeros((1, 1))
    outputs = layer(inputs=[x, x] if name == "cosine" else x, **arguments)
    assert (layer.compute_dtype, dtype_of(outputs)) == (low, low)
    np.testing.assert_allclose(np.ravel(outputs)[: len(expected)], expected, rtol=tolerance(low))
    assert np.isfinite(outputs).all()
    if isinstance(layer, layers.Masking) and "own" not in kind:
        mask = keras.ops.ravel(outputs._keras_mask)
        np.testing.assert_array_equal(mask, [True, False])


class CosineOfDense(layers.Dot):
    """Gives its base class what a sublayer computes, added to its own input."""

    def __init__(self):
        super().__init__(axes=1, normalize=True)
        self.dense = layers.Dense(2, kernel_initializer="identity")

    def call(self, inputs):
        return super().call([self.dense(x) + x for x in inputs])


def test_sublayers_of_a_layer_that_computes_in_float32_do_so_too(low):
    layer, x = CosineOfDense(), np.array([[300.0, 400.0]], "float32")
    outputs = layer([x, x])
    assert (layer.compute_dtype, dtype_of(outputs)) == (low, low)
    np.testing.assert_allclose(outputs, [[1.0]], rtol=tolerance(low))
    assert layer.dense.compute_dtype == "float32"


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_interpolated_and_their_gradients_computed_in_float32(low, interpolation):
    layer, x = layers.UpSampling2D(2, interpolation=interpolation), tf.ones((1, 2, 3, 1), low)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        assert y.dtype == low
        return tape.gradient(y, x)

    graph = gradient.get_concrete_function(x).graph.as_graph_def()
    resizing = [node for node in graph.node if node.op.startswith("Resize")]
    assert {node.attr["T"].type for node in resizing} == {tf.float32.as_datatype_enum}
    assert len(resizing) == 2
    np.testing.assert_allclose(tf.reduce_sum(tf.cast(gradient(x), tf.float32)), 24, rtol=1e-2)


def test_spectral_normalization_keeps_float32_weights(low):
    layer = layers.SpectralNormalization(layers.Dense(8))
    outputs = layer(X, training=True)
    kernel = layer.layer.kernel.numpy()
    assert (dtype_of(outputs), layer.layer.compute_dtype) == (low, low)
    assert (kernel != kernel.astype(low).astype("float32")).any()
    large = layers.SpectralNormalization(
        layers.Dense(64, kernel_initializer=lambda *a, **k: 1e3 * tf.ones((64, 64)))
    )
    large(np.ones((1, 64), "float32"), training=True)
    np.testing.assert_allclose(large.layer.kernel, 1 / 64, rtol=1e-4)
