"""The level that a `PrecisionConfig` means on a machine, each automatic choice with its reason.

Framework-free. `preparation` applies the level.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from tfamp.core.names import ComputeDtype, Level, LowDtype
from tfamp.levels.precision_config import PrecisionConfig, check_level
from tfamp.machine import hardware
from tfamp.machine.hardware import Hardware
from tfamp.policy import policy_named


@dataclass(frozen=True, slots=True)
class EffectiveLevel:
    """A configuration with every choice made.

    Attributes:
        level: "O0", "O1", "O2" or "O3".
        dtype: The low dtype; "float32" at level O0.
        loss_scale: The rule, None for no loss scale.
        master_weights: Whether low weights have float32 copies in the optimizer.
        config: The configuration that the user wrote.
        reasons: A sentence for each automatic choice.
        warning: A warning for the user, or None.
        jit_compile: Whether XLA compiles the steps, where that was measured; None to leave the
            model as it is.
    """

    level: Level
    dtype: ComputeDtype
    loss_scale: LossScale | None
    master_weights: bool
    config: PrecisionConfig
    reasons: tuple[str, ...]
    warning: str | None
    jit_compile: bool | None = None

    @property
    def low_weights(self) -> bool:
        """Whether the weights are stored in the low dtype."""
        is_rounded = self.config.weight_rounding is not None
        return self.level == "O3" or self.master_weights or is_rounded

    @property
    def optimizer_rule(self) -> LossScale | None:
        """The rule of the optimizer's wrapper; None where the optimizer needs none.

        Clipping, masters and rounding need one too; a fixed scale of 1 changes no gradient.
        """
        clips = self.config.grad_clip is not None
        rounds = self.config.weight_rounding is not None
        if self.loss_scale is None and (clips or self.master_weights or rounds):
            return FixedLossScale(1.0)
        return self.loss_scale


def effective_level(config: PrecisionConfig, machine: Hardware) -> EffectiveLevel:
    """Makes every choice that a configuration leaves open, by what a machine is fast in.

    A ValueError names arguments that contradict the level.

    Example:
        >>> cpu = Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
        >>> here = effective_level(PrecisionConfig(level="auto"), cpu)
        >>> here.level, here.dtype, here.loss_scale
        ('O1', 'bfloat16', FixedLossScale(scale=1.0, skip_nonfinite=True))
    """
    reasons: list[str] = []
    level = config.level
    if level == "auto":
        level, reason = _automatic_level(config.dtype, machine)
        reasons.append(f"level: auto is {level}: {reason}.")
        check_level(config, level, f"level 'auto' is {level} here ({reason}), which")
    dtype: ComputeDtype = "float32"
    warning = None
    if level != "O0" and config.dtype is not None:
        dtype = config.dtype
    elif level != "O0":
        dtype, warning = _automatic_dtype(machine, reasons)
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


def _automatic_level(dtype: str | None, machine: Hardware) -> tuple[Level, str]:
    """Returns O2 on GPUs and TPUs, O1 on CPUs with native bfloat16, else O0; and the reason."""
    policy, reason = hardware.automatic_policy(machine)
    if dtype == "float32":
        return "O0", "float32 was requested"
    if policy == "float32":
        return "O0", reason
    if machine.gpus or machine.tpu:
        return "O2", reason
    if dtype == "float16":
        return "O0", "float16 was requested, and this CPU multiplies only bfloat16 natively"
    return "O1", reason


def _automatic_dtype(machine: Hardware, reasons: list[str]) -> tuple[LowDtype, str | None]:
    """Returns a low dtype for a machine, and a warning or None; adds the reason to a list."""
    policy, reason = hardware.automatic_policy(machine)
    compute_dtype = policy_named(policy).compute_dtype
    automatic = next((low for low in LOW_PRECISION if low == compute_dtype), None)
    if automatic is not None:
        reasons.append(f"dtype: {automatic}, as {reason}.")
        return automatic, None
    # bfloat16 has float32's range, so nothing can overflow.
    fallback: LowDtype = "float16" if machine.gpus else "bfloat16"
    reasons.append(f"dtype: {fallback}, though {reason}.")
    return fallback, (
        f"No low precision is fast here: {reason}. The model is prepared for {fallback} all "
        "the same, which is emulated; level='auto' leaves it in float32, `tfamp doctor` "
        "explains."
    )


def _loss_scale(
    requested: LossScale | str | float | None, level: str, dtype: str, reasons: list[str]
) -> LossScale | None:
    scale = requested
    if scale is None:
        scale, why = _default_loss_scale(level, dtype)
        reasons.append(f"loss scale: {scale}, {why}.")
    if isinstance(scale, LossScale):
        return scale
    if isinstance(scale, str):
        return DynamicLossScale() if scale == "dynamic" else None
    return FixedLossScale(scale)


def _default_loss_scale(level: str, dtype: str) -> tuple[str | float, str]:
    """Returns a level's loss scale, as a configuration has it, with the reason."""
    if level == "O0":
        return "none", "the default of level O0"
    # With a scale of 1 the optimizer only skips nonfinite steps.
    if dtype == "bfloat16":
        return 1.0, "as bfloat16 has float32's range"
    if level == "O3":
        return 1.0, "the default of level O3"
    return "dynamic", f"the default of level {level} in {dtype}"
