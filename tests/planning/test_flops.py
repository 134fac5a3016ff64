"""Counts of operations, by hand; and every op of the allow lists is counted."""

import pytest

from tfamp import OpLists
from tfamp.planning import op_sets
from tfamp.planning.cost import FLOP_FORMULAS, FREE_OPS, MOVING_OPS

IMAGE, FILTER, MADE = (2, 8, 8, 3), (3, 3, 3, 16), (2, 4, 4, 16)
CONVOLUTION = 2 * 2 * 4 * 4 * 16 * 3 * 3 * 3
SIZES = (4,)  # the tensor that holds a shape


@pytest.mark.parametrize(
    ("op", "inputs", "output", "expected"),
    [
        ("MatMul", [(4, 8), (8, 5)], (4, 5), 2 * 4 * 8 * 5),
        ("MatMul", [(8, 4), (5, 8)], (4, 5), 2 * 4 * 8 * 5),  # both transposed
        ("BatchMatMulV2", [(7, 4, 8), (8, 5)], (7, 4, 5), 2 * 7 * 4 * 8 * 5),
        ("BatchMatMulV3", [(3, 7, 4, 8), (7, 8, 5)], (3, 7, 4, 5), 2 * 21 * 4 * 8 * 5),
        ("Conv2D", [IMAGE, FILTER], MADE, CONVOLUTION),
        ("Conv2DBackpropInput", [SIZES, FILTER, MADE], IMAGE, CONVOLUTION),
        ("Conv2DBackpropFilter", [IMAGE, SIZES, MADE], FILTER, CONVOLUTION),
        ("Conv3D", [(2, 4, 4, 4, 3), (3, 3, 3, 3, 5)], (2, 4, 4, 4, 5), 2 * 128 * 5 * 81),
        ("Conv3DBackpropInputV2", [(5,), (3, 3, 3, 3, 5), (2, 4, 4, 4, 5)], None, 2 * 640 * 81),
        ("DepthwiseConv2dNative", [IMAGE, (3, 3, 3, 2)], (2, 8, 8, 6), 2 * 2 * 64 * 6 * 9),
        ("FusedPadConv2D", [IMAGE, (4, 2), FILTER], MADE, CONVOLUTION),
        ("BlockLSTM", [(), (9, 2, 4), None, None, (10, 24)], None, 2 * 9 * 2 * 10 * 24),
        ("BlockLSTMGradV2", [(), (9, 2, 4), None, None, (10, 24)], None, 4 * 9 * 2 * 10 * 24),
        ("LSTMBlockCell", [(2, 4), None, None, (10, 24)], None, 2 * 2 * 10 * 24),
        ("CudnnRNNV3", [(9, 2, 4), None, None, (500,)], None, 2 * 9 * 2 * 500),
    ],
)
def test_counts(op, inputs, output, expected):
    assert FLOP_FORMULAS[op].flops(dict(enumerate(inputs)), {0: output}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("equation", "inputs", "expected"),
    [
        ("ab,bc->ac", [(4, 8), (8, 5)], 2 * 4 * 8 * 5),
        ("btd,de->bte", [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
        ("...ab,...bc->...ac", [(7, 6, 4, 8), (6, 8, 5)], 2 * 7 * 6 * 4 * 8 * 5),
        ("ab->ba", [(4, 8)], 4 * 8),
        ("a,b,c->abc", [(2,), (3,), (4,)], 2 * 2 * 24),
        ("abc,bc->ac", [(4, 8), (8, 5)], None),
    ],
)
def test_einsums_count_every_combination_of_indices(equation, inputs, expected):
    assert FLOP_FORMULAS["Einsum"].flops(dict(enumerate(inputs)), {}, equation) == expected


def test_a_shape_that_is_missing_makes_the_count_unknown():
    assert FLOP_FORMULAS["MatMul"].flops({0: (4, 8), 1: None}, {0: (4, 5)}) is None
    assert FLOP_FORMULAS["MatMul"].flops({0: (4, 8)}, {0: (4, 5)}) is None


def test_every_allowed_op_that_multiplies_is_counted():
    allowed = OpLists.default("float16", "gpu").allow | OpLists.default("bfloat16", "cpu").allow
    assert allowed - FLOP_FORMULAS.keys() == {"LSTMBlockCellGrad"}
    assert not (allowed - {"LSTMBlockCellGrad"}) & (FREE_OPS | MOVING_OPS)
    assert op_sets.FLOAT16_ALLOW - FLOP_FORMULAS.keys() >= op_sets.EXTERNAL - {
        "FusedConv2DBiasActivation"
    }
