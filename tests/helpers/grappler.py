"""TensorFlow's own optimizers, run one at a time on a graph: the reference for the rewrite.

Grappler takes the machine it optimizes for from a cluster, which need not exist: float16 is painted
for a GPU of any compute capability.
"""

from __future__ import annotations

PASSES = {"float16": "auto_mixed_precision", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}
# Before 7.0 the pass does nothing.
CAPABILITIES = ("7.0", "8.0", "9.0")


def optimized(graph_def, fetches, feeds, optimizer, capability=None):
    """The graph after one optimizer of Grappler's, for this machine or for one with a GPU."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    for name in (*fetches, *feeds):
        meta.collection_def["train_op"].node_list.value.append(name)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    options.meta_optimizer_iterations = options.ONE
    options.optimizers.append(optimizer)
    if optimizer == "function":
        options.function_optimization = options.AGGRESSIVE
    cluster = capability and _cluster(capability)
    with tf.device(None):
        return tf_optimizer.OptimizeGraph(config, meta, verbose=False, cluster=cluster)


def _cluster(capability):
    """A machine with a CPU and a GPU of a compute capability, such as "8.0"."""
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.grappler import cluster

    devices = []
    for kind in ("CPU", "GPU"):
        device = device_properties_pb2.NamedDevice(name=f"/job:localhost/task:0/device:{kind}:0")
        device.properties.type = kind
        devices.append(device)
    # The versions of CUDA and cuDNN decide which convolutions and RNNs are on its lists.
    facts = {"architecture": capability, "cuda": "12050", "cudnn": "90300"}
    devices[1].properties.environment.update(facts)
    return cluster.Cluster(devices=devices)


def painted_by_grappler(cases, dtype, capability="8.0"):
    """Runs TensorFlow's mixed precision pass on (graph, fetches, feeds) triples.

    Float16 is painted for a GPU of a compute capability, bfloat16 for this machine's CPU.

    Returns:
        The rewritten graphs.
    """
    of_gpu = capability if dtype == "float16" else None
    return [optimized(*case, PASSES[dtype], of_gpu) for case in cases]
