"""Machine profiles: checks, JSON, and the figures of the built-in ones."""

import dataclasses
import json

import pytest

from tfamp.core.profile import KINDS, MachineProfile, builtin_profile
from tfamp.planning.cost import peaks_of


def test_profiles_are_written_read_and_checked():
    profile = builtin_profile("gpu")
    fields = json.loads(profile.to_json())
    del fields["ops"], fields["least_gain"]
    found = MachineProfile.from_json(json.dumps(fields))
    assert found == dataclasses.replace(profile, least_gain=0.0, ops={})
    own = {"Erfc": {"float32": 2.0, "bfloat16": 1.0, "float16": 1.0}}
    changed = dataclasses.replace(profile, ops=own)
    assert MachineProfile.from_json(changed.to_json()) == changed
    assert peaks_of(changed, "Erfc", "elementwise") == own["Erfc"]
    assert peaks_of(changed, "Softmax", "elementwise") == profile.peaks["elementwise"]
    for changes, message in (
        ({"bandwidth": -1}, "bandwidth must be a positive finite number; got -1"),
        ({"op_overhead": -1}, "op_overhead must be a positive finite number; got -1"),
        ({"peaks": 3}, "peaks must have exactly matmul, .*; got 3"),
        ({"peaks": {"matmul": {}}}, "peaks must have exactly matmul, .*; got matmul"),
        ({"peaks": {**profile.peaks, "conv": {"float64": 1.0}}}, r"peaks\['conv'\] must have "),
        ({"ops": {"Erfc": {**own["Erfc"], "float16": "fast"}}}, r"\['float16'\] must .* 'fast'"),
        ({"ops": [1]}, "profile must be a JSON object"),
        ({"speed": 1}, "profile must be a JSON object with name, peaks, .*'speed'"),
    ):
        with pytest.raises(ValueError, match=message):
            MachineProfile.from_json(json.dumps(fields | changes))
    for text in ("[]", "{", "{}"):
        with pytest.raises(ValueError, match="JSON object|Expecting"):
            MachineProfile.from_json(text)
    with pytest.raises(ValueError, match="device must be one of cpu, gpu, tpu; got 'npu'"):
        builtin_profile("npu")


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
def test_what_is_native_multiplies_faster_and_what_is_not_does_not(device):
    native = builtin_profile(device, bfloat16=True, float16=True).peaks["matmul"]
    assert min(native["bfloat16"], native["float16"]) > native["float32"]
    emulated = builtin_profile(device, bfloat16=False, float16=False).peaks["matmul"]
    assert max(emulated["bfloat16"], emulated["float16"]) <= emulated["float32"]
    gradient = builtin_profile("cpu", bfloat16=True, float16=False).peaks["conv_gradient"]
    assert gradient["float16"] < 0.2 * gradient["float32"]


def test_op_types_that_cpus_compute_unlike_their_kind():
    profile = builtin_profile("cpu", bfloat16=True)
    erfc = peaks_of(profile, "Erfc", "elementwise")
    gradient = ("DepthwiseConv2dNativeBackpropInput", "conv_gradient")
    strided = peaks_of(profile, *gradient, "strided")
    assert max(erfc["bfloat16"], erfc["float16"]) < erfc["float32"] / 5
    assert strided["bfloat16"] < strided["float32"] / 5
    depthwise = ("DepthwiseConv2dNative", "conv")
    assert peaks_of(profile, *depthwise)["bfloat16"] > peaks_of(profile, *depthwise)["float32"]
    emulated = peaks_of(builtin_profile("cpu", bfloat16=False), *depthwise)
    assert emulated["bfloat16"] < emulated["float32"]
    assert not builtin_profile("gpu").ops


@pytest.mark.parametrize(
    ("name", "known", "ratio", "ratio_without_tf32"),
    [
        # float16 on Tensor Cores over float32, by the data sheets.
        ("Tesla T4", "T4", 65 / 8.1, 65 / 8.1),
        ("NVIDIA A100-SXM4-80GB", "A100", 2, 312 / 19.5),
        ("NVIDIA H100 80GB HBM3", "H100", 1979 / 989, 1979 / 2 / 67),
        ("NVIDIA GB200", "GB200", 2, 2500 / 80),
        ("NVIDIA L4", "L4", 121 / 60, 121 / 30.3),
        ("NVIDIA GeForce RTX 4090", "RTX 40", 2, 2),
        ("NVIDIA GeForce RTX 5070 Laptop GPU", "RTX 50", 209.5 / 104.8, 209.5 / 104.8),
        ("Quadro RTX 4000", "V100", 125 / 15.7, 125 / 15.7),  # Of an earlier generation.
    ],
)
def test_gpus_are_known_by_name_with_and_without_tf32(name, known, ratio, ratio_without_tf32):
    for tf32, expected in ((True, ratio), (False, ratio_without_tf32)):
        native = known not in ("T4", "V100")
        profile = builtin_profile("gpu", name=name, tf32=tf32, bfloat16=native)
        assert f" {known} " in profile.name
        for kind in KINDS[:3]:
            peaks = profile.peaks[kind]
            assert peaks["float16"] / peaks["float32"] == pytest.approx(expected)
        assert (peaks["bfloat16"] == peaks["float16"]) is native
        assert (peaks["bfloat16"] > peaks["float32"]) is native
