"""The kind of a device is in its name, in all spellings of graphs and tensors."""

import pytest

from tfamp.core.device_names import device_kind_of

KINDS = {
    "": "",
    "/device:GPU:0": "gpu",
    "GPU:1": "gpu",
    "/job:localhost/replica:0/task:0/device:CPU:0": "cpu",
    "/gpu:0": "gpu",
    "/device:TPU_REPLICATED_CORE:0": "tpu",
    "/job:cpus": "",
    "/device:XLA_LIKE:0": "",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_is_found_in_each_spelling(name):
    assert device_kind_of(name) == KINDS[name]
