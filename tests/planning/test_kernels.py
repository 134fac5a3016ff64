"""How many terms an op adds up for one result, and whether its row of the table holds for it."""

import pytest

from tfamp.planning.kernels import SAFE_TERMS, OpCall, fact_about

MOST = int(SAFE_TERMS)


def is_inexact(op, inputs, output=None, device="cpu", **attrs):
    return (
        fact_about(OpCall(op, inputs, output, attrs), "bfloat16", device, frozenset()) is not None
    )


@pytest.mark.parametrize(
    ("shape", "data_format", "inexact"),
    [
        ((MOST, 4), "NHWC", False),
        ((MOST + 1, 4), "NHWC", True),
        ((1, MOST, 1, 4), "NHWC", False),
        ((1, 4, MOST, 1), "NCHW", False),
        ((1, 4, MOST, 1), "NHWC", True),  # One channel.
        ((1, 4, MOST + 1, 1), "NCHW", True),
        ((MOST, 0), "NHWC", False),  # Nothing to add up.
        ((None, 4), "NHWC", True),
        ((1, None), "NHWC", True),
        (None, "NHWC", True),
    ],
)
def test_a_bias_gradient_adds_up_all_elements_of_a_channel(shape, data_format, inexact):
    assert is_inexact("BiasAddGrad", [shape], data_format=data_format) is inexact


@pytest.mark.parametrize(
    ("upstream", "data_format", "inexact"),
    [
        ((1, MOST // 4, 4, 64), "NHWC", False),
        ((2, MOST // 4, 4, 64), "NHWC", True),
        ((1, 64, MOST // 4, 4), "NCHW", False),
        ((2, 64, MOST // 4, 4), "NCHW", True),
        ((1, None, 1, 64), "NHWC", True),
        (None, "NHWC", True),
    ],
)
def test_the_gradient_of_a_filter_adds_up_all_pixels_of_a_batch(upstream, data_format, inexact):
    inputs = [(1, 64, 64, 8), (4,), upstream]
    for text in (data_format, data_format.encode()):  # As ops have it that are about to run.
        found = is_inexact("Conv2DBackpropFilter", inputs, (3, 3, 8, 64), data_format=text)
        assert found is inexact


@pytest.mark.parametrize(
    ("filter_shape", "inexact"),
    [
        *(((side, side, 8, 1), False) for side in (1, 3, 5, 7)),
        ((2, 2, 8, 1), True),
        ((9, 9, 8, 1), True),
        ((3, 5, 8, 1), True),
        ((3, 3, 8, 2), True),
        (None, True),
    ],
)
def test_cudnn_has_square_depthwise_filter_gradients_of_one_result_a_channel(filter_shape, inexact):
    inputs = [(8, 64, 64, 8), (4,), (8, 64, 64, 8)]
    op = "DepthwiseConv2dNativeBackpropFilter"
    assert is_inexact(op, inputs, filter_shape, device="gpu") is inexact


@pytest.mark.parametrize(
    ("filter_shape", "inexact"),
    [
        ((1, 1, 99, MOST), False),
        ((2, 2, 99, MOST // 4), False),
        ((2, 2, 99, MOST // 4 + 1), True),
        ((2, 2, None, MOST // 4), False),  # The gradient has these channels: no sum over them.
        ((2, 2, 4, None), True),
        (None, True),
    ],
)
def test_the_gradient_of_an_image_adds_up_a_filter_and_its_results(filter_shape, inexact):
    inputs = [(4,), filter_shape, (8, 64, 64, 64)]
    assert is_inexact("Conv2DBackpropInput", inputs, (8, 64, 64, 99)) is inexact


@pytest.mark.parametrize(
    ("shape", "inexact"),
    [
        ((), False),
        ((MOST, MOST), False),
        ((2, MOST + 1), True),
        ((2, None), True),
        (None, True),
    ],
)
def test_a_cumulative_sum_adds_up_at_most_the_longest_axis(shape, inexact):
    assert is_inexact("Cumsum", [shape, ()], shape) is inexact


@pytest.mark.parametrize(
    ("equation", "shapes", "inexact"),
    [
        ("ij,jk->ik", [(99, MOST), (MOST, 99)], False),
        ("ij,jk->ik", [(99, MOST + 1), (MOST + 1, 99)], True),
        ("bij,bjk->ik", [(4, 99, MOST // 2), (4, MOST // 2, 99)], True),
        ("ij,jk->ik", [(99, None), (None, 99)], True),
        ("ij,jk->ik", [(None, MOST), (MOST, 99)], False),
        ("ij,jk->ik", [None, (MOST, 99)], True),
        ("...j,jk->...k", [(99, MOST), (MOST, 99)], True),  # These axes are not counted.
    ],
)
def test_an_einsum_adds_up_the_axes_that_the_result_lacks(equation, shapes, inexact):
    assert is_inexact("Einsum", shapes, equation=equation) is inexact
