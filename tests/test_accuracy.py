"""The outputs of transformers are as exact in every way as under Keras's own policy."""

import pytest

from benchmarks.accuracy import DTYPES, SIZES, WAYS, Errors, errors, table
from helpers.cases import one_of_each

# The shape of the table in docs/benchmarks.md with fewer layers and tokens.
SIZE = {**SIZES["full"], "layers": 3, "tokens": 32, "batch": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), one_of_each(["opt", "bert"], DTYPES))
def test_error_is_at_most_that_of_keras_own_policy(model, dtype):
    pytest.importorskip("keras_hub")
    found = errors(model, SIZE, dtype, WAYS, seeds=1)
    # One rounding at least: of the embeddings, of products.
    assert 1e-4 < found.keras[0] < 2e-2
    for way in WAYS:
        assert found.ratio(way) <= 1.1, way


def test_table_compares_errors_over_all_seeds():
    found = Errors([0.01, 0.07], {"policy": [0.05, 0.05], "lists": [0.08, 0.06]})
    result = table("float16", [("bert", "full", found)], ("policy", "lists"))
    (row,) = result.rows
    assert row == ("bert", "full", "5 %", "1.00", "1.41 !")
    assert result.notes[-1] == ("bert, full: over 5% on some of 2 seeds: Keras's policy 1, lists 2")
