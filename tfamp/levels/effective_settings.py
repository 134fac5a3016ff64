"""`PrecisionSettings`: what a model computes in, layer by layer; it prints as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.options import DynamicLossScale, FixedLossScale, GradClip, LossScale
from tfamp.layers.layer_dtypes import managed_layers, quantization_of
from tfamp.levels.layer_policies import layers_before, set_by_hand
from tfamp.levels.model_structure import computing_layers_of, layers_of, path_of
from tfamp.levels.precision_config import EffectiveLevel
from tfamp.optimizer import LossScaleOptimizer
from tfamp.policy import prepares_data
from tfamp.reports import notebook_html
from tfamp.reports.text_table import table_lines

_HOW = {
    "O0": "nothing changes",
    "O1": "graph rewrite in graph mode, autocast when eager",
    "O2": "layer policies",
    "O3": "layer policies, nothing kept",
}

_ROUNDED = {
    "stochastic": "updates rounded stochastically",
    "split": "the float32 rest beside them in the optimizer",
}


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """One layer of a model.

    Attributes:
        path: Where it is in the model.
        kind: Name of its class.
        compute_dtype: The dtype it computes in; at level O1 the op lists decide.
        variable_dtype: The dtype its variables have, or would have.
        why: What decided, in a few words.
        quantization: How Keras has quantized it, "int8" for example; None where it is not. The
            dtypes are then those it computes in and stores its floats in.
    """

    path: str
    kind: str
    compute_dtype: str
    variable_dtype: str
    why: str
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """The settings in force for a model; `str()` is a table of them, and a notebook shows one.

    Attributes:
        level: "O0", "O1", "O2" or "O3", never "auto"; None for a model that `prepare` did not make.
        dtype: The low dtype, "float32" at level O0. Without a level the low dtype that most layers
            compute in, "float32" where none does.
        loss_scale: The rule of the loss scale, None for none. Without a level that of the model's
            optimizer.
        grad_clip: How gradients are clipped, None for not at all.
        master_weights: Whether low weights have float32 copies in the optimizer.
        weight_rounding: How their updates are rounded where they have none, None for to nearest.
        slots: With that, the dtype of what the optimizer keeps of them; None without an optimizer.
        keep_float32: Paths of the layers that the user keeps in float32.
        reasons: A sentence for every choice that was left open.
        layers: The layers that compute something, in the model's order.
        graph_rewrite: What rewrites the model's steps at level O1, else None.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> _, _ = prepared = tfamp.prepare(model, level="O2", dtype="bfloat16")
        >>> print(prepared.settings)
        level           O2 (layer policies)
        dtype           bfloat16
        ...
        sequential/head  Dense  float32  float32    output
    """

    level: str | None
    dtype: str
    loss_scale: LossScale | None
    grad_clip: GradClip | None
    master_weights: bool
    keep_float32: tuple[str, ...]
    reasons: tuple[str, ...]
    layers: tuple[LayerSettings, ...]
    graph_rewrite: Callable[..., Any] | None = None
    weight_rounding: str | None = None
    slots: str | None = None

    def rewrite(self, function: Callable[..., Any] | None = None) -> Any:
        """Makes a step of a custom loop run as `fit` runs the model's own.

        At level O1 its graph is rewritten, layers of `keep_float32` left out; see `tfamp.rewrite`.
        At the other levels the layers have their dtypes already, and it becomes a `tf.function`.
        So one loop serves all levels.

        Args:
            function: A Python function or a `tf.function`; on several replicas the one that calls
                `strategy.run`. Without it a decorator is returned.

        Returns:
            A function that is called like the given one.

        Example:
            >>> import keras, tensorflow as tf, tfamp
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            >>> prepared = tfamp.prepare(model, level="O1", dtype="bfloat16")
            >>> step = prepared.settings.rewrite(lambda x: model(x))
            >>> step(tf.ones((1, 4))).dtype, step.plan(tf.ones((1, 4))).summary.low_nodes > 0
            (tf.float32, True)
        """
        if function is None:
            return self.rewrite
        if self.graph_rewrite is not None:
            return self.graph_rewrite(function)
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            return function
        return tf.function(function)

    def __str__(self) -> str:
        text = [f"{name:<15} {value}" for name, value in self._facts()]
        return "\n".join([*text, "", *table_lines([_HEAD, *self._rows()])])

    def _repr_html_(self) -> str:
        level = "no level" if self.level is None else f"level {self.level}"
        return notebook_html.fragment(
            f"Precision of the model: {level}, {self.dtype}",
            notebook_html.facts(self._facts()),
            notebook_html.table(_HEAD, self._rows(), rest=": .layers has them all"),
        )

    def _facts(self) -> list[tuple[str, str]]:
        copies = ", float32 copies in the optimizer" if self.master_weights else ""
        copies += "" if self.weight_rounding is None else f", {_ROUNDED[self.weight_rounding]}"
        copies += "" if self.slots is None else f", {self.slots} slots"
        is_low = self.level == "O3" or bool(copies)
        stored = sorted({layer.variable_dtype for layer in self.layers}) or ["float32"]
        own = ", ".join(stored) + copies
        level = "none (the layers' own policies)"
        return [
            ("level", level if self.level is None else f"{self.level} ({_HOW[self.level]})"),
            ("dtype", self.dtype),
            (
                "weights",
                own if self.level is None else f"{self.dtype}{copies}" if is_low else "float32",
            ),
            ("loss scale", _rule_text(self.loss_scale)),
            ("gradients", _clip_text(self.grad_clip)),
            ("kept float32", ", ".join(self.keep_float32) or "none by name"),
            *(("", reason) for reason in self.reasons),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (x.path, x.kind, x.compute_dtype, x.variable_dtype, _why_text(x)) for x in self.layers
        ]


_HEAD = ("layer", "class", "compute", "variables", "why")


def settings_of(
    model: Any,
    level: EffectiveLevel,
    kept: tuple[Any, ...],
    rewrite: Callable[..., Any] | None,
    reasons: tuple[str, ...] = (),
) -> PrecisionSettings:
    """The settings of a model at a level, of which a user keeps layers, rewritten or not."""
    kept_below = {id(layer) for layer in layers_of(*kept)}
    optimizer = model.optimizer if model.compiled else None
    has_masters = getattr(optimizer, "master_weights", False)
    rounding = getattr(optimizer, "weight_rounding", None) or level.config.weight_rounding
    return PrecisionSettings(
        level=level.level,
        dtype=level.dtype,
        loss_scale=level.loss_scale,
        grad_clip=level.config.grad_clip,
        master_weights=level.master_weights or bool(has_masters),
        keep_float32=tuple(path_of(layer) for layer in kept),
        reasons=(*level.reasons, *reasons),
        layers=tuple(
            _row(layer, level, id(layer) in kept_below) for layer in _single_layers_of(model)
        ),
        graph_rewrite=rewrite,
        weight_rounding=rounding,
        slots=_slots_of(optimizer),
    )


def own_settings_of(model: Any) -> PrecisionSettings:
    """What a model computes in that no level was put on, by the policies of its layers."""
    layers = _single_layers_of(model)
    low = Counter(each.compute_dtype for each in layers if each.compute_dtype in LOW_PRECISION)
    optimizer = model.optimizer if model.compiled else None
    return PrecisionSettings(
        level=None,
        dtype=max(sorted(low), key=lambda dtype: low[dtype], default="float32"),
        loss_scale=_rule_of(optimizer),
        grad_clip=getattr(optimizer, "grad_clip", None),
        master_weights=bool(getattr(optimizer, "master_weights", False)),
        keep_float32=(),
        reasons=("prepare has not made it: each layer has the policy it was made with.",),
        layers=tuple(_described(layer, layer.compute_dtype, _own_why(layer)) for layer in layers),
        weight_rounding=getattr(optimizer, "weight_rounding", None),
        slots=_slots_of(optimizer),
    )


def _slots_of(optimizer: Any) -> str | None:
    # Of what was given as None, the optimizer's own choice.
    return getattr(getattr(optimizer, "stored_weights", None), "slots", None)


def _single_layers_of(model: Any) -> list[Any]:
    return [each for each in computing_layers_of(model) if not isinstance(each, keras.Model)]


def _rule_of(optimizer: Any) -> LossScale | None:
    """How an optimizer scales the loss: tfamp's, Keras's own or any other."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.rule
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        steps = optimizer.dynamic_growth_steps
        return DynamicLossScale(optimizer.initial_scale, growth_steps=steps)
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else FixedLossScale(factor)


def _row(layer: Any, level: EffectiveLevel, is_kept: bool) -> LayerSettings:
    left = is_kept or quantization_of(layer) is not None or layer.compute_dtype != "float32"
    by_lists = level.level == "O1" and not left
    compute = f"{level.dtype} by op" if by_lists else layer.compute_dtype
    return _described(layer, compute, _why(layer, level, is_kept))


def _described(layer: Any, compute: str, why: str) -> LayerSettings:
    mode = quantization_of(layer)
    has_weights = bool(layer.weights) and mode is None
    stored = layer.weights[0].dtype if has_weights else layer.variable_dtype
    return LayerSettings(path_of(layer), type(layer).__name__, compute, stored, why, mode)


def _own_why(layer: Any) -> str:
    """What decided over the dtype of a layer that no level was put on."""
    record, policy = managed_layers.get(layer), layer.dtype_policy.name
    reasons = {
        "set by hand": set_by_hand.get(layer),
        "statistics": record and record.follows_input and not record.raised,
        "output": record and record.raised,
        f"policy {policy}": policy.startswith("mixed_"),
        "data preparation": record and prepares_data(type(layer)),
        "float32": policy == "float32",
    }
    return next((reason for reason, holds in reasons.items() if holds), f"policy {policy}")


def _why(layer: Any, level: EffectiveLevel, is_kept: bool) -> str:
    record, low = managed_layers.get(layer), layer.compute_dtype in LOW_PRECISION
    is_moved = layers_before.get(layer) is not None
    stores_low = level.level == "O2" and level.low_weights
    # The first that holds.
    reasons = {
        "keep_float32": is_kept,
        "set by hand": set_by_hand.get(layer),
        "op lists": level.level == "O1" and not low and quantization_of(layer) is None,
        "own dtype": level.level == "O1" and not low,
        "statistics": record and record.follows_input and not record.raised,
        "output": (record and record.raised) or (stores_low and is_moved and not low),
        "level O0": level.level == "O0" and not low,
        "data preparation": prepares_data(type(layer)),
        f"level {level.level}": is_moved or (low and layer.compute_dtype == level.dtype),
    }
    return next((reason for reason, holds in reasons.items() if holds), "own dtype")


def _why_text(row: LayerSettings) -> str:
    return row.why if row.quantization is None else f"{row.why}; quantized to {row.quantization}"


def _clip_text(clip: GradClip | None) -> str:
    if clip is None:
        return "not clipped"
    return f"clipped to norm {clip.max_norm:g} of type {clip.norm_type:g}"


def _rule_text(rule: LossScale | None) -> str:
    if rule is None:
        return "none"
    if isinstance(rule, FixedLossScale):
        skips = ", steps that are not finite are skipped" if rule.skip_nonfinite else ""
        return f"fixed at {rule.scale:g}{skips}"
    return (
        f"dynamic from {rule.initial_scale:g}, times {rule.growth_factor:g} after "
        f"{rule.growth_steps} finite steps, times {rule.backoff_factor:g} after an overflow"
    )
