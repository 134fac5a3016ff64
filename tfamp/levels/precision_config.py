"""`PrecisionConfig`: everything `prepare` is told, as one value; and what it means on a machine.

Framework-free, and pure but for reading a file. `preparation` carries out what is decided here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import numbers
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.options import (
    PLACEMENTS,
    SLOTS,
    WEIGHT_ROUNDINGS,
    DynamicLossScale,
    FixedLossScale,
    GradClip,
    LossScale,
    resolve_grad_clip,
    resolve_weight_rounding,
)
from tfamp.machine import hardware
from tfamp.machine.hardware import Hardware
from tfamp.policy import Policy

LEVELS = ("O0", "O1", "O2", "O3", "auto")
_LEVELS = {level.lower(): level for level in LEVELS}
_DTYPES = {
    **{name: name for name in LOW_PRECISION},
    **{f"mixed_{name}": name for name in LOW_PRECISION},
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
}

# The variables that tfamp reads; `machine.hardware` says what they mean.
_VARIABLES = ("TFAMP_PROFILE",)

# What the pages on migration show of other systems' names: torch and mmdetection, DeepSpeed.
_DYNAMIC_NAMES = {
    **{name: name for name in DynamicLossScale.__dataclass_fields__},
    "init_scale": "initial_scale",
    "growth_interval": "growth_steps",
    "loss_scale_window": "growth_steps",
    "min_loss_scale": "min_scale",
}
_FIXED_NAMES = tuple(FixedLossScale.__dataclass_fields__)


@dataclass(frozen=True)
class PrecisionConfig:
    """What `tfamp.prepare` is to do, as one value.

    Args:
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for what this machine multiplies fast.
        loss_scale: None for the level's own. A `FixedLossScale` or `DynamicLossScale`, a number
            for a fixed one, "dynamic", or "none" for an optimizer that neither scales losses nor
            skips steps that are not finite. A dict of the fields of one of the classes, also under
            the names of torch, mmdetection and DeepSpeed.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number,
            which is the greatest Euclidean norm.
        keep_float32: What stays float32: names of layers, regular expressions, layer classes or
            layers.
        master_weights: True to store weights in the low dtype with float32 copies in the optimizer.
        placement: "lists", "min_cut" or "fused": at level O1 what decides which ops are
            converted. None is "lists", and with level "auto" "min_cut".
        weight_rounding: "stochastic" or "split" to store weights in the low dtype without
            copies, as `LossScaleOptimizer` does.
        slots: With it, the dtype of what the optimizer keeps: "bfloat16", "float16" or "float32".

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or two contradict each other.

    Example:
        >>> PrecisionConfig.from_dict({"loss_scale": 512.0}).to_dict()
        {'level': 'O2', 'loss_scale': 512.0}
    """

    level: str = "O2"
    dtype: str | None = None
    loss_scale: LossScale | str | float | None = None
    grad_clip: GradClip | None = None
    keep_float32: tuple[Any, ...] = ()
    master_weights: bool | None = None
    placement: str | None = None
    weight_rounding: str | None = None
    slots: str | None = None

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(getattr(self, name)))
        _check_together(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionConfig:
        """Makes one of a dict; every key may be left out.

        Args:
            values: The fields by name. The dict is not modified.

        Returns:
            The configuration.

        Raises:
            TypeError: A value has the wrong type, or `values` is no dict.
            ValueError: A key is unknown (the message names the nearest), a value is out of range,
                or two contradict each other.

        Example:
            >>> clip = {"max_norm": 35, "norm_type": 2}
            >>> config = PrecisionConfig.from_dict({"loss_scale": 512.0, "grad_clip": clip})
            >>> config.loss_scale, config.grad_clip.max_norm
            (512.0, 35.0)
        """
        if not isinstance(values, Mapping):
            example = "{'level': 'O2', 'loss_scale': 512.0}"
            raise wrong_type(f"A configuration is a dict such as {example}", values)
        _check_keys("PrecisionConfig", values, _READERS)
        return cls(**values)

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
            TypeError, ValueError: As `from_dict`, naming the file; or it ends otherwise.
            ImportError: It is TOML, and this is Python 3.10 without the package tomli.
        """
        path = Path(path)
        values = _parsed(path)
        if isinstance(values, Mapping) and isinstance(values.get("tfamp"), Mapping):
            values = values["tfamp"]
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, and the level, for JSON or TOML.

        Returns:
            A dict that `from_dict` makes an equal configuration of.

        Raises:
            TypeError: `keep_float32` holds classes or layers: only names can be written down.
        """
        for each in self.keep_float32:
            if not isinstance(each, str):
                raise TypeError(
                    f"keep_float32 holds {each!r}, which no file can; name the layer instead."
                )
        scale = self.loss_scale
        plain = vars(self) | {
            "loss_scale": dataclasses.asdict(scale) if isinstance(scale, LossScale) else scale,
            "grad_clip": None if self.grad_clip is None else self.grad_clip.to_dict(),
            "keep_float32": list(self.keep_float32) or None,
        }
        return {name: value for name, value in plain.items() if value is not None}

    def with_changes(self, **changes: Any) -> PrecisionConfig:
        """Returns one that differs in the fields given.

        Example:
            >>> PrecisionConfig(level="O1").with_changes(dtype="bfloat16").to_dict()
            {'level': 'O1', 'dtype': 'bfloat16'}
        """
        return dataclasses.replace(self, **changes)

    @property
    def rewrite_placement(self) -> str:
        """What decides which ops a rewrite converts, where nothing was asked for too."""
        return self.placement or ("min_cut" if self.level == "auto" else "lists")


def _check_together(config: PrecisionConfig) -> None:
    """Raises where two fields cannot both hold."""
    if config.dtype == "float32" and config.level in ("O1", "O2", "O3"):
        raise ValueError(
            f"level {config.level!r} computes in low precision and dtype 'float32' is none; give "
            "level='O0', or dtype 'float16' or 'bfloat16'."
        )
    if config.master_weights and config.level in ("O0", "O1"):
        raise ValueError(
            f"master_weights=True goes with weights in a low dtype, and those of level "
            f"{config.level!r} are float32; give level='O2' or 'O3', or leave master_weights out."
        )
    if config.placement and config.level not in ("O1", "auto"):
        raise ValueError(
            f"placement={config.placement!r} says what a rewrite converts, and level "
            f"{config.level!r} rewrites no graph; give level='O1', or leave placement out."
        )
    if config.weight_rounding and config.level not in ("O2", "O3"):
        raise ValueError(
            f"weight_rounding={config.weight_rounding!r} goes with weights in a low dtype, and "
            f"those of level {config.level!r} are float32, or may be; give level='O3' or 'O2', or "
            "leave weight_rounding out."
        )
    if config.weight_rounding == "split" and config.dtype == "float16":
        raise ValueError(
            "weight_rounding='split' keeps the lower half of a float32 number beside a bfloat16 "
            "weight; got dtype='float16'. Give dtype='bfloat16', or weight_rounding='stochastic'."
        )
    resolve_weight_rounding(config.weight_rounding, config.slots, config.master_weights)


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".json", ".toml"):
        raise ValueError(f"A configuration is a .json or .toml file; got {str(path)!r}.")
    parse = json.loads if suffix == ".json" else _toml()
    try:
        return parse(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for a configuration.") from None
    except ValueError as error:  # Common base of the two parsers' errors and UnicodeDecodeError.
        raise ValueError(f"{path} is no valid {suffix[1:].upper()}: {error}") from error


def _toml() -> Any:
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).loads
    raise ImportError(
        "Python 3.10 reads no TOML by itself: install tomli, use Python 3.11 or later, or write "
        "the configuration as JSON."
    )


def warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warns of variables that look like tfamp's and are not, once a process for each."""
    for variable in environ:
        if variable.startswith("TFAMP_") and variable not in _VARIABLES:
            warnings.warn(
                f"The environment variable {variable!r} is not one of tfamp's, which ignores it. "
                f"Known: {', '.join(_VARIABLES)}. Settings of prepare are its arguments or its "
                "config=, a dict or the path of a file.",
                TfampWarning,
                stacklevel=1,
            )


def wrong_type(expected: str, value: Any) -> TypeError:
    """The error for a value of another type than is expected, which a clause says."""
    return TypeError(f"{expected}; got {value!r} of type {type(value).__name__}.")


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that is spelled most like a name."""
    names = list(known)
    lower = {each.lower(): each for each in names}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.0)
    return lower[found[0]] if found else names[0]


def _check_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raises a ValueError that names the first unknown key and the nearest known one."""
    known = tuple(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f"{what} has no key {key!r}; did you mean {nearest(key, known)!r}? "
                f"Known: {', '.join(known)}."
            )


def _read_level(value: Any) -> str:
    """The level, "O0" to "O3" or "auto", whatever its capitals; the number 0 to 3 will do."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"O{value}"
    is_zero = isinstance(value, str) and re.fullmatch(r"0[0-3]", value)
    hint = " Levels begin with the letter O, not with a zero." if is_zero else ""
    return _read_word("level", value, f"one of {', '.join(LEVELS)}", _LEVELS, hint)


def read_dtype(value: Any) -> str | None:
    """The name of a low dtype or float32, in its many spellings; None or "auto" gives None."""
    name = getattr(value, "name", getattr(value, "__name__", value))
    if name is None or (isinstance(name, str) and name.lower() == "auto"):
        return None
    return _read_word("dtype", name, "'float16', 'bfloat16' or None", _DTYPES)


def _read_word(
    field: str, value: Any, expected: str, known: Mapping[str, str], hint: str = ""
) -> str:
    """What one of the known words means, whatever its capitals; an error names the nearest."""
    if not isinstance(value, str):
        raise wrong_type(f"{field} must be {expected}", value)
    if value.lower() not in known:
        meant = known[nearest(value, known)]
        raise ValueError(
            f"{field} must be {expected}; got {value!r}, did you mean {meant!r}?{hint}"
        )
    return known[value.lower()]


def _read_loss_scale(value: Any) -> LossScale | str | float | None:
    """A loss scale as `LossScaleOptimizer` takes it, "none" or False for none at all."""
    if value is None or isinstance(value, LossScale):
        return value
    if value is False:
        return "none"
    if isinstance(value, Mapping):
        return _loss_scale_of_dict(value)
    if isinstance(value, str) and value.lower() in ("dynamic", "none"):
        return value.lower()
    words = "a number, 'dynamic', 'none', a dict, a FixedLossScale or a DynamicLossScale"
    wrong = wrong_type(f"loss_scale must be {words}", value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise wrong
    try:
        number = float(value)
    except ValueError:
        raise ValueError(str(wrong)) from None
    return FixedLossScale(number).scale


def _loss_scale_of_dict(given: Mapping[Any, Any]) -> LossScale:
    values = dict(given)
    # mmdetection says with a word of its own which of the two it is.
    mode = values.pop("mode", "dynamic")
    if mode == "static":
        values = {"scale": values.get("init_scale", FixedLossScale.scale)}
    elif mode != "dynamic":
        raise ValueError(f"loss_scale has mode {mode!r}; it is 'dynamic' or 'static'.")
    _check_keys("loss_scale", values, (*_DYNAMIC_NAMES, *_FIXED_NAMES))
    fixed = [key for key in values if key in _FIXED_NAMES]
    dynamic = [key for key in values if key in _DYNAMIC_NAMES]
    if fixed and dynamic:
        raise ValueError(
            f"loss_scale has {fixed[0]!r}, which is of a fixed scale, and {dynamic[0]!r}, which is "
            "of a dynamic one; give the keys of one of them."
        )
    if fixed:
        return FixedLossScale(**values)
    arguments = {_DYNAMIC_NAMES[key]: value for key, value in values.items()}
    if len(arguments) < len(values):
        raise ValueError(f"loss_scale gives one value twice, under two names: {', '.join(values)}.")
    return DynamicLossScale(**arguments)


def _read_keep_float32(value: Any) -> tuple[Any, ...]:
    """What is to stay float32 as a tuple; a single thing will do."""
    if value is None:
        return ()
    single = isinstance(value, str | type) or not isinstance(value, Iterable)
    kept = (value,) if single else tuple(value)
    for each in kept:
        if isinstance(each, str):
            check_pattern("keep_float32", each)
        elif isinstance(each, bool | int | float | bytes | Mapping):
            expected = "names of layers, regular expressions, layer classes and layers"
            raise wrong_type(f"keep_float32 takes {expected}", each)
    return kept


def check_pattern(argument: str, pattern: str) -> None:
    """Raises a ValueError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{argument} holds {pattern!r}, which is no regular expression: {error}."
        ) from error


def _read_master_weights(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"master_weights must be True, False or None; got {value!r}.")
    return value


def _read_grad_clip(value: Any) -> GradClip | None:
    # False is no clipping in some systems' files.
    return None if value is False else resolve_grad_clip(value)


def _reader_of(field: str, words: tuple[str, ...]) -> Callable[[Any], str | None]:
    expected = f"{', '.join(map(repr, words))} or None"
    known = {word: word for word in words}
    return lambda value: None if value is None else _read_word(field, value, expected, known)


_READERS: dict[str, Callable[[Any], Any]] = {
    "level": _read_level,
    "dtype": read_dtype,
    "loss_scale": _read_loss_scale,
    "grad_clip": _read_grad_clip,
    "keep_float32": _read_keep_float32,
    "master_weights": _read_master_weights,
    "placement": _reader_of("placement", PLACEMENTS),
    "weight_rounding": _reader_of("weight_rounding", WEIGHT_ROUNDINGS),
    "slots": _reader_of("slots", SLOTS),
}


@dataclass(frozen=True, slots=True)
class EffectiveLevel:
    """A configuration with every choice made.

    Attributes:
        level: "O0", "O1", "O2" or "O3".
        dtype: The low dtype; "float32" at level O0.
        loss_scale: The rule, None for no loss scale.
        master_weights: Whether low weights have float32 copies in the optimizer.
        config: The configuration, with what the user chose or left open.
        reasons: A sentence for every choice that was left open.
        warning: What the user has to be told, if anything.
    """

    level: str
    dtype: str
    loss_scale: LossScale | None
    master_weights: bool
    config: PrecisionConfig
    reasons: tuple[str, ...]
    warning: str | None

    @property
    def low_weights(self) -> bool:
        """Whether the weights are stored in the low dtype."""
        is_rounded = self.config.weight_rounding is not None
        return self.level == "O3" or self.master_weights or is_rounded

    @property
    def needs_wrapper(self) -> bool:
        """Whether training needs more of the wrapper than that it skips steps."""
        rule, config = self.optimizer_rule, self.config
        features = (config.grad_clip, config.weight_rounding, self.master_weights or None)
        return rule is not None and (rule.initial_scale != 1.0 or features != (None, None, None))

    @property
    def optimizer_rule(self) -> LossScale | None:
        """The rule of the optimizer's wrapper; None where the optimizer needs none.

        A fixed scale of 1 changes no gradient: it is there for clipping, masters and rounding too.
        """
        clips = self.config.grad_clip is not None
        rounds = self.config.weight_rounding is not None
        if self.loss_scale is None and (clips or self.master_weights or rounds):
            return FixedLossScale(1.0)
        return self.loss_scale


def effective_level(config: PrecisionConfig, machine: Hardware) -> EffectiveLevel:
    """Makes every choice that a configuration leaves open, by what a machine multiplies natively.

    A ValueError says what does not go together once the level is known.

    Example:
        >>> cpu = Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
        >>> found = effective_level(PrecisionConfig(level="auto"), cpu)
        >>> found.level, found.dtype, found.loss_scale
        ('O1', 'bfloat16', FixedLossScale(scale=1.0, skip_nonfinite=True))
    """
    reasons: list[str] = []
    level = config.level
    if level == "auto":
        level, reason = _automatic_level(config.dtype, machine)
        reasons.append(f"level: auto is {level}: {reason}.")
        if config.master_weights and level in ("O0", "O1"):
            raise ValueError(
                f"level 'auto' is {level} here ({reason}), whose weights are float32: "
                "master_weights=True does not go with it. Give level='O2'."
            )
        if config.placement and level != "O1":
            raise ValueError(
                f"level 'auto' is {level} here ({reason}), which rewrites no graph: "
                f"placement={config.placement!r} does not go with it. Give level='O1'."
            )
    dtype, warning = "float32", None
    if level != "O0":
        dtype, warning = _dtype(config.dtype, machine, reasons)
    if config.weight_rounding == "split" and dtype != "bfloat16":
        raise ValueError(
            f"weight_rounding='split' goes with bfloat16, and the dtype here is {dtype}: give "
            "dtype='bfloat16', or weight_rounding='stochastic'."
        )
    return EffectiveLevel(
        level=level,
        dtype=dtype,
        loss_scale=_loss_scale(config.loss_scale, level, dtype, reasons),
        master_weights=bool(config.master_weights),
        config=config,
        reasons=tuple(reasons),
        warning=warning,
    )


def _automatic_level(dtype: str | None, machine: Hardware) -> tuple[str, str]:
    """O2 on GPUs and TPUs, O1 on CPUs that multiply bfloat16, else O0; and why."""
    policy, reason = hardware.automatic_policy(machine)
    if dtype == "float32":
        return "O0", "float32 was asked for"
    if policy == "float32":
        return "O0", reason
    if machine.gpus or machine.tpu:
        return "O2", reason
    if dtype == "float16":
        return "O0", "float16 was asked for, and this CPU multiplies bfloat16 natively only"
    return "O1", reason


def _dtype(given: str | None, machine: Hardware, reasons: list[str]) -> tuple[str, str | None]:
    if given is not None:
        return given, None
    policy, reason = hardware.automatic_policy(machine)
    automatic = Policy(policy).compute_dtype
    if automatic in LOW_PRECISION:
        reasons.append(f"dtype: {automatic}, as {reason}.")
        return automatic, None
    # bfloat16 has float32's range, so that at least nothing can overflow.
    fallback = "float16" if machine.gpus else "bfloat16"
    reasons.append(f"dtype: {fallback}, though {reason}.")
    return fallback, (
        f"No low precision is fast here: {reason}. The model is prepared for {fallback} all the "
        "same, which is emulated; level='auto' leaves it in float32, `tfamp doctor` explains."
    )


def _loss_scale(given: Any, level: str, dtype: str, reasons: list[str]) -> LossScale | None:
    if given is None:
        given, why = _default_loss_scale(level, dtype)
        reasons.append(f"loss scale: {given}, {why}.")
    if isinstance(given, str):
        return DynamicLossScale() if given == "dynamic" else None
    return given if isinstance(given, LossScale) else FixedLossScale(given)


def _default_loss_scale(level: str, dtype: str) -> tuple[str | int, str]:
    """Returns the default and the reason; a scale of 1 only skips steps that are not finite."""
    if level == "O0":
        return "none", "the default of level O0"
    if dtype == "bfloat16":
        return 1, "as bfloat16 has float32's range"
    if level == "O3":
        return 1, "the default of level O3"
    return "dynamic", f"the default of level {level} in {dtype}"
