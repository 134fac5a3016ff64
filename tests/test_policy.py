"""Policy as a value: names, dtypes, equality, what it keeps float32, errors that help."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfamp
from tfamp.machine import hardware
from tfamp.policy import POLICY_NAMES, low_dtype


class BatchNormalization:
    """Stands for Keras's: a policy knows classes by name too."""


class Subclass(BatchNormalization):
    pass


class Norm:
    pass


class Dense:
    pass


@pytest.mark.parametrize(
    ("name", "compute", "variable", "output"),
    [
        ("float16", "float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32", "float32"),
        ("float64", "float64", "float64", "float64"),
        ("mixed_float16", "float16", "float32", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32", "float32"),
    ],
)
def test_dtypes_of_each_name(name, compute, variable, output):
    policy = tfamp.Policy(name)
    assert policy.name == name
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)
    assert policy.output_dtype == output
    assert policy.is_mixed == name.startswith("mixed")


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_the_low_dtype_is_the_machines_unless_one_is_given(dtype, monkeypatch):
    for has_bfloat16, expected in ((True, "bfloat16"), (False, None)):
        cpu = hardware.Hardware("", cpu_bfloat16=has_bfloat16, cpu_float16=True, gpus=(), tpu=False)
        monkeypatch.setattr(hardware, "detect", lambda cpu=cpu: cpu)
        assert low_dtype(dtype) == expected
        for named in ("float16", np.float16, np.dtype("float16"), tf.float16):
            assert low_dtype(named) == "float16"


@pytest.mark.parametrize("dtype", ["float32", "half", "Auto", 16, tf.float64, "mixed_float16"])
def test_what_is_no_low_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float16, bfloat16, auto; got"):
        low_dtype(dtype)


def test_output_dtype_is_low_without_float32_outputs():
    assert tfamp.Policy("mixed_bfloat16", float32_outputs=False).output_dtype == "bfloat16"


def test_auto_becomes_the_name_the_hardware_decides(monkeypatch):
    tpu = hardware.Hardware("", cpu_bfloat16=False, cpu_float16=False, gpus=(), tpu=True)
    monkeypatch.setattr(hardware, "detect", lambda: tpu)
    assert tfamp.Policy("auto") == tfamp.Policy("mixed_bfloat16")


def test_equal_by_value_and_hashable():
    one = tfamp.Policy("mixed_float16", float32_layers=[Norm])
    same = tfamp.Policy("mixed_float16", float32_layers=("BatchNormalization", Norm, Norm))
    assert one == same
    assert len({one, same, tfamp.Policy("mixed_float16")}) == 2
    assert one != tfamp.Policy("mixed_float16", float32_layers=[Norm], float32_outputs=False)


def test_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tfamp.Policy("float32").name = "float16"


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_are_equal(make):
    policy = tfamp.Policy("mixed_float16", float32_layers=["LayerNormalization"])
    assert make(policy) == policy


def test_repr_can_be_evaluated():
    policy = tfamp.Policy("mixed_float16", float32_layers=["Softmax"], float32_outputs=False)
    assert eval(repr(policy), {"Policy": tfamp.Policy}) == policy


def test_keeps_batch_normalization_and_its_subclasses():
    policy = tfamp.Policy("mixed_float16")
    assert policy.keeps_float32(BatchNormalization)
    assert policy.keeps_float32(Subclass)
    assert not policy.keeps_float32(Dense)


@pytest.mark.parametrize("given_layers", [[Norm], ["Norm"], {Norm}, iter([Norm])])
def test_given_layers_are_kept_in_addition(given_layers):
    policy = tfamp.Policy("mixed_float16", float32_layers=given_layers)
    assert policy.keeps_float32(Norm)
    assert policy.keeps_float32(BatchNormalization)
    assert not policy.keeps_float32(Dense)


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


def test_empty_tuple_keeps_none():
    assert not tfamp.Policy("mixed_float16", float32_layers=()).keeps_float32(BatchNormalization)


def test_only_mixed_policies_keep_layers():
    assert not tfamp.Policy("float16").keeps_float32(BatchNormalization)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("mixed_fp16", "mixed_float16"), ("Float32", "float32"), ("MIXED_BFLOAT16", "mixed_bfloat16")],
)
def test_wrong_name_lists_the_names_and_suggests_the_nearest(name, suggestion):
    with pytest.raises(ValueError, match=f"did you mean '{suggestion}'") as error:
        tfamp.Policy(name)
    assert all(known in str(error.value) for known in POLICY_NAMES)


@given(st.text())
def test_any_other_text_is_a_value_error(name):
    if name in POLICY_NAMES:
        return
    with pytest.raises(ValueError, match="name must be one of"):
        tfamp.Policy(name)


@pytest.mark.parametrize("name", [None, 16, 1.5, b"float16", float, ["float16"]])
def test_name_that_is_no_string_is_a_type_error(name):
    with pytest.raises(TypeError, match="name must be a string"):
        tfamp.Policy(name)


def test_a_policy_of_keras_as_name_says_to_give_its_name():
    class DTypePolicy:
        name = "mixed_float16"

    with pytest.raises(TypeError, match="Give its name, 'mixed_float16'"):
        tfamp.Policy(DTypePolicy())


def test_a_quantized_name_says_how_layers_are_quantized():
    with pytest.raises(ValueError, match=r"by model\.quantize"):
        tfamp.Policy("int8_from_float32")


def test_classes_of_tf_keras_would_keep_nothing():
    other = type("Dense", (), {"__module__": "tf_keras.src.layers.core.dense"})
    with pytest.raises(TypeError, match=r"of tf_keras .* Give the name 'Dense'"):
        tfamp.Policy("mixed_float16", float32_layers=[other])


def test_policy_as_name_says_to_use_it_as_it_is():
    with pytest.raises(TypeError, match="already is a Policy"):
        tfamp.Policy(tfamp.Policy("float16"))


@pytest.mark.parametrize("layers", ["BatchNormalization", Norm, None, 3])
def test_float32_layers_that_are_no_sequence(layers):
    with pytest.raises(TypeError, match="float32_layers must be a sequence"):
        tfamp.Policy("mixed_float16", float32_layers=layers)


@pytest.mark.parametrize("item", [Norm(), None, 3])
def test_float32_layers_that_hold_something_else(item):
    with pytest.raises(TypeError, match="float32_layers must hold layer classes"):
        tfamp.Policy("mixed_float16", float32_layers=[item])


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_float32_outputs_must_be_a_bool(value):
    with pytest.raises(TypeError, match="float32_outputs must be True or False"):
        tfamp.Policy("mixed_float16", float32_outputs=value)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        tfamp.Policy("mixed_float16", ())
