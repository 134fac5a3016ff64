"""The outputs of transformers are as exact in every way as under Keras's own policy."""

import pytest

from benchmarks.accuracy import DTYPES, SIZES, WAYS, Errors, errors, table

# The shape of the table in docs/accuracy.md with fewer layers and tokens.
SIZE = {**SIZES["full"], "layers": 3, "tokens": 32, "batch": 2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["opt", "bert"])
def test_error_is_at_most_that_of_keras_own_policy(model, dtype):
    pytest.importorskip("keras_hub")
    found = errors(model, SIZE, dtype, WAYS, seeds=1)
    # One rounding at least: of the embeddings, of products.
    assert 1e-4 < found.keras[0] < 2e-2
    for way in WAYS:
        (ratio,) = found.ratios(way)
        assert ratio <= 1.1, way


def test_table_marks_what_is_over_the_bound():
    found = Errors([0.01, 0.01, 0.02], {"policy": [0.01, 0.01, 0.03], "lists": [0.02, 0.02, 0.02]})
    (row,) = table("float16", [("bert", "full", found)], ("policy", "lists")).rows
    assert row == ("bert", "full", "1 %", "1.00 (!)", "2.00 !")
