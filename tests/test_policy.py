"""Policy as a value: names, dtypes, equality, what it keeps float32, errors that help."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.machine import hardware
from tfamp.policy import POLICY_NAMES, low_dtype


class BatchNormalization:
    """Stands for Keras's: a policy knows classes by name too."""


Subclass = type("Subclass", (BatchNormalization,), {})
Norm, Dense = type("Norm", (), {}), type("Dense", (), {})


@pytest.mark.parametrize(
    ("name", "compute", "variable", "output"),
    [
        *((dtype,) * 4 for dtype in ("float16", "bfloat16", "float32", "float64")),
        *((f"mixed_{low}", low, "float32", "float32") for low in ("float16", "bfloat16")),
    ],
)
def test_dtypes_of_each_name(name, compute, variable, output):
    policy = tfamp.Policy(name)
    assert policy.name == name
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)
    assert policy.output_dtype == output
    assert policy.is_mixed == name.startswith("mixed")
    assert tfamp.Policy(name, float32_outputs=False).output_dtype == compute


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_the_low_dtype_is_the_machines_unless_one_is_given(dtype, monkeypatch):
    for has_bfloat16, expected in ((True, "bfloat16"), (False, None)):
        cpu = hardware.Hardware("", cpu_bfloat16=has_bfloat16, cpu_float16=True, gpus=(), tpu=False)
        monkeypatch.setattr(hardware, "detect", lambda cpu=cpu: cpu)
        assert low_dtype(dtype) == expected
        for named in ("float16", np.float16, np.dtype("float16"), tf.float16):
            assert low_dtype(named) == "float16"


def test_equal_by_value_and_hashable():
    one = tfamp.Policy("mixed_float16", float32_layers=[Norm])
    same = tfamp.Policy("mixed_float16", float32_layers=("BatchNormalization", Norm, Norm))
    assert one == same
    assert len({one, same, tfamp.Policy("mixed_float16")}) == 2
    assert one != tfamp.Policy("mixed_float16", float32_layers=[Norm], float32_outputs=False)


def test_copies_and_the_evaluated_repr_are_equal():
    policy = tfamp.Policy("mixed_float16", float32_layers=["Softmax"], float32_outputs=False)
    for copied in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert copied == policy
    assert eval(repr(policy), {"Policy": tfamp.Policy}) == policy
    sums = tfamp.Policy("mixed_float16", float32_outputs="sums")
    assert eval(repr(sums), {"Policy": tfamp.Policy}) == sums == pickle.loads(pickle.dumps(sums))
    assert sums != tfamp.Policy("mixed_float16")
    assert sums.output_dtype == "float32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "float16"


def test_mixed_policies_keep_batch_normalization_and_its_subclasses_unless_told_not_to():
    policy = tfamp.Policy("mixed_float16")
    assert policy.keeps_float32(BatchNormalization)
    assert policy.keeps_float32(Subclass)
    assert not policy.keeps_float32(Dense)
    assert not tfamp.Policy("mixed_float16", float32_layers=()).keeps_float32(BatchNormalization)
    assert not tfamp.Policy("float16").keeps_float32(BatchNormalization)


@pytest.mark.parametrize("given_layers", [[Norm], ["Norm"], {Norm}, iter([Norm])])
def test_given_layers_are_kept_in_addition(given_layers):
    policy = tfamp.Policy("mixed_float16", float32_layers=given_layers)
    kept = [policy.keeps_float32(each) for each in (Norm, BatchNormalization, Dense)]
    assert kept == [True, True, False]


def test_layers_that_prepare_data_are_kept():
    class Normalization:
        __module__ = "keras.src.layers.preprocessing.normalization"

    class OfAUsersOwn:
        __module__ = "shop.layers.preprocessing"

    for policy in (
        tfamp.Policy("mixed_float16"),
        tfamp.Policy("mixed_bfloat16", float32_layers=[Norm]),
    ):
        assert policy.keeps_float32(Normalization)
        assert policy.keeps_float32(type("Own", (Normalization,), {"__module__": "shop"}))
        assert not policy.keeps_float32(OfAUsersOwn)
    assert not tfamp.Policy("mixed_float16", float32_layers=()).keeps_float32(Normalization)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("mixed_fp16", "mixed_float16"),
        ("Float32", "float32"),
        ("MIXED_BFLOAT16", "mixed_bfloat16"),
        # Elsewhere these mean mixed precision, not float16 variables.
        *((name, "mixed_float16") for name in ("fp16", "FP16", "half", "torch.float16")),
        *((name, "mixed_bfloat16") for name in ("bf16", "mixed_bf16")),
        *((name, "float32") for name in ("fp32", "float", "single")),
        ("amp", "auto"),
    ],
)
def test_wrong_name_lists_the_names_and_suggests_the_nearest(name, suggestion):
    with pytest.raises(ValueError, match=f"did you mean '{suggestion}'") as error:
        tfamp.Policy(name)
    assert all(known in str(error.value) for known in POLICY_NAMES)


@pytest.mark.parametrize("name", ["O0", "O1", "o2", "O3"])
def test_a_level_is_not_a_policy_and_the_message_names_prepare(name):
    call = rf'tfamp\.prepare\(model, optimizer, level="{name.upper()}"\)'
    with pytest.raises(ValueError, match=call) as error:
        tfamp.set_global_policy(name)
    assert "did you mean" not in str(error.value)
    with pytest.raises(ValueError, match=call):
        tfamp.autocast(name)


@pytest.mark.parametrize("name", ["fp8", "float8_e4m3fn", "mixed_float8"])
def test_8_bit_floats_are_said_to_be_missing(name):
    with pytest.raises(ValueError, match="8-bit floats are not supported: .*'mixed_bfloat16'"):
        tfamp.Policy(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("FP16", "float16")],
)
def test_a_dtype_by_the_name_of_another_system_is_recognized(name, meant):
    for give in (
        lambda dtype: tfamp.autocast(dtype),
        lambda dtype: tfamp.rewrite(lambda x: x, dtype=dtype),
        lambda dtype: tfamp.PrecisionConfig(dtype=dtype),
    ):
        with pytest.raises(ValueError, match=f"got '{name}'. Did you mean '{meant}'"):
            give(name)


def test_float32_by_another_name_is_suggested_where_it_is_accepted():
    with pytest.raises(ValueError, match="Did you mean 'float32'"):
        tfamp.PrecisionConfig(dtype="fp32")
    with pytest.raises(ValueError, match="got 'fp32'") as error:
        tfamp.autocast("fp32")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "own", "mode"),
    [
        ("int8_from_mixed_float16", "mixed_float16", "int8"),
        ("gptq/4/128_from_float32", "float32", "gptq"),
    ],
)
def test_the_name_of_a_quantized_policy_is_explained(name, own, mode):
    with pytest.raises(ValueError, match=rf"give '{own}', .* model\.quantize\('{mode}'\)"):
        tfamp.Policy(name)
    with pytest.raises(ValueError, match="did you mean"):
        tfamp.Policy(name.replace(own, "float"))


class DTypePolicy:
    """Stands for Keras's."""

    name = "mixed_float16"


LAYERS, ITEMS = "float32_layers must be a sequence", "float32_layers must hold layer classes"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(([name], ValueError, "name must be one of") for name in ("", "float", "mixed")),
        *(([name], TypeError, "name must be a string") for name in (None, 16, b"float16", float)),
        ([DTypePolicy()], TypeError, "Give its name, 'mixed_float16'"),
        ([tfamp.Policy("float16")], TypeError, "Give its name, 'float16'"),
        *(({"float32_layers": x}, TypeError, LAYERS) for x in ("Norm", Norm, None, 3)),
        *(({"float32_layers": [x]}, TypeError, ITEMS) for x in (Norm(), None, 3)),
        *(
            ({"float32_outputs": value}, TypeError, "float32_outputs must be True or False")
            for value in (None, 1, "yes", "Sums")
        ),
    ],
)
def test_wrong_arguments_say_what_is_expected(arguments, error, message):
    with pytest.raises(error, match=message):
        if isinstance(arguments, dict):
            tfamp.Policy("mixed_float16", **arguments)
        else:
            tfamp.Policy(*arguments)
