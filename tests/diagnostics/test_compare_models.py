"""`compare` on Keras models: the culprit is named, the list is proved, the model is as before."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.helpers.tolerances import tolerance
from tfamp.diagnostics import Comparison, compare

L = keras.layers
DTYPES = ("float16", "bfloat16")


class Overflowing(L.Layer):
    """A root mean square, whose squares exceed 65504 and whose result does not."""

    def call(self, x):
        return x * tf.sqrt(tf.reduce_mean(tf.square(x * 300.0), -1, keepdims=True)) / 300.0


class Cancelling(L.Layer):
    """A small difference of large numbers."""

    def call(self, x):
        return (x + 4096.0) - 4096.0


CULPRITS = {"float16": Overflowing, "bfloat16": Cancelling}


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(8, 16)).astype("float32")


def sequential(middle):
    first = [keras.Input((16,)), L.Dense(32, "relu", name="first"), *middle]
    rest = [L.Dense(32, "relu", name="second"), L.BatchNormalization(name="norm")]
    return keras.Sequential([*first, *rest, L.Dense(4, name="head")], name="net")


def functional(middle):
    inputs = keras.Input((16,))
    y = L.Dense(32, "relu", name="first")(inputs)
    for layer in middle:
        y = layer(y)
    y = L.Add(name="add")([y, L.Dense(32, name="second")(y)])
    return keras.Model(inputs, {"a": L.Dense(4, name="head")(y), "b": y}, name="net")


def nested(middle):
    block = keras.Sequential([keras.Input((32,)), *middle, L.Dense(32, name="in")], name="block")
    layers = [keras.Input((16,)), L.Dense(32, "relu", name="first"), block, L.Dense(4, name="head")]
    return keras.Sequential(layers, name="net")


class Subclassed(keras.Model):
    def __init__(self, middle):
        super().__init__(name="net")
        self.inner = [L.Dense(32, "relu", name="first"), *middle, L.Dense(4, name="head")]

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


KINDS = [sequential, functional, nested, Subclassed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named_and_keeping_it_is_proved_to_be_enough(kind, dtype, x):
    model = kind([CULPRITS[dtype](name="culprit")])
    found = compare(model, x, dtype=dtype, bound=0.02)
    assert found.worst.layer.endswith("culprit")
    assert found.worst.dtype == dtype
    assert found.output_error > 0.02
    (kept,) = found.keep_float32
    assert kept == found.worst.layer
    assert found.proved_error <= 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_model_has_small_errors_and_nothing_to_keep(kind, dtype, x):
    found = compare(kind([]), x, dtype=dtype, bound=0.1)
    assert found.keep_float32 == ()
    assert found.proved_error == found.output_error
    assert 0 < found.output_error <= tolerance(dtype, depth=64)
    low = [row for row in found.rows if row.dtype == dtype]
    assert low
    assert all(row.own_error <= tolerance(dtype, depth=32) for row in low)
    assert all(row.share_out_of_range == 0 for row in found.rows)


def test_the_proof_is_what_the_user_gets(x):
    """Keeping the layer float32 by Keras's own means gives the proved error."""
    model = sequential([Overflowing(name="culprit")])
    expected = model(x)
    found = compare(model, x, dtype="float16", bound=0.02)
    for layer in model.layers:
        low = isinstance(layer, L.Dense | Overflowing) and layer.name != "head"
        if low and layer.path not in found.keep_float32:
            layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    difference = np.max(np.abs(model(x).numpy() - expected.numpy()))
    assert difference / np.max(np.abs(expected)) == pytest.approx(found.proved_error, rel=1e-3)


def test_shares_out_of_range_are_those_of_the_float32_values():
    scale = L.Identity(name="scale")
    model = keras.Sequential([keras.Input((4,)), scale, L.Dense(1, name="head")])
    x = np.array([[1e5, 1.0, 1e-9, 0.0]], "float32")
    row = compare(model, x, dtype="float16").rows[0]
    assert (row.overflow, row.underflow, row.share_out_of_range) == (0.25, 0.25, 0.5)
    assert row.max == 1e5
    assert row.own_error == math.inf
    assert compare(model, x, dtype="bfloat16").rows[0].share_out_of_range == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_culprit_in_a_layers_own_code_is_that_layer_and_one_inside_is_named_before(inside, x):
    class Block(L.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.inner = Overflowing(name="inner") if inside else L.Dense(32, name="inner")

        def call(self, x):
            return self.inner(x) if inside else Overflowing.call(self, self.inner(x))

    found = compare(Subclassed([Block()]), x, dtype="float16", bound=0.02)
    assert found.keep_float32 == ("net/block/inner" if inside else "net/block",)
    assert [row.layer for row in found.rows][1:3] == ["net/block/inner", "net/block"]


def test_recurrent_attention_and_shared_layers_are_compared():
    inputs = keras.Input((6, 8))
    shared = L.Dense(8, name="shared")
    y = L.LSTM(8, return_sequences=True, name="lstm")(shared(shared(inputs)))
    y = L.MultiHeadAttention(2, 4, name="attention")(y, y)
    model = keras.Model(inputs, L.Dense(2, name="head")(y), name="net")
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    found = compare(model, x, dtype="bfloat16", bound=0.1)
    rows = {row.layer.rpartition("/")[2]: row for row in found.rows}
    assert {"lstm", "attention", "query", "head"} <= set(rows)
    assert (rows["shared"].kind, rows["shared"].calls) == ("Dense", 2)
    assert 0 < rows["attention"].own_error < 0.1
    assert found.keep_float32 == ()


def test_the_model_is_as_before_also_after_an_error(x):
    model = sequential([L.Dropout(0.5, seed=1), L.GaussianNoise(1.0, seed=2)])
    model.compile(keras.optimizers.Adam(), "mse")
    model.train_on_batch(x, np.zeros((8, 4)))

    def state():
        variables = [*model.variables, *model.optimizer.variables]
        return [np.array(keras.ops.convert_to_numpy(value)) for value in variables]

    def policies():
        return [layer.dtype_policy for layer in model.layers]

    before, own = state(), policies()
    compare(model, x, dtype="float16", bound=1e-6)
    with pytest.raises(ValueError, match="incompatible"):
        compare(model, x[:, :3], dtype="float16")
    assert all(a is b for a, b in zip(own, policies(), strict=True))
    assert keras.config.dtype_policy().name == "float32"
    for old, new in zip(before, state(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixed_model_is_compared_as_it_is_in_the_order_of_the_run(dtype, x):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        model = sequential([])
    found = compare(model, x)
    assert (found.dtype, found.keep_float32, found.proved_error, found.bound) == (
        dtype, (), None, None
    )  # fmt: skip
    names = ["net/first", "net/second", "net/norm", "net/head"]
    assert [row.layer for row in found.rows] == names
    assert [row.kind for row in found.rows] == ["Dense", "Dense", "BatchNormalization", "Dense"]
    assert [row.dtype for row in found.rows] == [dtype, dtype, "float32", "float32"]
    assert found.rows[2].own_error is None
    assert 0 < found.output_error == found.rows[-1].relative_error < tolerance(dtype, depth=64)
    other = "bfloat16" if dtype == "float16" else "float16"
    assert compare(model, x, dtype=other).rows[0].dtype == other
    assert model.layers[0].compute_dtype == dtype


def test_no_list_is_enough_for_a_random_model(x):
    noisy = L.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype), name="noisy")
    found = compare(sequential([noisy]), x, dtype="bfloat16", bound=1e-9)
    assert (found.keep_float32, found.proved_error) == (None, None)
    assert "no list of layers in float32 brings it under 1e-09" in found.to_text()


def test_dtypes_and_inputs_of_all_forms_are_taken(x):
    model = sequential([])
    expected = compare(model, x, dtype="bfloat16").output_error
    assert compare(model, tf.constant(x), dtype=tf.bfloat16).output_error == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "one of float16, bfloat16, auto; got 'float32'"),
        ({"bound": -1.0}, "bound must be a relative error"),
        ({"bound": math.nan}, "bound must be a relative error"),
    ],
)
def test_wrong_arguments_are_refused(options, message, x):
    with pytest.raises(ValueError, match=message):
        compare(sequential([]), x, **options)
    for wrong in (3, tf.nn.relu):
        with pytest.raises(TypeError, match=f"takes a Keras model.*got {type(wrong).__name__}"):
            compare(wrong, x, dtype="float16")


def test_text_and_json_tell_the_same(x):
    found = compare(sequential([Overflowing(name="culprit")]), x, dtype="float16", bound=0.02)
    assert isinstance(found, Comparison)
    lines = found.to_text().splitlines()
    assert lines[1].split()[:3] == ["net/culprit", "Overflowing", "float16"]
    assert "  net/culprit" in lines[-3:]
    facts = json.loads(found.to_json())
    assert facts["keep_float32"] == ["net/culprit"]
    assert facts["output_error"] == "inf"
    assert facts["rows"][0]["share_out_of_range"] == 0
    assert [row["layer"] for row in facts["rows"]] == [row.layer for row in found.rows]


def test_a_layer_by_itself_is_compared_and_one_that_is_an_output_is_float32(x):
    (row,) = compare(L.Dense(4, name="alone"), x, dtype="bfloat16").rows
    assert (row.layer, row.dtype) == ("alone", "bfloat16")
    assert 0 < row.own_error < tolerance("bfloat16", depth=16)
    (kept,) = compare(L.BatchNormalization(name="norm"), x, dtype="bfloat16").rows
    assert kept.dtype == "float32"
    model = keras.Sequential([keras.Input((16,)), L.Dense(4, name="head")])
    found = compare(model, x, dtype="bfloat16", bound=0.01)
    assert (found.output_error, found.keep_float32, found.worst) == (0.0, (), None)
    assert "nothing of it computes in bfloat16" in found.to_text()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x: x[:0], "outputs have no elements"),
        (lambda x: x * np.nan, "no output is finite in float32"),
    ],
)
def test_where_float32_gives_nothing_no_error_is_claimed(x, made, message):
    model = keras.Sequential([keras.Input((16,)), L.Dense(4), L.Dense(2)])
    with pytest.raises(ValueError, match=message):
        compare(model, made(x), dtype="float16", bound=0.01)
