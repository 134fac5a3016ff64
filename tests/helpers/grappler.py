"""TensorFlow's own optimizers, run one at a time on a graph: the reference for the rewrite.

Grappler reads its environment once per process, so the float16 mode that shows a GPU's decisions
runs in a process of its own: `python -m helpers.grappler`, with the tests directory on the path.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

PASSES = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
_TESTS = Path(__file__).parent.parent


def optimized(graph_def, fetches, feeds, optimizer):
    """The graph after one optimizer of Grappler's, in this process."""
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
    with tf.device(None):
        return tf_optimizer.OptimizeGraph(config, meta, verbose=False)


def painted_by_grappler(cases, dtype):
    """Runs TensorFlow's mixed precision pass on (graph, fetches, feeds) triples.

    Returns:
        The rewritten graphs.
    """
    if dtype == "bfloat16":
        return [optimized(*case, PASSES[dtype]) for case in cases]
    payload = pickle.dumps(
        [(graph.SerializeToString(), fetches, feeds) for graph, fetches, feeds in cases]
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "helpers.grappler"],
        input=payload,
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [_parsed(each) for each in pickle.loads(done.stdout)]


def _parsed(serialized):
    import tensorflow as tf

    return tf.compat.v1.GraphDef.FromString(serialized)


def _main():
    cases = pickle.loads(sys.stdin.buffer.read())
    results = [
        optimized(_parsed(graph), fetches, feeds, PASSES["float16"]).SerializeToString()
        for graph, fetches, feeds in cases
    ]
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    _main()
