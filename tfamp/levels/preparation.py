"""`prepare`: puts a level of mixed precision on a model and its optimizer, in one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.options import GradClip, LossScale
from tfamp.interop.keras_backend import advice, described
from tfamp.levels.application import (
    is_stored_so,
    level_in_place,
    level_on_copy,
    prepared_models,
    stores_low,
)
from tfamp.levels.compiled_model import give_optimizer
from tfamp.levels.effective_settings import PrecisionSettings, settings_of
from tfamp.levels.meaning import effective_level
from tfamp.levels.model_structure import layers_of, select
from tfamp.levels.precision_config import PrecisionConfig
from tfamp.levels.prepared_optimizer import (
    prepared_optimizer,
    trouble_with_slots,
    with_needed_masters,
)
from tfamp.machine import hardware


class _NotGiven(str):
    """The default of an argument: equal to it, but not given by anyone."""

    __slots__ = ()


_DEFAULT_LEVEL = _NotGiven("O2")


class Prepared(tuple[Any, Any]):
    """What `prepare` returns: a pair of model and optimizer, and the settings in force.

    Attributes:
        settings: The settings; `print(prepared.settings)` is a table of them.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> prepared = tfamp.prepare(model, keras.optimizers.SGD(), level="O0")
        >>> model, optimizer = prepared
        >>> prepared.settings.level
        'O0'
    """

    settings: PrecisionSettings

    def __new__(cls, model: Any, optimizer: Any, settings: PrecisionSettings) -> Prepared:
        """Makes the pair."""
        pair = super().__new__(cls, (model, optimizer))
        pair.settings = settings
        return pair

    @property
    def model(self) -> Any:
        """The model to use from now on."""
        return self[0]

    @property
    def optimizer(self) -> Any:
        """The optimizer to use from now on; None where there is none."""
        return self[1]


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    level: str = _DEFAULT_LEVEL,
    dtype: Any = None,
    loss_scale: LossScale | Mapping[str, Any] | str | float | None = None,
    grad_clip: GradClip | Mapping[str, Any] | float | None = None,
    keep_float32: Any = (),
    master_weights: bool | None = None,
    config: PrecisionConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Prepared:
    """Puts a level of mixed precision on a model and its optimizer.

    | level | compute | BatchNorm, outputs | weights | loss scale |
    |---|---|---|---|---|
    | O0 | float32 | float32 | float32 | none |
    | O1 | by op lists | by lists; outputs float32 | float32 | dynamic |
    | O2 | low dtype | float32 | float32, or low + float32 masters | dynamic |
    | O3 | low dtype | low dtype | low dtype | none unless given |
    | auto | O2 on GPUs and TPUs, O1 on CPUs that multiply bfloat16, else O0 | | | |

    bfloat16 has float32's range: it gets no loss scale by default. Use what is returned. A model
    may be fresh, or built, trained and compiled: weights, the state of the optimizer, compiled
    losses and metrics are kept. Levels can follow each other; O0 leads back to float32, with the
    very predictions of before. Where the weights get another dtype (O3, master weights, and back
    from them) a new model is returned and the given one left as it was; otherwise it is changed
    in place. Later calls of `model.compile` wrap their optimizer as well.

    What is given here wins over `config`, and that over the environment variables TFAMP_LEVEL,
    TFAMP_DTYPE and so on, which count where there is no `config`.

    Args:
        model: A `keras.Model`: Functional, Sequential or subclassed.
        optimizer: A Keras optimizer or its name; None for the compiled model's, if any.
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for what this machine multiplies fast.
        loss_scale: A `FixedLossScale` or `DynamicLossScale`, a number for a fixed one, "dynamic",
            "none", or a dict of fields; None for the level's own.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number.
            Clips after unscaling.
        keep_float32: What stays float32, with all layers inside: names of layers, regular
            expressions, layer classes or layers; one or several.
        master_weights: True at level O2 or O3 stores the weights in the low dtype, with float32
            copies in the optimizer. None is False, but at O3 True for optimizers that keep averages
            of squared gradients, Adam for one: they learn nothing from low variables alone.
        config: A `PrecisionConfig`, a dict of its fields, or the path of a JSON or TOML file.

    Returns:
        The pair of model and optimizer, with `.settings`, which prints as a table.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is wrong or contradicts another, a layer does not run in the low
            dtype, or weights to be stored in another dtype belong to layers that Keras has
            quantized. Model, weights and optimizer are as they were then.

    Warns:
        TfampWarning: No low precision is fast on this machine, and one was asked for; or the
            optimizer is one that a low dtype does not serve, at level O3.
        NothingConvertedWarning: No layer computes in the low dtype.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential(
        ...     [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
        ... )
        >>> model, optimizer = tfamp.prepare(
        ...     model, keras.optimizers.SGD(0.1), level="O2", dtype="float16", loss_scale=512.0
        ... )
        >>> [layer.compute_dtype for layer in model.layers], float(optimizer.loss_scale)
        (['float16', 'float32'], 512.0)
    """
    _check_model(model)
    chosen = _config(
        config,
        level=None if isinstance(level, _NotGiven) else level,
        dtype=dtype,
        loss_scale=loss_scale,
        grad_clip=grad_clip,
        keep_float32=None if isinstance(keep_float32, tuple) and not keep_float32 else keep_float32,
        master_weights=master_weights,
    )
    given = _optimizer(model, optimizer)
    wanted = with_needed_masters(effective_level(chosen, hardware.detect()), given)
    if wanted.warning is not None:
        warnings.warn(wanted.warning, TfampWarning, stacklevel=2)
    kept = tuple(select(layers_of(model)[1:], wanted.keep_float32, "keep_float32"))
    if is_stored_so(model, wanted, kept):
        made = None if given is None else prepared_optimizer(given, wanted)
    elif wanted.low_weights or stores_low(model):
        model, made = level_on_copy(model, given, wanted, kept)
    else:
        made = level_in_place(model, given, wanted, kept)
    trouble = trouble_with_slots(made, wanted)
    if trouble is not None:
        warnings.warn(trouble, TfampWarning, stacklevel=2)
    if model.compiled and made is not None:
        give_optimizer(model, made)
    return Prepared(model, made, precision_settings(model))


def precision_settings(model: Any) -> PrecisionSettings:
    """Returns the settings in force for a model, as they are now.

    Args:
        model: A model that `prepare` returned, possibly with dtypes set by hand since.

    Returns:
        The settings; `print` shows them as a table, layer by layer.

    Raises:
        ValueError: The model was not prepared.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model, _ = tfamp.prepare(model, level="O2", dtype="float16")
        >>> tfamp.precision_settings(model).layers[0].why
        'output'
    """
    record = prepared_models.get(model)
    if record is None:
        raise ValueError(
            f"{getattr(model, 'name', model)!r} was not prepared by tfamp.prepare.{advice(model)}"
        )
    kept = tuple(layer for layer in layers_of(model) if layer.name in record.kept)
    return settings_of(model, record.level, kept, record.rewrite)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"prepare takes a keras.Model; got {described(model)} For plain functions there are "
            "tfamp.rewrite and tfamp.autocast."
        )


def _config(config: Any, **given: Any) -> PrecisionConfig:
    if config is None:
        found = PrecisionConfig.from_env()
    elif isinstance(config, PrecisionConfig):
        found = config
    elif isinstance(config, Mapping):
        found = PrecisionConfig.from_dict(config)
    elif isinstance(config, str | os.PathLike):
        found = PrecisionConfig.from_file(config)
    else:
        raise TypeError(
            "config must be a PrecisionConfig, a dict or the path of a file; got "
            f"{config!r} of type {type(config).__name__}."
        )
    return found.with_changes(**{name: x for name, x in given.items() if x is not None})


def _optimizer(model: Any, optimizer: Any) -> Any:
    if optimizer is None:
        return model.optimizer if model.compiled else None
    if isinstance(optimizer, str | dict):
        return keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(), or its "
            f"name; got {described(optimizer)}"
        )
    return optimizer
