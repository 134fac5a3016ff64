"""Models return float32: Functional and Sequential models, nested, shared, rebuilt, extended."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tfamp
from helpers.cases import first_of, tiers
from helpers.graph_asserts import assert_computes_in, assert_has_low_precision
from helpers.tolerances import assert_close
from tfamp.layers.layer_record import managed_by, places_of, record_of
from tfamp.layers.records import copied

pytestmark = pytest.mark.usefixtures("low")
KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
X = np.linspace(-1, 1, 24, dtype="float32").reshape(3, 8)
SEQUENCE = np.linspace(-1, 1, 48, dtype="float32").reshape(2, 4, 6)


def flat_dtypes(value):
    return [keras.backend.standardize_dtype(x.dtype) for x in keras.tree.flatten(value)]


def assert_all_say(dtypes, model, *inputs):
    """The outputs, the spec, the eager call and the traced call have these dtypes."""
    inputs = list(inputs) if len(inputs) > 1 else inputs[0]
    assert flat_dtypes(model.outputs) == dtypes
    assert flat_dtypes(model.compute_output_spec(symbolic_inputs(model))) == dtypes
    assert flat_dtypes(model(inputs)) == dtypes
    assert flat_dtypes(tf.function(model)(inputs)) == dtypes


def symbolic_inputs(model):
    specs = [keras.KerasTensor(x.shape, dtype=x.dtype) for x in model.inputs]
    return specs if len(specs) > 1 else specs[0]


def assert_float32(model, *inputs):
    assert_all_say(["float32"] * len(model.outputs), model, *inputs)


def compute_dtypes(model):
    return [layer.compute_dtype for layer in model.layers if layer.weights]


def chain(x, *units):
    made = []
    for n in units:
        made.append(layers.Dense(n))
        x = made[-1](x)
    return x, made


# Functional


def test_the_output_layer_is_float32_and_the_others_are_low(low):
    x = keras.Input((8,))
    y, made = chain(x, 7, 6, 5)
    model = keras.Model(x, y)
    assert_float32(model, X)
    assert compute_dtypes(model) == [low, low, "float32"]
    assert {layer.variable_dtype for layer in made} == {"float32"}
    assert {type(layer.dtype_policy) for layer in made} == {keras.DTypePolicy}
    assert_has_low_precision(model, tf.TensorSpec((3, 8)))


def test_batch_normalization_and_its_subclasses_are_float32(low):
    class MyNorm(layers.BatchNormalization):
        pass

    x = keras.Input((8,))
    norms = [layers.BatchNormalization(), MyNorm()]
    y = layers.Dense(4)(norms[1](layers.Dense(4)(norms[0](x))))
    assert [norm.compute_dtype for norm in norms] == ["float32", "float32"]
    assert_float32(keras.Model(x, y), X)


@pytest.mark.parametrize(
    "dtype", tiers(["bfloat16", "float32"], ["float16", "float64", "mixed_float16"])
)
def test_an_explicit_dtype_always_wins(low, dtype):
    policy, x = keras.DTypePolicy(dtype), keras.Input((8,))
    by_hand = layers.Dense(2)
    by_hand.dtype_policy = "bfloat16" if low == "float16" else "mixed_float16"
    for given_dtype in (dtype, policy, tfamp.Policy(dtype)):
        norm = layers.BatchNormalization(dtype=given_dtype)
        head = layers.Dense(2, dtype=given_dtype)
        hidden = norm(layers.Dense(3)(x))
        model = keras.Model(x, [head(hidden), by_hand(hidden)])
        assert norm.dtype_policy == head.dtype_policy == policy
        assert_all_say([policy.compute_dtype, by_hand.compute_dtype], model, X)


def test_a_dtype_that_another_layer_hands_on_is_the_policys(low):
    """As libraries give their heads the dtype of a backbone: nobody chose it."""
    x = keras.Input((8,))
    hidden = layers.Dense(4)
    inner = layers.Dense(4, dtype=hidden.dtype_policy)
    head = layers.Dense(2, dtype=hidden.dtype_policy)
    model = keras.Model(x, head(inner(hidden(x))))
    assert [layer.compute_dtype for layer in (hidden, inner, head)] == [low, low, "float32"]
    assert_all_say(["float32"], model, X)
    longer = keras.Model(x, layers.Dense(3)(model.output))
    assert [head.compute_dtype, longer.output.dtype] == [low, "float32"]


@pytest.mark.parametrize(
    "pack", [list, tuple, lambda outputs: dict(zip("ab", outputs, strict=True))]
)
def test_several_outputs(low, pack):
    x = keras.Input((8,))
    trunk = layers.Dense(6)
    heads = [layers.Dense(2), layers.Dense(3)]
    model = keras.Model(x, pack([head(trunk(x)) for head in heads]))
    assert_float32(model, X)
    assert trunk.compute_dtype == low
    assert [head.compute_dtype for head in heads] == ["float32", "float32"]
    assert type(model(X)) is type(model.output)


def test_integer_and_boolean_outputs_inputs_and_casts_of_the_users_own_are_left_alone(low):
    x = keras.Input((8,), dtype="float16")
    made = [layers.Dense(4) for _ in range(3)]
    y, *others = (layer(x) for layer in made)
    casts = [keras.ops.cast(each, to) for each, to in zip(others, (low, "float32"), strict=True)]
    model = keras.Model(x, [keras.ops.argmax(y), y > 0, layers.Dense(2)(y), x, *casts])
    expected = ["int32", "bool", "float32", "float16", low, "float32"]
    assert_all_say(expected, model, X.astype("float16"))
    assert [layer.compute_dtype for layer in made] == [low] * 3


def outputs_of_ops(x):
    made = [layers.Dense(4), layers.Dense(4)]
    return keras.ops.softmax(made[0](x) + made[1](x) * 2.0), made, ["float32", "float32"]


def an_output_that_feeds_the_model(x):
    features, head = layers.Dense(4), layers.Dense(2)
    return [features(x), head(features.output)], [features, head], ["float32", "float32"]


def an_activation(x):
    made = [layers.Dense(3), layers.Softmax()]
    return made[1](made[0](x)), made, ["low", "float32"]


@pytest.mark.parametrize("make", [outputs_of_ops, an_output_that_feeds_the_model, an_activation])
def test_the_layers_that_outputs_come_from_are_float32(low, make):
    x = keras.Input((8,))
    outputs, made, expected = make(x)
    assert_float32(keras.Model(x, outputs), X)
    assert [layer.compute_dtype.replace(low, "low") for layer in made] == expected


def test_float32_outputs_false_leaves_outputs_low(low):
    with tfamp.policy_scope(tfamp.Policy(f"mixed_{low}", float32_outputs=False)):
        x = keras.Input((8,))
        assert_all_say([low], keras.Model(x, layers.Dense(2)(layers.Dense(3)(x))), X)
        assert_all_say([low], keras.Sequential([keras.Input((8,)), layers.Dense(2)]), X)


# Layers shared between models


@pytest.mark.parametrize("extractor_first", [True, False])
def test_features_of_a_model_in_either_order(low, extractor_first):
    x = keras.Input((8,))
    y, (hidden, head) = chain(x, 5, 2)
    makes = [lambda: keras.Model(x, {"h": hidden.output}), lambda: keras.Model(x, y)]
    models = [make() for make in (makes if extractor_first else reversed(makes))]
    for model in models:
        assert_float32(model, X)
    # A cast, not a float32 layer: the full model keeps its speed.
    assert (hidden.compute_dtype, head.compute_dtype) == (low, "float32")
    assert [hidden.name] in [model.output_names for model in models]


def activation_of_a_layer(x):
    y = layers.Reshape((4, 2))(x)
    for _ in range(2):
        y = layers.Conv1D(3, 2, padding="same", activation="relu")(y)
    return y, layers.Dense(2)(layers.GlobalAveragePooling1D()(y))


def activation_of_an_op(x):
    y = keras.ops.relu(layers.Dense(4)(x))
    return y, layers.Dense(2)(y)


def activation_of_a_model(x):
    y = keras.Sequential([keras.Input((8,)), layers.Dense(4, activation="relu")])(x)
    return y, layers.Dense(2)(y)


@pytest.mark.parametrize(
    "make", tiers([activation_of_an_op], [activation_of_a_layer, activation_of_a_model])
)
def test_a_prediction_has_gradients_by_the_activations_beside_it(low, make):
    x = keras.Input((8,))
    activation, prediction = make(x)
    full = keras.Model(x, prediction)
    expected = full(X)
    model = keras.Model(x, [activation, full.output])
    assert_float32(model, X)
    head = full.layers[-1]

    def run(x):
        with tf.GradientTape() as tape:
            activations, predictions = model(x)
            first = predictions[:, 0]
        return activations, predictions, tape.gradient(first, activations)

    for call in (run, tf.function(run)):
        activations, predictions, gradient = call(X)
        assert flat_dtypes([activations, predictions, gradient]) == ["float32"] * 3
        rows = tf.broadcast_to(head.kernel[:, 0], activations.shape)
        scale = gradient.shape[1] if len(gradient.shape) == 3 else 1
        assert_close(gradient * scale, rows, low)
        np.testing.assert_array_equal(predictions, expected)
    # The full model does not compute in float32 nor cast for it, and nothing stays behind.
    assert activation.dtype == low
    np.testing.assert_array_equal(full(X), expected)


def test_a_head_put_on_a_model(low):
    x = keras.Input((8,))
    features = layers.Dense(5)
    base = keras.Model(x, features(x))
    assert features.compute_dtype == "float32"
    full = keras.Model(base.input, layers.Dense(3)(base.output))
    assert features.compute_dtype == low
    assert_float32(full, X)
    assert_float32(base, X)
    assert base.output_names == [features.name]
    another = keras.Model(base.input, keras.ops.relu(base.output))
    assert_float32(another, X)
    assert_close(base(X), features(X), low)


# Nested models


def inner_model(sequential):
    made = [layers.Dense(6), layers.Dense(8)]
    if sequential == "deferred":
        return keras.Sequential(made), made
    if sequential:
        return keras.Sequential([keras.Input((8,)), *made]), made
    x = keras.Input((8,))
    return keras.Model(x, made[1](made[0](x))), made


INNER = pytest.mark.parametrize("sequential", [False, True, "deferred"])


@INNER
def test_an_inner_model_inside_another_is_low_throughout(low, sequential):
    inner, made = inner_model(sequential)
    x = keras.Input((8,))
    y = inner(x)
    head = layers.Dense(2)
    outer = keras.Model(x, head(keras.ops.relu(y)))
    assert [layer.compute_dtype for layer in (*made, head)] == [low, low, "float32"]
    assert_float32(outer, X)
    assert flat_dtypes(inner.outputs) == [low]
    assert y.dtype == low


@pytest.mark.parametrize("sequential", first_of([False, True, "deferred"]))
def test_an_inner_model_at_the_end_of_one_and_inside_another(low, sequential):
    inner, made = inner_model(sequential)
    x = keras.Input((8,))
    ends = keras.Model(x, inner(x))
    assert_float32(ends, X)
    assert [layer.compute_dtype for layer in made] == [low, "float32"]
    contains = keras.Model(x, layers.Dense(2)(inner(x)))
    ends_too = keras.Model(x, inner(x))
    for model in (ends, contains, ends_too):
        assert_float32(model, X)
    assert made[1].compute_dtype == low


class Block(layers.Layer):
    """A user's layer that holds models, adds with Python's operator, and may come last."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, _ = inner_model(sequential="deferred")
        self.second, _ = inner_model(sequential=True)
        self.third, _ = inner_model(sequential=False)

    def call(self, x):
        return x + self.first(x) + self.second(x) + self.third(x)


@pytest.mark.filterwarnings("error:Layer 'block")
@pytest.mark.parametrize("symbolic", [True, False])
def test_models_inside_a_users_layer_are_parts_of_it(low, symbolic):
    block = Block(name="block")
    y = block(keras.Input((8,)) if symbolic else X)
    assert flat_dtypes(y) == [low]
    inner = [*block.first.layers, *block.second.layers, *block.third.layers[1:]]
    assert [layer.compute_dtype for layer in inner] == [low] * 6


@pytest.mark.parametrize("last", first_of([True, False]))
def test_a_users_layer_of_layers_at_the_end_gets_a_cast(low, last):
    block = Block()
    model = keras.Sequential([keras.Input((8,)), block, *([] if last else [layers.Dense(2)])])
    assert_float32(model, X)
    assert block.compute_dtype == low


# Sequential


def test_layers_added_and_taken_off_one_by_one_and_after_one_that_does_not_fit(low):
    model = keras.Sequential([keras.Input((8,))])
    for n in (1, 2, 3, 2, 1):
        if n > len(model.layers):
            model.add(layers.Dense(8))
        else:
            assert model.pop().compute_dtype == low
        assert compute_dtypes(model) == [low] * (n - 1) + ["float32"]
        assert_float32(model, X)
    with pytest.raises(ValueError, match="incompatible"):
        model.add(layers.Conv2D(1, 1))
    model.pop()
    assert_float32(model, X)


def test_built_by_its_first_call_before_or_after_the_policy_has_changed(low):
    model, late = (keras.Sequential([layers.Dense(4), layers.Dense(2)]) for _ in range(2))
    grown, added = keras.Sequential([keras.Input((8,)), layers.Dense(4)]), layers.Dense(3)
    assert flat_dtypes(model(X)) == ["float32"]
    assert_float32(model, X.astype(low))
    tfamp.set_global_policy("float32")
    assert flat_dtypes(late(X)) == ["float32"]
    grown.add(added)
    assert_float32(grown, X)
    for each in (model, late, grown):
        assert compute_dtypes(each) == [low, "float32"]


def test_sequential_with_nested_inputs_has_no_graph_and_returns_float32(low):
    class Sum(layers.Layer):
        def call(self, inputs):
            return inputs["a"] + inputs["b"]

        def build(self, shape):
            pass

    model = keras.Sequential([Sum(), layers.Dense(2)])
    assert flat_dtypes(model({"a": X, "b": X})) == ["float32"]
    assert model.layers[-1].compute_dtype == low


# Which layers can be raised

BUILT_IN = {
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
    "Conv1D": (lambda: layers.Conv1D(3, 2), SEQUENCE),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (None, 3)), SEQUENCE),
    "LSTM": (lambda: layers.LSTM(3, return_sequences=True, return_state=True), SEQUENCE),
    "Lambda": (lambda: layers.Lambda(lambda x: x * 2), SEQUENCE),
    "LayerNormalization": (lambda: layers.LayerNormalization(), SEQUENCE),
    "MultiHeadAttention": (lambda: layers.MultiHeadAttention(2, 3), [SEQUENCE, SEQUENCE]),
    "RNN": (lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]), SEQUENCE),
    "SpectralNormalization": (lambda: layers.SpectralNormalization(layers.Dense(3)), SEQUENCE),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE),
}


@pytest.mark.parametrize(
    "name",
    tiers(
        ["EinsumDense", "Lambda"],
        [each for each in BUILT_IN if each not in ("EinsumDense", "Lambda")],
    ),
)
def test_keras_layers_as_output_layers(low, name):
    make, data = BUILT_IN[name]
    data = data if isinstance(data, list) else [data]
    inputs = [keras.Input(x.shape[1:]) for x in data]
    hidden = [layers.Dense(6)(x) for x in inputs]
    layer = make()
    outputs = layer(*hidden)
    assert set(flat_dtypes(outputs)) == {low}
    model = keras.Model(inputs, outputs)
    assert_float32(model, *data)
    parts = [layer, *(layer._flatten_layers(include_self=False))]
    assert {part.compute_dtype for part in parts} == {"float32"}
    # And back again, inside another model.
    outer = keras.Model(inputs, layers.Dense(1)(keras.tree.flatten(model.output)[0]))
    assert {part.compute_dtype for part in parts} == {low}
    assert_float32(outer, *data)
    assert_float32(model, *data)


class KeepsLowConstant(layers.Layer):
    """Cannot be raised once built: TensorFlow does not multiply float32 by float16."""

    def build(self, shape):
        self.factor = tf.constant(2.0, self.compute_dtype)

    def call(self, x):
        return tf.multiply(x, self.factor)


class CastsDown(layers.Layer):
    def call(self, x):
        return keras.ops.cast(x, "float16")


class Plain(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.w


@pytest.mark.parametrize(
    ("layer_class", "raised"), [(Plain, True), (KeepsLowConstant, False), (CastsDown, True)]
)
def test_users_layers_as_output_layers(low, layer_class, raised):
    layer = layer_class()
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layer])
    assert_float32(model, X)
    assert layer.compute_dtype == ("float32" if raised else low)


def test_a_wrapper_of_a_model_gets_a_cast(low):
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])
    model = keras.Sequential([keras.Input((4, 6)), layers.TimeDistributed(inner)])
    assert_float32(model, SEQUENCE)
    assert [layer.compute_dtype for layer in inner.layers] == [low, low]


def test_float32_layers_keep_what_they_are_made_of(low):
    class MyBlock(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)
            self.chosen = layers.Dense(6, dtype=f"mixed_{low}")
            self.wrapped = layers.Bidirectional(layers.LSTM(3, return_sequences=True))

        def call(self, x):
            return self.wrapped(self.chosen(self.dense(x)))

    policy = tfamp.Policy(f"mixed_{low}", float32_layers=[MyBlock, layers.GRU])
    with tfamp.policy_scope(policy):
        block, gru = MyBlock(), layers.GRU(3)
        model = keras.Sequential([keras.Input((4, 6)), block, gru, layers.Dense(2)])
    assert_float32(model, SEQUENCE)
    parts = [layer for layer in block._flatten_layers() if layer is not block.chosen]
    assert {part.compute_dtype for part in (*parts, *gru._flatten_layers())} == {"float32"}
    assert block.chosen.compute_dtype == low


def test_float32_layers_build_and_make_their_sublayers_in_float32(low):
    class Kept(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = KeepsLowConstant()

        def build(self, shape):
            self.inner.build(shape)
            self.dense = layers.Dense(4)

        def call(self, x):
            made.append(layers.Softmax())
            return made[-1](self.dense(self.inner(x)))

    made = []
    with tfamp.policy_scope(tfamp.Policy(f"mixed_{low}", float32_layers=[Kept])):
        model = keras.Sequential([keras.Input((8,)), Kept(), layers.Dense(4), layers.Dense(1)])
    assert_float32(model, X)
    kept, hidden, _ = model.layers
    assert {each.compute_dtype for each in (kept, kept.dense, *made)} == {"float32"}
    assert (kept.inner.factor.dtype, hidden.compute_dtype) == (tf.float32, low)


@pytest.mark.skipif(
    KERAS_VERSION < (3, 14), reason="this Keras loses masks where a layer casts its input"
)
def test_masks_survive_the_cast():
    x = keras.Input((4,), dtype="int32")
    hidden = layers.LSTM(3, return_sequences=True)(layers.Embedding(5, 3, mask_zero=True)(x))
    keras.Model(x, layers.LSTM(2)(hidden))
    extractor = keras.Model(x, hidden)
    result = extractor(np.array([[1, 2, 0, 0]]))
    assert flat_dtypes(result) == ["float32"]
    assert result._keras_mask.numpy().tolist() == [[True, True, False, False]]


# The numbers, training, and what is left behind


def test_close_to_float32_and_more_exact_than_a_low_output(low):
    x = keras.Input((8,))
    y, made = chain(x, 32, 3)
    model = keras.Model(x, y)
    expected = X.astype("float64")
    for layer in made:
        expected = expected @ layer.kernel.numpy() + layer.bias.numpy()
    for call in (model, tf.function(model, jit_compile=True)):
        result = call(tf.constant(X)).numpy()
        assert_close(result, expected, low, depth=32)
        assert not np.array_equal(result, tf.cast(tf.cast(result, low), tf.float32))


def test_pure_policies_are_left_to_keras(low):
    with tfamp.policy_scope(low):
        model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(), layers.Dense(2)])
    assert_all_say([low], model, X)
    assert {weight.dtype for weight in model.weights} == {low}
    assert_computes_in(low, model, tf.TensorSpec((3, 8)))


def _build_and_drop():
    # In a function of its own: a local of the test would keep the layers alive.
    x = keras.Input((8,))
    y, made = chain(x, 4, 2)
    base = keras.Model(x, y)
    keras.Model(x, made[0].output)
    keras.Model(x, layers.Dense(2)(base(x)))
    keras.Sequential([keras.Input((8,)), layers.Dense(8), Block()])(X)
    assert all(managed_by(layer) for layer in made)
    assert record_of(base).graph is not None
    return [weakref.ref(obj) for obj in (*made, base)]


def test_a_copied_record_does_not_change_with_the_layer():
    x = keras.Input((8,))
    y, (head,) = chain(x, 2)
    keras.Model(x, y)
    record = places_of(head)
    noted = copied(record)
    keras.Model(x, layers.Dense(2)(y))
    assert (noted.raised, record.raised) == ([head], [])
    assert (len(noted.interior_of), len(record.interior_of)) == (0, 1)


def test_nothing_is_kept_alive():
    dropped = _build_and_drop()
    keras.utils.clear_session()
    gc.collect()
    assert [reference() for reference in dropped] == [None] * 3


# Any model: a random graph of layers, every one of whose tensors may be an output.

_graph = st.lists(
    st.tuples(
        st.sampled_from(
            ["dense", "shared", "norm", "shared_norm", "relu", "add", "inner", "explicit"]
        ),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=7,
)


class _Maker:
    def __init__(self):
        self.shared = layers.Dense(4)
        self.shared_norm = layers.BatchNormalization()
        self.inner = keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.Dense(4)])

    def step(self, kind, x, y):
        return {
            "dense": lambda: layers.Dense(4)(x),
            "shared": lambda: self.shared(x),
            "norm": lambda: layers.BatchNormalization()(x),
            "shared_norm": lambda: self.shared_norm(x),
            "relu": lambda: keras.ops.relu(x),
            "add": lambda: layers.Add()([x, y]) if x is not y else x + 1.0,
            "inner": lambda: self.inner(x),
            "explicit": lambda: layers.Dense(4, dtype="float32")(x),
        }[kind]()


@settings(max_examples=12)
@given(steps=_graph, picks=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_any_graph_and_any_outputs(steps, picks):
    for policy in ("mixed_float16", "mixed_bfloat16"):
        with tfamp.policy_scope(policy):
            tensors = [keras.Input((4,))]
            maker = _Maker()
            for kind, i, j in steps:
                x, y = (tensors[k % len(tensors)] for k in (i, j))
                tensors.append(maker.step(kind, x, y))
            first = keras.Model(tensors[0], [tensors[-1]])
            second = keras.Model(tensors[0], [tensors[1:][k % len(steps)] for k in picks])
        x = np.ones((2, 4), "float32")
        for model in (first, second):
            assert set(flat_dtypes(model.outputs)) == {"float32"}
            assert set(flat_dtypes(model(x))) == {"float32"}
        # What the tensors in between say is what they are.
        inner = keras.Function(tensors[0], tensors[1:])
        assert flat_dtypes(inner(x)) == flat_dtypes(tensors[1:])


def test_a_dtype_set_by_hand_stays_when_the_layer_becomes_an_interior_one():
    with tfamp.policy_scope("mixed_float16"):
        x = keras.Input((4,))
        layer = layers.Dense(4)
        outputs = layer(x)
        keras.Model(x, outputs)
        assert layer.compute_dtype == "float32"
        layer.dtype_policy = "bfloat16"
        model = keras.Model(x, layers.Dense(2)(outputs))
    assert layer.compute_dtype == "bfloat16"
    assert model(np.ones((2, 4), "float32")).dtype == "float32"
