"""Level "auto" by measurement: the train step of a model at each level that may pay, by turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.levels.precision_config import EffectiveLevel, PrecisionConfig, effective_level
from tfamp.levels.step_rewriting import keep_in_float32, step_settings
from tfamp.machine import hardware
from tfamp.planning.structures import FLOAT32
from tfamp.rewriting.function_state import kept_random_states
from tfamp.rewriting.tuning import (
    CANDIDATES,
    Candidate,
    TuneReport,
    candidates_of,
    compare_candidates,
    time_text,
)

_MIXED = "O2"


def check_measurable(model: Any, config: PrecisionConfig, batch: Any) -> None:
    """Raises a ValueError or TypeError where there is no train step to measure on a batch."""
    if config.level != "auto":
        raise ValueError(
            f"example_batch is what level='auto' is measured on; level is {config.level!r}. Leave "
            "example_batch out, or give level='auto'."
        )
    _check_batch(batch)
    if config.master_weights:
        raise ValueError(
            "master_weights=True stores the weights in a low dtype, which is not measured: leave "
            "example_batch out, or give level='O2'."
        )
    if not model.compiled:
        raise ValueError(
            f"{model.name} is not compiled, so that it has no train step to measure: call "
            "model.compile(optimizer, loss) before prepare(level='auto', example_batch=...)."
        )
    with model.distribute_strategy.scope():
        if tf.distribute.has_strategy():
            raise ValueError(
                f"{model.name} was made under a {type(tf.distribute.get_strategy()).__name__}, "
                "whose steps are not measured: leave example_batch out, or give a level."
            )


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, tuple | list) or not 1 <= len(batch) <= 3:
        got = f"{len(batch)} of them" if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(
            "example_batch must be a tuple as fit takes it, (x,), (x, y) or (x, y, sample_weight); "
            f"got {got}. Of a dataset give next(iter(dataset))."
        )
    for leaf in keras.tree.flatten(tuple(batch)):
        has_values = hasattr(leaf, "__array__") and not isinstance(leaf, keras.KerasTensor)
        if leaf is not None and not has_values:
            raise TypeError(
                "example_batch must hold arrays or tensors with values, as fit takes them; got "
                f"{leaf!r}. Make arrays of lists by np.array."
            )


def measured_level(
    model: Any,
    level: EffectiveLevel,
    kept: tuple[Any, ...],
    batch: Any,
    mixed_step: Callable[[Any], Any],
) -> EffectiveLevel:
    """Returns the fastest level for the train step of a float32 model, which stays as it is.

    `level` is what the device suggests; `mixed_step` traces the step at level O2 on some data.
    """
    config = level.config
    if config.dtype == FLOAT32:
        return level
    low = effective_level(dataclasses.replace(config, level="O1"), hardware.detect())
    data = keras.tree.map_structure(_as_fit_gives, tuple(batch))
    settings = step_settings(low.dtype, placement=low.config.rewrite_placement)
    names = (config.placement,) if config.placement else CANDIDATES
    ways = candidates_of(train_step_of(model), settings, names)
    if level.level == _MIXED:
        with kept_random_states():  # Python code that is traced may draw.
            step = mixed_step(data)
        ways.append(Candidate(_MIXED, step, fresh=lambda: None, is_copy=True))
    with keep_in_float32(kept):
        report = compare_candidates(ways, (data,), name=model.name, dtype=low.dtype)
    return _found(report, config)


def _found(report: TuneReport, config: PrecisionConfig) -> EffectiveLevel:
    chosen = report.chosen
    name = {FLOAT32: "O0", _MIXED: _MIXED}.get(chosen.candidate, "O1")
    placement = chosen.candidate if name == "O1" else None
    found = dataclasses.replace(config, level=name, placement=placement)
    level = effective_level(found, hardware.detect())
    times = time_text(chosen.seconds)
    if name != "O0":
        times += f" ({chosen.candidate}), and {time_text(report.rows[0].seconds)} in float32"
    reason = f"level: auto is {name}, the fastest on the example batch: a step takes {times}."
    # A warning would be of a guess, where this was measured.
    return dataclasses.replace(
        level,
        config=dataclasses.replace(config, placement=placement),
        reasons=(reason, *level.reasons),
        warning=None,
    )


def train_step_of(model: Any) -> Any:
    """Returns the train step of a compiled model as `fit` traces it."""
    return tf.function(model.train_step, autograph=False, jit_compile=model.jit_compile or None)


def _as_fit_gives(value: Any) -> Any:
    """An array as a tensor; numbers of any other float dtype become Keras's default one."""
    if value is None:
        return None
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor
