"""`float32_outputs="sums"`: low products in output layers that are float32 otherwise."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import tiers
from helpers.graph_asserts import graph_op_dtypes
from tfamp.interop import tf_private
from tfamp.interop.patching import wrapped_methods
from tfamp.layers import low_products
from tfamp.layers.layer_plan import LayerFacts, plan_layer
from tfamp.layers.low_products import contracted_axes
from tfamp.layers.model_calls import plan_of

WORDS, WIDTH, TIME = 300, 64, 16
NAMES = ("mixed_bfloat16", "mixed_float16")
# Half a step of each dtype just below 1.
ROUNDING = {"mixed_bfloat16": 2**-9, "mixed_float16": 2**-12}
SCALE = 1024.0
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sums(name="mixed_bfloat16"):
    return tfamp.policy_scope(tfamp.Policy(name, float32_outputs="sums"))


def language_model():
    """A block of a transformer with a layer of words behind it."""
    words = keras.Input((TIME,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    hidden = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 32)(hidden, hidden, use_causal_mask=True)
    x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(words, layers.Dense(WORDS, name="head")(layers.LayerNormalization()(x)))


@pytest.fixture(scope="module")
def trained():
    """Weights after some steps, and sentences whose next word depends on the last one."""
    rng = np.random.default_rng(0)
    words = np.cumsum(rng.integers(1, 4, (64, TIME + 1)), axis=1).astype("int32") % WORDS
    keras.utils.set_random_seed(0)
    model = language_model()
    model.compile(keras.optimizers.Adam(3e-3), loss_fn)
    model.fit(words[:, :-1], words[:, 1:], batch_size=16, epochs=5, verbose=0)
    return model.get_weights(), words[:32, :-1], words[:32, 1:]


def loss_and_gradients(model, x, y, how):
    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x)
            loss = loss_fn(y, tf.cast(outputs, "float32"))
            scaled = loss * SCALE
        gradients = tape.gradient(scaled, model.trainable_variables)
        return loss, [tf.convert_to_tensor(x) for x in gradients]

    if how != "eager":
        step = tf.function(step, jit_compile=how == "xla")
    loss, gradients = step(tf.constant(x), tf.constant(y))
    return float(loss), [g.numpy().astype("float64") / SCALE for g in gradients]


def distance(some, others):
    squares = [
        (np.square(a - b).sum(), np.square(b).sum()) for a, b in zip(some, others, strict=True)
    ]
    return float(np.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares)))


@pytest.mark.parametrize(
    ("name", "how"),
    tiers(
        [("mixed_bfloat16", "xla"), ("mixed_float16", "graph"), ("mixed_bfloat16", "eager")],
        [("mixed_float16", "xla"), ("mixed_bfloat16", "graph"), ("mixed_float16", "eager")],
    ),
)
def test_errors_of_loss_and_gradients_are_of_the_size_of_the_hidden_layers_roundings(
    name, how, trained
):
    weights, x, y = trained
    found = {}
    for policy in ("float32", tfamp.Policy(name), tfamp.Policy(name, float32_outputs="sums")):
        with tfamp.policy_scope(policy) as in_force:
            model = language_model()
        model.set_weights(weights)
        found[in_force.name, in_force.float32_outputs] = loss_and_gradients(model, x, y, how)
        assert model(x).dtype == "float32"
    exact_loss, exact = found["float32", True]
    (loss, gradients), (loss_by_sums, gradients_by_sums) = found[name, True], found[name, "sums"]
    error = abs(loss_by_sums - exact_loss) / exact_loss
    # In bfloat16 the forward sums are float32; in float16 each logit is rounded once, by itself.
    share = 8 if name == "mixed_bfloat16" else 2
    assert error < abs(loss - exact_loss) / exact_loss + ROUNDING[name] / share
    assert any((a != b).any() for a, b in zip(gradients, gradients_by_sums, strict=True))
    assert distance(gradients_by_sums, exact) < 1.5 * distance(gradients, exact)
    # The weight gradient of the output layer is a sum over all positions of the batch.
    assert distance(gradients_by_sums[-2:-1], exact[-2:-1]) < 4 * ROUNDING[name]
    assert distance(gradients_by_sums[-1:], exact[-1:]) < 4 * ROUNDING[name]


def matmuls(model, x, y, *, xla=False):
    """The products of a step: op, dtype of the operands, dtype of the results."""

    @tf.function(jit_compile=xla)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        return tape.gradient(loss, model.trainable_variables)

    definition = step.get_concrete_function(x, y).graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    found = []
    for node in nodes:
        dtypes = {"MatMul": ("T", "T"), "BatchMatMulV3": ("Ta", "Tout")}.get(node.op)
        if dtypes is not None:
            found.append((node.op, *(tf.as_dtype(node.attr[name].type).name for name in dtypes)))
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "xla", "forward"),
    [
        ("mixed_bfloat16", True, ("BatchMatMulV3", "bfloat16", "float32")),
        ("mixed_float16", True, ("BatchMatMulV3", "float16", "float32")),
        ("mixed_bfloat16", False, ("MatMul", "float32", "float32")),
        ("mixed_float16", False, ("MatMul", "float16", "float16")),
    ],
)
def test_products_are_low_and_their_forward_sums_float32_where_a_kernel_can(name, xla, forward):
    low = name.removeprefix("mixed_")
    with sums(name):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(6)])
    x, y = tf.ones((4, 8)), tf.zeros(4, "int32")
    found = matmuls(model, x, y, xla=xla)
    assert forward in found
    found.remove(forward)
    assert found == [("MatMul", low, low)] * 2


@pytest.fixture
def on_tiles(monkeypatch):
    """As on a CPU with AMX, where XLA multiplies low operands faster than TensorFlow in float32."""
    monkeypatch.setattr(low_products, "xla_multiplies_on_tiles", lambda: True)


def wide(features=(512,), units=512, name="mixed_bfloat16"):
    with sums(name):
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input(features), layers.Dense(units)])


ALONE, FLOAT32 = ("BatchMatMulV3", "bfloat16", "float32"), ("MatMul", "float32", "float32")


@pytest.mark.parametrize(
    ("model", "forward"),
    [
        (lambda: wide(), ALONE),
        (lambda: wide((16, 512)), ALONE),
        (lambda: wide((None, 512)), FLOAT32),  # XLA would compile each length.
        (lambda: wide(units=128), FLOAT32),  # A call of XLA takes as long.
        (lambda: wide(name="mixed_float16"), ("MatMul", "float16", "float16")),
    ],
    ids=["wide", "sequences", "of any length", "narrow", "float16"],
)
def test_xla_multiplies_alone_in_a_training_step_on_a_cpu_with_tiles(model, forward, on_tiles):
    model = model()
    shape = model.input_shape
    found = matmuls(model, tf.TensorSpec(shape), tf.TensorSpec(shape[:-1], "int32"))
    assert forward in found
    assert len(found) == 3
    predicting = tf.function(model).get_concrete_function(tf.TensorSpec(shape)).graph.as_graph_def()
    assert "BatchMatMulV3" not in graph_op_dtypes(predicting)


def test_xla_multiplies_alone_only_where_the_cpu_has_tiles_and_the_op_is_on_it(monkeypatch):
    x, y = tf.ones((4, 512)), tf.zeros(4, "int32")
    monkeypatch.setattr(low_products, "xla_multiplies_on_tiles", lambda: False)
    assert FLOAT32 in matmuls(wide(), x, y)
    monkeypatch.setattr(low_products, "xla_multiplies_on_tiles", lambda: True)
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    assert FLOAT32 in matmuls(wide(), x, y)
    with tf.device("CPU:0"):
        assert ALONE in matmuls(wide(), x, y)


def test_a_product_of_xla_alone_adds_up_and_returns_float32(on_tiles):
    """Its operands are rounded, and nothing else: 2 ** -6 is lost beside 256 in bfloat16."""
    model = wide()
    kernel = np.zeros((512, 512))
    kernel[0], kernel[1] = 256.0, 2.0**-6
    model.set_weights([kernel, np.full(512, 2.0**-7)])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            outputs = model(x)
            total = tf.reduce_sum(outputs)
        return outputs, tape.gradient(total, model.trainable_variables)

    outputs, (of_kernel, of_bias) = step(tf.ones((4, 512)))
    np.testing.assert_array_equal(outputs, np.full((4, 512), 256 + 2.0**-6 + 2.0**-7))
    np.testing.assert_array_equal(of_kernel, np.full((512, 512), 4.0))
    np.testing.assert_array_equal(of_bias, np.full(512, 4.0))


def fitted(x, y):
    model = wide()
    model.compile("sgd", loss_fn, jit_compile=False, steps_per_execution=2)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return model


def trained_on_a_replica(x, y):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model, optimizer = wide(), keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for start in (0, 8, 16):
        strategy.run(step, (tf.constant(x[start : start + 8]), tf.constant(y[start : start + 8])))
    return model


@pytest.mark.parametrize("train", [fitted, trained_on_a_replica])
def test_training_by_a_product_of_xla_alone_goes_as_in_float32(train, on_tiles, monkeypatch):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((20, 512)).astype("float32"), rng.integers(0, 512, 20)
    by_tiles = train(x, y).get_weights()
    monkeypatch.setattr(low_products, "xla_multiplies_on_tiles", lambda: False)
    in_float32 = train(x, y).get_weights()
    before = wide().get_weights()
    changes = [
        [after - start for after, start in zip(weights, before, strict=True)]
        for weights in (by_tiles, in_float32)
    ]
    assert any((a != b).any() for a, b in zip(*changes, strict=True))
    assert distance(*changes) < 4 * ROUNDING["mixed_bfloat16"]


def of_two_tapes(model, x):
    with tf.GradientTape() as one, tf.GradientTape() as other:
        loss = tf.reduce_mean(model(x) ** 2)
    variables = model.trainable_variables
    return [*one.gradient(loss, variables), *other.gradient(loss, variables)]


def of_a_persistent_tape(model, x):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def of_a_penalty(model, x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_mean(model(x) ** 2)
        penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return [outer.gradient(penalty, model.trainable_variables[0])]


def of_each_row(model, x):
    def gradient(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(row[None]) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return tf.vectorized_map(gradient, x)


def forward(model, x):
    with tf.autodiff.ForwardAccumulator(x, 0.5 * x) as accumulator, tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    return [accumulator.jvp(y)]


@pytest.mark.parametrize(
    "way", [of_two_tapes, of_a_persistent_tape, of_a_penalty, of_each_row, forward]
)
@pytest.mark.parametrize("xla", [False, True], ids=["graph", "XLA"])
def test_every_way_of_differentiating_a_product_of_xla(way, xla, on_tiles, monkeypatch):
    model = wide()
    x = tf.constant(np.random.default_rng(4).standard_normal((4, 512)).astype("float32"))
    found = tf.function(way, jit_compile=xla)(model, x)
    monkeypatch.setattr(low_products, "xla_multiplies_on_tiles", lambda: False)
    expected = tf.function(way)(model, x)
    assert (
        distance([np.float64(each) for each in found], [np.float64(each) for each in expected])
        < 4 * (ROUNDING["mixed_bfloat16"])
    )


def test_a_sum_that_16_bits_cannot_hold_is_float32():
    """1 + 2 ** -6 has 7 bits behind the point more than 256 leaves in bfloat16."""
    with sums():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.set_weights([np.array([[256.0], [2.0**-6]]), np.array([2.0**-7])])
    x = np.ones((1, 2), "float32")
    expected = 256 + 2.0**-6 + 2.0**-7
    assert float(model(x)[0, 0]) == expected
    assert float(tf.function(model)(x)[0, 0]) == expected
    assert float(tf.function(model, jit_compile=True)(x)[0, 0]) == expected
    assert float(model.predict(x, verbose=0)[0, 0]) == expected


def test_bias_softmax_and_logits_for_the_loss_are_float32():
    with sums("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    model.set_weights([np.eye(4, 3), np.array([1.0, 1.0 + 2.0**-14, 0.0])])
    probabilities = model(np.zeros((1, 4), "float32")).numpy()[0].astype("float64")
    logits = np.array([1.0, 1.0 + 2.0**-14, 0.0])
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(probabilities, expected, rtol=1e-6)
    with sums("mixed_float16"):
        model = keras.Sequential([keras.Input((1,)), layers.Dense(2, "softmax")])
    model.set_weights([np.array([[0.0, 200.0]]), np.zeros(2)])
    x, y = np.ones((1, 1), "float32"), np.zeros(1)
    model.compile("sgd", "sparse_categorical_crossentropy")
    # By the logits; of a probability that is 0 in float32 it would be 16.1.
    assert model.evaluate(x, y, verbose=0) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("equation", "shape", "bias_axes", "axes"),
    [
        ("abc,cd->abd", (None, 5), "d", 1),
        ("abc,cde->abde", (None, 2, 3), "de", 1),
        ("abc,bcd->ad", (5,), None, 2),
        ("abc,cd->adb", (5, None), None, 0),
        ("...c,cd->...d", 5, None, 0),
        ("abc,bcd->abd", (3, 5), None, 0),
    ],
)
def test_einsums_that_multiply_last_axes_have_low_products_and_others_are_float32(
    equation, shape, bias_axes, axes
):
    inputs = keras.Input((3, 4))
    with sums():
        head = layers.EinsumDense(equation, output_shape=shape, bias_axes=bias_axes)
        model = keras.Model(inputs, head(inputs))
    assert contracted_axes(head) == axes
    equation = equation.replace("...", "ab")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")
    kernel = head.kernel.numpy().astype("float64")
    weight = tf.random.stateless_normal(model(x).shape, (1, 2))

    @tf.function(jit_compile=True)
    def gradient(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x) * weight)
        return tape.gradient(value, head.kernel.value)

    expected = np.einsum(equation, x.astype("float64"), kernel)
    assert model(x).shape == expected.shape
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    compiled = tf.function(model, jit_compile=True)(x).numpy()
    assert np.abs(compiled - expected).max() < 2**-6 * np.abs(expected).max()
    operands, result = equation.split("->")
    features, of_kernel = operands.split(",")
    exact = np.einsum(f"{features},{result}->{of_kernel}", x.astype("float64"), weight.numpy())
    found = gradient(x).numpy()
    assert np.abs(found - exact).max() < 2**-6 * np.abs(exact).max()
    assert (np.abs(found - exact).max() > 1e-5) == bool(axes)


@pytest.mark.skipif(not hasattr(layers, "ReversibleEmbedding"), reason="of Keras 3.13 and later")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("xla", [True, False])
def test_tied_weights_have_low_products_and_exact_lookups(tied, xla):
    def make(policy):
        keras.utils.set_random_seed(3)
        with tfamp.policy_scope(policy):
            words = layers.ReversibleEmbedding(50, 16, tie_weights=tied, logit_soft_cap=2.0)
            tokens = keras.Input((5,), dtype="int32")
            hidden = layers.Dense(16, "gelu")(words(tokens))
            return keras.Model(tokens, words(hidden, reverse=True))

    x, y = np.arange(40).reshape(8, 5), np.arange(40).reshape(8, 5)[:, ::-1]
    how = "xla" if xla else "graph"
    exact_loss, exact = loss_and_gradients(make("float32"), x, y, how)
    loss, gradients = loss_and_gradients(make("mixed_float16"), x, y, how)
    model = make(tfamp.Policy("mixed_float16", float32_outputs="sums"))
    assert plan_of(model.layers[1]).low_product == "float16"
    loss_by_sums, gradients_by_sums = loss_and_gradients(model, x, y, how)
    assert abs(loss_by_sums / exact_loss - 1) < ROUNDING["mixed_float16"]
    assert distance(gradients_by_sums, exact) < 4 * ROUNDING["mixed_float16"]
    assert any((a != b).any() for a, b in zip(gradients, gradients_by_sums, strict=True))


def test_a_subclass_and_other_layers_are_float32_as_by_default():
    class Doubled(layers.Dense):
        def call(self, x):
            return 2 * super().call(x)

    inputs = keras.Input((4, 8))
    with sums():
        heads = [Doubled(3), layers.Conv1D(3, 1), layers.TimeDistributed(layers.Dense(3))]
        model = keras.Model(inputs, [head(inputs) for head in heads])
    assert [plan_of(head).low_product for head in heads] == ["", "", ""]
    assert [output.dtype for output in model.outputs] == ["float32"] * 3


def test_a_layer_that_stops_being_an_output_is_low_and_one_with_a_dtype_of_its_own_keeps_it():
    with sums():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
        first = model.layers[0]
        assert plan_of(first).low_product == "bfloat16"
        model.add(layers.Dense(2))
        chosen = layers.Dense(3, dtype="float32")
        keras.Model(model.inputs, chosen(model.outputs[0]))
    assert plan_of(first).low_product == ""
    assert first.compute_dtype == first(np.ones((1, 8))).dtype == "bfloat16"
    assert plan_of(chosen).low_product == ""


def test_the_default_is_unchanged():
    facts = LayerFacts(managed=True, protected=True, float32_outputs=True, low="float16")
    assert plan_layer(facts, "output").low_product == ""
    with tfamp.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(6)])
    assert tfamp.Policy("mixed_bfloat16").float32_outputs is True
    assert "get_build_config" not in wrapped_methods(model.layers[0])
    x, y = tf.ones((4, 8)), tf.zeros(4, "int32")
    assert set(matmuls(model, x, y)) == {("MatMul", "float32", "float32")}


def test_a_file_keeps_the_low_product_under_the_policy_and_is_float32_without_it(tmp_path, trained):
    weights, x, y = trained
    with sums():
        model = language_model()
    model.set_weights(weights)
    model.save(tmp_path / "model.keras")
    with sums():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert plan_of(again.get_layer("head")) == plan_of(model.get_layer("head"))
    assert again.get_layer("head").dtype_policy.name == "float32"
    loss, gradients = loss_and_gradients(model, x, y, "graph")
    loss_again, gradients_again = loss_and_gradients(again, x, y, "graph")
    assert loss_again == loss
    assert all((a == b).all() for a, b in zip(gradients, gradients_again, strict=True))
    for policy in (
        "float32",
        "mixed_bfloat16",
        tfamp.Policy("mixed_float16", float32_outputs="sums"),
    ):
        with tfamp.policy_scope(policy):
            other = keras.models.load_model(tmp_path / "model.keras")
        plan = plan_of(other.get_layer("head"))
        assert plan is None or not plan.low_product
        assert other.get_layer("head").compute_dtype == "float32"


def test_an_exported_model_returns_what_the_model_does(tmp_path, trained):
    weights, x, _ = trained
    for name in NAMES:
        with sums(name):
            model = language_model()
        model.set_weights(weights)
        model.export(tmp_path / name, verbose=False)
        loaded = tf.saved_model.load(str(tmp_path / name))
        outputs, expected = loaded.serve(x), tf.function(model)(x).numpy()
        assert outputs.dtype == "float32"
        # Hidden layers are rounded elsewhere in another graph.
        assert np.abs(outputs - expected).max() < 4 * ROUNDING[name] * np.abs(expected).max()
        # No op that runs only under XLA.
        definition = loaded.signatures["serving_default"].graph.as_graph_def()
        assert "BatchMatMulV3" not in graph_op_dtypes(definition)


def test_a_layer_that_is_quantized_later_computes_as_quantized():
    found = []
    for policy in ("mixed_bfloat16", tfamp.Policy("mixed_bfloat16", float32_outputs="sums")):
        keras.utils.set_random_seed(1)
        with tfamp.policy_scope(policy):
            model = keras.Sequential([keras.Input((8,)), layers.Dense(6), layers.Dense(4)])
        model.quantize("int8")
        found.append(model(np.linspace(-1, 1, 16, dtype="float32").reshape(2, 8)).numpy())
    np.testing.assert_array_equal(*found)


def test_a_function_that_was_traced_under_xla_runs_outside_of_it():
    with sums():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(6)])
    inner = tf.function(model)
    x = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
    compiled = tf.function(inner, jit_compile=True)(x)
    assert np.abs(inner(x) - compiled).max() < 2**-5


def test_second_derivatives_are_those_of_the_product():
    with sums("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.set_weights([np.array([[0.5], [2.0]]), np.zeros(1)])
    x = tf.constant([[1.0, 3.0]])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            squared = tf.reduce_sum(model(x) ** 2)
        gradient = tape.gradient(squared, x)
    np.testing.assert_array_equal(gradient, [[6.5, 26.0]])
    # Of (w x)^2 it is 2 w w^T; summed over the rows of the gradient 2 w sum(w).
    np.testing.assert_array_equal(outer.gradient(gradient, x), [[2.5, 10.0]])


def test_a_model_learns(trained):
    _, x, y = trained
    losses = {}
    for policy in ("float32", tfamp.Policy("mixed_float16", float32_outputs="sums")):
        keras.utils.set_random_seed(1)
        with tfamp.policy_scope(policy) as in_force:
            model = language_model()
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(3e-3))
        model.compile(optimizer, loss_fn)
        history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False)
        losses[in_force.name] = history.history["loss"]
    assert losses["mixed_float16"][-1] < 0.9 * losses["mixed_float16"][0]
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=2e-3)
