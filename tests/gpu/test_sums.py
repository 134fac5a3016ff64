"""Sums of low-precision tensors against float64."""

import pytest

from helpers.cases import first_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("process", first_of([1, 2], pytest.mark.long))
def test_sums(device, check, dtype, process):
    """Sums over 8,192 rows, rewritten and under autocast, are exact to their dtype, each time."""
    device.needs(dtype)
    sums = device.helper("acceptance_sums", dtype, str(device.size(8192, 64)))
    for name, found in sums.items():
        check(f"{name}: dtype of the product", ", ".join(found["products"]), equals=dtype)
        check(f"{name}: error", found["tfamp"], at_most=2, unit="eps")
        check(f"{name}: error under autocast", found["autocast"], at_most=2, unit="eps")
        check(f"{name}: error of TensorFlow's kernel", found["TensorFlow"], unit="eps")
