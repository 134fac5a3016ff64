"""The meaning of each level, by machine and dtype: a second, hand-written table."""

import pytest

from tfamp import DynamicLossScale, FixedLossScale, PrecisionConfig
from tfamp.levels.precision_config import effective_level
from tfamp.machine.hardware import Gpu, Hardware


def machine(*, bfloat16=False, capability=None, tpu=False):
    gpus = () if capability is None else (Gpu("gpu", capability),)
    return Hardware("", cpu_bfloat16=bfloat16, cpu_float16=False, gpus=gpus, tpu=tpu)


PLAIN_CPU = machine()
BF16_CPU = machine(bfloat16=True)
VOLTA = machine(capability=(7, 0))
AMPERE = machine(capability=(8, 0))


@pytest.mark.parametrize(
    ("where", "level", "dtype"),
    [
        (PLAIN_CPU, "O0", "float32"),
        (BF16_CPU, "O1", "bfloat16"),
        (VOLTA, "O2", "float16"),
        (AMPERE, "O2", "bfloat16"),
        (machine(capability=(6, 0)), "O0", "float32"),
        (machine(tpu=True), "O2", "bfloat16"),
    ],
)
def test_auto_goes_by_the_device(where, level, dtype):
    found = effective_level(PrecisionConfig(level="auto"), where)
    assert (found.level, found.dtype) == (level, dtype)
    assert any(reason.startswith(f"level: auto is {level}") for reason in found.reasons)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_auto_does_not_take_float16_to_a_cpu(dtype):
    found = effective_level(PrecisionConfig(level="auto", dtype=dtype), BF16_CPU)
    assert found.level == "O0"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_default_loss_scale_is_that_of_the_table(level, dtype):
    found = effective_level(PrecisionConfig(level=level, dtype=dtype), PLAIN_CPU)
    dynamic = level in ("O1", "O2") and dtype == "float16"
    skips_only = None if level == "O0" else FixedLossScale(1.0, skip_nonfinite=True)
    assert found.loss_scale == (DynamicLossScale() if dynamic else skips_only)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_scale_that_is_given_holds_at_every_level(level):
    config = PrecisionConfig(level=level, dtype="bfloat16", loss_scale=128)
    assert effective_level(config, PLAIN_CPU).loss_scale == FixedLossScale(128.0)
    config = PrecisionConfig(level=level, loss_scale="none")
    assert effective_level(config, PLAIN_CPU).optimizer_rule is None


def test_a_machine_without_low_precision_gets_one_all_the_same_and_a_warning():
    found = effective_level(PrecisionConfig(), PLAIN_CPU)
    assert found.dtype == "bfloat16"
    assert "emulated" in found.warning
    assert effective_level(PrecisionConfig(), BF16_CPU).warning is None


def test_clipping_and_masters_need_a_wrapper_that_scales_by_one():
    config = PrecisionConfig(dtype="bfloat16", grad_clip=1.0, loss_scale="none")
    assert effective_level(config, BF16_CPU).optimizer_rule == FixedLossScale(1.0)


def test_auto_refuses_masters_where_weights_are_float32():
    with pytest.raises(ValueError, match="level 'auto' is O1 here"):
        effective_level(PrecisionConfig(level="auto", master_weights=True), BF16_CPU)


def test_split_weights_are_bfloat16():
    config = PrecisionConfig(level="O3", dtype="float16", weight_rounding="split")
    with pytest.raises(ValueError, match="goes with bfloat16, and the dtype here is float16"):
        effective_level(config, BF16_CPU)
