"""Kernels on the device for all ops that tfamp converts."""

import contextlib
import functools

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from helpers import acceptance_models as models

pytestmark = pytest.mark.gpu
TOY_KINDS = ("cnn", "attention", "resizing")
# Its layer calls the op itself, with all inputs in the dtype of the first.
NOT_FOR = {"policy": {"cnn_fused"}}
# They move values and compute none.
MOVES = ("_Arg", "_Retval", "_Recv", "_Send", "_HostRecv", "_HostSend", "Const", "Identity", "NoOp")


@contextlib.contextmanager
def hard_placement(device):
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device(device.name):
            yield
    finally:
        tf.config.set_soft_device_placement(True)


def train_once(zoo, kind, way, dtype, device, *, scaled=True):
    """Runs one step; returns TensorFlow's error where an op has no kernel, else ""."""
    ((x, y),) = zoo.digits(kind, 1)
    options = {"placement": "lists"} if way == "rewrite" else {}
    inner = functools.partial(keras.optimizers.SGD, 1e-3)
    try:
        with hard_placement(device):
            training = models.train(
                lambda: zoo.build(kind), way, dtype, inner=inner, scaled=scaled, **options
            )
            training.step(tf.identity(x), tf.identity(y))
    except tf.errors.OpError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["policy", "rewrite"])
def test_layers(device, check, way, dtype):
    """Every kind of layer trains with soft placement off."""
    device.needs(dtype)
    zoo = pytest.importorskip("helpers.model_zoo", reason="scikit-learn is not installed")
    # The same without tfamp's decisions: a rewrite makes them for ops, a policy for layers only.
    bare = ("policy", dtype) if way == "policy" else ("float32", "float32")
    for kind in TOY_KINDS if device.toy else sorted(set(zoo.KINDS) - NOT_FOR.get(way, set())):
        message = train_once(zoo, kind, way, dtype, device)
        if message and train_once(zoo, kind, *bare, device, scaled=False):
            check.leave_out(kind, f"TensorFlow cannot run the layers themselves: {message}")
        else:
            check(f"{kind}: ops without a kernel", message or "none", equals="none")


def nodes_that_ran(step, x, y):
    """Returns the nodes of the first call as TensorFlow placed and fused them."""
    context.enable_run_metadata()
    context.context().enable_graph_collection()
    try:
        step(x, y)
        found = context.export_run_metadata()
    finally:
        context.context().disable_graph_collection()
        context.disable_run_metadata()
    graphs = [graph for each in found.function_graphs for graph in each.partition_graphs]
    return [
        node
        for graph in graphs
        for nodes in (graph.node, *(each.node_def for each in graph.library.function))
        for node in nodes
    ]


def dtypes_of(node):
    """Returns the dtypes of a node's inputs and outputs."""
    found = {node.attr[name].type for name in ("T", "SrcT", "DstT", "dtype") if name in node.attr}
    return {tf.dtypes.as_dtype(each) for each in found if each}


def test_placement(device, check):
    """Every float op of a rewritten ResNet-50 runs on the device."""

    def make():
        if device.toy:
            return models.cnn(8)
        return keras.applications.ResNet50(weights=None, classes=models.CLASSES)

    pixels, channels = device.size(224, 8), device.size(3, 1)
    x, y = tf.random.normal((8, pixels, pixels, channels)), tf.zeros(8, "int32")
    training = models.train(make, "rewrite", device.low, placement="lists")
    nodes = nodes_that_ran(training.step, x, y)
    computing = [node for node in nodes if node.op not in MOVES]
    floats = [node for node in computing if any(each.is_floating for each in dtypes_of(node))]
    # Nodes in function bodies need not name a device: they run on their caller's.
    kind = device.name.partition(":")[0]
    elsewhere = {node.op for node in floats if node.device and f"device:{kind}:" not in node.device}
    low = tf.dtypes.as_dtype(device.low)
    # Fused ops and oneDNN's have other names, such as _MklNativeFusedConv2D.
    compute = [node for node in floats if "Conv2D" in node.op or "MatMul" in node.op]
    lowered = sum(low in dtypes_of(node) for node in compute)
    check("float ops that ran", len(floats), at_least=20)
    check("convolutions and matmuls", len(compute), at_least=3)
    check(f"of these in {device.low}", lowered, at_least=3)
    others = ", ".join(sorted(elsewhere)) or "none"
    check(f"float ops that did not run on {kind}s", others, equals="none")
