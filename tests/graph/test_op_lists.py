"""Op lists: TensorFlow's own are restated faithfully, tfamp's can run, changes are checked."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tfamp
from helpers.cases import one_in, one_of_each
from tfamp.graph import op_lists
from tfamp.graph.op_lists import COLORS, DEVICES, OpLists
from tfamp.interop import tf_private
from tfamp.planning import op_sets

DTYPES = ("float16", "bfloat16")
DEFAULTS = [(dtype, device) for dtype in DTYPES for device in DEVICES]
SETS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (op_sets, op_lists)
    for name, value in vars(module).items()
    if isinstance(value, frozenset)
}
HEADER = (
    Path(tf.__file__).parent
    / "include/tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
)


def type_attributes(op: str) -> dict[str, set[str] | None]:
    """Type attributes of an op and the dtypes each admits; None stands for any."""
    return {
        attr.name: {tf.as_dtype(value).name for value in attr.allowed_values.list.type} or None
        for attr in tf_private.op_definition(op).attr
        if attr.type in ("type", "list(type)")
    }


def admits(op: str, dtype: str) -> bool:
    """Whether a type attribute of the op admits both float32 and the dtype."""
    return any(
        allowed is None or {"float32", dtype} <= allowed for allowed in type_attributes(op).values()
    )


def kernel_dtypes(op: str, device: str) -> set[str]:
    """Dtypes some kernel of an op has on a device."""
    return {
        tf.as_dtype(value).name
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
        if kernel.device_type == device
        for constraint in kernel.constraint
        for value in constraint.allowed_values.list.type
    }


# Facts


@pytest.mark.parametrize("name", one_in(4, SETS))
def test_every_op_is_one_tensorflow_knows(name):
    unknown = SETS[name] - tf_private.known_ops() - op_sets.EXTERNAL
    assert not unknown, "a comma lost between two names shows here too"


def header_lists() -> dict[str, dict[str, frozenset[str]]]:
    """The lists in TensorFlow's header, without what the CPU's float16 mode adds."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text(encoding="utf-8"))
    base, float16, bfloat16 = re.split(r"class AutoMixedPrecisionLists(?:Fp16|Mkl)\b", text)
    of_tensor_lists = set(re.findall(r'"(TensorList\w+)"', base))
    methods = re.compile(r"(\w+)List\(\) override \{(.*?)return list;", re.DOTALL)
    one_dnn = re.compile(r"if \(use_onednn_\) \{(.*?)\}", re.DOTALL)
    found = {}
    for dtype, body in (("float16", float16), ("bfloat16", bfloat16)):
        found[dtype] = {}
        for method, code in methods.findall(body):
            of_gpu = one_dnn.sub("", code)
            ops = set(re.findall(r'list\.insert\("(\w+)"\)', of_gpu))
            for literal in re.findall(r"FlatSet<string>\s*\{(.*?)\}", of_gpu, re.DOTALL):
                ops |= set(re.findall(r'"(\w+)"', literal))
            ops |= of_tensor_lists if "AddTensorListOps" in code else set()
            found[dtype][method.lower()] = frozenset(ops)
    return found


@pytest.mark.skipif(not HEADER.exists(), reason="this TensorFlow comes without its C++ headers")
def test_grapplers_lists_are_those_of_the_installed_tensorflow():
    header = header_lists()
    for dtype in DTYPES:
        lists = OpLists.grappler(dtype)
        assert {color: getattr(lists, color) for color in COLORS} == header[dtype]


# tfamp's defaults


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_default_ops_that_compute_admit_the_dtype(dtype, device):
    lists = OpLists.default(dtype, device)
    refused = [op for op in sorted(lists.allow | lists.infer) if not admits(op, dtype)]
    assert not refused


@pytest.mark.parametrize(
    ("device", "kernels_of"),
    [("auto", "CPU"), ("auto", "GPU"), ("cpu", "CPU"), ("gpu", "GPU")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_allows_no_op_that_would_lose_its_kernel(dtype, device, kernels_of):
    lost = [
        op
        for op in sorted(OpLists.default(dtype, device).allow)
        if "float32" in (found := kernel_dtypes(op, kernels_of)) and dtype not in found
    ]
    assert not lost


PADDED = {"Conv", "FusedPadConv2D", "FusedResizeAndPadConv2D"}
NOT_OURS = {"GRUBlockCell", "GRUBlockCellGrad"} | op_sets.EXTERNAL
CUDNN = {f"CudnnRNN{name}{version}" for name in ("", "Backprop") for version in ("", "V2", "V3")}


@pytest.mark.parametrize(
    ("dtype", "device", "color", "more", "fewer"),
    [
        ("float16", "auto", "allow", PADDED, NOT_OURS),
        ("float16", "gpu", "allow", {"BatchMatMulV3", *PADDED}, NOT_OURS),
        ("float16", "cpu", "infer", set(), set()),
        ("float16", "gpu", "infer", set(), set()),
        ("float16", "auto", "deny", set(), set()),
        ("float16", "auto", "clear", {"StatelessWhile", "While"}, set()),
        ("bfloat16", "auto", "allow", {"BatchMatMulV3", "Conv", *CUDNN}, set()),
        ("bfloat16", "cpu", "infer", {"Pow", "RsqrtGrad"}, set()),
        ("bfloat16", "auto", "deny", set(), {"Pow"}),
        ("bfloat16", "auto", "clear", set(), {"ResizeBilinear"}),
    ],
)
def test_how_defaults_differ_from_grapplers(dtype, device, color, more, fewer):
    ours = getattr(OpLists.default(dtype, device), color)
    theirs = getattr(OpLists.grappler(dtype), color)
    assert ours - theirs == more
    assert theirs - ours == fewer


@pytest.mark.parametrize("build", [OpLists.default, OpLists.grappler])
@pytest.mark.parametrize("dtype", ["float32", "half", "", None, tf.float16, ["float16"]])
def test_another_dtype_is_refused(build, dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16; got "):
        build(dtype)


@pytest.mark.parametrize("device", ["GPU", "cuda", "/CPU:0", None])
def test_another_device_is_refused(device):
    with pytest.raises(ValueError, match=r"device must be one of auto, cpu, gpu, tpu; got "):
        OpLists.default("float16", device)


# What autocast derives


@pytest.mark.parametrize("lists", [OpLists.default(*args) for args in DEFAULTS])
def test_autocasts_sets_do_not_overlap(lists):
    assert lists.low == lists.allow
    assert lists.deny <= lists.float32
    assert not lists.low & lists.float32
    assert not lists.widest & (lists.low | lists.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("expected", "ops"),
    [
        ("low", "MatMul BatchMatMulV2 Einsum Conv2D Conv3DBackpropInputV2 DepthwiseConv2dNative"),
        (
            "float32",
            "Exp Expm1 Log Log1p Pow Rsqrt Softmax LogSoftmax Sum Mean Prod Cumsum Cumprod L2Loss "
            "EuclideanNorm Softplus SoftmaxCrossEntropyWithLogits Reciprocal Tan Erfinv CTCLoss "
            "Square SquaredDifference "
            "SparseSoftmaxCrossEntropyWithLogits Cholesky Svd RFFT CTCLossV2",
        ),
        (
            "widest",
            "AddV2 Sub Mul RealDiv Maximum AddN ConcatV2 Pack SelectV2 Equal Less BiasAdd Cross "
            "Atan2 FloorMod TensorScatterUpdate ClipByValue PadV2",
        ),
        (None, "Relu Tanh Sigmoid Reshape Identity Max AvgPool Cast FusedBatchNormV3 Sqrt"),
    ],
)
def test_a_sample_of_autocasts_sets(dtype, expected, ops):
    lists = OpLists.default(dtype)
    for op in ops.split():
        holding = [name for name in ("low", "float32", "widest") if op in getattr(lists, name)]
        assert holding == ([expected] if expected else []), op


def test_joining_ops_take_several_tensors_of_one_low_dtype():
    for op in sorted(op_sets.JOINING):
        arguments = tf_private.op_definition(op).input_arg
        attributes = [
            argument.type_attr
            for argument in arguments
            for _ in range(2 if argument.number_attr else 1)
        ]
        shared = {name for name in attributes if name and attributes.count(name) > 1}
        admitted = type_attributes(op)
        assert any(
            admitted[name] is None or {"float32", *DTYPES} <= admitted[name] for name in shared
        ), op


def test_float32_kernel_ops_lack_a_low_kernel_or_type_attribute():
    for op in sorted(op_sets.FLOAT32_KERNELS):
        lacking = [
            (dtype, device)
            for dtype in DTYPES
            for device in ("CPU", "GPU")
            if not admits(op, dtype) or dtype not in kernel_dtypes(op, device)
        ]
        assert lacking, op


@pytest.mark.parametrize(
    ("change", "held", "freed"),
    [
        ({"deny_add": ["AddV2"]}, {"float32"}, set()),
        ({"allow_add": ["Softmax"]}, {"low"}, set()),
        ({"infer_add": ["Pow"]}, {"widest"}, {"Pow"}),  # Its two inputs still need one dtype.
        ({"clear_add": ["Pow"]}, {"widest"}, {"Pow"}),
        ({"infer_add": ["Softmax"]}, set(), {"Softmax"}),  # It is there; this frees it.
        ({"deny_remove": ["Exp"]}, set(), {"Exp"}),
        ({"allow_remove": ["MatMul"]}, {"widest"}, set()),
    ],
)
def test_changes_hold_under_autocast(change, held, freed):
    ((op,),) = change.values()
    lists = OpLists.default("float16").with_changes(**change)
    assert {name for name in ("low", "float32", "widest") if op in getattr(lists, name)} == held
    assert lists.as_given == freed
    assert op in lists.with_changes(deny_add=[op]).float32


# Changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allow_add": ["Sum"], "deny_add": ["Sum"]}, r"'Sum' in both allow_add and deny_add"),
        ({"infer_add": ["Sum"], "clear_add": ["Sum"]}, r"'Sum' in both infer_add and clear_add"),
        ({"deny_add": ["Sum"], "deny_remove": ["Sum"]}, r"'Sum' in both deny_add and deny_remove"),
        ({"allow_remove": ["Sum"]}, r"allow_remove .*; got 'Sum', but it is on deny"),
        ({"clear_remove": ["Cast"]}, r"clear_remove .*; got 'Cast', but it is on no list"),
        ({"deny_add": ["MatMull"]}, r"no op 'MatMull'; the nearest name is 'MatMul'\."),
        ({"deny_add": ["batch_mat_mul"]}, r"no op 'batch_mat_mul'; .* 'BatchMatMul'\."),
        ({"deny_add": ["tf.matmul"]}, r"no op 'tf.matmul'; the nearest name is 'MatMul'\."),
        ({"deny_remove": ["Expp"]}, r"no op 'Expp'; the nearest name is 'Exp'\. Give op types"),
    ],
)
def test_contradictions_and_unknown_ops_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        OpLists.default("float16").with_changes(**changes)


@pytest.mark.parametrize(
    ("argument", "value"),
    one_of_each(
        [f"{c}_{what}" for c in COLORS for what in ("add", "remove")],
        ["MatMul", 3, None, [b"MatMul"], [None], {"MatMul": 1}.values()],
    ),
)
def test_what_is_no_collection_of_strings_is_a_type_error(argument, value):
    with pytest.raises(TypeError, match=rf"{argument} must "):
        OpLists.default("float16").with_changes(**{argument: value})


# The value


def test_lists_are_made_of_any_collection_and_are_values():
    lists = OpLists(allow=["MatMul", "MatMul"], deny={"Exp"})
    assert lists.allow == frozenset({"MatMul"})
    assert lists == OpLists(allow=("MatMul",), deny=["Exp"])
    assert len({lists, OpLists(allow=("MatMul",), deny=["Exp"]), OpLists()}) == 2
    assert pickle.loads(pickle.dumps(lists)) == lists
    assert tfamp.OpLists is OpLists
    assert tfamp.graph.OpLists is OpLists


def test_lists_cannot_be_changed():
    lists = OpLists.default("float16")
    for name in ("allow", "low", "float32", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(lists, name, frozenset())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"infer": ["Exp"], "deny": ["Exp"]}, ValueError, "got 'Exp' in both infer and deny"),
        ({"deny": ["Exp"], "as_given": ["Exp"]}, ValueError, "as_given .*'Exp', which is on deny"),
        (
            {"allow": "MatMul"},
            TypeError,
            "allow must be a collection of strings.*; got the string 'MatMul'",
        ),
        ({"deny": [1]}, TypeError, "deny must hold strings; got 1"),
    ],
)
def test_wrong_lists_are_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        OpLists(**given)
