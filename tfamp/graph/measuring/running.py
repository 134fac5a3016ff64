"""Runs a graph for what it reports, and undoes what it did to variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfamp.graph.measuring.feeding import Feeds
from tfamp.interop import tf_functions


def runnable(graph_def: Any, feeds: Feeds, fetches: Sequence[str]) -> Callable[..., None]:
    """Returns a function that runs a graph for its effects.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; its functions have names that no other ones have.
        feeds: What it is run on.
        fetches: Tensors and operations to compute.

    Returns:
        A function of the values of all inputs.
    """

    def imported(*values: Any) -> Any:
        given = dict(zip(feeds.inputs, values, strict=True))
        fetched = tf.graph_util.import_graph_def(
            graph_def, input_map=given, return_elements=list(fetches), name="calibration"
        )
        with tf.control_dependencies(fetched):
            return tf.constant(0)

    function = tf.compat.v1.wrap_function(imported, feeds.specs)
    function.add_to_graph()
    config = tf.compat.v1.ConfigProto()
    # TensorFlow's optimizers take ten times as long as a run, and there are only a few.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    settings = config.SerializeToString()

    def run(*values: Any) -> None:
        tf.raw_ops.StatefulPartitionedCall(
            args=values, Tout=[tf.int32], f=function, config_proto=settings
        )

    return run


@contextmanager
def restored_handles(values: Sequence[Any]) -> Iterator[None]:
    """Gives the variables among captured values what they held, however the block ends.

    Args:
        values: Tensors; handles of variables count, anything else is passed over.
    """
    handles = [each for each in values if each.dtype == tf.resource]
    dtypes = [tf_functions.variable_dtype(handle) for handle in handles]
    before = [
        (handle, tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)))
        for handle, dtype in zip(handles, dtypes, strict=True)
        if dtype is not None and tf.raw_ops.VarIsInitializedOp(resource=handle)
    ]
    try:
        yield
    finally:
        for handle, value in before:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


@contextmanager
def restored(variables: Sequence[Any]) -> Iterator[None]:
    """Gives variables the values they had, however the block ends."""
    values = [tf.identity(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
