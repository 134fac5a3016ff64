"""Keras on JAX and PyTorch, with TensorFlow installed beside: what works there and what says no."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import tfamp
from tfamp.core.messages import described
from tfamp.interop.keras_hooks import require_tensorflow

# One fresh process per backend, as Keras picks its backend when it is imported.
_PROGRAM = """
import json
import keras, numpy as np, tfamp

found = {}

def model():
    start = {"kernel_initializer": keras.initializers.Constant(0.05)}  # The same on every backend.
    with tfamp.policy_scope("mixed_float16"):
        return keras.Sequential([
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", **start),
            keras.layers.Dense(1, **start),
        ])

net = model()
found["policies"] = [layer.dtype_policy.name for layer in net.layers]
found["compute"] = keras.backend.standardize_dtype(net.layers[0](np.ones((2, 8))).dtype)
found["returns"] = keras.backend.standardize_dtype(net(np.ones((2, 8))).dtype)

optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**10)
net.compile(optimizer, "mse")
x, y = np.random.default_rng(0).random((64, 8)).astype("float32"), np.ones((64, 1), "float32")
losses = net.fit(x, y, batch_size=16, epochs=4, verbose=0, shuffle=False).history["loss"]
found["falls"] = losses[-1] < 0.5 * losses[0]
found["steps"] = int(optimizer.iterations)
before = [np.array(w) for w in net.get_weights()]
net.fit(np.full((16, 8), np.inf, "float32"), y[:16], batch_size=16, verbose=0)
found["unchanged"] = all(map(np.array_equal, before, net.get_weights()))
found["skipped"] = int(optimizer.skipped_steps)
found["scale"] = float(optimizer.get_scale())

def value(number):
    return keras.ops.convert_to_tensor(np.float32(number))

def numbers(values):
    return [float(keras.ops.convert_to_numpy(v)) for v in values]

stateless = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
weight = keras.Variable(1.0)
stateless.build([weight])
unscaled, _ = stateless.stateless_apply(
    [v.value for v in stateless.variables], [value(1.0)], [weight.value]
)
found["stateless_never_scaled"] = numbers(unscaled)
stateless.get_scale()
scale_at = [v.path for v in stateless.variables].index(stateless.dynamic_scale.path)
state = [v.value for v in stateless.variables]
weights, state = stateless.stateless_apply(state, [value(4.0)], [weight.value])
found["stateless"] = numbers(weights)
weights, state = stateless.stateless_apply(state, [value(np.inf)], weights)
found["stateless_overflow"] = numbers(weights) + [numbers(state)[scale_at]]

custom = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
weight = keras.Variable(1.0)
for gradient in (1.0, np.inf):
    scaled = custom.get_scaled_loss(value(gradient))
    custom.apply_gradients(zip(custom.get_unscaled_gradients([scaled]), [weight]))
found["custom"] = numbers([weight.value, custom.get_scale()])

for name, call in {
    "autocast": lambda: tfamp.autocast("bfloat16"),
    "rewrite": lambda: tfamp.rewrite(net, dtype="bfloat16"),
    "GradScaler": lambda: tfamp.GradScaler(),
}.items():
    try:
        call()
    except tfamp.UnsupportedBackendError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(scope="module")
def found(backend):
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_policies_fit_and_loops_work_and_what_needs_tensorflow_says_so(found, backend):
    assert found["policies"] == ["mixed_float16", "float32"]
    assert (found["compute"], found["returns"]) == ("float16", "float32")
    assert found["steps"] == 16
    assert found["falls"]
    assert found["unchanged"]
    assert (found["skipped"], found["scale"]) == (1, 2.0**9)
    assert found["stateless_never_scaled"] == found["stateless"] == [0.5]
    assert found["stateless_overflow"] == [0.5, 2.0]
    assert found["custom"] == [0.5, 2.0]
    for name in ("autocast", "rewrite", "GradScaler"):
        assert found[name].startswith(f"tfamp.{name} works on TensorFlow's ops")
        assert f"Keras runs on the {backend} backend" in found[name]
        assert "KERAS_BACKEND=tensorflow" in found[name]


def test_without_jax_installed_autocast_and_rewrite_still_refuse_its_backend(monkeypatch):
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    for call in (lambda: tfamp.autocast("bfloat16"), lambda: tfamp.rewrite(abs, dtype="bfloat16")):
        with pytest.raises(RuntimeError, match="jax backend"):
            call()
    message = r"a\.b works .* runs on the jax backend\. Set KERAS_BACKEND=tensorflow .* use c, "
    with pytest.raises(tfamp.UnsupportedBackendError, match=message):
        require_tensorflow("a.b", "c")
    with tfamp.autocast(enabled=False):
        pass
    monkeypatch.undo()
    require_tensorflow("a.b")


def foreign(module, name, *bases):
    """An object of a class as another package has it."""
    return type(name, bases, {"__module__": module})()


TF1 = "tensorflow.python.training"
TF_KERAS = "tf_keras.src.optimizers.adam", "Adam"


@pytest.mark.parametrize(
    ("module", "name", "library"),
    [
        (*TF_KERAS, "tf_keras"),
        (TF1 + ".adam", "AdamOptimizer", "TensorFlow 1"),
        ("torch.optim.adamw", "AdamW", "PyTorch"),
    ],
)
def test_foreign_objects_are_named_with_their_module_and_what_to_do(module, name, library):
    value = foreign(module, name)
    # What a user derives from one is one, and so is a class.
    for each in (value, foreign("shop", "Own", type(value)), type(value)):
        assert f" That is of {library}" in described(each)
        assert described(each).endswith(": use its counterpart in keras, which is Keras 3.")
    assert described(type(value)).startswith(f"the class {module}.{name}.")
    assert described(3) == "3 of type int."  # Others are named without advice.


def _entries():
    import keras
    import tensorflow as tf

    from tfamp.diagnostics import NumericsMonitor

    other, weight = foreign(*TF_KERAS), tf.Variable([1.0])
    pairs = [(tf.ones(1), weight)]

    def model():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    return {
        "LossScaleOptimizer": lambda: tfamp.LossScaleOptimizer(other),
        "GradScaler.step": lambda: tfamp.GradScaler().step(other, pairs),
        "GradScaler.unscale": lambda: tfamp.GradScaler().unscale(other, [tf.ones(1)]),
        "GradientAccumulator": lambda: tfamp.GradientAccumulator(other, 2),
        "prepare, model": lambda: tfamp.prepare(other),
        "prepare, optimizer": lambda: tfamp.prepare(model(), other),
        "prepare, kept layer": lambda: tfamp.prepare(model(), keep_float32=[other]),
        "prepare, kept class": lambda: tfamp.prepare(model(), keep_float32=[type(other)]),
        "set_layer_dtype": lambda: tfamp.set_layer_dtype(other, "float16"),
        "precision_settings": lambda: tfamp.precision_settings(other),
        "NumericsMonitor.record": lambda: NumericsMonitor().record(
            [tf.ones(1)], [weight], optimizer=other
        ),
        "set_global_policy": lambda: tfamp.set_global_policy(other),
        "Policy": lambda: tfamp.Policy("mixed_float16", float32_layers=[type(other)]),
    }


@pytest.mark.parametrize("entry", _entries())
def test_entries_say_what_is_foreign_and_what_to_do(entry):
    message = r"tf_keras\.src\.optimizers\.adam\.Adam.*use its counterpart in keras"
    with pytest.raises((TypeError, ValueError), match=message):
        _entries()[entry]()
