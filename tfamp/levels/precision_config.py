"""`PrecisionConfig`: the arguments of `prepare` as one value. Framework-free.

Only reading a file has effects. `effective_level` says what it means on a machine.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import numbers
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tfamp.core import options
from tfamp.core.dtypes import given_low_dtype
from tfamp.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from tfamp.core.names import (
    ComputeDtype,
    Float32Outputs,
    Level,
    LowDtypeLike,
    Placement,
    ScaleName,
    WeightRounding,
)
from tfamp.core.options import GradClip, checked_scale
from tfamp.levels import foreign_settings
from tfamp.policy import FLOAT32_SUMS, check_outputs

# How each level works.
LEVELS = {
    "O0": "nothing changes",
    "O1": "graph rewrite in graph mode, autocast when eager",
    "O2": "layer policies",
    "O3": "layer policies, nothing kept",
}
# The levels that accept an argument, and why the others reject it.
_GOES_WITH = {
    "master_weights": (("O2", "O3"), "has float32 weights"),
    "weight_rounding": (("O2", "O3"), "has float32 weights"),
    "placement": (("O1",), "rewrites no graph"),
    "float32_outputs": (("O2",), "gives layers no policies with float32 outputs"),
}
_WORDS = {
    "placement": options.PLACEMENTS,
    "weight_rounding": options.WEIGHT_ROUNDINGS,
    "slots": options.SLOT_DTYPES,
}

# Other systems' names, as on the migration pages: torch and mmdetection, DeepSpeed.
_DYNAMIC_NAMES = {
    **{field.name: field.name for field in dataclasses.fields(DynamicLossScale)},
    "init_scale": "initial_scale",
    "growth_interval": "growth_steps",
    "loss_scale_window": "growth_steps",
    "min_loss_scale": "min_scale",
}


@dataclass(frozen=True)
class PrecisionConfig:
    """The arguments of `tfamp.prepare`, as one value.

    Args:
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for the one that this machine multiplies natively.
        loss_scale: None for the level's. A `FixedLossScale` or `DynamicLossScale`, a number
            for a fixed one, "dynamic", or "none" for an optimizer that neither scales losses
            nor skips steps that are not finite. A dict of the fields of one of the classes,
            also under the names of torch, mmdetection and DeepSpeed.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number,
            which is the greatest Euclidean norm.
        keep_float32: Layers that stay float32: their names, regular expressions, layer classes
            or layers.
        master_weights: True to store weights in the low dtype with float32 copies in the
            optimizer.
        placement: "lists", "min_cut" or "fused": at level O1 what decides which ops are
            converted. None is "lists", and with level "auto" "fused" or "min_cut".
        weight_rounding: "stochastic" or "split" to store weights in the low dtype without
            copies, as `LossScaleOptimizer` does.
        slots: With it, the dtype of the optimizer's slots: "bfloat16", "float16" or "float32".
        float32_outputs: At level O2 True or "sums", as for `Policy`. None is True, and with
            level "auto" "sums" for models with a large output layer.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or two contradict each other.

    Example:
        >>> PrecisionConfig.from_dict({"loss_scale": 512.0}).to_dict()
        {'level': 'O2', 'loss_scale': 512.0}
    """

    level: Level = "O2"
    dtype: ComputeDtype | None = None
    loss_scale: LossScale | ScaleName | float | None = None
    grad_clip: GradClip | None = None
    keep_float32: tuple[Any, ...] = ()
    master_weights: bool | None = None
    placement: Placement | None = None
    weight_rounding: WeightRounding | None = None
    slots: ComputeDtype | None = None
    float32_outputs: Float32Outputs | None = None

    if TYPE_CHECKING:
        # Arguments may be what fields are made of.
        def __init__(
            self,
            level: Level = "O2",
            dtype: LowDtypeLike | ComputeDtype | None = None,
            loss_scale: LossScale | Mapping[str, Any] | ScaleName | float | None = None,
            grad_clip: GradClip | Mapping[str, Any] | float | None = None,
            keep_float32: Any = (),
            master_weights: bool | None = None,
            placement: Placement | None = None,
            weight_rounding: WeightRounding | None = None,
            slots: ComputeDtype | None = None,
            float32_outputs: Float32Outputs | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        checked = {
            "level": options.checked_word("level", self.level, (*LEVELS, "auto")),
            "dtype": read_dtype(self.dtype),
            "loss_scale": _read_loss_scale(self.loss_scale),
            "grad_clip": options.resolve_grad_clip(self.grad_clip),
            "keep_float32": _checked_selectors(self.keep_float32),
        }
        if self.master_weights is not None:
            options.checked_flag("master_weights", self.master_weights)
        for name, words in _WORDS.items():
            if getattr(self, name) is not None:
                checked[name] = options.checked_word(name, getattr(self, name), words)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.level != "auto":
            check_level(self, self.level, f"level {self.level!r}")
        options.resolve_weight_rounding(self.weight_rounding, self.slots, self.master_weights)
        self._check_outputs()

    def _check_outputs(self) -> None:
        if self.float32_outputs is None:
            return
        check_outputs(self.float32_outputs)
        if self.float32_outputs is False:
            raise ValueError(
                "float32_outputs=False is a policy's: level O2 returns float32. Give True or "
                f"{FLOAT32_SUMS!r}, level='O3' for outputs in the low dtype, or build the model "
                "under tfamp.Policy(name, float32_outputs=False)."
            )
        stored_low = self.master_weights or self.weight_rounding
        if self.float32_outputs == FLOAT32_SUMS and stored_low:
            raise ValueError(
                f"float32_outputs={FLOAT32_SUMS!r} goes with float32 weights, and master_weights "
                "and weight_rounding store low ones: give one of the two."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionConfig:
        """Makes a configuration from a dict; every key is optional.

        Args:
            values: The fields by name. The dict is not modified.

        Returns:
            The configuration.

        Raises:
            TypeError: A value has the wrong type, or `values` is not a dict.
            ValueError: A key is unknown (the message names the nearest), a value is out of
                range, or two contradict each other.

        Example:
            >>> clip = {"max_norm": 35, "norm_type": 2}
            >>> config = PrecisionConfig.from_dict({"loss_scale": 512.0, "grad_clip": clip})
            >>> config.loss_scale, config.grad_clip.max_norm
            (512.0, 35.0)
        """
        return options.from_mapping(cls, "PrecisionConfig", values, advice=foreign_settings.advice)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> PrecisionConfig:
        """Reads a JSON or TOML file.

        Args:
            path: A file that ends in .json or .toml. The fields are at the top, or in a table
                named `tfamp`, as in a file that configures other things as well.

        Returns:
            The configuration.

        Raises:
            OSError: The file cannot be read.
            TypeError, ValueError: As `from_dict`, naming the file; or it has another ending.
            ImportError: It is TOML, and this is Python 3.10 without tomli.
        """
        return _read_file(Path(path), {})

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that were given, and the level, for `from_dict` and for files.

        Returns:
            A dict of which `from_dict` makes an equal configuration. JSON and TOML have all its
            types, except for classes and layers in `keep_float32`.

        Example:
            >>> config = PrecisionConfig(level="O1", grad_clip=35, keep_float32="head")
            >>> config.to_dict()["grad_clip"]
            {'max_norm': 35.0, 'norm_type': 2}
            >>> PrecisionConfig.from_dict(config.to_dict()) == config
            True
        """
        scale, clip = self.loss_scale, self.grad_clip
        plain = vars(self) | {
            "loss_scale": dataclasses.asdict(scale) if isinstance(scale, LossScale) else scale,
            "grad_clip": None if clip is None else clip.to_dict(),
            "keep_float32": list(self.keep_float32) or None,
        }
        return {name: value for name, value in plain.items() if value is not None}

    @property
    def rewrite_placement(self) -> Placement:
        """The placement of a rewrite, chosen or by default."""
        return self.placement or ("min_cut" if self.level == "auto" else "lists")


def with_arguments(config: Any, arguments: Mapping[str, Any]) -> PrecisionConfig:
    """Returns a configuration as `prepare` takes it, with arguments that override its fields.

    A dict and a file are checked together with the arguments.
    """
    if isinstance(config, PrecisionConfig):
        return dataclasses.replace(config, **arguments)
    if isinstance(config, Mapping):
        return PrecisionConfig.from_dict({**config, **arguments})
    if isinstance(config, str | os.PathLike):
        return _read_file(Path(config), arguments)
    raise TypeError(
        "config must be a PrecisionConfig, a dict or the path of a file; got "
        f"{config!r} of type {type(config).__name__}."
    )


def _read_file(path: Path, arguments: Mapping[str, Any]) -> PrecisionConfig:
    """Reads a configuration; arguments override its fields. An error names the file."""
    if path.suffix.lower() not in (".json", ".toml"):
        raise ValueError(f"A configuration is a .json or .toml file; got {str(path)!r}.")
    parse = json if path.suffix.lower() == ".json" else _toml_module(path)
    try:
        values = parse.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, Mapping):
            values = values.get("tfamp", values)
        if isinstance(values, Mapping):
            values = {**values, **arguments}
        return PrecisionConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def _toml_module(path: Path) -> Any:
    """Returns the module that reads TOML: tomllib, or tomli, which it was, on Python 3.10."""
    for name in ("tomllib", "tomli"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError(
        f"{path} is TOML, and Python {platform.python_version()} has no module that reads it. "
        "Install tomli, use Python 3.11 or newer, or write the configuration as JSON."
    )


def check_level(config: PrecisionConfig, level: str, subject: str) -> None:
    """Raises where a level, named `subject` in the message, contradicts another argument."""
    if config.dtype == "float32" and level != "O0":
        raise ValueError(
            f"dtype='float32' goes with level O0, and {subject} computes in low precision; "
            "give level='O0', or dtype 'float16' or 'bfloat16'."
        )
    for name, (levels, why) in _GOES_WITH.items():
        value = getattr(config, name)
        if value and level not in levels:
            raise ValueError(
                f"{name}={value!r} goes with level {' or '.join(levels)}, and {subject} {why}; "
                f"give level={levels[0]!r}, or leave {name} out."
            )


def read_dtype(value: Any) -> ComputeDtype | None:
    """Returns the name of a low dtype or float32; None for the machine's choice."""
    return cast("ComputeDtype | None", given_low_dtype(value, ("float32",)))


def _read_loss_scale(value: Any) -> LossScale | str | float | None:
    """Returns a loss scale as `LossScaleOptimizer` takes it, or "none" for none at all."""
    if value is None or isinstance(value, LossScale):
        return value
    if isinstance(value, Mapping):
        values = dict(value)
        # mmdetection has a separate key for the rule.
        if values.pop("mode", "dynamic") != "dynamic":
            raise ValueError(
                f"loss_scale has the mode {value['mode']!r}, and a dict with a mode is a "
                "dynamic loss scale: give 'dynamic'. For a fixed scale give the number alone, "
                "such as loss_scale=512.0, or {'scale': 512.0}."
            )
        if "scale" in values:
            return options.from_mapping(FixedLossScale, "loss_scale", values)
        return options.from_mapping(
            DynamicLossScale,
            "loss_scale",
            values,
            _DYNAMIC_NAMES,
            foreign_settings.advice_on_loss_scale,
        )
    if isinstance(value, str) and value.lower() in ("dynamic", "none"):
        return value.lower()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(
            "loss_scale must be a number, 'dynamic', 'none', a dict, a FixedLossScale or a "
            f"DynamicLossScale; got {value!r} of type {type(value).__name__}."
        )
    if value == 0:
        raise ValueError(
            f"loss_scale must be positive; got {value!r}. DeepSpeed's 0 means a dynamic loss "
            "scale: give 'dynamic'."
        )
    return checked_scale("loss_scale", value)


def _checked_selectors(kept: Any) -> tuple[Any, ...]:
    """Returns the values of `keep_float32`, or the single one, as a tuple.

    Raises:
        ValueError: A string is not a regular expression.
    """
    is_single = isinstance(kept, str | type) or not isinstance(kept, Iterable)
    selectors = (kept,) if is_single else tuple(kept)
    for selector in selectors:
        if isinstance(selector, str):
            options.checked_pattern("keep_float32", selector)
    return selectors
