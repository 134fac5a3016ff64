"""Rewrites SavedModels in low precision: reads, converts, writes."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import SavedModelError
from tfamp.core.kinds import SavedModel
from tfamp.core.messages import argument
from tfamp.core.names import Device, LowDtype, LowDtypeLike, Placement
from tfamp.core.options import checked_number
from tfamp.graph.calibration import Calibration
from tfamp.graph.graph import Graph
from tfamp.graph.op_lists import OpLists
from tfamp.interop import tf_private
from tfamp.machine import hardware
from tfamp.machine.file_replacing import new_directory
from tfamp.planning.decision import make_plan
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import Accuracy, RewritePlan
from tfamp.policy import low_dtype
from tfamp.rewriting import saved_graph
from tfamp.rewriting.bounded import search_scopes
from tfamp.rewriting.other_files import what_else_it_is

# The model may run on another machine, whose op times are unknown.
_PLACEMENT: Placement = "lists"
_GRAPH_FILE = "saved_model.pb"
_WRITTEN = (_GRAPH_FILE, "fingerprint.pb")
# Files that a frozen model keeps.
_KEPT_IN_FROZEN = ("assets", "assets.extra")


def rewrite_saved_model(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: LowDtypeLike | None = None,
    freeze: bool = False,
    calibration: Any = None,
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: Placement = _PLACEMENT,
    device: Device = RewriteOptions.device,
    overwrite: bool = False,
    bound: float | None = None,
    data: Any = None,
) -> RewritePlan:
    """Writes a SavedModel that computes in low precision where the op lists allow it.

    The new model is used like the old one: signatures, their names, dtypes and shapes,
    functions, variables, assets and lookup tables are kept; inputs, outputs and variables
    remain float32. Loading it does not need tfamp. The SavedModel in `src` is not modified, and
    `dst` appears when it is complete: it is written next to its place and renamed. A replaced
    SavedModel is first renamed to ".NAME-….old"; a process killed between the two renames
    leaves it there, complete.

    Args:
        src: Directory of a SavedModel: from `tf.saved_model.save`, `model.export` of Keras 3,
            or TensorFlow 1.
        dst: Directory to write; it must not exist unless `overwrite`.
        dtype: "float16" or "bfloat16", also as a dtype of TensorFlow or NumPy; None or "auto"
            is the dtype that this machine multiplies natively.
        freeze: Whether variables become constants, stored in the low dtype if used in that
            only: about half the bytes. A frozen model has only its signatures and cannot be
            trained.
        calibration: Data to run the signatures on in float32: a dict of arrays by input name, a
            list of these, the path of a `.npz` file that holds them, or a
            `tfamp.graph.Calibration`. Nodes whose values are too large for the dtype stay
            float32.
        op_lists: The ops that may be converted; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these nodes stay float32.
            Names of nodes in functions, branches and loops are prefixed with their caller's
            name.
        force_low: The same: these nodes compute in low precision if the op has a kernel for it.
        placement: "lists": the op lists decide alone, as the model may run on another machine.
            "min_cut": they decide which nodes may be converted, and a minimum cut which are
            worth it on such a device, by built-in times. "fused", with `freeze` only: like
            "min_cut", and XLA compiles the arithmetic between products where the model runs.
        device: Kind of device that the model will run on: "cpu", "gpu", "tpu", or "auto" for
            this machine's. Nodes without a kernel there stay float32.
        overwrite: Whether a SavedModel in `dst` is replaced.
        bound: Largest acceptable error of the outputs on `data`: the largest difference from
            float32 over the largest magnitude, as in `tfamp.diagnostics.compare`. Name scopes
            stay float32 until the error is at most this; a run of the written model proves it.
            Each scope takes a run.
        data: Data for `bound`, as for `calibration`.

    Returns:
        The plan, with the reason for every node, and with a bound `plan.accuracy`. If no node
        could be converted, there is a `NothingConvertedWarning`, and the new model computes
        like the old one.

    Raises:
        TypeError, ValueError: An argument is wrong; the message lists the allowed values.
        SavedModelError: `src` cannot be read or frozen, `dst` cannot be written, or no nodes in
            float32 bring the error to the bound.
        RewriteError: A graph is not valid or has an unknown op; it names node, op and cause.

    Example:
        >>> import os, tempfile, tensorflow as tf
        >>> module, here = tf.Module(), tempfile.mkdtemp()
        >>> module.call = tf.function(lambda x: x @ x, [tf.TensorSpec((8, 8))])
        >>> tf.saved_model.save(module, f"{here}/a", signatures=module.call)
        >>> plan = rewrite_saved_model(f"{here}/a", f"{here}/b", dtype="bfloat16")
        >>> {node.dtype for node in plan.nodes if node.op == "MatMul"}
        {'bfloat16'}
        >>> tf.saved_model.load(f"{here}/b").call(tf.eye(8)).dtype.name
        'float32'
    """
    source, target = Path(src), Path(dst)
    model = _read(source)
    final = _checked_target(source, target, overwrite)
    choices = {"op_lists": op_lists, "keep_float32": keep_float32, "force_low": force_low}
    options = _options(dtype, freeze, calibration, placement, device=device, **choices)
    accuracy, patterns = _searched(model, source, freeze, options, bound, data)
    try:
        with new_directory(final) as work:
            plan = _write(model, source, work, freeze, options.keeping(patterns))
    except (OSError, tf_private.message_error()) as error:  # A message is limited to 2 GiB.
        raise SavedModelError(f"The output {target} could not be written: {error}") from error
    return dataclasses.replace(plan, accuracy=accuracy)


def _searched(
    model: SavedModel,
    source: Path,
    freeze: bool,
    options: RewriteOptions,
    bound: float | None,
    data: Any,
) -> tuple[Accuracy | None, list[str]]:
    """Returns what was measured for a bound, and patterns of nodes that stay float32 for it."""
    if bound is None and data is None:
        return None, []
    if bound is None or data is None:
        raise ValueError(
            f"{argument('bound')} and {argument('data')} go together: the error is measured on the "
            "data. Give both, or neither."
        )
    checked_number("bound", bound, low=0.0, high=math.inf)

    def candidate(patterns: Sequence[str], folder: Path) -> RewritePlan:
        kept = options.keeping(patterns)
        return _write(model, source, folder, freeze, kept, copy_file=_link_or_copy)

    return search_scopes(model, source, _calls_of(data), bound, candidate)


def _write(
    model: SavedModel,
    source: Path,
    folder: Path,
    freeze: bool,
    options: RewriteOptions,
    copy_file: Callable[[str, str], object] = shutil.copy2,
) -> RewritePlan:
    """Writes a converted SavedModel; returns the plan. `model` is not modified."""
    new = tf_private.saved_model_message()
    new.CopyFrom(model)
    plan = _rewritten(new, source, freeze, options)

    def left_out(inside: str, names: list[str]) -> set[str]:
        dropped = set(names).difference(_KEPT_IN_FROZEN) if freeze else set(_WRITTEN)
        return dropped if Path(inside) == source else set()

    shutil.copytree(source, folder, ignore=left_out, dirs_exist_ok=True, copy_function=copy_file)
    (folder / _GRAPH_FILE).write_bytes(new.SerializeToString(deterministic=True))
    tf_private.write_fingerprint(str(folder))
    return plan


def _link_or_copy(source: str, target: str) -> None:
    """Links a file that is only read for a while: weights may be gigabytes."""
    try:
        os.symlink(os.path.abspath(source), target)
    except OSError:  # Windows lets administrators only, some file systems nobody.
        shutil.copy2(source, target)


def inspect_saved_model(
    src: str | os.PathLike[str],
    *,
    dtype: LowDtypeLike | None = None,
    freeze: bool = False,
    **choices: Any,
) -> RewritePlan:
    """Returns the plan of `rewrite_saved_model` without writing anything.

    Args:
        src: Directory of a SavedModel.
        dtype: As for `rewrite_saved_model`.
        freeze: As for `rewrite_saved_model`.
        **choices: Its arguments `calibration`, `op_lists`, `keep_float32`, `force_low`,
            `placement` and `device`.

    Raises:
        TypeError, ValueError, SavedModelError, RewriteError: As `rewrite_saved_model`.
    """
    source = Path(src)
    return _rewritten(_read(source), source, freeze, _options(dtype, freeze, **choices))


def required_dtype(dtype: LowDtypeLike | None) -> LowDtype:
    """Returns the low dtype that an argument stands for.

    Raises:
        ValueError: It is not a low dtype, or it is None and this machine does not multiply any.
    """
    name = low_dtype(dtype)
    if name is None:
        _, reason = hardware.automatic_policy(hardware.detect())
        choices = " or ".join(argument("dtype", low) for low in LOW_PRECISION)
        raise ValueError(
            f"{argument('dtype', None)} takes what this machine multiplies natively, and that "
            f"is float32: {reason}. Give {choices} for a model that runs elsewhere."
        )
    return name


def _options(
    dtype: Any,
    freeze: bool,
    calibration: Any = None,
    placement: Placement = _PLACEMENT,
    **choices: Any,
) -> RewriteOptions:
    if placement == "fused" and not freeze:
        raise ValueError(
            f"{argument('placement', 'fused')} compiles the arithmetic of the main graph, and a "
            "SavedModel that is not frozen computes in functions: give "
            f"{argument('freeze', True)} too, or {argument('placement', 'min_cut')}, which is "
            "the same without compiling."
        )
    return RewriteOptions(
        dtype=required_dtype(dtype),
        calibration=None if calibration is None else _calls_of(calibration),
        placement=placement,
        profile="builtin",
        **choices,
    )


def _calls_of(data: Any) -> Calibration:
    """Returns data of an argument as calls: of a file, of one dict of arrays, or as it is."""
    if isinstance(data, str | os.PathLike):
        return Calibration.from_npz(data)
    return Calibration.of([data] if isinstance(data, Mapping) else data)


def _rewritten(
    model: SavedModel,
    src: Path,
    freeze: bool,
    options: RewriteOptions,
) -> RewritePlan:
    """Converts the graphs of a SavedModel in place; returns the plan."""
    data = options.calibration
    plans = []
    for meta_graph in model.meta_graphs:
        roles = saved_graph.find_roles(meta_graph)
        # Before freezing drops the objects: tables stay in a frozen graph.
        loaded, resources = saved_graph.captured(src, meta_graph) if data else (None, {})
        if freeze:
            saved_graph.freeze_meta_graph(meta_graph, roles, src)
            roles = saved_graph.find_roles(meta_graph)
        ranges = data and saved_graph.measure_meta_graph(meta_graph, roles, src, data, resources)
        del loaded  # Its resources lived as long.
        plan = saved_graph.rewrite_meta_graph(meta_graph, roles, options, ranges)
        if freeze:
            plan = saved_graph.store_low_constants(meta_graph, roles, plan)
        plans.append(plan)
    if len(plans) == 1:
        return plans[0]
    nodes = tuple(node for plan in plans for node in plan.nodes)
    casts = tuple(cast for plan in plans for cast in plan.casts)
    retypes = tuple(retype for plan in plans for retype in plan.retypes)
    return make_plan(plans[0].dtype, nodes, casts, retypes, None)


# ---- Files ---------------------------------------------------------------------------------------


def _read(src: Path) -> SavedModel:
    """Reads the graphs of a SavedModel, and its variables once, to check that none is damaged.

    Raises:
        SavedModelError: It is missing or broken.
    """
    path = src / _GRAPH_FILE
    if not path.is_file():
        raise SavedModelError(what_else_it_is(src))
    model = tf_private.saved_model_message()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, tf_private.message_error()) as error:
        raise SavedModelError(
            f"{path} is broken and cannot be read: {error}. Save the model again."
        ) from error
    if not model.meta_graphs:
        raise SavedModelError(f"{path} is broken: it holds no graph.")
    nodes = (node for graph in model.meta_graphs for node in Graph(graph.graph_def).nodes)
    for node in nodes:
        if node.op == "Const" and "value" not in node.attr:  # TensorFlow would crash on it.
            raise SavedModelError(
                f"{path} is broken: its constant {node.name!r} has no value. Save the model again."
            )
    if any(graph.HasField("saver_def") for graph in model.meta_graphs):
        try:
            reader = tf.train.load_checkpoint(str(src / saved_graph.VARIABLES_PREFIX))
            for name in reader.get_variable_to_dtype_map():  # Reading verifies checksums.
                reader.get_tensor(name)
        except (tf.errors.OpError, ValueError, IndexError, MemoryError) as error:
            raise SavedModelError(
                f"The variables of {src} cannot be read: {saved_graph.first_line(error)}"
            ) from error
    return model


def _checked_target(src: Path, dst: Path, overwrite: bool) -> Path:
    """Checks the directory to write to; returns it without symbolic links.

    Raises:
        SavedModelError: `dst` is `src`, is inside it or holds it, or exists and must stay.
    """
    if not dst.name:
        raise SavedModelError("The output has no name; give a new directory to write to.")
    source, target = src.resolve(), dst.resolve()
    if source == target or (target.exists() and source.samefile(target)):
        raise SavedModelError(f"The output {dst} is the input {src}; give another directory.")
    if source in target.parents or target in source.parents:
        raise SavedModelError(
            f"The output {dst} and the input {src} are inside one another; give a directory "
            "next to it."
        )
    if os.path.lexists(dst) and not overwrite:
        raise SavedModelError(
            f"The output {dst} exists; give another directory, or {argument('overwrite', True)} "
            "to replace it."
        )
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty and not (target / _GRAPH_FILE).is_file():
        raise SavedModelError(
            f"The output {dst} exists and is not a SavedModel; it is not overwritten. Give "
            "another directory."
        )
    return target


def directory_bytes(path: Path) -> int:
    """Returns the bytes of all files in a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
