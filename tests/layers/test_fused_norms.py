"""BatchNormalization under mixed policies: the fused kernel runs, and Keras sees its own layer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import config

import tfamp
from helpers.cases import first_of, one_of_each, tiers
from helpers.graph_asserts import concrete, op_dtypes
from helpers.replicas import per_replica
from helpers.tolerances import assert_all_close, assert_all_equal, assert_close
from tfamp.interop import tf_private
from tfamp.layers import fused_norms

pytestmark = pytest.mark.usefixtures("low")
RANKS = {4: (4, 3, 5, 8), 3: (4, 6, 8), 2: (24, 8), 5: (2, 3, 2, 4, 8)}


def sample(shape, dtype="float32", *, center=2.0, spread=3.0, seed=0):
    noise = np.random.default_rng(seed).standard_normal(shape)
    return tf.cast(center + spread * noise, dtype)


def step_of(shape, dtype, **options):
    """The two layers, what goes in, and the gradient of what comes out."""
    return *pair(shape, **options), sample(shape, dtype), sample(shape, dtype, center=0.1, seed=1)


def pair(shape, **options):
    """A layer of the policy, and Keras's own in float32, with the same weights."""
    ours = layers.BatchNormalization(**options)
    with tfamp.policy_scope("float32"):
        keras_own = layers.BatchNormalization(**options)
    for layer in (ours, keras_own):
        layer.build(shape)
        channels = shape[layer.axis]
        values = {
            "gamma": np.linspace(0.5, 1.5, channels),
            "beta": np.linspace(-1, 1, channels),
            "moving_mean": np.linspace(0, 3, channels),
            "moving_variance": np.linspace(0.5, 8, channels),
        }
        for weight in layer.weights:
            if weight.name in values:
                weight.assign(values[weight.name])
    return ours, keras_own


def step(layer, x, dy, training, **options):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=training, **options)
    weights = [weight.value for weight in layer.trainable_weights]
    return y, *tape.gradient(y, [x, *weights], output_gradients=tf.cast(dy, y.dtype))


def assert_fused(fn, *, dtype, gradient=False):
    found = concrete(fn).graph.get_operations()
    found = [node for node in found if node.type.startswith("FusedBatchNorm")]
    wanted = ["FusedBatchNormV3", "FusedBatchNormGradV3"]
    assert [node.type for node in found] == wanted[: 1 + gradient]
    for node in found:
        assert (node.get_attr("T"), node.get_attr("U")) == (dtype, tf.float32)


def assert_not_fused(fn, *args):
    assert not any(op.startswith("FusedBatchNorm") for op in op_dtypes(fn, *args))


def assert_same_step(ours, keras_own, x, dy, low, training, ours_step=None, **options):
    wide = tf.cast(x, "float32")
    actual = ours_step() if ours_step else step(ours, x, dy, training, **options)
    expected = step(keras_own, wide, dy, training, **options)
    assert [each.dtype for each in actual[:2]] == [low, low]
    assert {each.dtype for each in actual[2:]} <= {tf.float32}
    depth = x.shape.num_elements() // x.shape[ours.axis]
    assert_all_close(actual, expected, low, depth=depth)
    assert_all_close(
        ours.non_trainable_weights, keras_own.non_trainable_weights, "float32", depth=depth
    )


@pytest.mark.parametrize(("rank", "training"), one_of_each(RANKS, [True, False], quick=1))
def test_one_step_is_keras_own(low, rank, training):
    ours, keras_own, x, dy = step_of(RANKS[rank], low, momentum=0.7)
    assert_fused(lambda: step(ours, x, dy, training), dtype=low, gradient=True)
    for _ in range(3):
        assert_same_step(ours, keras_own, x, dy, low, training)
    with tfamp.autocast(low):
        assert_same_step(ours, keras_own, x, dy, low, training)
    compiled = tf.function(lambda: step(ours, x, dy, training), jit_compile=True)
    assert_fused(compiled, dtype=low, gradient=True)
    assert_same_step(ours, keras_own, x, dy, low, training, ours_step=compiled)


@pytest.mark.parametrize(
    "options",
    [{"scale": False}, {"center": False}, {"scale": False, "center": False}, {"epsilon": 0.5}],
)
@pytest.mark.parametrize("shape", tiers([RANKS[4]], [((1, 8),)]))
def test_options_of_the_layer_and_a_batch_of_one_value(low, options, shape):
    ours, keras_own, x, dy = step_of(shape, low, **options)
    assert_fused(lambda: ours(x, training=True), dtype=low)
    assert_same_step(ours, keras_own, x, dy, low, True)


def test_shapes_known_only_at_run_time_and_empty_batches(low):
    ours, keras_own = pair((None, None, 8))
    fn = tf.function(lambda x: ours(x, training=True))
    fn = fn.get_concrete_function(tf.TensorSpec((None, None, 8), low))
    assert_fused(fn, dtype=low)
    for count in (1, 4, 0):
        x = sample((count, 6, 8), low)
        assert_close(fn(x), keras_own(tf.cast(x, "float32"), training=True), low, depth=24)


def test_kernels(monkeypatch):
    assert fused_norms.has_fused_kernel("float32", 1e-3)
    assert fused_norms.has_fused_kernel("bfloat16", 1e-3)
    assert not fused_norms.has_fused_kernel("float64", 1e-3)
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "cpu")
    assert fused_norms.has_fused_kernel("float32", 1e-6)
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    assert fused_norms.has_fused_kernel("float32", 1.001e-5)
    assert not fused_norms.has_fused_kernel("float32", 1e-6)
    with tf.device("CPU:0"):
        assert fused_norms.has_fused_kernel("float32", 1e-6)


def test_the_layer_is_float32_as_far_as_keras_is_concerned(low):
    layer = layers.BatchNormalization()
    layer.build((None, 8))
    assert type(layer) is layers.BatchNormalization
    assert type(layer.dtype_policy) is keras.DTypePolicy
    assert (layer.compute_dtype, layer.variable_dtype) == ("float32", "float32")
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    with tfamp.policy_scope("float32"):
        plain = layers.BatchNormalization(name=layer.name)
    plain.build((None, 8))
    assert layer.get_config() == plain.get_config()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (RANKS[4], {"axis": 1}),
        (RANKS[3], {"synchronized": True}),
        (RANKS[4], {"renorm": True}),
        (RANKS[4], {}),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_done_as_keras_does(low, shape, options, monkeypatch):
    if "renorm" in options and not hasattr(layers.BatchNormalization(), "renorm"):
        pytest.skip("this Keras has no renorm")
    if not options:
        monkeypatch.setattr(fused_norms, "has_fused_kernel", lambda *_, **__: False)
    ours, keras_own, x, dy = step_of(shape, low, **options)
    assert_not_fused(lambda: ours(x, training=True))
    assert_same_step(ours, keras_own, x, dy, low, True)
    # The symbolic dtype does not depend on what can be fused.
    assert ours(keras.Input(batch_shape=shape, dtype=low)).dtype == low


def test_a_frozen_one_is_keras_own_where_gpus_are_to_be_deterministic(low, monkeypatch):
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    ours, keras_own, x, dy = step_of(RANKS[4], low)
    rewritten = tfamp.rewrite(lambda x: keras_own(x), dtype=low)
    assert_fused(lambda: ours(x, training=False), dtype=low)
    tf.config.experimental.enable_op_determinism()
    try:
        assert_not_fused(lambda: step(ours, x, dy, False))
        assert_not_fused(rewritten.concrete(tf.cast(x, "float32")))
        assert_same_step(ours, keras_own, x, dy, low, False)
        # Where the layer trains, and on CPUs, the kernel is deterministic.
        assert_fused(lambda: step(ours, x, dy, True), dtype=low, gradient=True)
        with tf.device("CPU:0"):
            assert_fused(lambda: step(ours, x, dy, False), dtype=low, gradient=True)
        ours.trainable = keras_own.trainable = False
        assert_not_fused(lambda: ours(x, training=True))
    finally:
        config.disable_op_determinism()
    before = ours.get_weights()
    y = ours(x, training=True)
    assert_close(y, keras_own(tf.cast(x, "float32"), training=True), low, depth=2)
    assert_all_equal(ours.get_weights(), before)


def test_masked_steps_do_not_count(low):
    ours, keras_own, x, dy = step_of(RANKS[3], low)
    mask = tf.sequence_mask([1, 6, 3, 2], 6)
    assert_not_fused(lambda: ours(x, training=True, mask=mask))
    assert_same_step(ours, keras_own, x, dy, low, True, mask=mask)


@pytest.mark.parametrize("dtype", first_of(["float32", "float64", "int32"]))
def test_other_inputs_are_treated_as_keras_does(dtype):
    ours, keras_own = pair(RANKS[4])
    x = tf.cast(sample(RANKS[4]), dtype)
    assert_not_fused(lambda: ours(x, training=True))
    for training in (True, False):
        y, expected = ours(x, training=training), keras_own(x, training=training)
        assert y.dtype == expected.dtype == tf.float32
        np.testing.assert_array_equal(y, expected)
    assert_all_equal(ours.weights, keras_own.weights)
    assert ours(keras.Input((3, 5, 8), dtype=dtype)).dtype == "float32"
    np.testing.assert_array_equal(ours(x.numpy()), keras_own(x.numpy()))


def test_an_explicit_dtype_leaves_the_layer_to_keras_but_one_kept_low_is_fused(low):
    x = sample(RANKS[4], low, center=0.0, spread=1e3)
    layer, by_hand = layers.BatchNormalization(dtype="float32"), layers.BatchNormalization()
    by_hand.dtype_policy = "float64"
    with tfamp.policy_scope(tfamp.Policy(f"mixed_{low}", float32_layers=())):
        kept = layers.BatchNormalization()
    for each in (layer, by_hand):
        assert_not_fused(lambda each=each: each(x, training=True))
    assert_fused(lambda: kept(x, training=True), dtype=low)
    wide = np.asarray(x).astype(np.float64)
    expected = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-3)
    y = layer(x, training=True)
    assert [each.dtype for each in (y, by_hand(x), kept(x))] == [tf.float32, tf.float64, low]
    assert_close(y, expected, "float32", depth=60)


def test_subclasses(low):
    class Named(layers.BatchNormalization):
        def __init__(self, **kwargs):
            super().__init__(momentum=0.9, **kwargs)

    class Doubled(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return 2 * super().call(inputs, training=training, mask=mask)

    assert fused_norms.can_fuse(Named)
    assert not fused_norms.can_fuse(Doubled)
    assert not fused_norms.can_fuse(layers.LayerNormalization)
    x = sample(RANKS[4], low)
    named, doubled = Named(), Doubled()
    assert_fused(lambda: named(x, training=True), dtype=low)
    assert_not_fused(lambda: doubled(x, training=True))
    assert doubled(x).dtype == tf.float32


# In models


def convolutional():
    x = inputs = keras.Input((12, 12, 3))
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, strides=2)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def real_dtypes(model, x):
    inner = keras.Function(model.inputs, [layer.output for layer in model.layers])
    return [keras.backend.standardize_dtype(each.dtype) for each in inner([x])]


def test_a_first_layer_takes_what_is_fed_in_float32(low):
    model = keras.Sequential(
        [keras.Input((8,)), layers.BatchNormalization(), layers.Dense(4), layers.Dense(2)]
    )
    said = [layer.output.dtype for layer in model.layers]
    assert said == ["float32", low, "float32"]
    # 1e5 is inf in float16.
    y = model(sample((4, 8), center=1e5), training=True)
    assert np.isfinite(y).all()


def test_an_output_layer_returns_float32(low):
    x = sample((6, 8))
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.BatchNormalization()])
    norm = model.layers[-1]
    assert model.outputs[0].dtype == norm.output.dtype == "float32"
    assert model(x).dtype == tf.function(model)(x).dtype == tf.float32
    model.add(layers.Dense(2))  # No output layer any more.
    assert norm.output.dtype == low
    assert real_dtypes(model, x) == [low, low, "float32"]
    assert_fused(lambda: model(x, training=True), dtype=low)
    model.pop()
    assert model(x).dtype == tf.float32
    assert model.outputs[0].dtype == "float32"


def test_a_model_rewritten_exported_or_used_after_the_policy_stays_and_a_copy_is_keras_own(
    low, tmp_path
):
    model, x = convolutional(), sample((2, 12, 12, 3))
    said = [layer.output.dtype for layer in model.layers]
    assert said == ["float32", *[low] * 7, "float32"]
    assert real_dtypes(model, x) == said
    fast = tfamp.rewrite(lambda x: model(x, training=True), dtype=low)
    nodes = [n for n in fast.concrete(x).graph.get_operations() if n.type == "FusedBatchNormV3"]
    assert len(nodes) == 2
    assert {(n.get_attr("T"), n.get_attr("U")) for n in nodes} == {(tf.as_dtype(low), tf.float32)}
    assert_close(fast(x), model(x, training=True), low, depth=8)
    expected = model(x)
    model.export(tmp_path / "export", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "export")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.layers[2].output.dtype == "float32"
    assert_not_fused(lambda: clone(x, training=True))
    for each in (loaded.serve, clone):
        assert_close(each(x), expected, low, depth=8)
    tfamp.set_global_policy("float32")
    assert op_dtypes(model, x, training=True)["FusedBatchNormV3"] == {low}
    assert "call" not in vars(layers.BatchNormalization())
    other = convolutional()
    assert_not_fused(lambda: other(x, training=True))


def test_two_replicas_average_their_moving_statistics(low, two_replicas):
    with two_replicas.scope():
        ours, keras_own = pair((4, 8))
    batches = [sample((4, 8), low, center=c, seed=int(c)) for c in (1.0, 5.0)]
    values = per_replica(two_replicas, *batches)

    def run(layer, dtype):
        fn = tf.function(lambda x: layer(tf.cast(x, dtype), training=True))
        return two_replicas.experimental_local_results(two_replicas.run(fn, (values,)))

    actual, expected = run(ours, low), run(keras_own, "float32")
    assert [y.dtype for y in actual] == [low, low]
    assert_all_close(actual, expected, low, depth=2)
    assert_close(ours.moving_mean, keras_own.moving_mean, "float32", depth=4)
    assert_close(ours.moving_variance, keras_own.moving_variance, "float32", depth=4)


def trained(low):
    """A model with a fused layer, and one whose dtype a user chose, and a function to train it."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(dtype="float32"),
            keras.layers.Dense(3),
        ]
    )
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = np.random.default_rng(5).standard_normal((2, 64, 8)).astype("float32")

    def train(model, epochs):
        model.fit(x, y[:, :3], batch_size=16, epochs=epochs, shuffle=False, verbose=0)

    train(model, 2)
    return model, train


def test_a_model_loaded_under_its_policy_goes_on_bit_for_bit(low, tmp_path):
    path = tmp_path / "model.keras"
    with tfamp.policy_scope(f"mixed_{low}"):
        model, train = trained(low)
        model.save(path)
        loaded = keras.models.load_model(path)
    dtypes = [layer.output.dtype for layer in model.layers]
    assert dtypes == [low, low, low, "float32", "float32"]
    assert [layer.output.dtype for layer in loaded.layers] == dtypes
    calls = tfamp.diagnostics.op_counts(lambda: loaded(np.ones((4, 8), "float32"), training=True))
    assert calls["FusedBatchNormV3"] == {low: 1}
    for each in (model, loaded):
        train(each, 12)
    for one, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.save(path)  # The mark is kept.
    with tfamp.policy_scope(f"mixed_{low}"):
        again = keras.models.load_model(path)
    assert [layer.output.dtype for layer in again.layers] == dtypes


def test_a_model_loaded_elsewhere_has_kerass_layers(low, tmp_path):
    path = tmp_path / "model.keras"
    other = {"float16": "bfloat16", "bfloat16": "float16"}[low]
    with tfamp.policy_scope(f"mixed_{low}"):
        model, _ = trained(low)
        model.save(path)
    for policy in ("float32", f"mixed_{other}"):
        with tfamp.policy_scope(policy):
            loaded = keras.models.load_model(path)
        assert loaded.layers[1].output.dtype == "float32"
        assert [layer.compute_dtype for layer in loaded.layers] == [
            layer.compute_dtype for layer in model.layers
        ]
