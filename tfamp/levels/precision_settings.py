"""`PrecisionSettings`: what a model computes in, layer by layer; it prints as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Layer, Model
from tfamp.core.loss_scale import FixedLossScale, LossScale
from tfamp.core.options import GradClip
from tfamp.interop.keras_hooks import layers_of
from tfamp.layers.layer_dtypes import quantization_of
from tfamp.layers.layer_plan import Assignment
from tfamp.layers.layer_record import assignment_of
from tfamp.layers.model_calls import described_plan
from tfamp.levels.effective_level import EffectiveLevel
from tfamp.levels.model_structure import computing_layers_of, path_of
from tfamp.levels.precision_config import LEVELS
from tfamp.levels.prepared_optimizer import rule_of
from tfamp.policy import prepares_data
from tfamp.reports import tables
from tfamp.reports.tables import table_lines
from tfamp.rewriting.traced_function import TracedFunction

_HEAD = ("layer", "class", "compute", "variables", "why", "plan")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """One layer of a model.

    Attributes:
        path: Where it is in the model.
        kind: Name of its class.
        compute_dtype: The dtype it computes in; at level O1 the op lists decide.
        variable_dtype: The dtype its variables have, or would have.
        why: The reason for the dtype, in a few words.
        quantization: How Keras has quantized it, for example "int8"; None if it is not. Its
            dtypes are then the ones it computes in and stores floats in.
        calls: Its role, and changes of its calls besides the dtype, in a few words; "" for none.

    Example:
        >>> import keras, tfamp
        >>> layers = [keras.Input((3,)), keras.layers.Embedding(9, 2), keras.layers.Dense(2)]
        >>> model = keras.Sequential(layers, name="texts")
        >>> prepared = tfamp.prepare(model, level="O2", dtype="bfloat16")
        >>> [layer.calls for layer in prepared.settings.layers]
        ['hidden; exact ids; exact sums', 'output of texts; exact sums']
    """

    path: str
    kind: str
    compute_dtype: str
    variable_dtype: str
    why: str
    quantization: str | None = None
    calls: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """The settings in force for a model; `str()` is a table of them, and a notebook shows one.

    Attributes:
        level: "O0", "O1", "O2" or "O3", never "auto"; None for a model not made by `prepare`.
        dtype: The low dtype, "float32" at level O0. Without a level the low dtype that most
            layers compute in, "float32" where none does.
        loss_scale: The rule of the loss scale, None for none. Without a level, the rule of the
            model's optimizer.
        grad_clip: How gradients are clipped, None for not at all.
        master_weights: Whether low weights have float32 copies in the optimizer.
        weight_rounding: How low weights without copies are rounded in updates; None: to nearest.
        slots: With `weight_rounding`, the dtype of the optimizer's slots; None without one.
        keep_float32: Paths of the layers that the user keeps in float32.
        reasons: A sentence for each automatic choice.
        layers: The layers that compute something, in the model's order.
        graph_rewrite: The function that rewrites the model's steps at level O1, else None.
        jit_compile: Whether XLA compiles the model's steps, where `prepare` chose that by a
            measurement; None where it did not.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> _, _ = prepared = tfamp.prepare(model, level="O2", dtype="bfloat16")
        >>> print(prepared.settings)
        level           O2 (layer policies)
        dtype           bfloat16
        ...
        sequential/head  Dense  float32  float32    output  output of sequential; exact sums
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
    jit_compile: bool | None = None

    def rewrite(self, function: Callable[..., Any] | None = None) -> Any:
        """Compiles a step of a custom loop as `fit` compiles those of the model.

        At level O1 its graph is rewritten, except for layers of `keep_float32`; see
        `tfamp.rewrite`. At the other levels the layers have their dtypes already, and it
        becomes a `tf.function`. If `prepare` measured that XLA makes the steps faster, it has
        `jit_compile=True`, unless you gave it a value. So one loop serves all levels.

        Args:
            function: A Python function or a `tf.function`; on several replicas the one that
                calls `strategy.run`. Without it a decorator is returned.

        Returns:
            A function that is called like that one.

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
        if self.jit_compile:
            traced = TracedFunction.of(function)
            function = traced.compiled() if traced.jit_compile is None else function
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
        return tables.fragment(
            f"Precision of the model: {level}, {self.dtype}",
            tables.facts(self._facts()),
            tables.table(_HEAD, self._rows(), rest=": .layers has them all"),
        )

    def _facts(self) -> list[tuple[str, str]]:
        level = "none (the layers' own policies)"
        if self.level is not None:
            level = f"{self.level} ({LEVELS[self.level]})"
        weights = sorted({layer.variable_dtype for layer in self.layers}) or ["float32"]
        if self.master_weights:
            weights.append("float32 copies in the optimizer")
        if self.weight_rounding is not None:
            weights.append(f"weight_rounding {self.weight_rounding}")
        if self.slots is not None:
            weights.append(f"{self.slots} slots")
        clip, clipped = self.grad_clip, "not clipped"
        if clip is not None:
            clipped = f"clipped to norm {clip.max_norm:g} of type {clip.norm_type}"
        return [
            ("level", level),
            ("dtype", self.dtype),
            ("weights", ", ".join(weights)),
            ("loss scale", _rule_text(self.loss_scale)),
            ("gradients", clipped),
            ("kept float32", ", ".join(self.keep_float32) or "none by name"),
            *(("", reason) for reason in self.reasons),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for layer in self.layers:
            why = layer.why
            if layer.quantization is not None:
                why += f"; quantized to {layer.quantization}"
            dtypes = (layer.compute_dtype, layer.variable_dtype)
            rows.append((layer.path, layer.kind, *dtypes, why, layer.calls))
        return rows


def settings_of(
    model: Model,
    level: EffectiveLevel | None,
    kept: tuple[Layer, ...] = (),
    rewrite: Callable[..., Any] | None = None,
) -> PrecisionSettings:
    """Returns the settings of a model at a level, or by its layers' policies without one.

    `kept` are the layers that the user keeps in float32, `rewrite` rewrites the model's steps.
    """
    optimizer = model.optimizer if model.compiled else None
    computing = computing_layers_of(model)
    layers = [layer for layer in computing if not isinstance(layer, keras.Model)]
    below = {id(layer) for layer in layers_of(*kept)}
    dtypes = [layer.compute_dtype for layer in layers]
    low = Counter(dtype for dtype in dtypes if dtype in LOW_PRECISION)
    values: dict[str, Any] = {
        "level": None,
        "dtype": max(sorted(low), key=lambda dtype: low[dtype], default="float32"),
        "loss_scale": rule_of(optimizer),
        "grad_clip": getattr(optimizer, "grad_clip", None),
        "master_weights": bool(getattr(optimizer, "master_weights", False)),
        "weight_rounding": getattr(optimizer, "weight_rounding", None),
        "reasons": ("prepare has not made it: each layer has the policy it was made with.",),
    }
    if level is not None:
        names = ("level", "dtype", "loss_scale", "reasons", "jit_compile")
        values |= {name: getattr(level, name) for name in names}
        values["grad_clip"] = level.config.grad_clip
        values["master_weights"] |= level.master_weights
        values["weight_rounding"] = values["weight_rounding"] or level.config.weight_rounding
    return PrecisionSettings(
        keep_float32=tuple(path_of(layer) for layer in kept),
        layers=tuple(_row(layer, level, id(layer) in below) for layer in layers),
        graph_rewrite=rewrite,
        # Where slots is None, the optimizer has chosen.
        slots=getattr(getattr(optimizer, "stored_weights", None), "slots", None),
        **values,
    )


def _row(layer: Layer, level: EffectiveLevel | None, is_kept: bool) -> LayerSettings:
    mode = quantization_of(layer)
    compute, stored = layer.compute_dtype, layer.variable_dtype
    if layer.weights and mode is None:
        stored = layer.weights[0].dtype
    why = _why(layer, level, is_kept)
    if why == "op lists" and level is not None:
        compute = f"{level.dtype} by op"
    calls = described_plan(layer)
    return LayerSettings(path_of(layer), type(layer).__name__, compute, stored, why, mode, calls)


def _why(layer: Layer, level: EffectiveLevel | None, is_kept: bool) -> str:
    """Returns the first reason for a layer's dtype that holds, at a level or without one."""
    assignment = assignment_of(layer) or Assignment(layer.dtype_policy.name, "policy")
    is_moved = assignment.before is not None
    name = None if level is None else level.level
    is_float32 = layer.compute_dtype == "float32"
    reasons = {
        "keep_float32": is_kept,
        "set by hand": assignment.by == "user",
        "statistics": assignment.role == "statistics",
        "output": assignment.role == "output" or (name == "O2" and is_moved and is_float32),
        f"policy {layer.dtype_policy.name}": level is None,
        "op lists": name == "O1" and is_float32 and quantization_of(layer) is None,
        "data preparation": name != "O0" and prepares_data(type(layer)),
        f"level {name}": is_moved or (level is not None and layer.compute_dtype == level.dtype),
    }
    return next((why for why, holds in reasons.items() if holds), "own dtype")


def _rule_text(rule: LossScale | None) -> str:
    if rule is None:
        return "none"
    start = "fixed at" if isinstance(rule, FixedLossScale) else "dynamic from"
    skips = ", steps that are not finite are skipped" if rule.skip_nonfinite else ""
    return f"{start} {rule.initial_scale:g}{skips}"
