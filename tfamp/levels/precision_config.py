"""`PrecisionConfig`: everything `prepare` is told, as one value that files can hold.

Framework-free. The environment variables that configure a level are read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tfamp.core.options import GradClip, LossScale
from tfamp.levels import config_values

PREFIX = "TFAMP_"
# Read elsewhere: what the cost model goes by is no matter of precision.
_OTHER_VARIABLES = frozenset({"TFAMP_PROFILE"})
_FILE_VARIABLE = "TFAMP_CONFIG"


@dataclass(frozen=True)
class PrecisionConfig:
    """What `tfamp.prepare` is to do, as one value.

    Args:
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for what this machine multiplies fast.
        loss_scale: None for the level's own. A `FixedLossScale` or `DynamicLossScale`, a number
            for a fixed one, "dynamic", or "none" for none at all. A dict of the fields of one of
            the classes, also under the names of torch, mmdetection, MindSpore and DeepSpeed.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number,
            which is the greatest Euclidean norm.
        keep_float32: What stays float32: names of layers, regular expressions, layer classes or
            layers.
        master_weights: True to store weights in the low dtype with float32 copies in the optimizer.

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

    def __post_init__(self) -> None:
        for name, value in {
            "level": config_values.read_level(self.level),
            "dtype": config_values.read_dtype(self.dtype),
            "loss_scale": config_values.read_loss_scale(self.loss_scale),
            "grad_clip": config_values.read_grad_clip(self.grad_clip),
            "keep_float32": config_values.read_keep_float32(self.keep_float32),
            "master_weights": config_values.read_flag("master_weights", self.master_weights),
        }.items():
            object.__setattr__(self, name, value)
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
            raise TypeError(
                "A configuration is a dict such as {'level': 'O2', 'loss_scale': 512.0}; got "
                f"{values!r} of type {type(values).__name__}."
            )
        config_values.check_keys("PrecisionConfig", values, _names())
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

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PrecisionConfig:
        """Reads the environment variables TFAMP_LEVEL, TFAMP_DTYPE and so on, one for each field.

        A dict is written as JSON, several layers of TFAMP_KEEP_FLOAT32 are separated by commas.
        TFAMP_CONFIG is the path of a file, over which the other variables win.

        Args:
            environ: The variables; None for this process's.

        Returns:
            The configuration; the defaults where no variable is set.

        Raises:
            TypeError, ValueError: As `from_dict`, naming the variable. A variable that begins with
                TFAMP_ and is none of these is unknown.

        Example:
            >>> env = {"TFAMP_LEVEL": "O1", "TFAMP_GRAD_CLIP": '{"max_norm": 1.0}'}
            >>> PrecisionConfig.from_env(env).to_dict()
            {'level': 'O1', 'grad_clip': {'max_norm': 1.0, 'norm_type': 2}}
        """
        environ = os.environ if environ is None else environ
        given = {
            name: text
            for name, text in environ.items()
            if name.startswith(PREFIX) and name not in _OTHER_VARIABLES and text.strip()
        }
        known = (*(PREFIX + name.upper() for name in _names()), _FILE_VARIABLE)
        config_values.check_keys("The environment", given, known)
        file = given.pop(_FILE_VARIABLE, None)
        values = cls.from_file(file)._given() if file is not None else {}
        for variable, text in given.items():
            name = variable.removeprefix(PREFIX).lower()
            values[name] = config_values.from_text(variable, text, _READERS[name])
        return cls.from_dict(values)

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
        plain = {
            "level": self.level,
            "dtype": self.dtype,
            "loss_scale": config_values.loss_scale_to_plain(self.loss_scale),
            "grad_clip": None if self.grad_clip is None else self.grad_clip.to_dict(),
            "keep_float32": list(self.keep_float32) or None,
            "master_weights": self.master_weights,
        }
        return {name: value for name, value in plain.items() if value is not None}

    def with_changes(self, **changes: Any) -> PrecisionConfig:
        """Returns one that differs in the fields given.

        Example:
            >>> PrecisionConfig(level="O1").with_changes(dtype="bfloat16").to_dict()
            {'level': 'O1', 'dtype': 'bfloat16'}
        """
        return dataclasses.replace(self, **changes)

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _names()}


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(PrecisionConfig))


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
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
        except ImportError as error:
            raise ImportError(
                "Python 3.10 reads no TOML by itself: install tomli, use Python 3.11 or later, or "
                "write the configuration as JSON."
            ) from error
    return tomllib.loads


def _read_names(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return config_values.read_keep_float32(value)


def _read_flag(value: Any) -> bool:
    spelled = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in spelled:
        raise ValueError(f"must be one of {', '.join(spelled)}; got {value!r}.")
    return spelled[str(value).lower()]


def _read_clip(value: Any) -> GradClip | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(
                'must be a number or JSON such as {"max_norm": 35, "norm_type": 2}; got '
                f"{value!r}."
            ) from None
    return config_values.read_grad_clip(value)


_READERS = {
    "level": config_values.read_level,
    "dtype": config_values.read_dtype,
    "loss_scale": config_values.read_loss_scale,
    "grad_clip": _read_clip,
    "keep_float32": _read_names,
    "master_weights": _read_flag,
}
