"""`compare`: the culprit is named, the list is proved and minimal, the model is as before."""

import json
import math
import re
import string

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import tolerance
from helpers.training import assert_identical, snapshot
from tfamp.diagnostics import Comparison, compare
from tfamp.diagnostics.comparison import range_shares
from tfamp.diagnostics.comparison_notes import largest_inexact
from tfamp.diagnostics.model_runs import computing_in, observing_layers, unchanged

L = keras.layers
DTYPES = ("float16", "bfloat16")
NAMES = string.ascii_letters


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


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
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


@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_model_has_small_errors_and_nothing_to_keep(kind, dtype, x):
    found = compare(kind([]), x, dtype=dtype, bound=0.1)
    assert found.keep_float32 == ()
    assert found.proved_error == found.output_error
    assert 0 < found.output_error <= tolerance(dtype, depth=64)
    own = [row.own_error for row in found.rows if row.dtype == dtype]
    assert 0 < max(own) <= tolerance(dtype, depth=32)
    assert all(row.share_out_of_range == 0 for row in found.rows)
    assert found.notes == ()


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
    before, own = snapshot(model, model.optimizer), [layer.dtype_policy for layer in model.layers]
    compare(model, x, dtype="float16", bound=1e-6)
    with pytest.raises(ValueError, match="incompatible"):
        compare(model, x[:, :3], dtype="float16")
    assert all(a is layer.dtype_policy for a, layer in zip(own, model.layers, strict=True))
    assert keras.config.dtype_policy().name == "float32"
    assert_identical(snapshot(model, model.optimizer), before)


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
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
    assert compare(model, tf.constant(x), dtype=tf.as_dtype(other)).rows[0].dtype == other
    assert model.layers[0].compute_dtype == dtype


def test_no_list_is_enough_for_a_random_model_and_the_text_names_its_noise(x):
    noisy = L.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype), name="noisy")
    found = compare(sequential([noisy]), x, dtype="bfloat16", bound=1e-9)
    assert (found.keep_float32, found.proved_error) == (None, None)
    assert "no list of layers in float32 brings it under 1e-09" in found.to_text()
    assert found.noise > 0.01
    assert "differ by" in found.to_text()
    assert "the model is random" in found.to_text()
    assert json.loads(found.to_json())["noise"] == found.noise
    same = compare(sequential([L.Dropout(0.5)]), x, dtype="bfloat16")
    assert same.noise == 0
    assert "random" not in same.to_text()


def test_the_policy_of_a_low_dtype_means_the_dtype(x):
    model = sequential([])
    expected = compare(model, x, dtype="bfloat16").output_error
    for given_dtype in ("mixed_bfloat16", keras.DTypePolicy("mixed_bfloat16"), tf.bfloat16):
        found = compare(model, tf.constant(x), dtype=given_dtype)
        assert (found.dtype, found.output_error) == ("bfloat16", expected)


def test_wrong_arguments_are_refused(x):
    with pytest.raises(ValueError, match="one of float16, bfloat16, auto; got 'float32'"):
        compare(sequential([]), x, dtype="float32")
    for bound in (-1.0, math.nan):
        with pytest.raises(ValueError, match="bound must be a number in"):
            compare(sequential([]), x, bound=bound)
    for wrong in (3, tf.nn.relu):
        with pytest.raises(TypeError, match=f"takes a Keras model.*got {type(wrong).__name__}"):
            compare(wrong, x, dtype="float16")
    other = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})()
    message = r"got Sequential\. That is of tf_keras .*: use its counterpart in keras"
    with pytest.raises(TypeError, match=message):
        compare(other, x, dtype="float16")


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


class Sines(L.Layer):
    """Adds sines of positions, which are given as floats."""

    def call(self, x, positions):
        return x + keras.ops.sin(positions[..., None] / 10.0)


def positioned(policy, **arguments):
    x, positions = keras.Input((3000, 8), name="x"), keras.Input((3000,), name="positions")
    with tfamp.policy_scope(policy):
        y = Sines(name="sines", **arguments)(x, positions=positions)
        y = L.Dense(4, name="head")(L.Dense(4, name="last")(y))
    return keras.Model({"x": x, "positions": positions}, y, name="net")


@pytest.mark.parametrize(("dtype", "exact"), [("float16", "2,048"), ("bfloat16", "256")])
def test_a_layer_that_rounds_whole_numbers_is_named_with_the_largest(dtype, exact):
    data = {
        "x": np.zeros((2, 3000, 8), "float32"),
        "positions": np.tile(np.arange(3000.0, dtype="float32"), (2, 1)),
    }
    found = compare(positioned("float32"), data, dtype=dtype)
    (note,) = found.notes
    start = f"sines takes whole numbers up to 2,999 as floats and casts them to {dtype}, which"
    assert note.startswith(f"{start} holds them exactly up to {exact}: ")
    assert note in found.to_text()
    assert json.loads(found.to_json())["notes"] == [note]
    assert "up to 2,999" in found._repr_html_()
    # With the note's advice, and for numbers that the dtype holds.
    repaired = compare(positioned(f"mixed_{dtype}", dtype="float32"), data)
    assert repaired.notes == ()
    assert repaired.output_error < found.output_error / 10
    held = {**data, "positions": np.minimum(data["positions"], float(exact.replace(",", "")))}
    assert compare(positioned("float32"), held, dtype=dtype).notes == ()


def test_whole_numbers_among_others_and_integers_are_not_named():
    for values in ([300.5, 301.0], [2.0**25], [256.0, 512.0], [np.inf, 301.0], []):
        assert largest_inexact([np.array(values, "float32")], "bfloat16") == 0.0
    assert largest_inexact([np.array([[-301.0, 3.0]], "float32")], "bfloat16") == 301.0
    model = keras.Sequential([keras.Input((4,), dtype="int32"), L.Embedding(5000, 8), L.Dense(2)])
    assert compare(model, np.full((2, 4), 4999), dtype="bfloat16").notes == ()


class Forecast(L.Layer):
    """Normalizes series, calls a model and undoes the normalization."""

    def build(self, shape):
        self.inner = keras.Sequential([L.Dense(32, "gelu"), L.Dense(24)])
        self.inner.build(shape)

    def call(self, x):
        mean, variance = keras.ops.moments(x, [1], keepdims=True)
        deviation = keras.ops.sqrt(variance + 1e-3)
        changes = keras.ops.cast(self.inner((x - mean) / deviation), x.dtype)
        return changes * deviation + mean


def test_an_error_that_is_small_for_the_size_of_the_output_and_large_for_its_variation_is_named():
    random = np.random.default_rng(0)
    steps = np.cumsum(random.normal(size=(32, 96)), 1)
    x = (random.uniform(100, 1000, (32, 1)) + steps).astype("float32")

    def found(**arguments):
        with tfamp.policy_scope("mixed_bfloat16"):
            layers = [Forecast(name="forecast", **arguments), L.Activation("linear")]
            return compare(keras.Sequential([keras.Input((96,)), *layers], name="net"), x)

    (note,) = found().notes
    assert re.match(r"output 0: the error \(root mean square\) is \d\d% of the standard dev", note)
    assert "and 0.2% of the largest value" in note
    assert 'net/forecast undoes a normalization, give it dtype="float32"' in note
    assert found(dtype="float32").notes == ()


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


def test_where_float32_gives_nothing_no_error_is_claimed(x):
    model = keras.Sequential([keras.Input((16,)), L.Dense(4), L.Dense(2)])
    for values in (x[:0], x * np.nan):
        with pytest.raises(ValueError, match="no output is finite in float32"):
            compare(model, values, dtype="float16", bound=0.01)


# ---- Errors --------------------------------------------------------------------------------------


def test_shares_count_what_the_dtype_cannot_hold():
    values = [np.array([0.0, 65504.0, 65505.0, math.inf]), np.array([2.0**-24, 2.0**-25, 1.0, 1.0])]
    shares = range_shares(values, "float16")
    assert shares == {"max": 65505.0, "overflow": 1 / 8, "underflow": 1 / 8}
    assert range_shares(values, "bfloat16")["overflow"] == 0
    assert range_shares([], "float16")["max"] == 0


# ---- The model while it runs ---------------------------------------------------------------------


def test_low_variables_are_cast_up_and_calls_are_observed():
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    model = keras.Sequential([keras.Input((8,)), L.Dense(3, dtype="float16")])
    called = []

    def note(layer, call):
        called.append(layer.name)
        return call()

    with computing_in(model, "float32"), unchanged(model.variables), observing_layers(note):
        result = model(x)
    assert model.layers[0].name in called
    assert result.dtype == "float32"
    kernel = model.layers[0].kernel.numpy().astype(np.float32)
    np.testing.assert_allclose(result, x @ kernel, rtol=1e-6, atol=1e-6)


def test_a_policy_map_is_left_alone():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    layer = L.Dense(2, dtype=policies, name="mapped")
    model = keras.Sequential([keras.Input((8,)), layer, L.Dense(1)])
    # Also after an exception.
    with pytest.raises(KeyError, match="inside"), computing_in(model, "float16"):
        assert layer.compute_dtype == "float16"
        raise KeyError("inside")
    assert layer.dtype_policy is policies
    assert not list(policies)


def test_a_model_at_level_o1_is_compared_with_float32_and_not_with_its_autocast():
    made = [L.Dense(4, kernel_initializer="ones", name="big"), L.Dense(1, name="small"), L.ReLU()]
    model = keras.Sequential([keras.Input((1,)), *made])
    x = tf.constant([[3e5]])
    expected = compare(model, x, dtype="float16", bound=0.01)
    exact = np.asarray(model(x))
    model, _ = tfamp.prepare(model, level="O1", dtype="float16")
    found = compare(model, x, dtype="float16", bound=0.01)
    assert (found.worst.layer, found.output_error) == (expected.worst.layer, math.inf)
    assert found.keep_float32 == expected.keep_float32
    assert np.isfinite(exact).all()
    assert not np.isfinite(np.asarray(model(x))).all(), "its own calls are autocast as before"


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_page_has_a_heading_for_each_column(policy):
    with tfamp.policy_scope(policy):
        model = keras.Sequential([keras.Input((4,)), L.Dense(4), L.Dense(2)])
    page = compare(model, tf.ones((1, 4)), dtype="float16")._repr_html_()
    rows = [len(re.findall("<t[hd]", row)) for row in re.findall("<tr.*?</tr>", page, re.DOTALL)]
    assert len(rows) >= 3
    assert set(rows) == {8 if policy == "float32" else 9}
