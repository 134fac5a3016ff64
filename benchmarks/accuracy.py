"""Compares the error of every way to mixed precision on KerasHub models with Keras's own policy.

    python -m benchmarks.accuracy [--sizes full] [--models gpt2 bert] [--dtypes bfloat16]
                                  [--ways policy autocast] [--seeds N] [--markdown]

For each model the rms difference of its outputs from its float32 outputs, with the same weights and
inputs, over Keras's mixed policy's. Biases and gains are moved from their initial values.
Plans are made with the built-in profile of the machine: the same everywhere of its kind.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks.outputs import difference, floats, keras_policy
from benchmarks.progress import reporting
from benchmarks.tables import Table, show, to_markdown
from tfamp.core.options import PLACEMENTS

Sizes = Mapping[str, int]
# "full" is the shape of a real model with fewer layers; the others are where roundings of a few
# numbers decide.
SIZES: Mapping[str, Sizes] = {
    "full": {"layers": 6, "width": 256, "heads": 8, "tokens": 64, "vocabulary": 1000, "batch": 4},
    **{
        f"width {width}": {
            **{"layers": 2, "width": width, "heads": max(1, width // 8)},
            **{"tokens": 16, "vocabulary": 100, "batch": 4},
        }
        for width in (2, 4, 8, 16)
    },
}
BOUNDS = {size: 1.1 if size == "full" else 2.0 for size in SIZES}
DTYPES = ("bfloat16", "float16")
# Every placement that there is.
WAYS = ("policy", *PLACEMENTS, "autocast")
# More than roundings make: outputs with the other sign.
JUMP = 0.05
# How far biases and gains are from zero and one, as in trained models.
MOVED = 0.2
# How these are called.
_MOVED_WEIGHTS = ("bias", "beta", "gamma", "scale")

# ---- The models ----------------------------------------------------------------------------------


def _language_model(name: str, **arguments: Any) -> Callable[[Sizes], Any]:
    def make(size: Sizes) -> Any:
        import keras_hub

        sizes = {key: size[value] for key, value in arguments.items() if isinstance(value, str)}
        return getattr(keras_hub.models, name)(
            vocabulary_size=size["vocabulary"],
            num_layers=size["layers"],
            hidden_dim=size["width"],
            intermediate_dim=4 * size["width"],
            **{**arguments, **sizes},
        )

    return make


def _vit(size: Sizes) -> Any:
    import keras_hub

    return keras_hub.models.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=4 if size["tokens"] > 16 else 8,
        num_layers=size["layers"],
        num_heads=size["heads"],
        hidden_dim=size["width"],
        mlp_dim=4 * size["width"],
    )


_PLAIN = {"num_heads": "heads", "max_sequence_length": "tokens", "dropout": 0.0}
MODELS: Mapping[str, Callable[[Sizes], Any]] = {
    "gpt2": _language_model("GPT2Backbone", **_PLAIN),
    "bert": _language_model("BertBackbone", **_PLAIN),
    "opt": _language_model("OPTBackbone", **_PLAIN),
    "llama": _language_model("LlamaBackbone", num_query_heads="heads", num_key_value_heads="heads"),
    "vit": _vit,
}


def inputs_of(model: keras.Model, size: Sizes, seed: int) -> Any:
    """Inputs as in training: images, or tokens, padded at the end in some rows."""
    random = np.random.default_rng(seed)
    if not isinstance(model.input, Mapping):
        return tf.constant(random.normal(size=(size["batch"], *model.input.shape[1:])), tf.float32)
    shape = size["batch"], size["tokens"]
    padding = np.ones(shape, "int32")
    padding[::2, size["tokens"] * 3 // 4 :] = 0
    given = {
        "token_ids": random.integers(size["vocabulary"], size=shape),
        "padding_mask": padding,
        "segment_ids": random.integers(2, size=shape),
    }
    return {name: tf.constant(given[name], tf.int32) for name in model.input}


def weights_of(initial: Sequence[tuple[str, np.ndarray]], seed: int) -> list[np.ndarray]:
    """The initial weights, by their paths, with biases and gains moved; but for seed 0 shuffled."""
    random = np.random.default_rng(seed)
    return [
        values + MOVED * random.normal(size=values.shape).astype("float32")
        if path.rpartition("/")[2].endswith(_MOVED_WEIGHTS)
        else (random.permutation(values.ravel()).reshape(values.shape) if seed else values)
        for path, values in initial
    ]


# ---- The error of a way --------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Relative rms errors of a model's outputs: a number for each seed.

    Attributes:
        keras: Those under Keras's own mixed policy.
        ways: Errors of each way.
    """

    keras: Sequence[float]
    ways: Mapping[str, Sequence[float]]

    def ratio(self, way: str) -> float:
        """The rms error of a way over all seeds, over Keras's policy's."""
        return _rms(self.ways[way]) / _rms(self.keras)


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, "float64")))))


def errors(model: str, size: Sizes, dtype: str, ways: Sequence[str], seeds: int) -> Errors:
    """Runs a model in every way, on the weights and inputs of each seed."""
    make = MODELS[model]
    keras.utils.set_random_seed(0)
    exact = make(size)
    initial = [(each.path, each.numpy()) for each in exact.weights]
    with keras_policy(f"mixed_{dtype}"):
        mixed = {"keras": make(size)}
    with tfamp.policy_scope(f"mixed_{dtype}"):
        mixed["policy"] = make(size)
    functions = {name: tf.function(each) for name, each in {"exact": exact, **mixed}.items()}
    functions |= {way: _in_way(way, exact, dtype) for way in ways if way not in functions}
    found: dict[str, list[float]] = {way: [] for way in ("keras", *ways)}
    for seed in range(seeds):
        weights, x = weights_of(initial, seed), inputs_of(exact, size, seed)
        for each in (exact, *mixed.values()):
            each.set_weights(weights)
        wanted = floats(functions["exact"](x))
        for way, of_way in found.items():
            of_way.append(difference(floats(functions[way](x)), wanted))
    return Errors(found.pop("keras"), found)


def _in_way(way: str, exact: Any, dtype: str) -> Callable[[Any], Any]:
    """A float32 model as a function, under one of `WAYS`."""
    if way == "autocast":
        return tfamp.autocast(dtype)(tf.function(exact))
    return tfamp.rewrite(tf.function(exact), dtype=dtype, placement=way, profile="builtin")


# ---- The table -----------------------------------------------------------------------------------


def table(dtype: str, rows: Sequence[tuple[str, str, Errors]], ways: Sequence[str]) -> Table:
    """The table of a dtype: rows are model, size and what was found."""
    cells = [
        (
            *(model, size, f"{100 * _rms(found.keras):.3g} %"),
            *(_cell(found.ratio(way), BOUNDS[size]) for way in ways),
        )
        for model, size, found in rows
    ]
    return Table(
        f"Error in {dtype}: Keras's own policy, and each way over it",
        ("model", "size", "Keras's policy", *ways),
        tuple(cells),
        left=2,
        notes=(
            "errors are root mean squares over the seeds, of both sides of a ratio",
            "! is over the bound: 1.1 at full size, 2 at tiny widths",
            *(f"{model}, {size}: {text}" for model, size, found in rows if (text := _jumps(found))),
        ),
    )


def _jumps(found: Errors) -> str:
    """On how many seeds an error is a jump, "" for none."""
    counts = {
        way: sum(error > JUMP for error in of_seeds)
        for way, of_seeds in {"Keras's policy": found.keras, **found.ways}.items()
    }
    counted = ", ".join(f"{way} {count}" for way, count in counts.items() if count)
    return f"over {JUMP:.0%} on some of {len(found.keras)} seeds: {counted}" if counted else ""


def _cell(ratio: float, bound: float) -> str:
    return f"{ratio:.2f}{' !' if ratio > bound else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choices = {"--sizes": SIZES, "--models": MODELS, "--dtypes": DTYPES, "--ways": WAYS}
    for option, values in choices.items():
        parser.add_argument(option, nargs="+", choices=values, default=[*values])
    parser.add_argument("--seeds", type=int, default=3, help="how many sets of weights and inputs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    tables = []
    with reporting("models", len(args.dtypes) * len(args.models) * len(args.sizes)) as progress:
        for dtype in args.dtypes:
            rows = []
            for size in args.sizes:
                for model in args.models:
                    progress(f"{model}, {size}, {dtype}")
                    found = errors(model, SIZES[size], dtype, args.ways, args.seeds)
                    rows.append((model, size, found))
            tables.append(table(dtype, rows, args.ways))
    if args.markdown:
        print("\n".join(map(to_markdown, tables)))
    else:
        show(tables)


if __name__ == "__main__":
    main()
