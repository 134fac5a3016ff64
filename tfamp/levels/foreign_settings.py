"""Settings of other systems and the settings of tfamp that mean the same, for messages.

Systems: DeepSpeed's blocks `fp16` and `bf16`, Apex, PyTorch's GradScaler, Paddle, Keras 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Their name -> field of a DynamicLossScale.
_LOSS_SCALE_FIELDS = {
    "init_scale": "initial_scale",
    "initial_scale": "initial_scale",
    "init_loss_scaling": "initial_scale",
    "growth_interval": "growth_steps",
    "growth_steps": "growth_steps",
    "dynamic_growth_steps": "growth_steps",
    "loss_scale_window": "growth_steps",
    "incr_every_n_steps": "growth_steps",
    "growth_factor": "growth_factor",
    "incr_ratio": "growth_factor",
    "backoff_factor": "backoff_factor",
    "decr_ratio": "backoff_factor",
    "hysteresis": "hysteresis",
    "decr_every_n_nan_or_inf": "hysteresis",
    "min_scale": "min_scale",
    "min_loss_scale": "min_scale",
    "max_scale": "max_scale",
    "max_loss_scale": "max_scale",
}
# Their name -> field of a PrecisionConfig with the same values.
_FIELDS = {
    "opt_level": "level",
    "amp_level": "level",
    "master_weight": "master_weights",
    "gradient_clipping": "grad_clip",
    "max_grad_norm": "grad_clip",
}
_BATCH_NORM = (
    "Leave Apex's setting out: level O2 keeps BatchNormalization in float32. At O3 give "
    "keep_float32=[keras.layers.BatchNormalization] in Python."
)


def _block(dtype: str) -> Callable[[Any], str]:
    return lambda value: (
        f"For DeepSpeed's block give 'level': 'O2', 'dtype': {dtype!r}, 'master_weights': True, "
        "and its settings of the scale in a dict 'loss_scale'."
    )


def _enabled(value: Any) -> str:
    return "Leave it out to enable mixed precision, and give 'level': 'O0' to disable it."


# Their name -> advice for a value.
_OTHERS: dict[str, Callable[[Any], str]] = {
    "keep_batchnorm_fp32": lambda value: _BATCH_NORM,
    "fp16": _block("float16"),
    "bf16": _block("bfloat16"),
    "enabled": _enabled,
    "enable": _enabled,
}


def advice(key: str, value: Any) -> str:
    """Returns what to give instead of another system's setting; "" for a key of none."""
    if key in _OTHERS:
        return _OTHERS[key](value)
    if key in _FIELDS:
        return f"Give {_FIELDS[key]!r}: {value!r}."
    if key == "initial_scale_power" or key in _LOSS_SCALE_FIELDS:
        entry, why = _loss_scale_entry(key, value)
        return f"Give 'loss_scale': {{{entry}}}{why}."
    return ""


def advice_on_loss_scale(key: str, value: Any) -> str:
    """The same, for a key in the dict of a loss scale."""
    if key == "loss_scale":
        return (
            "A dict of these fields is a dynamic loss scale: leave DeepSpeed's 0 out. For a fixed "
            "scale give the number alone, such as 'loss_scale': 128.0."
        )
    if key == "consecutive_hysteresis":
        return "Leave it out: a finite step always resets the count."
    if key in ("enabled", "enable"):
        return _enabled(value)
    if key == "initial_scale_power" or key in _LOSS_SCALE_FIELDS:
        entry, why = _loss_scale_entry(key, value)
        return f"Give {entry}{why}."
    return ""


def _loss_scale_entry(key: str, value: Any) -> tuple[str, str]:
    """Returns the entry of a loss scale's dict as text, and the reason for another value."""
    if key != "initial_scale_power":
        return f"{_LOSS_SCALE_FIELDS[key]!r}: {value!r}", ""
    reason = "DeepSpeed's value is a power of 2"
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 126:
        return "'initial_scale': 2.0**n", f"; {reason}"
    return f"'initial_scale': {2.0**value!r}", f", which is 2**{value}; {reason}"
