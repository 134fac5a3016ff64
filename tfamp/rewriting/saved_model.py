"""SavedModels: read, rewritten in low precision, written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import SavedModelError
from tfamp.graph.calibration import Calibration
from tfamp.graph.op_lists import OpLists
from tfamp.machine import hardware
from tfamp.machine.file_replacing import new_directory
from tfamp.planning.decision import make_plan
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import RewritePlan
from tfamp.policy import low_dtype
from tfamp.rewriting import saved_files
from tfamp.rewriting.saved_freeze import KEPT_IN_FROZEN, freeze_meta_graph, store_low_constants
from tfamp.rewriting.saved_graph import find_roles, measure_meta_graph, rewrite_meta_graph

# The model may run on another machine than this, of which no times are known.
_PLACEMENT = "lists"


def rewrite_saved_model(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: Any = None,
    freeze: bool = False,
    calibration: Any = None,
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: str = _PLACEMENT,
    device: str = RewriteOptions.device,
    overwrite: bool = False,
) -> RewritePlan:
    """Writes a SavedModel that computes in low precision where the lists say so.

    The new model is used like the old one: signatures, their names, dtypes and shapes, functions,
    variables, assets and lookup tables are kept; inputs, outputs and variables are float32 as
    before. It needs no tfamp to load. The SavedModel in `src` is not modified, and `dst` appears
    when it is complete: it is written next to its place and renamed. A SavedModel that is replaced
    is put aside until then; a process killed between the two renames leaves it under a name that
    begins with a dot, and the next rewrite to `dst` puts it back first.

    Args:
        src: Directory of a SavedModel: from `tf.saved_model.save`, `model.export` of Keras 3, or
            TensorFlow 1.
        dst: Directory to write; it must not exist unless `overwrite`.
        dtype: "float16" or "bfloat16", also as a dtype of TensorFlow or NumPy; None or "auto" is
            what this machine multiplies natively.
        freeze: Whether variables become constants, stored in the low dtype where that is all they
            are used in: about half the bytes. A frozen model has its signatures only and cannot be
            trained.
        calibration: Data to run the signatures on in float32: a dict of arrays by input name, a
            list of these, the path of a `.npz` file that holds them, or a
            `tfamp.graph.Calibration`. Nodes whose values are too large for the dtype stay float32.
        op_lists: Which ops may be low; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32. Nodes of
            functions, branches and loops have the name of their caller in front too.
        force_low: The same: these compute in low precision wherever the op has a kernel for it.
        placement: "lists": the lists decide alone, as the model may run on another machine than
            this. "min_cut": they decide what may be low, a minimum cut what is worth it on a device
            of this kind, by the built-in table. "fused", with `freeze` only: as "min_cut", and XLA
            compiles the arithmetic between products where the model runs.
        device: Kind of device the model will run on: "cpu", "gpu", "tpu", or "auto" for this
            machine's. A node without a kernel there stays float32.
        overwrite: Whether a SavedModel in `dst` is replaced.

    Returns:
        The plan, with the reason for every node. A `NothingConvertedWarning` says that no node
        could be converted; the new model computes as the old one then.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names what is allowed.
        SavedModelError: `src` cannot be read or frozen, or `dst` cannot be written.
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
    if not source.exists():
        saved_files.read_saved_model(source)  # It says what is missing.
    final = saved_files.check_target(source, target, overwrite)
    options = _options(
        freeze, dtype, calibration, op_lists, keep_float32, force_low, placement, device
    )
    model, plan = _rewritten(source, options, freeze)
    leave_out = {saved_files.GRAPH_FILE, saved_files.FINGERPRINT_FILE}
    if freeze:
        leave_out |= {path.name for path in source.iterdir() if path.name not in KEPT_IN_FROZEN}
    try:
        with new_directory(final) as work:
            saved_files.copy_files(source, work, frozenset(leave_out))
            saved_files.write_graphs(model, work)
    except OSError as error:
        raise SavedModelError(f"The output {target} could not be written: {error}") from error
    return plan


def inspect_saved_model(
    src: str | os.PathLike[str],
    *,
    dtype: Any = None,
    freeze: bool = False,
    calibration: Any = None,
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: str = _PLACEMENT,
    device: str = RewriteOptions.device,
) -> RewritePlan:
    """Returns the plan of `rewrite_saved_model`, and writes nothing.

    Args:
        src: Directory of a SavedModel.
        dtype: See `rewrite_saved_model`, as for all others.
        freeze: As there.
        calibration: As there.
        op_lists: As there.
        keep_float32: As there.
        force_low: As there.
        placement: As there.
        device: As there.

    Raises:
        TypeError, ValueError, SavedModelError, RewriteError: As `rewrite_saved_model`.
    """
    options = _options(
        freeze, dtype, calibration, op_lists, keep_float32, force_low, placement, device
    )
    return _rewritten(Path(src), options, freeze)[1]


def _options(
    freeze: bool,
    dtype: Any,
    calibration: Any,
    op_lists: OpLists | None,
    keep_float32: Iterable[str],
    force_low: Iterable[str],
    placement: str,
    device: str,
) -> RewriteOptions:
    """Returns how to rewrite a model that may run on another machine: by the built-in figures."""
    if placement == "fused" and not freeze:
        raise ValueError(
            "placement='fused' compiles the arithmetic of a graph, and a SavedModel that is not "
            "frozen computes in functions, which are left alone: give freeze=True too, or "
            "placement='min_cut', which is the same without compiling."
        )
    return RewriteOptions(
        dtype=required_dtype(dtype),
        op_lists=op_lists,
        keep_float32=keep_float32,
        force_low=force_low,
        calibration=calibration_of(calibration),
        placement=placement,
        device=device,
        profile="builtin",
    )


def calibration_of(data: Any) -> Calibration | None:
    """Returns what an argument named `calibration` means."""
    if data is None:
        return None
    if isinstance(data, str | os.PathLike):
        return Calibration.from_npz(data)
    return Calibration.of([data] if isinstance(data, Mapping) else data)


def required_dtype(dtype: Any) -> str:
    """Returns the low dtype that an argument asks for.

    Raises:
        ValueError: It is no low dtype, or this machine is asked and multiplies none natively.
    """
    name = low_dtype(dtype)
    if name is None:
        _, reason = hardware.automatic_policy(hardware.detect())
        raise ValueError(
            f"dtype=None takes what this machine multiplies natively, and that is float32: "
            f"{reason}. Give dtype={' or '.join(map(repr, LOW_PRECISION))} for a model that "
            "runs elsewhere."
        )
    return name


def _rewritten(src: Path, options: RewriteOptions, freeze: bool) -> tuple[Any, RewritePlan]:
    """Reads and converts a SavedModel; writes nothing."""
    model = saved_files.read_saved_model(src)
    data = options.calibration
    plans = []
    for meta_graph in model.meta_graphs:
        roles = find_roles(meta_graph)
        if freeze:
            freeze_meta_graph(meta_graph, roles, src)
            roles = find_roles(meta_graph)
        ranges = None if data is None else measure_meta_graph(meta_graph, roles, src, data)
        plan = rewrite_meta_graph(meta_graph, roles, options, ranges)
        plans.append(store_low_constants(meta_graph, roles, plan) if freeze else plan)
    return model, _joined(plans)


def _joined(plans: Sequence[RewritePlan]) -> RewritePlan:
    """One plan for the graphs of a SavedModel, of which most have one."""
    if len(plans) == 1:
        return plans[0]
    nodes = tuple(node for plan in plans for node in plan.nodes)
    scopes = tuple(scope for plan in plans for scope in plan.scopes)
    return make_plan(plans[0].dtype, nodes, scopes, None)
