"""`find_nonfinite`: op and cause of ten faults, nothing for healthy models, nothing left behind."""

import json

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfamp
from helpers import model_zoo
from helpers.cases import first_of
from helpers.faults import FAULTS, LOSS, raw_softmax_log
from helpers.training import assert_identical, snapshot
from tfamp.diagnostics import NonFiniteReport, find_nonfinite

NAMES = list(FAULTS)


def _everything(model):
    """Values of all variables, and the policies and collected losses of all layers."""
    owners = [model, *([model.optimizer] if getattr(model, "optimizer", None) else [])]
    policies = [id(layer.dtype_policy) for layer in model._flatten_layers()]
    return snapshot(*owners), policies, len(model.losses)


def _find(fault, policy, **kwargs):
    model = fault.model(policy)
    loss = None if getattr(model, "compiled", False) else LOSS
    before = _everything(model)
    report = find_nonfinite(model, fault.x, fault.y, loss=loss, **kwargs)
    after = _everything(model)
    assert_identical(after[0], before[0])
    assert after[1:] == before[1:]
    return report


def _assert_names(fault, report, kind):
    assert isinstance(report, NonFiniteReport)
    assert (report.stage, report.op, report.kind) == (fault.stage, fault.op, kind)
    assert report.layer == fault.layer
    assert all(words in report.fix for words in fault.fix), report.fix
    assert report.fix in report.to_text()
    assert json.loads(report.to_json())["op"] == fault.op


@pytest.mark.parametrize("name", NAMES)
def test_ten_faults_are_named_in_float16(name):
    fault = FAULTS[name]
    report = _find(fault, "mixed_float16")
    _assert_names(fault, report, fault.kind)
    if name == "exp":
        (given,), (made,), (right,) = (report.ranges[k] for k in ("inputs", "outputs", "float32"))
        assert (given.dtype, made.dtype, right.dtype) == ("float16", "float16", "float32")
        assert (given.max, made.infs, right.finite) == (12.0, 4 * 8, True)
        assert right.max_abs == pytest.approx(np.exp(12.0), rel=1e-5)
    if name in ("exp", "epsilon 1e-8", "mask constant", "bad weights"):  # of a float32 model
        _assert_names(fault, _find(fault, "float32", dtype="float16"), fault.kind)


# The others are tensors of the same ranges.
@pytest.mark.parametrize("name", ["exp", "mask constant", "loss scale", "bad input", "bad weights"])
def test_faults_of_the_range_are_gone_in_bfloat16_and_others_named(name):
    fault = FAULTS[name]
    report = _find(fault, "mixed_bfloat16")
    if fault.in_bfloat16 is None:
        assert report is None
    else:
        _assert_names(fault, report, fault.in_bfloat16)


@pytest.mark.parametrize(("name", "factor"), [("sum over a long axis", 1e35), ("exp", 10.0)])
def test_overflow_of_bfloat16_is_float32s_too(name, factor):
    fault = FAULTS[name]
    model = fault.model("mixed_bfloat16")
    report = find_nonfinite(model, fault.x * np.float32(factor), fault.y, loss=LOSS)
    assert (report.stage, report.layer, report.op) == (fault.stage, fault.layer, fault.op)
    assert report.kind == "also_in_float32"
    assert "float32 has it too" in report.fix


def test_the_suggested_loss_scale_works_and_twice_of_it_does_not():
    fault = FAULTS["loss scale"]
    model = fault.model("mixed_float16")
    report = find_nonfinite(model, fault.x, fault.y)
    assert report.variable == "first/kernel"
    exponent = int(report.fix.partition("initial_scale=2**")[2].partition(",")[0])
    for scale, finite in ((2.0**exponent, True), (2.0 ** (exponent + 1), False)):
        model.optimizer.dynamic_scale.assign(scale)
        assert (find_nonfinite(model, fault.x, fault.y) is None) == finite


def test_a_loss_scale_that_is_not_a_positive_number():
    fault = FAULTS["loss scale"]
    model = fault.model("mixed_float16")
    for scale in (np.inf, np.nan, 0.0):
        model.optimizer.dynamic_scale.assign(scale)
        report = find_nonfinite(model, fault.x, fault.y)
        assert report.stage == "loss_scale"
        assert "dynamic_scale" in report.variable


def test_inputs_weights_targets_and_the_loss_are_stages_of_their_own():
    model = FAULTS["bad input"].model("mixed_float16")
    x, y = np.ones((2, 8), np.float32), np.zeros((2, 3), np.float32)
    report = find_nonfinite(model, x, y * np.nan, loss="mse")
    assert (report.stage, report.kind) == ("input", "also_in_float32")
    assert "the first at index [0, 0] of y" in report.fix
    report = find_nonfinite(model, x, y, loss=lambda y, out: tf.math.log(y))
    assert (report.stage, report.op, report.kind) == ("loss", "Log", "also_in_float32")
    report = find_nonfinite(model, x * 1e5, y, loss="mse")
    assert (report.stage, report.op, report.kind) == ("input", "Cast", "overflow")
    model.get_layer("first").kernel.assign(np.full((8, 8), 1e5))
    report = find_nonfinite(model, x * 0, y, loss="mse")
    assert (report.stage, report.layer, report.kind) == ("weights", "first", "overflow")
    assert report.variable == "first/kernel"


def test_a_gradient_that_float32_does_not_have_either():
    class Norm(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")

        def call(self, x):
            return ops.sqrt(ops.abs(x * self.scale))

    model = keras.Sequential([keras.Input((4,)), Norm(name="norm")])
    report = find_nonfinite(model, np.ones((2, 4)), np.ones((2, 4)), loss="mse")
    assert (report.stage, report.op, report.kind) == ("backward", "SqrtGrad", "also_in_float32")
    assert report.variable.endswith("norm/scale")
    assert report.layer.endswith("norm")


# ---- Custom loops, rewritten functions, loops in graphs ------------------------------------------


def test_raw_ops_of_a_function():
    report = find_nonfinite(raw_softmax_log, tf.constant([[30.0, 0.0]]))
    assert (report.op, report.kind) == ("Log", "underflow")
    assert "Softmax" in report.fix
    assert find_nonfinite(raw_softmax_log, tf.constant([[3.0, 0.0]])) is None
    concrete = tf.function(raw_softmax_log).get_concrete_function(tf.TensorSpec((1, 2)))
    report = find_nonfinite(concrete, tf.constant([[30.0, 0.0]]))
    assert (report.op, report.node) == ("Log", "Log")


def test_a_custom_loop_whose_loss_scale_explodes():
    weights = tf.Variable(tf.ones((8, 4)), name="weights")

    def step(x, y):
        with tf.GradientTape() as tape:
            out = tf.cast(x, tf.float16) @ tf.cast(weights, tf.float16)
            loss = tf.reduce_mean(tf.square(tf.cast(out, tf.float32) - y))
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weights]))
        optimizer.apply_gradients(zip(gradients, [weights], strict=True))
        return loss

    x, y = tf.ones((4, 8)), tf.zeros((4, 4))
    # A dynamic scale of 2**16 backs off by itself, a fixed one does not.
    for rule in ({"initial_scale": 2.0**30}, {"loss_scale": 2.0**16}, {"initial_scale": 2.0**16}):
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(), **rule)
        optimizer.build([weights])
        state = [weights, *(variable.value for variable in optimizer.variables)]
        before = [value.numpy() for value in state]
        for function in (step, tf.function(step)):
            report = find_nonfinite(function, x, y * 0 - 100.0)
            if rule == {"initial_scale": 2.0**16}:
                assert report is None
                continue
            assert (report.stage, report.op, report.kind) == ("loss_scale", "Cast", "overflow")
            assert report.variable == "weights"
        for old, new in zip(before, state, strict=True):
            np.testing.assert_array_equal(old, new.numpy())
    scaler = tfamp.GradScaler(init_scale=2.0**30)  # Its scale counts as well.

    def scaled_step(x):
        with tf.GradientTape() as tape:
            out = tf.cast(x, tf.float16) @ tf.cast(weights, tf.float16)
            scaled = scaler.scale(tf.reduce_mean(tf.cast(out, tf.float32)))
        return tape.gradient(scaled, weights)

    report = find_nonfinite(scaled_step, x)
    assert (report.stage, report.variable) == ("loss_scale", "weights")
    assert scaler.get_scale() == 2.0**30
    optimizer.dynamic_scale.assign(2.0**10)
    assert find_nonfinite(step, x, y) is None


def test_autocast_inside_a_function():
    def step(x):
        with tfamp.autocast("float16"), tf.name_scope("block"):
            return tf.matmul(x, x, transpose_b=True)

    report = find_nonfinite(step, tf.fill((4, 32), 100.0))
    assert (report.layer, report.op, report.kind) == ("block", "MatMul", "overflow")
    assert "autocast(enabled=False)" in report.fix


def test_float32_functions_are_asked_about_float16_and_rewritten_ones_name_the_node_to_keep():
    def step(x):
        with tf.name_scope("block"):
            return tf.reduce_sum(tf.matmul(x, x, transpose_b=True))

    x = tf.fill((4, 32), 100.0)
    for dtype in (None, "float32"):
        assert find_nonfinite(step, x, dtype=dtype) is None
    assert find_nonfinite(step, x, dtype="float16").op == "MatMul"
    rewritten = tfamp.rewrite(step, dtype="float16", placement="lists")
    report = find_nonfinite(rewritten, x)
    assert (report.op, report.node, report.kind) == ("MatMul", "block/MatMul", "overflow")
    assert 'keep_float32=["block/MatMul"]' in report.fix
    kept = tfamp.rewrite(step, dtype="float16", placement="lists", keep_float32=[report.node])
    with pytest.warns(tfamp.NothingConvertedWarning):
        assert find_nonfinite(kept, x) is None
    assert find_nonfinite(rewritten, x, dtype="bfloat16") is None


def test_the_cell_of_an_rnn():
    square = {"activation": ops.square, "use_bias": False, "recurrent_initializer": "identity"}
    with tfamp.policy_scope("mixed_float16"):
        rnn = layers.SimpleRNN(4, kernel_initializer="ones", **square)
        model = keras.Sequential([keras.Input((6, 4)), rnn, layers.Dense(2)])
    x = np.full((2, 6, 4), 0.5, np.float32)
    report = find_nonfinite(model, x, np.zeros((2, 2), np.float32), loss="mse")
    assert (report.op, report.kind) == ("Square", "overflow")
    assert report.layer.endswith("cell")


def test_a_layer_by_itself_and_a_dtype_that_is_not_a_name():
    layer, x = layers.Dense(3, kernel_initializer="ones"), np.full((2, 4), 4e4, np.float32)
    assert find_nonfinite(layer, x) is None
    report = find_nonfinite(layer, x, x[:, :3], loss="mse", dtype=tf.float16)
    assert (report.stage, report.layer, report.op) == ("forward", layer.path, "MatMul")


def test_a_function_compiled_by_xla():
    function = tf.function(lambda x: tf.exp(tf.cast(x, tf.float16)), jit_compile=True)
    assert find_nonfinite(lambda x: function(x) + 1, tf.constant([12.0])).op == "Exp"


def test_a_step_without_arguments_needs_no_batch():
    weight, target = tf.Variable([12.0]), tf.constant([1.0])

    def step():
        return tf.exp(tf.cast(weight, tf.float16))

    class Loop(tf.Module):
        step = tf.function(lambda self: step())

    traced = tf.function(step)
    for function in (step, traced, traced.get_concrete_function(), Loop().step, lambda x=0: step()):
        report = find_nonfinite(function)
        assert (report.op, report.kind, report.stage) == ("Exp", "overflow", "forward")
    assert find_nonfinite(step, y=target, loss="mse").op == "Exp"
    assert find_nonfinite(lambda: tf.exp(weight)) is None
    assert find_nonfinite(lambda: tf.exp(weight), y=target, loss="mse") is None
    large = tf.Variable(tf.fill((4, 32), 100.0))
    product = lambda: tf.matmul(large, large, transpose_b=True)  # noqa: E731
    assert find_nonfinite(product, dtype="float16").op == "MatMul"
    rewritten = tfamp.rewrite(product, dtype="float16", placement="lists")
    assert "tfamp.rewrite(..., keep_float32=" in find_nonfinite(rewritten).fix


def test_a_train_step_without_arguments_leaves_its_variables():
    weight = tf.Variable(tf.ones((8, 4)), name="weights")
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**30)
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            out = tf.cast(tf.ones((4, 8)), tf.float16) @ tf.cast(weight, tf.float16)
            scaled = optimizer.get_scaled_loss(tf.reduce_mean(tf.cast(out, tf.float32)))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    report = find_nonfinite(step)
    assert (report.stage, report.variable) == ("loss_scale", "weights")
    assert weight.numpy().max() == 1.0


def test_a_product_is_called_attention_where_a_softmax_takes_it():
    x = np.full((2, 8, 8), 100.0, np.float32)

    def fix(function):
        report = find_nonfinite(function, tf.cast(x, tf.float16))
        assert report.op in ("BatchMatMulV2", "Einsum", "MatMul")
        return report.fix

    def logits(x):
        return tf.matmul(x, x, transpose_b=True)

    mask = tf.constant([0.0, -1e4, *[0.0] * 6], tf.float16)
    for attention in (
        lambda x: tf.nn.softmax(logits(x)),
        lambda x: tf.nn.softmax(tf.cast(logits(x) / 2.0 + mask, tf.float32)),
        lambda x: tf.matmul(tf.nn.softmax(tf.einsum("bid,bjd->bij", x, x)), x),
    ):
        assert "attention logits" in fix(attention)
    for other in (logits, lambda x: logits(x) @ x, lambda x: tf.nn.softmax(x) + logits(x)):
        assert "attention" not in fix(other)
        assert "sum of products" in fix(other)
    # A classifier's last product feeds a softmax too, and multiplies by weights.
    dense = layers.Dense(4, activation="softmax", kernel_initializer="ones", dtype="float16")
    dense.build((None, 8))
    dense.kernel.assign(dense.kernel * 200.0)
    found = find_nonfinite(dense, x[0])
    assert (found.op, "attention" in found.fix) == ("MatMul", False)


# ---- Wrong arguments -----------------------------------------------------------------------------


def test_wrong_arguments():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    x = np.ones((2, 4))
    with pytest.raises(TypeError, match="must be a Keras model, a function"):
        find_nonfinite(3, x)
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        find_nonfinite(model, x, dtype="float8")
    with pytest.raises(ValueError, match="Give loss="):
        find_nonfinite(model, x, x)
    with pytest.raises(TypeError, match="loss must be"):
        find_nonfinite(model, x, x, loss=3)
    for batches in (tf.data.Dataset.from_tensors(x), iter([x])):
        with pytest.raises(TypeError, match="one batch"):
            find_nonfinite(model, batches)
    for given in ((model,), (model, ()), (lambda x: x,), (tf.function(lambda x: x),)):
        with pytest.raises(TypeError, match="no batch x, .*; x is missing"):
            find_nonfinite(*given)
    with pytest.raises(TypeError, match="no batch x"):
        find_nonfinite(lambda: tf.ones(2), y=x)
    with pytest.raises(ValueError, match="x is an empty batch"):
        find_nonfinite(model, x[:0], x[:0, :2], loss="mse", dtype="float16")


def test_a_model_at_level_o1_is_searched_in_the_graph_that_fit_runs():
    class OwnStep(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    x, y = np.full((8, 4), 1e5, "float32"), np.ones((8, 1), "float32")
    for kind in (keras.Sequential, OwnStep):
        model = kind([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(), "mse")
        _, optimizer = tfamp.prepare(model, level="O1", dtype="float16")
        model.fit(x, y, verbose=0)
        assert int(optimizer.skipped_steps) == 1
        # A Cast that the rewrite of the whole graph makes; autocast's has another name.
        assert "CastTo-float16" in find_nonfinite(model, x, y).node


def test_the_train_step_of_a_models_class_is_searched():
    class OwnStep(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(1)

        def call(self, x):
            return self.head(x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.exp(tf.cast(self(data[0]) * 0 + 100.0, tf.float16)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model, x = OwnStep(), np.ones((8, 4), "float32")
    model(x)
    model.compile(keras.optimizers.SGD())
    assert find_nonfinite(model, x) is None
    assert find_nonfinite(model, x, x[:, :1]).op == "Exp"
    assert int(model.optimizer.iterations) == 0


# ---- Which op of a function ----------------------------------------------------------------------


def _found(function, x):
    return find_nonfinite(function, tf.convert_to_tensor(x))


def test_the_first_op_in_the_order_of_the_data():
    def function(x):
        return tf.sqrt(tf.math.log(x) + 1.0) * 2.0

    report = _found(function, [0.0, 1.0])
    assert (report.op, report.node, report.kind) == ("Log", "Log", "also_in_float32")
    assert [(each.name, each.max) for each in report.ranges["inputs"]] == [("input 0", 1.0)]


def test_only_what_leads_to_the_result_counts_and_large_numbers_and_constants_do():
    # A masked logarithm is passed over.
    function = lambda x: tf.where(x > 0, tf.math.log(x), 0.0) + tf.sqrt(x - 1.0)  # noqa: E731
    assert _found(function, [0.0, 2.0]).op == "Sqrt"
    large = _found(lambda x: tf.math.rsqrt(tf.reduce_sum(tf.square(x))), [1e30, 1.0])
    assert large.op == "Square"  # Though the result is finite.
    assert _found(lambda x: x + np.inf, [1.0]).op == "Const"


def test_nothing_where_results_are_finite():
    assert _found(lambda x: tf.exp(x), [1.0]) is None
    # A masked infinity, and an infinite constant that a softmax takes.
    assert _found(lambda x: tf.where(x > 0, 1.0 / x, 0.0), [0.0, 1.0]) is None
    assert _found(lambda x: tf.nn.softmax(tf.where(x > 0, x, -np.inf)), [0.0, 1.0]) is None
    # A branch that never ran.
    assert _found(lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x * np.inf), [1.0]) is None


def test_a_value_that_is_bad_inside_a_call_only():
    @tf.function(autograph=False)
    def masked(x):
        return tf.where(x > 0, tf.cast(tf.exp(tf.cast(x, tf.float16)), tf.float32) * 0.0 + x, x)

    def function(x):
        return tf.while_loop(
            lambda i, _: i < 1, lambda i, y: (i + 1, tf.nn.relu(-masked(y))), (0, x)
        )[1]

    report = _found(function, [12.0])
    assert (report.op, report.kind) == ("Exp", "overflow")


def test_inside_a_loop_the_iteration_is_that_of_the_fault():
    @tf.function
    def function(x):
        for i in tf.range(12):
            x = x * 3.0 if i > 0 else x
        return x

    report = find_nonfinite(function, tf.ones((2,), tf.float16))
    assert (report.op, report.kind) == ("Mul", "overflow")
    # 3**11 is the first power above 65504.
    assert report.ranges["inputs"][0].max == pytest.approx(3.0**10, rel=2.0**-10)
    assert report.ranges["float32"][0].max == 3.0**11


def test_a_late_iteration_is_known_by_what_was_before():
    def function(x):
        return tf.while_loop(lambda i, _: i < 400, lambda i, x: (i + 1, x * 1.5), (0, x))[1]

    with np.errstate(over="ignore"):
        values = np.cumprod(np.float32([2.0**-40, *[1.5] * 400]), dtype=np.float32)
    executions = int(np.isfinite(values).sum())
    assert 100 < executions < 400
    report = _found(function, np.float32(2.0**-40))
    assert report.ranges["inputs"][0].max == values[executions - 1]


def test_lists_do_not_hide_where_a_value_came_from():
    def function(x):
        array = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            array = array.write(i, tf.math.log(x - tf.cast(i, tf.float32)))
        return tf.reduce_sum(array.stack())

    assert _found(function, 2.0).op == "Log"


# ---- What values are like ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_kind_of_value_is_counted(dtype):
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    values = np.array([[1.0, -3.0, np.inf], [-np.inf, np.nan, 0.0], [smallest, -0.0, 2.0]], dtype)
    (found,) = find_nonfinite(tf.identity, values).ranges["outputs"]
    assert (found.dtype, found.shape) == (np.dtype(dtype).name, (3, 3))
    assert (found.min, found.max, found.max_abs) == (-3.0, 2.0, 3.0)
    assert (found.infs, found.nans, found.zeros, found.subnormals) == (2, 1, 2, 1)
    assert not found.finite


def test_without_a_finite_value_the_range_is_zero():
    (found,) = find_nonfinite(tf.identity, np.array([np.nan], np.float32)).ranges["outputs"]
    assert (found.min, found.max, found.max_abs) == (0.0, 0.0, 0.0)
    assert found.to_text() == "float32 [1], 1 NaN of 1"


def test_an_empty_array_is_finite():
    assert find_nonfinite(tf.identity, np.array([], np.float32)) is None
    report = _found(lambda x: tf.reduce_mean(x), np.zeros(0, np.float32))
    assert report.ranges["inputs"][0].max_abs == 0.0


# ---- Healthy models ------------------------------------------------------------------------------


def _masked():
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(inputs)
    attention = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attention)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    tokens = np.random.default_rng(0).integers(1, 50, (4, 10))
    tokens[:, 7:] = 0
    return keras.Model(inputs, layers.Dense(50)(layers.Dropout(0.3)(x))), tokens, tokens


@pytest.mark.parametrize("name", first_of(["masked", "cnn", "depthwise", "attention"]))
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.nightly)]
)
def test_models_without_a_fault(name, policy):
    with tfamp.policy_scope(policy):
        if name == "masked":
            model, x, y = _masked()
        else:
            model, ((x, y),) = model_zoo.build(name), model_zoo.digits(name, 1)
    assert find_nonfinite(model, x, y, loss=LOSS) is None
