"""Graphs and HLO for a GPU, without a GPU: cuDNN's RNNs, XLA's products, Casts and sums."""

import collections
import re

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import graph_op_dtypes
from tfamp.graph import rewrite_graph_def
from tfamp.interop import tf_private

pytestmark = pytest.mark.skipif(
    not tf.test.is_built_with_cuda(), reason="no kernels of GPUs are registered"
)
LOW = ["bfloat16", "float16"]


@pytest.fixture
def with_gpu(monkeypatch):
    """As where Keras and tfamp see a GPU."""
    visible = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: ["GPU:0"] if kind == "GPU" else visible(kind),
    )
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")


def rewritten(function, low, *specs):
    """A function's graph, converted for a GPU by the lists."""
    graph = tf.function(function).get_concrete_function(*specs).graph
    return rewrite_graph_def(
        graph.as_graph_def(add_shapes=True),
        [output.name for output in graph.outputs],
        dtype=low,
        device="gpu",
        placement="lists",
    )


# ---- cuDNN ---------------------------------------------------------------------------------------


def recurrent_step(layer):
    model = keras.Sequential(
        [keras.Input((6, 8)), layer(16, return_sequences=True), layer(16), layers.Dense(4)]
    )

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def rnn_dtypes(graph_def):
    found = graph_op_dtypes(graph_def)
    assert not {"While", "StatelessWhile"} & set(found)
    return {op: dtypes for op, dtypes in found.items() if "Cudnn" in op}


@pytest.mark.filterwarnings("ignore:This CPU:tfamp.TfampWarning")
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("layer", first_of([layers.LSTM, layers.GRU]))
def test_lstm_and_gru_are_cudnns_but_in_bfloat16(layer, low, with_gpu):
    x = tf.TensorSpec((2, 6, 8))
    dtype = {"float16": "float16", "bfloat16": "float32"}[low]
    wanted = {"CudnnRNNV3": {dtype}, "CudnnRNNBackpropV3": {dtype}}
    with tfamp.policy_scope(f"mixed_{low}"):
        traced = tf.function(recurrent_step(layer)).get_concrete_function(x)
    assert rnn_dtypes(traced.graph.as_graph_def()) == wanted
    step = recurrent_step(layer)
    with tfamp.autocast(low):
        traced = tf.function(step).get_concrete_function(x)
    assert rnn_dtypes(traced.graph.as_graph_def()) == wanted
    assert rnn_dtypes(rewritten(step, low, x).graph_def) == wanted


# ---- XLA -----------------------------------------------------------------------------------------


def small_model():
    """Convolutions, batch and layer normalization, attention and dense layers."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Reshape((9, 8))(layers.Conv2D(8, 3, strides=2)(x))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.Dense(16, activation="gelu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(4)(x))


def instructions(hlo):
    """How many instructions of each dtype and kind the text of an HLO module has."""
    return collections.Counter(re.findall(r"= (\w+)\[[\d,]*\]\S* ([\w-]+)\(", hlo))


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("low", first_of(LOW))
def test_xla_multiplies_in_low_precision(low):
    short = {"float16": "f16", "bfloat16": "bf16"}[low]
    with tfamp.policy_scope(f"mixed_{low}"):
        model = small_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(x, y, values):
        # Without a device XLA takes no variables.
        state = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=state) as scope, tf.GradientTape() as tape:
            weights = [variable.value for variable in model.trainable_variables]
            tape.watch(weights)
            loss = loss_of(y, model(x, training=True)) * 2.0**15
        kept = [scope.get_current_value(each) for each in model.non_trainable_variables]
        return tape.gradient(loss, weights), kept

    batch = tf.zeros((4, 8, 8, 3)), tf.zeros((4,), tf.int32)
    values = [tf.convert_to_tensor(variable.value) for variable in model.variables]
    compiled = tf.function(gradients, jit_compile=True)
    on_gpu = compiled.experimental_get_compiler_ir(*batch, values)(stage="hlo", platform_name="GPU")
    found = instructions(on_gpu)
    multiplied = {each: n for each, n in found.items() if each[1] in ("dot", "convolution")}
    # The output layer's, forward and backward, are float32.
    assert multiplied.pop(("f32", "dot")) == 3
    assert {dtype for dtype, _ in multiplied} == {short}
    assert sum(multiplied.values()) == 27


# ---- Casts ---------------------------------------------------------------------------------------


def test_gradients_of_biases_need_no_casts():
    inputs = keras.Input((16, 32))
    x = inputs
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "relu")(x)))
    model = keras.Model(inputs, layers.Dense(4)(x))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    result = rewritten(step, "bfloat16", tf.TensorSpec((8, 16, 32)))
    nodes = {node.name: node for node in result.graph_def.node}
    # A GPU's BiasAddGrad adds up in bfloat16 between its blocks of threads: a Sum where it is low.
    sums = [n for n in nodes.values() if n.op in ("BiasAddGrad", "Sum") and "BiasAddGrad" in n.name]
    assert len(sums) == 7
    # The others take what gradients of normalizations and of the loss give, which are float32.
    low = [node for node in sums if node.attr["T"].type == tf.bfloat16.as_datatype_enum]
    assert [node.op for node in low] == ["Sum"] * 2
    for node in sums:
        assert nodes[node.input[0].partition(":")[0]].op != "Cast", node.name


# ---- Sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", first_of(LOW))
def test_gradients_by_depthwise_filters_that_cudnn_has_not_are_float32(low):
    in_cudnn = [(3, 3, 4, 1), (5, 5, 4, 1)]
    for shape in [*in_cudnn, (4, 4, 4, 1), (1, 3, 4, 1), (3, 3, 4, 2)]:

        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch(w)
                y = tf.nn.depthwise_conv2d(x @ tf.eye(4), w, [1, 1, 1, 1], "SAME")
                loss = tf.reduce_sum(tf.matmul(y, tf.eye(y.shape[-1])) ** 2)
            return tape.gradient(loss, w)

        specs = tf.TensorSpec((8, 16, 16, 4)), tf.TensorSpec(shape)
        plan = rewritten(step, low, *specs).plan
        (node,) = [n for n in plan.nodes if n.op == "DepthwiseConv2dNativeBackpropFilter"]
        assert node.dtype == (low if shape in in_cudnn else "float32"), shape
        assert (node.reason.rule == "sum") == (shape not in in_cudnn)
