"""How exact each way to mixed precision is on models of KerasHub, beside Keras's own policy.

    python -m benchmarks.accuracy [--sizes full] [--models gpt2 bert] [--dtypes bfloat16]
                                  [--ways policy autocast] [--seeds N] [--markdown]

For each model the rms difference of its outputs from its float32 outputs, with the same weights and
inputs, over that of Keras's mixed policy. Biases and gains are moved from their initial values.
Plans are made with the built-in profile of the machine: the same everywhere of its kind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfamp
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
# How far biases and gains are from zero and one, as those of trained models are.
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


MODELS: Mapping[str, Callable[[Sizes], Any]] = {
    "gpt2": _language_model(
        "GPT2Backbone", num_heads="heads", max_sequence_length="tokens", dropout=0.0
    ),
    "bert": _language_model(
        "BertBackbone", num_heads="heads", max_sequence_length="tokens", dropout=0.0
    ),
    "opt": _language_model(
        "OPTBackbone", num_heads="heads", max_sequence_length="tokens", dropout=0.0
    ),
    "llama": _language_model("LlamaBackbone", num_query_heads="heads", num_key_value_heads="heads"),
    "vit": _vit,
}


def inputs_of(model: keras.Model, size: Sizes, seed: int) -> Any:
    """Inputs like those of training: images, or tokens of which the last of some are padding."""
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


def weights_of(model: keras.Model, seed: int) -> list[np.ndarray]:
    """The weights of a model with its biases and gains moved."""
    random = np.random.default_rng(seed)
    return [
        each.numpy() + MOVED * random.normal(size=each.shape).astype("float32")
        if each.path.rpartition("/")[2].endswith(_MOVED_WEIGHTS)
        else each.numpy()
        for each in model.weights
    ]


# ---- The error of a way --------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Relative rms errors of a model's outputs: a number for each seed.

    Attributes:
        keras: Those under Keras's own mixed policy.
        ways: Those of each way.
    """

    keras: Sequence[float]
    ways: Mapping[str, Sequence[float]]

    def ratios(self, way: str) -> list[float]:
        """The error of a way over Keras's, for each seed."""
        return [own / keras for own, keras in zip(self.ways[way], self.keras, strict=True)]


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, "float64")))))


def _flat(outputs: Any) -> np.ndarray:
    tensors = [tf.cast(each, tf.float64) for each in tf.nest.flatten(outputs)]
    return np.concatenate([each.numpy().ravel() for each in tensors])


@contextlib.contextmanager
def _keras_policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def errors(model: str, size: Sizes, dtype: str, ways: Sequence[str], seeds: int) -> Errors:
    """Runs a model in every way, on the weights and inputs of each seed."""
    found = [_errors_of_seed(MODELS[model], size, dtype, ways, seed) for seed in range(seeds)]
    return Errors([own for own, _ in found], {way: [of[way] for _, of in found] for way in ways})


def _errors_of_seed(
    make: Callable[[Sizes], Any], size: Sizes, dtype: str, ways: Sequence[str], seed: int
) -> tuple[float, dict[str, float]]:
    keras.utils.set_random_seed(seed)
    exact = make(size)
    weights, x = weights_of(exact, seed), inputs_of(exact, size, seed)
    exact.set_weights(weights)
    wanted = _flat(tf.function(exact)(x))

    def error(function: Callable[[Any], Any]) -> float:
        return _rms(_flat(function(x)) - wanted) / _rms(wanted)

    with _keras_policy(f"mixed_{dtype}"):
        mixed = _with_weights(make, size, weights)
    return error(tf.function(mixed)), {
        way: error(_in_way(way, exact, dtype, lambda: _with_weights(make, size, weights)))
        for way in ways
    }


def _with_weights(make: Callable[[Sizes], Any], size: Sizes, weights: Any) -> Any:
    model = make(size)
    model.set_weights(weights)
    return model


def _in_way(way: str, exact: Any, dtype: str, make: Callable[[], Any]) -> Callable[[Any], Any]:
    """The model as a function, under one of `WAYS`."""
    if way == "policy":
        with tfamp.policy_scope(f"mixed_{dtype}"):
            return tf.function(make())
    if way == "autocast":
        return tfamp.autocast(dtype)(tf.function(exact))
    return tfamp.rewrite(tf.function(exact), dtype=dtype, placement=way, profile="builtin")


# ---- The table -----------------------------------------------------------------------------------


def table(dtype: str, rows: Sequence[tuple[str, str, Errors]], ways: Sequence[str]) -> Table:
    """The table of a dtype: rows are model, size and what was found."""
    cells = [
        (
            *(model, size, f"{100 * statistics.median(found.keras):.3g} %"),
            *(_cell(found.ratios(way), BOUNDS[size]) for way in ways),
        )
        for model, size, found in rows
    ]
    return Table(
        f"Error in {dtype}: Keras's own policy, and each way over it",
        ("model", "size", "Keras's policy", *ways),
        tuple(cells),
        left=2,
        notes=(
            "medians over the seeds; the bound is 1.1 at full size, 2 at tiny widths",
            "! is over the bound, (!) that of a single seed",
        ),
    )


def _cell(ratios: Sequence[float], bound: float) -> str:
    median = statistics.median(ratios)
    mark = " !" if median > bound else " (!)" if max(ratios) > bound else ""
    return f"{median:.2f}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choices = {"--sizes": SIZES, "--models": MODELS, "--dtypes": DTYPES, "--ways": WAYS}
    for option, values in choices.items():
        parser.add_argument(option, nargs="+", choices=values, default=[*values])
    parser.add_argument("--seeds", type=int, default=3, help="how many weights and inputs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    tables = []
    with reporting("models", len(args.dtypes) * len(args.models) * len(args.sizes)) as tell:
        for dtype in args.dtypes:
            rows = []
            for size in args.sizes:
                for model in args.models:
                    tell(f"{model}, {size}, {dtype}")
                    found = errors(model, SIZES[size], dtype, args.ways, args.seeds)
                    rows.append((model, size, found))
            tables.append(table(dtype, rows, args.ways))
    if args.markdown:
        print("\n".join(map(to_markdown, tables)))
    else:
        show(tables)


if __name__ == "__main__":
    main()
