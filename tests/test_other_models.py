"""Models that are not Keras 3's (tf.Module, tf_keras), and a package next to Keras."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of

pytestmark = pytest.mark.models
DTYPES = ["float16", "bfloat16"]


class Perceptron(tf.Module):
    """Two matrices, and no Keras."""

    def __init__(self):
        super().__init__()
        generator = tf.random.Generator.from_seed(1)
        self.first = tf.Variable(generator.normal((16, 32)) / 4)
        self.second = tf.Variable(generator.normal((32, 4)) / 6)

    def __call__(self, x):
        return tf.matmul(tf.nn.relu(tf.matmul(x, self.first)), self.second)


def keras2():
    tf_keras = pytest.importorskip("tf_keras")
    tf_keras.utils.set_random_seed(1)
    layers = [tf_keras.layers.Dense(32, "relu"), tf_keras.layers.Dense(4)]
    return tf_keras.Sequential([tf_keras.Input((16,)), *layers])


MODELS = {"tf.Module": Perceptron, "tf_keras": keras2}
SAID = {"tf.Module": r"(?s)Perceptron.*(rewrite|autocast)", "tf_keras": r"(?s)tf_keras.*keras"}


def batch():
    rng = np.random.default_rng(0)
    return tf.constant(rng.normal(size=(8, 16)), tf.float32), tf.constant(rng.integers(0, 4, 8))


def loss_of(model, x, y):
    logits = tf.cast(model(x), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def matmuls(graph):
    return {op.outputs[0].dtype.name for op in graph.get_operations() if op.type == "MatMul"}


@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("kind", MODELS)
def test_autocast_and_rewrite_convert_it(kind, dtype):
    model, (x, _) = MODELS[kind](), batch()
    expected = model(x)
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    with tfamp.autocast(dtype):
        low = model(x)
        traced = tf.function(lambda x: model(x)).get_concrete_function(x)
    assert matmuls(traced.graph) == {dtype}
    assert not np.array_equal(tf.cast(low, tf.float32), expected)
    rewritten = tfamp.rewrite(tf.function(lambda x: model(x)), dtype=dtype, placement="lists")
    assert matmuls(rewritten.concrete(x).graph) == {dtype}
    assert rewritten(x).dtype == tf.float32
    for actual in (tf.cast(low, tf.float32), rewritten(x)):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_with_a_grad_scaler_trains_it_and_prepare_says_what_to_use(kind):
    model, (x, y) = MODELS[kind](), batch()
    with pytest.raises(TypeError, match=SAID[kind]):
        tfamp.prepare(model)
    scaler, optimizer = tfamp.GradScaler(init_scale=1024.0), keras.optimizers.SGD(0.05)
    start = float(loss_of(model, x, y))
    for _ in range(5):
        with tf.GradientTape() as tape, tfamp.autocast("float16"):
            scaled = scaler.scale(loss_of(model, x, y))
        gradients = tape.gradient(scaled, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        assert bool(scaler.step(optimizer, list(pairs)))
        scaler.update()
    assert float(loss_of(model, x, y)) < start


def test_sparse_gradients_of_keras_rs_stay_sparse():
    keras_rs = pytest.importorskip("keras_rs")
    with tfamp.policy_scope("mixed_float16"):
        table = keras_rs.layers.EmbedReduce(50, 8, combiner="mean")
        cross = keras_rs.layers.FeatureCross(projection_dim=4)
        outputs = keras.layers.Dense(1)(cross(table(ids := keras.Input((3,), dtype="int32"))))
        model = keras.Model(ids, outputs)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    x = tf.constant([[1, 2, 3], [4, 5, 6]])
    before = table.embeddings.numpy()
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(tf.reduce_mean(tf.square(model(x) - 1.0)))
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    assert len(sparse) == 1
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    moved = np.flatnonzero((table.embeddings.numpy() != before).any(axis=1))
    assert moved.tolist() == [1, 2, 3, 4, 5, 6]
    assert (model.outputs[0].dtype, cross.compute_dtype) == ("float32", "float16")
