"""What a level of mixed precision means, on a machine: a pure function of the configuration.

Framework-free; `preparation` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.options import DynamicLossScale, FixedLossScale, GradClip, LossScale
from tfamp.levels.precision_config import PrecisionConfig
from tfamp.machine import hardware
from tfamp.machine.hardware import Hardware
from tfamp.policy import Policy


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """One row of the table of levels.

    Attributes:
        compute: What the layers compute in.
        norms_and_outputs: What BatchNormalization computes in, and models return.
        weights: What the weights are stored in.
        how: How it is done.
        scaled: Whether float16 gets a dynamic loss scale by default.
    """

    compute: str
    norms_and_outputs: str
    weights: str
    how: str
    scaled: bool


LEVEL_FACTS = {
    "O0": LevelFacts("float32", "float32", "float32", "nothing changes", scaled=False),
    "O1": LevelFacts(
        "by op lists",
        "by op lists; outputs float32",
        "float32",
        "graph rewrite in graph mode, autocast when eager",
        scaled=True,
    ),
    "O2": LevelFacts("low", "float32", "float32", "layer policies", scaled=True),
    "O3": LevelFacts("low", "low", "low", "layer policies, nothing kept", scaled=False),
}


@dataclass(frozen=True, slots=True)
class EffectiveLevel:
    """A configuration with every choice made.

    Attributes:
        level: "O0", "O1", "O2" or "O3".
        dtype: The low dtype; "float32" at level O0.
        loss_scale: The rule, None for no loss scale.
        grad_clip: How gradients are clipped, if at all.
        keep_float32: What the user keeps in float32.
        master_weights: Whether low weights have float32 copies in the optimizer.
        chose_loss_scale: Whether the user said which loss scale, if any.
        chose_master_weights: Whether the user said whether there are copies.
        placement: How a graph rewrite decides: by the op lists, or also by what pays here.
        reasons: A sentence for every choice that was left open.
        warning: What the user has to be told, if anything.
    """

    level: str
    dtype: str
    loss_scale: LossScale | None
    grad_clip: GradClip | None
    keep_float32: tuple[Any, ...]
    master_weights: bool
    chose_loss_scale: bool
    chose_master_weights: bool
    placement: str
    reasons: tuple[str, ...]
    warning: str | None

    @property
    def low_weights(self) -> bool:
        """Whether the weights are stored in the low dtype."""
        return self.level == "O3" or self.master_weights

    @property
    def policy(self) -> Policy:
        """The policy of layers that nothing keeps, as far as they compute; O2's or O3's."""
        if self.level == "O3":
            return Policy(self.dtype)
        return Policy("float32" if self.level in ("O0", "O1") else f"mixed_{self.dtype}")

    @property
    def optimizer_rule(self) -> LossScale | None:
        """The rule of the optimizer's wrapper; None where the optimizer needs none.

        A fixed scale of 1 changes no gradient: what it is there for are clipping and masters.
        """
        if self.loss_scale is None and (self.grad_clip is not None or self.master_weights):
            return FixedLossScale(1.0)
        return self.loss_scale


def effective_level(config: PrecisionConfig, machine: Hardware) -> EffectiveLevel:
    """Makes every choice that a configuration leaves open.

    Args:
        config: The configuration.
        machine: What the machine multiplies natively.

    Returns:
        The level as it will be carried out.

    Raises:
        ValueError: What is asked for does not go together once the level is known.

    Example:
        >>> cpu = Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
        >>> found = effective_level(PrecisionConfig(level="auto"), cpu)
        >>> found.level, found.dtype, found.loss_scale
        ('O1', 'bfloat16', None)
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
    dtype, warning = "float32", None
    if level != "O0":
        dtype, warning = _dtype(config.dtype, machine, reasons)
    return EffectiveLevel(
        level=level,
        dtype=dtype,
        loss_scale=_loss_scale(config.loss_scale, level, dtype, reasons),
        grad_clip=config.grad_clip,
        keep_float32=config.keep_float32,
        master_weights=bool(config.master_weights),
        chose_loss_scale=config.loss_scale is not None,
        chose_master_weights=config.master_weights is not None,
        placement="min_cut" if config.level == "auto" else "lists",
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
    if isinstance(given, FixedLossScale | DynamicLossScale):
        return given
    if given == "dynamic":
        return DynamicLossScale()
    if given == "none":
        return None
    if given is not None:
        return FixedLossScale(given)
    if not LEVEL_FACTS[level].scaled:
        reasons.append(f"loss scale: none, the default of level {level}.")
        return None
    if dtype == "bfloat16":
        reasons.append("loss scale: none, as bfloat16 has float32's range.")
        return None
    reasons.append(f"loss scale: dynamic, the default of level {level} in {dtype}.")
    return DynamicLossScale()
