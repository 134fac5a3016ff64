"""The table of docs/guides/deploy.md: which exports which runtimes take, with which error.

The converters and runtimes are real. A refusal is tested as well: when a new version of a runtime
takes what an older one refused, the page is out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "deploy.md"
MODELS = ("ConvNet", "Transformer")
X = {
    "ConvNet": np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype("float32"),
    "Transformer": np.random.default_rng(1).normal(size=(4, 16, 32)).astype("float32"),
}
# Times the page's figure: another CPU adds up in another order.
_MARGIN = 3.0
_ROUNDING = 2e-6

_SERVE = """
import sys
sys.modules["keras"] = sys.modules["tfamp"] = None  # An import of either is an error.
import numpy as np, tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
serve = loaded.signatures["serving_default"]
(value,) = serve(x=tf.constant(np.load(sys.argv[2]))).values()
np.save(sys.argv[3], tf.cast(value, tf.float32).numpy())  # NumPy stores no bfloat16.
print(value.dtype.name)
"""


def rows():
    """The cells of the page's table; none without the page, as beside a wheel's tests."""
    text = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    table = text.partition("<!-- runtimes: begin -->")[2].partition("<!-- runtimes: end -->")[0]
    lines = re.findall(r"^\| (?!export |---)(.+) \|$", table, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.split("|")) for line in lines]


def test_the_page_has_the_rows_of_this_file_and_the_words_that_people_search():
    if not PAGE.is_file():
        pytest.skip("the documentation is not beside the tests")
    ways = ("float32, or `O0`", "policy", "`O1`", "`O2`", "`O3`", "rewritten SavedModel")
    assert {way for way, *_ in rows()} == set(ways)
    text = PAGE.read_text("utf-8")
    for word in ("tflite", "TFLite", "LiteRT", "onnx", "ONNX", "TensorFlow Serving"):
        assert re.search(rf"\b{word}\b", text), word


def made(name):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input(X[name].shape[1:], name="x")
    if name == "ConvNet":
        x = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(x))
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(x))
    else:
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
        hidden = layers.Dense(64)(x)
        hidden = layers.Dense(32)(keras.ops.gelu(hidden, approximate=True))
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + hidden))
    return keras.Model(inputs, layers.Dense(10)(x))


def exported(name, way, dtype, folder):
    """Writes a SavedModel; returns the model it is of, None for a rewritten file."""
    path = str(folder / "saved")
    if way == "policy":
        with tfamp.policy_scope(f"mixed_{dtype}"):
            model = made(name)
    elif way.startswith("float32"):
        # The way back too: what is exported after O0 was mixed before.
        with tfamp.policy_scope("mixed_bfloat16"):
            model = made(name)
        model, _ = tfamp.prepare(model, level="O0")
    elif way == "rewritten SavedModel":
        made(name).export(str(folder / "float32"), verbose=False)
        tfamp.rewrite_saved_model(folder / "float32", path, dtype=dtype)
        return None
    else:
        model, _ = tfamp.prepare(made(name), level=way.strip("`"), dtype=dtype)
    model.export(path, verbose=False)
    return model


def served(folder, dtype):
    """The signature's answer in a process with TensorFlow alone, as in TensorFlow Serving."""
    given, answer = folder / "x.npy", folder / "y.npy"
    command = [sys.executable, "-c", _SERVE, folder / "saved", given, answer]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == dtype
    return np.load(answer)


def in_litert(folder, x):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "saved"))
    runtime = interpreter.Interpreter(model_content=converter.convert())
    (taken,), (given,) = runtime.get_input_details(), runtime.get_output_details()
    runtime.resize_tensor_input(taken["index"], x.shape)
    runtime.allocate_tensors()
    runtime.set_tensor(taken["index"], x)
    runtime.invoke()
    return runtime.get_tensor(given["index"])


def in_onnxruntime(model, folder, x):
    pytest.importorskip("tf2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = str(folder / "model.onnx")
    if model is None:
        command = ["tf2onnx.convert", "--saved-model", folder / "saved", "--output", path]
        command += ["--opset", "18"]
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    else:
        model.export(path, format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    return session.run(None, {taken.name: x})[0]


def check(cell, run, expected, refusal):
    if cell == "refused":
        with pytest.raises(Exception, match=refusal):
            run()
        return
    error = np.abs(run().astype("float64") - expected).max() / np.abs(expected).max()
    assert error <= _MARGIN * float(cell) + _ROUNDING


@pytest.mark.parametrize(("way", "dtype", "model", "saved", "lite", "onnx"), rows())
def test_each_runtime_does_what_the_page_says(way, dtype, model, saved, lite, onnx, tmp_path):
    x = X[model]
    np.save(tmp_path / "x.npy", x)
    expected = made(model)(x).numpy().astype("float64")
    source = exported(model, way, dtype, tmp_path)
    # Only level O3 returns the low dtype.
    returned = dtype if way == "`O3`" else "float32"
    check(saved, lambda: served(tmp_path, returned), expected, "")
    # Tensors of 16 bits are named in each refusal.
    check(lite, lambda: in_litert(tmp_path, x), expected, r"xf16|xbf16|\bf16|\bbf16")
    check(onnx, lambda: in_onnxruntime(source, tmp_path, x), expected, "bfloat16")
