"""The messages on the page of errors are those that TensorFlow, Keras and tfamp give."""

import ast
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
if not PAGE.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
HALF, SINGLE = tf.ones((2, 2), tf.float16), tf.ones((2, 2))


def large_weight():
    layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    layers[0].kernel.assign(np.full((2, 2), 1e6))
    tfamp.prepare(model, level="O3", dtype="float16")


# Words of a message, on the page too -> what causes it.
ERRORS = {
    "cannot compute AddV2 as input #1(zero-based) was expected to be a half tensor but is a float "
    "tensor": lambda: HALF + SINGLE,
    "Input 'y' of 'AddV2' Op has type float32 that does not match type float16 of argument 'x'": (
        lambda: tf.function(lambda: HALF + SINGLE)()
    ),
    "Input 'b' of 'MatMul' Op has type float32 that does not match type float16 of argument 'a'": (
        lambda: tf.function(lambda: tf.matmul(HALF, SINGLE))()
    ),
    "Tensors in list passed to 'values' of 'ConcatV2' Op have types [float16, float32] that don't "
    "all match": lambda: tf.function(lambda: tf.concat([HALF, SINGLE], 0))(),
    "Tensor conversion requested dtype float32 for Tensor with dtype float16": (
        lambda: tf.Variable(tf.ones(2)).assign(tf.ones(2, tf.float16))
    ),
    "Value for attr 'T' of bfloat16 is not in the list of allowed values": (
        lambda: tf.linalg.cholesky(tf.eye(2, dtype=tf.bfloat16))
    ),
    "RFFT requires tf.float32 or tf.float64 inputs": lambda: tf.signal.rfft(HALF),
    "Tensor had NaN values": lambda: tf.debugging.check_numerics(np.float32([np.nan]), "x"),
    "Cannot convert 'fp16' to a mixed precision DTypePolicy": (
        lambda: keras.mixed_precision.set_global_policy("fp16")
    ),
    "name must be one of float16, bfloat16, float32, float64, mixed_float16, mixed_bfloat16": (
        lambda: tfamp.set_global_policy("O1")
    ),
    "dtype must be one of float16, bfloat16, auto": lambda: tfamp.autocast("fp16"),
    "holds 1e+06, and float16 holds up to 65504": large_weight,
    "is the policy of layers that Keras has quantized, and a tfamp.Policy is not quantized": (
        lambda: tfamp.set_global_policy("int8_from_mixed_bfloat16")
    ),
    "PrecisionConfig has no key 'initial_scale_power'": (
        lambda: tfamp.PrecisionConfig.from_dict({"initial_scale_power": 16})
    ),
    "which is not a regular expression": lambda: tfamp.PrecisionConfig(keep_float32="("),
    "is a LossScaleOptimizer already; with a LossScaleOptimizer the loss would be scaled twice": (
        lambda: tfamp.LossScaleOptimizer(tfamp.LossScaleOptimizer(keras.optimizers.SGD()))
    ),
    "The optimizer for a LossScaleOptimizer must be a keras.optimizers.Optimizer": (
        lambda: tfamp.LossScaleOptimizer("adam")
    ),
    "No inf checks were recorded prior to update()": lambda: tfamp.GradScaler().update(),
    "'LossScaleOptimizer' object has no attribute 'get_scaled_loss'": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).get_scaled_loss
    ),
}


def page_text():
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("words", ERRORS)
def test_the_words_of_an_error_are_on_the_page(words):
    with pytest.raises(Exception, match=re.escape(words)):
        ERRORS[words]()
    assert words in page_text()


def test_the_words_of_a_warning_are_on_the_page():
    words = "The graph has no op that can be converted to bfloat16: it stays as it is"
    with pytest.warns(tfamp.NothingConvertedWarning, match=words):
        tfamp.rewrite(lambda x: x + 1, dtype="bfloat16")(SINGLE)
    assert words in page_text()


def test_the_words_of_the_errors_of_a_bound_are_on_the_page(tmp_path):
    class Noise(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
        def __call__(self, x):
            shape = [4, 4]
            return {"y": tf.matmul(x, tf.raw_ops.RandomStandardNormal(shape=shape, dtype="float"))}

    class Words(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
        def __call__(self, x):
            return {"y": tf.argmax(tf.matmul(x, tf.eye(4)), -1)}

    class Checked(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
        def __call__(self, x):
            return {"y": tf.matmul(tf.debugging.check_numerics(x, "x"), tf.eye(4))}

    nan = np.full((2, 4), np.nan, "float32")
    for module, data, words in (
        (Noise(), np.ones((2, 4), "float32"), "No nodes in float32 bring the error of"),
        (
            Words(),
            np.ones((2, 4), "float32"),
            "There is nothing to measure: on the data no signature of",
        ),
        (Checked(), nan, "cannot be run on the data:"),
    ):
        source = str(tmp_path / type(module).__name__)
        tf.saved_model.save(module, source, signatures=module.__call__)
        with pytest.raises(tfamp.SavedModelError, match=words):
            tfamp.rewrite_saved_model(
                source, tmp_path / "low", dtype="bfloat16", bound=1e-6, data={"x": data}
            )
        assert words in page_text()


def test_the_words_of_the_warning_of_a_loss_that_keras_never_scaled_are_on_the_page():
    with tfamp.policy_scope("mixed_float16"):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(name="sgd"))
    weight = keras.Variable([1.0])
    with pytest.warns(tfamp.TfampWarning) as caught:
        optimizer.apply([tf.ones(1)], [weight])
    assert str(caught[0].message).partition(" Keras wraps the")[0] in page_text()


def test_the_words_of_the_warning_of_clipped_gradients_are_on_the_page():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), name="loss_scale_optimizer")
    weight = keras.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value**2))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, [weight.value]), 1.0)
        optimizer.apply(gradients, [weight])

    with pytest.warns(tfamp.TfampWarning) as caught:
        step()
    assert str(caught[0].message).partition(" Unscale them")[0] in page_text()


@pytest.mark.parametrize("is_built", [False, True])
def test_the_words_of_the_warning_of_a_later_policy_are_on_the_page(is_built):
    model = keras.Sequential([keras.layers.Dense(1)], name="sequential")
    if is_built:
        model.build((None, 2))
    model.compile("sgd", "mse", run_eagerly=True)
    with tfamp.policy_scope("mixed_bfloat16"), pytest.warns(tfamp.TfampWarning) as caught:
        model.fit(SINGLE, SINGLE, verbose=0)
    text = str(caught[0].message)
    words = "was built before the policy" if is_built else text.partition(" Set the")[0]
    assert words in text
    assert words in page_text()


class Average(keras.layers.Layer):
    def build(self, shape):
        self.average = self.add_weight(shape=(2,), trainable=False, name="average")

    def call(self, x):
        self.average.assign(self.average * 0.9 + keras.ops.mean(x, 0) * 0.1)
        return x


def test_the_words_of_the_warning_of_state_are_on_the_page():
    with tfamp.policy_scope("mixed_bfloat16"), pytest.warns(tfamp.TfampWarning) as caught:
        Average(name="ema")(SINGLE)
    text = str(caught[0].message)
    assert text.partition("Small updates are lost there.")[0] in page_text()


# Errors that only tfamp raises, for which arguments that are right by themselves can be the cause.
# A page is for these first: their message alone does not always say what to do.
OF_TFAMP = {"RewriteError", "SavedModelError", "SkippedStepsError", "UnsupportedBackendError"}
# Words of those messages of them that need no page, as they name their cause and the remedy.
HAVE_THEIR_REMEDY = {
    # Files: which one is broken, or must be given instead.
    "cannot be loaded: there is no such file.",
    "Load a model with code of its own in Python and give it to",
    "is broken: it holds no graph.",
    "is broken and cannot be read:",
    "has no value. Save the model again.",
    "The variables of",
    "The output has no name; give a new directory to write to.",
    "; give another directory.",
    "are inside one another; give a directory next to it.",
    "exists and is not a SavedModel; it is not overwritten.",
    "could not be written:",
    # Signatures, data and freezing: what there is, or what to leave out.
    "No signature of",
    "cannot be run on the calibration data:",
    "has no signatures, and a frozen model has nothing else.",
    "cannot be frozen: its value was not found. Convert without freezing.",
    "does more with it than read it. Convert without freezing.",
    # Graphs that are damaged, or that a function cannot be traced for.
    "The graph has a function without a name.",
    "is computed from nothing but itself: a call is its own argument.",
    "The functions of the graph call each other hundreds deep",
    "which is not UTF-8 text: the graph is damaged.",
    "The values in a loop or a conditional of TensorFlow 1 cannot be observed",
    "which the rewritten graph does not have. Pass it to the function",
    "was not rewritten: it runs in float32.",
    "Tuning runs functions: call it where no function is being traced.",
    "Tuning needs graphs: tf.config.run_functions_eagerly(True) is on.",
    "works on TensorFlow's ops, but Keras runs on the",
}


def messages():
    """The longest text without a value in each message of the errors that only tfamp raises."""
    found = {}
    for path in sorted(Path(tfamp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(made, ast.Call) and ast.unparse(made.func) in OF_TFAMP:
                texts = [x.value for x in ast.walk(made.args[0]) if isinstance(x, ast.Constant)]
                words = max((x for x in texts if isinstance(x, str)), key=len, default="")
                found[f"{path.name}: {ast.unparse(made.args[0])[:60]}"] = words.strip()
    return found


def test_every_error_that_only_tfamp_raises_is_on_the_page_or_named_here():
    found = {where: words for where, words in messages().items() if words}
    text = page_text()
    missing = {
        where: words
        for where, words in found.items()
        if words not in text and not any(known in words for known in HAVE_THEIR_REMEDY)
    }
    assert not missing, (
        "give each of these a section of docs/errors.md; or name its words in HAVE_THEIR_REMEDY "
        f"if the message has cause and remedy: {missing}"
    )
    unused = {
        known for known in HAVE_THEIR_REMEDY if not any(known in words for words in found.values())
    }
    assert not unused, f"no message has these words any more: {unused}"
    both = {known for known in HAVE_THEIR_REMEDY if known in text}
    assert not both, f"these are on the page, so that nothing needs to name them here: {both}"


def test_every_section_of_the_page_has_a_message_and_a_remedy():
    sections = re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    assert sections
    for section in sections:
        heading, _, rest = section.partition("\n")
        _, message, remedy = rest.split("```", 2)
        assert message.startswith("text\n"), heading
        assert remedy.strip(), heading
