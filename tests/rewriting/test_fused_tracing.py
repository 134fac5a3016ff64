"""Float32 BatchNormalization in rewritten functions: one fused op, and Keras's own elsewhere."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_close

DTYPES = ["float16", "bfloat16"]


def make(**options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((6, 6, 3)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(**options),
        keras.layers.ReLU(),
        keras.layers.Conv2D(4, 3),
        keras.layers.GlobalAveragePooling2D(),
    ]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.05)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, step


@pytest.fixture
def batch():
    random = np.random.default_rng(3)
    x = random.standard_normal((8, 6, 6, 3)).astype("float32")
    return tf.constant(x), tf.constant(random.standard_normal((8, 4)).astype("float32"))


def fused_nodes(concrete):
    return [node for node in concrete.graph.as_graph_def().node if "FusedBatchNorm" in node.op]


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_a_train_step_has_the_fused_op_in_low_precision_and_keras_numbers(dtype, batch):
    model, step = make()
    reference, plain = make()
    fast = tfamp.rewrite(step, dtype=dtype)
    nodes = fused_nodes(fast.concrete(*batch))
    assert {node.op for node in nodes} == {"FusedBatchNormV3", "FusedBatchNormGradV3"}
    for node in nodes:
        assert tf.as_dtype(node.attr["T"].type).name == dtype
        assert tf.as_dtype(node.attr["U"].type) == tf.float32
    for _ in range(5):
        assert_close(fast(*batch), plain(*batch), dtype, depth=9)
    for mine, its in zip(model.variables, reference.variables, strict=True):
        assert_close(mine, its, dtype, depth=36)


def test_inference_is_fused_too(batch):
    model, _ = make()
    fast = tfamp.rewrite(model, dtype="bfloat16")
    (node,) = fused_nodes(fast.concrete(batch[0], training=False))
    assert not node.attr["is_training"].b
    assert_close(fast(batch[0], training=False), model(batch[0]), "bfloat16", depth=36)


@pytest.mark.parametrize("options", [{"axis": 1}, {"dtype": "float64"}])
def test_what_keras_computes_otherwise_stays_keras_own(batch, options):
    _, step = make(**options)
    assert not fused_nodes(tfamp.rewrite(step, dtype="bfloat16").concrete(*batch))


def test_only_tracing_threads_see_it_and_nothing_is_left(batch):
    original = keras.layers.BatchNormalization.call
    model, _ = make()
    inside, seen = threading.Event(), []

    def body(x):
        if not inside.is_set():
            inside.set()
            other = threading.Thread(target=lambda: seen.append(tf.function(model)))
            other.start()
            other.join()
            thread = threading.Thread(
                target=lambda: seen.append(fused_nodes(seen[0].get_concrete_function(x_spec)))
            )
            thread.start()
            thread.join()
        return model(x, training=True)

    x_spec = tf.TensorSpec((8, 6, 6, 3))
    fast = tfamp.rewrite(body, dtype="bfloat16")
    assert fused_nodes(fast.concrete(batch[0]))
    assert seen[1] == []
    assert keras.layers.BatchNormalization.call is original


def test_it_is_put_back_after_an_error(batch):
    original = keras.layers.BatchNormalization.call

    def fails(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        tfamp.rewrite(fails, dtype="bfloat16")(batch[0])
    assert keras.layers.BatchNormalization.call is original


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_a_prepared_model_has_the_fused_op_too(dtype, batch):
    """Methods that `prepare` wraps do not hide the one that a rewrite replaces."""
    model, _ = make()
    model.compile("sgd", "mse")
    settings = tfamp.prepare(model, level="O1", dtype=dtype).settings
    fast = settings.rewrite(lambda x: model(x, training=True))
    assert {node.op for node in fused_nodes(fast.concrete(batch[0]))} == {"FusedBatchNormV3"}
