"""The files of a SavedModel: read and checked, and written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.graph.functions import GRADIENT, attribute_text
from tfamp.interop import tf_private
from tfamp.machine.file_replacing import restore_directory
from tfamp.planning.structures import node_name
from tfamp.rewriting.pipeline import all_nodes
from tfamp.rewriting.saved_graph import tensors_of

GRAPH_FILE = "saved_model.pb"
FINGERPRINT_FILE = "fingerprint.pb"
VARIABLES_PREFIX = "variables/variables"
# Protobuf's limit on one message.
MAX_GRAPH_BYTES = 2**31 - 1
_OTHER_FORMATS = ("saved_model.pbtxt", "saved_model.cpb")
# TensorFlow reads these unseen: where they are not, the process dies.
_READ_UNSEEN = {
    "Const": ("dtype", "value"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


def check_target(src: Path, dst: Path, overwrite: bool) -> Path:
    """Checks where a SavedModel is to be written; returns it without symbolic links.

    A SavedModel that another process was killed in the middle of replacing is put back first.

    Raises:
        SavedModelError: `dst` is `src`, is inside it or holds it, or exists and must stay.
    """
    source, target = src.resolve(), dst.resolve()
    if source == target or (target.exists() and source.samefile(target)):
        raise SavedModelError(f"The output {dst} is the input {src}; give another directory.")
    if source in target.parents or target in source.parents:
        raise SavedModelError(
            f"The output {dst} and the input {src} are inside one another; give a directory next "
            "to it."
        )
    above = next(each for each in target.parents if each.exists())
    if not above.is_dir():
        raise SavedModelError(f"The output {dst} cannot be: {above} is no directory.")
    restore_directory(target)
    if not os.path.lexists(dst):
        return target
    if not overwrite:
        raise SavedModelError(
            f"The output {dst} exists; give another directory, or allow to overwrite it "
            "(overwrite=True)."
        )
    is_model = any((target / name).is_file() for name in (GRAPH_FILE, *_OTHER_FORMATS))
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_model and not is_empty:
        raise SavedModelError(
            f"The output {dst} exists and is not a SavedModel; it is not overwritten. Give another "
            "directory."
        )
    return target


def read_saved_model(src: Path) -> Any:
    """Reads the graphs of a SavedModel, and its variables once, to see that they are all there.

    Raises:
        SavedModelError: There is none, or it is broken.
        RewriteError: What a node says of its gradient is no text.
    """
    path = src / GRAPH_FILE
    if not path.is_file():
        raise SavedModelError(_why_missing(src))
    model = tf_private.saved_model_message()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, tf_private.message_error()) as error:
        raise SavedModelError(
            f"{path} is broken and cannot be read: {error}. Save the model again."
        ) from error
    if not model.meta_graphs:
        raise SavedModelError(f"{path} is broken: it holds no graph.")
    for graph in model.meta_graphs:
        if wrong := _broken_reference(graph):
            raise SavedModelError(f"{path} is broken: {wrong}.")
        for node in all_nodes(graph.graph_def):
            attribute_text(node, GRADIENT)  # TensorFlow reads it unseen.
    if any(_has_variables(graph) for graph in model.meta_graphs):
        _check_variables(src)
    return model


def _why_missing(src: Path) -> str:
    if not src.exists():
        return f"There is no directory {src}; give the directory of a SavedModel."
    if not src.is_dir():
        return f"{src} is no directory; give the directory of a SavedModel."
    for name in _OTHER_FORMATS:
        if (src / name).is_file():
            return (
                f"{src} has a {name}, a format tfamp does not read; load it with "
                f"tf.saved_model.load and save it again, which writes {GRAPH_FILE}."
            )
    return f"{src} is no SavedModel: it has no {GRAPH_FILE}."


def _broken_reference(meta_graph: Any) -> str | None:
    """Finds a name or a number that refers to nothing, or a missing attribute.

    A broken file may name anything. Not names inside the graph, which the rewrite compares edge by
    edge. Returns what is wrong as half a sentence, None if all is there.
    """
    nodes = {node.name for node in meta_graph.graph_def.node}
    for _, signature in sorted(meta_graph.signature_def.items()):
        for tensor in (*tensors_of(signature.inputs), *tensors_of(signature.outputs)):
            if node_name(tensor) not in nodes:
                return f"a signature uses the tensor {tensor!r}, which its graph does not have"
    for node in all_nodes(meta_graph.graph_def):
        for attr in _READ_UNSEEN.get(node.op, ()):
            if attr not in node.attr:
                return f"its node {node.name!r}, a {node.op}, has no attribute {attr!r}"
    count = len(meta_graph.object_graph_def.nodes)
    for number in _object_numbers(meta_graph.object_graph_def):
        if not 0 <= number < count:
            return f"an object refers to the object {number}, and there are {count}"
    return None


def _object_numbers(objects: Any) -> Iterator[int]:
    for each in objects.nodes:
        yield from (child.node_id for child in each.children)
        for _, saveable in sorted(each.saveable_objects.items()):
            yield saveable.save_function
            yield saveable.restore_function
    for _, function in sorted(objects.concrete_functions.items()):
        yield from function.bound_inputs


def _has_variables(meta_graph: Any) -> bool:
    # The restore function of a model without variables reads the object graph only.
    kinds = [node.WhichOneof("kind") for node in meta_graph.object_graph_def.nodes]
    return "variable" in kinds or (not kinds and meta_graph.HasField("saver_def"))


# Where the reader has no error of TensorFlow's it raises one of Python's; a damaged size may ask
# for more memory than there is.
_READER_ERRORS = (tf.errors.OpError, ValueError, IndexError, NotImplementedError, MemoryError)


def _check_variables(src: Path) -> None:
    prefix = str(src / VARIABLES_PREFIX)
    try:
        dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
        for name, dtype in sorted(dtypes.items()):  # Checksums are compared on the way.
            tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
            )
    except _READER_ERRORS as error:
        raise SavedModelError(
            f"The variables of the SavedModel {src} cannot be read: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; TensorFlow adds where in the graph it was."""
    text = getattr(error, "message", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def copy_files(src: Path, work: Path, leave_out: frozenset[str]) -> None:
    """Copies what is in a SavedModel's directory, but the files and directories to leave out."""

    def left_out(folder: str, names: list[str]) -> frozenset[str]:
        return leave_out if Path(folder) == src else frozenset()

    try:
        shutil.copytree(src, work, ignore=left_out, dirs_exist_ok=True)
    except shutil.Error as error:  # It goes on after an error and lists them all.
        raise OSError(error.args[0][0][2]) from error


def write_graphs(model: Any, work: Path) -> None:
    """Writes the graphs of a SavedModel and their fingerprint.

    Raises:
        SavedModelError: They are too large for one file.
    """
    size = model.ByteSize()
    if size > MAX_GRAPH_BYTES:
        raise SavedModelError(
            f"The graph would take {size} bytes, and a SavedModel's may take {MAX_GRAPH_BYTES}. "
            "Convert without freezing: variables are in a file of their own."
        )
    (work / GRAPH_FILE).write_bytes(model.SerializeToString(deterministic=True))
    tf_private.write_fingerprint(str(work))


def directory_bytes(path: Path) -> int:
    """Returns the bytes of all files in a directory."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
