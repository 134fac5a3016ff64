"""Level "auto" by measurement: the fastest level for a model on a batch of its data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.kinds import Function, Layer, Model, Nest, Tensor
from tfamp.core.messages import described
from tfamp.core.names import Level
from tfamp.core.options import PLACEMENTS
from tfamp.interop.keras_hooks import automatic_jit_compile, layers_of
from tfamp.interop.tf_private import op_determinism_is_enabled
from tfamp.levels import level_assignments, model_structure
from tfamp.levels.effective_level import EffectiveLevel, effective_level
from tfamp.levels.precision_config import PrecisionConfig
from tfamp.levels.rewritten_steps import keep_in_float32, step_options
from tfamp.machine import hardware
from tfamp.planning.structures import FLOAT32
from tfamp.planning.ways import POLICY, WAY_NAMES, Way, incumbent_of, way_named
from tfamp.rewriting import tuning
from tfamp.rewriting.choice_cache import keras_program
from tfamp.rewriting.measured_runs import Candidate
from tfamp.rewriting.tune_report import TuneReport, time_text
from tfamp.training.scaling import build_optimizer

# Puts a level on a model: its layers that stay float32, and the ids of those with a dtype that a
# user chose.
PutOn: TypeAlias = Callable[[Model, EffectiveLevel, tuple[Layer, ...], Iterable[int]], object]


def measured_level(
    model: Model, level: EffectiveLevel, kept: tuple[Layer, ...], batch: Nest, put_on: PutOn
) -> EffectiveLevel:
    """Returns the fastest level for a model, measured on a batch; leaves the model as before.

    Args:
        model: A compiled model whose weights are float32.
        level: The device's default level.
        kept: Layers that stay float32.
        batch: Data as `fit` takes them.
        put_on: Puts a level on a model that has none.
    """
    config = level.config
    _check_measurable(model, config, batch)
    if config.dtype == FLOAT32:
        return level
    low = effective_level(dataclasses.replace(config, level="O1"), hardware.detect())
    options = step_options(low.dtype, low.config.rewrite_placement)
    why_not = why_not_compiled(model)
    data = keras.tree.map_structure(_as_fit_gives, tuple(batch))
    with contextlib.ExitStack() as undo:
        undo.callback(level_assignments.note_state(model))
        chosen = level_assignments.take_back(model, keep_by_hand=True)
        model_structure.correct_symbolic_dtypes(model)
        program = keras_program(model, data)
        fixed = model.jit_compile if why_not else None
        step = _as_fit_traces(model.train_step, fixed)
        candidates, left_out = tuning.candidates_of(step, options, None, why_not)
        if config.placement:
            wanted = (FLOAT32, config.placement)
            candidates = [each for each in candidates if each.way.placement in wanted]
        device = tuning.device_here()
        if level.level == POLICY:
            mixed_step = _mixed_step(model, level, kept, chosen, put_on)
            candidates.append(Candidate(Way(POLICY), _as_fit_traces(mixed_step, fixed)))
            if not why_not and device != "cpu":
                compiled = _as_fit_traces(mixed_step, True)
                candidates.append(Candidate(Way(POLICY, is_compiled=True), compiled))
        kept_ids = {id(layer) for layer in kept}
        with keep_in_float32([*kept, *level_assignments.float32_by_hand(model, chosen)]):
            report = tuning.compare_candidates(
                candidates,
                (data,),
                name=model.name,
                dtype=low.dtype,
                # By position, as another process has other ids.
                kept=[[id(x) in kept_ids, id(x) in chosen] for x in layers_of(model)],
                program=program,
                before=functools.partial(build_optimizer, model),
                left_out=left_out,
                incumbent=_incumbent(level, [each.way for each in candidates], device),
            )
    return _fastest_level(report, config, None if why_not else bool(model.jit_compile))


def why_not_compiled(model: Model) -> str:
    """Why measuring must not decide whether XLA compiles a model's steps; "" if it may."""
    automatic = automatic_jit_compile(model)
    if model.run_eagerly:
        return "the model was compiled with run_eagerly=True"
    if model.jit_compile != automatic:
        return f"the model was compiled with jit_compile={model.jit_compile}"
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return "the model has several replicas"
    if op_determinism_is_enabled():
        return "tf.config.experimental.enable_op_determinism is on"
    refusing = [layer.name for layer in layers_of(model) if not layer.supports_jit]
    if refusing:
        return f"layer {refusing[0]} has supports_jit=False"
    shapes = [tensor.shape[1:] for tensor in getattr(model, "inputs", None) or ()]
    if not automatic and (not shapes or any(None in shape for shape in shapes)):
        return "the shapes of inputs may vary, and XLA compiles again for each"
    return ""


def _incumbent(level: EffectiveLevel, ways: Sequence[Way], device: str) -> Way:
    """The way that the level is run in if nothing is measured."""
    if level.level == "O1" and level.config.placement:
        return Way(level.config.placement)
    return incumbent_of(ways, is_native=level.level != "O0", device=device)


def _check_measurable(model: Model, config: PrecisionConfig, batch: Any) -> None:
    """Raises a ValueError or TypeError unless a train step can be measured on a batch."""
    if config.level != "auto":
        raise ValueError(
            f"example_batch is what level='auto' is measured on; level is {config.level!r}. "
            "Leave example_batch out, or give level='auto'."
        )
    if not isinstance(batch, tuple | list) or not 1 <= len(batch) <= 3:
        raise TypeError(
            "example_batch must be a tuple as fit takes it, (x,), (x, y) or (x, y, "
            f"sample_weight); got {type(batch).__name__}. Of a dataset give "
            "next(iter(dataset))."
        )
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=False):
        for leaf in keras.tree.flatten(part):
            if leaf is not None and not _has_values(leaf):
                raise TypeError(
                    "example_batch must hold arrays or tensors with values, as fit takes them; "
                    f"{name} holds {described(leaf)} Make arrays of lists with np.array, and "
                    "give a batch of data instead of specs and symbolic tensors."
                )
    if not model.compiled:
        raise ValueError(
            f"{model.name} is not compiled, so that it has no train step to measure: call "
            "model.compile(optimizer, loss) before prepare(level='auto', example_batch=...)."
        )


def _has_values(leaf: Any) -> bool:
    """Whether a leaf of a batch is an array or a tensor, other than a symbolic one."""
    is_symbolic = isinstance(leaf, keras.KerasTensor) or tf.is_symbolic_tensor(leaf)
    return not is_symbolic and (hasattr(leaf, "__array__") or tf.is_tensor(leaf))


def _mixed_step(
    model: Model,
    level: EffectiveLevel,
    kept: tuple[Layer, ...],
    chosen: Iterable[int],
    put_on: PutOn,
) -> Function:
    """The train step of a float32 model as at level O2; a trace leaves the model as before."""

    def step(data: Nest) -> Nest:
        with contextlib.ExitStack() as undo:
            undo.callback(level_assignments.note_state(model))
            put_on(model, level, kept, chosen)
            return model.train_step(data)

    return step


def _fastest_level(
    report: TuneReport, config: PrecisionConfig, jit_compile: bool | None
) -> EffectiveLevel:
    """The level of the chosen row; `jit_compile` is the model's, None if it is to stay."""
    fastest = report.chosen
    way = way_named(fastest.candidate)
    levels: dict[str, Level] = {FLOAT32: "O0", POLICY: "O2"}
    name = levels.get(way.placement, "O1")
    placements = (placement for placement in PLACEMENTS if placement == way.placement)
    placement = next(placements, None)
    outputs = config.float32_outputs if name == "O2" else None
    concrete = dataclasses.replace(config, level=name, placement=placement, float32_outputs=outputs)
    level = effective_level(concrete, hardware.detect())
    times = time_text(fastest.seconds)
    if way != Way(FLOAT32):
        float32_time = time_text(report.rows[0].seconds)
        times += f" ({fastest.candidate}), and {float32_time} in float32"
    how = f"the fastest on the example batch ({report.source})"
    reason = f"level: auto is {name}, {how}: a step takes {times}."
    reasons = [reason, *level.reasons]
    rows = [way_named(row.candidate) for row in report.rows]
    if jit_compile is not None:
        if way.is_compiled:
            reasons.append("jit_compile: True, as steps are faster if XLA compiles them.")
        elif jit_compile or any(row.is_compiled for row in rows):
            reasons.append("jit_compile: False, as no step that XLA compiles is faster.")
        jit_compile = way.is_compiled
    compiled = tuple(f"{name}: " for name in WAY_NAMES if way_named(name).is_compiled)
    reasons += [f"not measured: {each}." for each in report.left_out if each.startswith(compiled)]
    # Measured, so a warning about a guess does not apply.
    return dataclasses.replace(level, reasons=tuple(reasons), warning=None, jit_compile=jit_compile)


def _as_fit_traces(step: Function, jit_compile: bool | None) -> Function:
    """Returns a train step of a compiled model as `fit` traces it."""
    return tf.function(step, autograph=False, jit_compile=jit_compile or None)


def _as_fit_gives(value: Any) -> Tensor | None:
    """Returns an array as a tensor, floats in Keras's default dtype."""
    if value is None:
        return None
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)  # Sparse ones too.
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor
