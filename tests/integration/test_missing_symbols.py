"""Without a private symbol, calls that need it say so, and others work, as the page says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import missing_symbols
from helpers.missing_symbols import rows, rows_of

PAGE = Path(__file__).parents[2] / "docs" / "missing_symbols.md"
pytestmark = [
    pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests"),
    pytest.mark.filterwarnings("ignore"),
]
# One that only a warning needs, one by which gradients are made exact, and two of autocast.
SOME = (
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit",
    "tensorflow.python.eager.execute:record_gradient",
    "keras.src.losses.loss:ops",
    "tensorflow.python.ops.gen_math_ops:cast",
)


NAMES = ("policies", "LossScaleOptimizer", "autocast", "rewrite")


def page() -> dict[str, str]:
    return rows_of(PAGE.read_text("utf-8"))


def outcomes(symbols: dict[str, list[str]] | None) -> dict[str, dict[str, str]]:
    """The outcomes in a process of their own: caches are emptied, and symbols not found."""
    command = [sys.executable, "-W", "ignore", missing_symbols.__file__, "--json"]
    result = subprocess.run(
        [*command, json.dumps(symbols)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_some_calls_do_what_the_page_says():
    for symbol, found in outcomes({symbol: list(NAMES) for symbol in SOME}).items():
        cells = page()[symbol].split("|")[2:4]
        for name in NAMES:
            is_in = [name in (each.strip() for each in cell.split(",")) for cell in cells]
            expected = "raises" if is_in[0] else "warns" if is_in[1] else "works"
            assert found[name] == expected, (symbol, name)


@pytest.mark.nightly
def test_every_symbol_is_survived_as_the_page_says():
    assert rows(outcomes(None).items()) == page()


# In a process of its own, as it is looked up when a module is imported.
WITHOUT_FUNCTION = """
import numpy as np, tensorflow as tf, keras
from tfamp.interop import patching
locate = patching.locate

def missing(symbol):
    if symbol.endswith(".polymorphic_function:Function"):
        raise patching.missing_symbol(symbol, "TensorFlow")
    return locate(symbol)

patching.locate = missing
import tfamp
x = np.ones((4, 3), "float32")
with tfamp.policy_scope("mixed_bfloat16"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
model.fit(x, x[:, :1], verbose=0)
with tfamp.autocast("bfloat16"):
    assert tf.matmul(x, x, transpose_b=True).dtype == tf.bfloat16
tfamp.prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), level="O2")
try:
    tfamp.rewrite(lambda x: x, dtype="bfloat16")(x)
except tfamp.UnsupportedVersionError as error:
    print(error)
"""


def test_without_the_class_of_functions_only_rewrites_fail():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_FUNCTION],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "polymorphic_function:Function is not in TensorFlow" in result.stdout
