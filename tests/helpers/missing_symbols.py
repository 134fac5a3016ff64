"""Calls that work without a private symbol of TensorFlow and Keras, for each of these.

    python tests/helpers/missing_symbols.py [--write docs/missing_symbols.md]

A symbol is missing where tfamp looks it up; TensorFlow and Keras go on with theirs, as a release
would that has renamed it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    # A choice that `tune` finds in the user's cache looks no symbol up.
    os.environ["TFAMP_CACHE"] = "off"

import tfamp
from tfamp.interop import patching

# ---- The public calls ----------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = (X @ np.linspace(-1, 1, 8)[:, None]).astype("float32")


def _model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.LayerNormalization()(keras.layers.Dense(16, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def _fits(model: keras.Model) -> None:
    before = model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
    after = model.evaluate(X, Y, verbose=0)
    assert after < 0.9 * before, (before, after)


def _step(model, loss_scale=1.0):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(tf.constant(X)) - Y) ** 2) * loss_scale
    return loss, tape.gradient(loss, model.trainable_variables)


def policy() -> None:
    with tfamp.policy_scope("mixed_bfloat16"):
        model = _model()
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        _fits(model)
        assert model.layers[1].compute_dtype == "bfloat16"


def loss_scaling() -> None:
    model = _model()
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    _fits(model)


def stored_weights() -> None:
    model = _model()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-2), master_weights=True)
    model.compile(optimizer, "mse")
    _fits(model)


def accumulation() -> None:
    model = _model()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=1.0)
    accumulator = tfamp.GradientAccumulator(optimizer, 2)
    losses = []
    for _ in range(8):
        loss, gradients = _step(model)
        accumulator.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def grad_scaler() -> None:
    model, scaler, optimizer = _model(), tfamp.GradScaler(), keras.optimizers.SGD(0.1)
    losses = []
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(tf.constant(X)) - Y) ** 2)
            scaled = scaler.scale(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        scaler.step(optimizer, zip(gradients, model.trainable_variables, strict=True))
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def autocast() -> None:
    for run in (tf.function, lambda function: function):
        with tfamp.autocast("bfloat16"):
            product = run(lambda x: tf.matmul(x, x, transpose_b=True))(tf.constant(X))
        assert product.dtype == tf.bfloat16
        np.testing.assert_allclose(tf.cast(product, tf.float32), X @ X.T, rtol=0.05, atol=0.1)


def rewrite() -> None:
    function = tfamp.rewrite(lambda x: tf.matmul(x, x, transpose_b=True) + 1.0, dtype="bfloat16")
    np.testing.assert_allclose(function(tf.constant(X)), X @ X.T + 1, rtol=0.05, atol=0.1)
    assert any(op.type == "Cast" for op in _trace(function).graph.get_operations())


def _trace(function) -> tf.types.experimental.ConcreteFunction:
    return function.get_concrete_function(tf.TensorSpec((32, 8)))


def rewrite_of_a_step() -> None:
    model, optimizer = _model(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step():
        loss, gradients = _step(model)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    step = tfamp.rewrite(step, dtype="bfloat16")
    losses = [float(step()) for _ in range(4)]
    assert losses[-1] < losses[0]


def saved_models() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        model = _model()
        model.export(before, verbose=False)
        tfamp.rewrite_saved_model(before, after, dtype="bfloat16")
        loaded = tf.saved_model.load(after)
        result = loaded.serve(X)
        np.testing.assert_allclose(result, model(X), rtol=0.05, atol=0.1)


def _prepared(level: str) -> None:
    model = _model()
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    _fits(tfamp.prepare(model, level=level, dtype="bfloat16").model)


def comparison() -> None:
    result = tfamp.diagnostics.compare(_model(), X, dtype="bfloat16")
    assert 0 < result.output_error < 0.1


def search() -> None:
    model = _model()
    model.compile("sgd", "mse")
    report = tfamp.diagnostics.find_nonfinite(model, X * 1e6, Y, dtype="float16")
    assert report is not None


def monitor() -> None:
    model, seen = _model(), tfamp.diagnostics.NumericsMonitor(every=1)
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    model.fit(X, Y, verbose=0, callbacks=[seen])
    assert "dense" in seen.to_text()


def device() -> None:
    assert "tensorflow" in tfamp.diagnostics.device_report().to_text().lower()


def tuning() -> None:
    report = tfamp.tune(
        lambda x: tf.matmul(x, x, transpose_b=True),
        tf.constant(X),
        dtype="bfloat16",
        candidates=("float32", "lists"),
        seconds=0.2,
        rounds=2,
    )
    assert report.best


def keras_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model = _model()
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-2)), "mse")
        model.fit(X, Y, verbose=0)
        model.save(path)
        loaded = keras.saving.load_model(path)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
        assert isinstance(loaded.optimizer, tfamp.LossScaleOptimizer)


CALLS: dict[str, Callable[[], None]] = {
    "policies": policy,
    "LossScaleOptimizer": loss_scaling,
    "master_weights": stored_weights,
    "GradientAccumulator": accumulation,
    "GradScaler": grad_scaler,
    "autocast": autocast,
    "rewrite": rewrite,
    "rewrite of a step": rewrite_of_a_step,
    "rewrite_saved_model": saved_models,
    "prepare O1": functools.partial(_prepared, "O1"),
    "prepare O2": functools.partial(_prepared, "O2"),
    "prepare O3": functools.partial(_prepared, "O3"),
    "compare": comparison,
    "find_nonfinite": search,
    "NumericsMonitor": monitor,
    "device_report": device,
    "tune": tuning,
    "files": keras_files,
}

# ---- Missing symbols -----------------------------------------------------------------------------

_locate, _foreign_symbol = patching.locate, patching.foreign_symbol


def _modules() -> list:
    names = [module.name for module in pkgutil.walk_packages(tfamp.__path__, "tfamp.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


@contextlib.contextmanager
def _looked_up(check: Callable[[str], None]) -> Iterator[None]:
    """A context in which `check` is called with each symbol before it is looked up."""

    def locate(symbol):
        check(symbol)
        return _locate(symbol)

    def foreign_symbol(owner, name, library):
        check(f".{name}")
        return _foreign_symbol(owner, name, library)

    modules = _modules()
    _forget(modules)
    for new_locate, new_symbol in ((locate, foreign_symbol), (_locate, _foreign_symbol)):
        for module in modules:
            for name, value in (("locate", new_locate), ("foreign_symbol", new_symbol)):
                if hasattr(module, name):
                    setattr(module, name, value)
        if new_locate is locate:
            yield
    _forget(modules)


def _forget(modules: list) -> None:
    """Empties the caches of all modules: what they keep was found while nothing was missing."""
    patching._reported.clear()
    for module in modules:
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and value is not patching.locate:
                value.cache_clear()


@contextlib.contextmanager
def without(missing: str) -> Iterator[None]:
    """A context in which tfamp does not find a symbol."""

    def check(symbol):
        if symbol == missing:
            library = "Keras" if symbol.startswith("keras") else "TensorFlow"
            raise patching.missing_symbol(symbol.replace(":", "."), library)

    with _looked_up(check):
        yield


def requested() -> dict[str, list[str]]:
    """The calls that look up each symbol, by symbol; an attribute of objects begins with a dot."""
    found = defaultdict(list)
    for name, call in CALLS.items():
        seen = set()
        gc.collect()  # An optimizer of the call before would hold what this one looks up.
        with _looked_up(seen.add):
            call()
        for symbol in seen:
            # A class is looked up on the way to what it holds.
            if not re.match(r"\.[A-Z]", symbol):
                found[symbol].append(name)
    return dict(sorted(found.items()))


def outcome(symbol: str, name: str) -> str:
    """The outcome of a call without a symbol: "works", "warns" or "raises"; else a fault."""
    before = wrapped()  # By a policy of the process, for one.
    with without(symbol), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CALLS[name]()
            result = "works"
        except Exception as error:  # noqa: BLE001 - another error than the one that names it
            # Keras wraps errors of a layer that it makes from a configuration.
            is_named = "was tested with" in str(error) and _name_of(symbol) in str(error)
            result = "raises" if is_named else f"{type(error).__name__}: {error}"
        gc.collect()
    told = [warning for warning in caught if "was tested with" in str(warning.message)]
    if left := sorted(set(wrapped()) - set(before)):
        return f"left wrappers of {', '.join(left)}"
    return "warns" if result == "works" and told else result


def _name_of(symbol: str) -> str:
    return symbol.replace(":", ".").rpartition(".")[2]


def wrapped() -> list[str]:
    """The symbols that are replaced now."""
    values = {symbol: getattr(*_locate(symbol)) for _, symbol in patching.SYMBOLS}
    return [name for name, value in values.items() if patching._replaced_by(value) is not None]


Outcomes = Mapping[str, str]


def measured(symbols: Mapping[str, list[str]]) -> Iterator[tuple[str, Outcomes]]:
    """The outcomes of the calls that look up each symbol, one symbol after the other."""
    for symbol, names in symbols.items():
        yield symbol, {name: outcome(symbol, name) for name in names}


# ---- The page ------------------------------------------------------------------------------------


def rows(symbols: Iterable[tuple[str, Outcomes]]) -> dict[str, str]:
    """The row of a symbol in the page's table, by symbol."""

    def named(outcomes: Outcomes, wanted: str) -> str:
        return ", ".join(name for name in CALLS if outcomes.get(name) == wanted) or "-"

    return {
        symbol: f"| `{symbol}` | {named(found, 'raises')} | {named(found, 'warns')} |"
        for symbol, found in symbols
    }


def rows_of(page: str) -> dict[str, str]:
    """The rows of a page that `rows` made."""
    return {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}


HEAD = """# Missing symbols

tfamp uses symbols of TensorFlow and Keras that are not public. A release may rename or remove
them. For each the table has those of {count} calls that raise `UnsupportedVersionError` without
it, which names the symbol, and those that work with one warning of what is lost. All other calls
work as they do with it. A symbol that begins with a dot is an attribute of objects. Measured
with TensorFlow {tensorflow} and Keras {keras}:

```sh
python tests/helpers/missing_symbols.py --write docs/missing_symbols.md
```

| without | raise | warn |
|---|---|---|
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", help="names of calls by symbol, or null for all: prints outcomes")
    arguments = parser.parse_args()
    if arguments.json is not None:
        print(json.dumps(list(measured(json.loads(arguments.json) or requested()))))
        sys.exit()
    found = []
    for symbol, outcomes in measured(requested()):
        print(symbol, outcomes, flush=True)
        found.append((symbol, outcomes))
    if arguments.write:
        text = (
            HEAD.format(count=len(CALLS), tensorflow=tf.__version__, keras=keras.__version__)
            + "\n".join(rows(found).values())
            + "\n"
        )
        arguments.write.write_text(text, encoding="utf-8")
