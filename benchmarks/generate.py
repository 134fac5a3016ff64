"""Generates text with small KerasHub models at every level and compares it with float32's.

    python -m benchmarks.generate                                # prints the table
    python -m benchmarks.generate --page docs/guides/generate.md # writes it into the page

The models learn source text of the standard library first, byte by byte, so that the likeliest
next token is not decided by rounding.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json.decoder
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.outputs import difference
from benchmarks.progress import reporting
from benchmarks.tables import Table, show, to_markdown

LENGTH, PROMPT, TEXTS = 48, 16, 8
_ALPHABET, _BATCH, _EPOCHS, _EXAMPLES = 128, 32, 10, 1024
_SIZES = {"vocabulary_size": _ALPHABET, "num_layers": 2, "hidden_dim": 64}
# KerasHub's class without the last word -> arguments of its backbone.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2": _SIZES
    | {"num_heads": 4, "intermediate_dim": 128, "max_sequence_length": LENGTH, "dropout": 0.0},
    "Gemma": _SIZES
    | {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_dim": 128},
}
# A level or "policy", and a dtype.
WAYS = (
    ("O0", "float32"),
    *((way, dtype) for dtype in ("float16", "bfloat16") for way in ("policy", "O1", "O2", "O3")),
)


@dataclass(frozen=True)
class Generated:
    """Tokens that a model generates, with the logits, cache and traces of that.

    Attributes:
        tokens: The tokens after the prompts.
        logits: Logits of texts that the model has learned, in float32.
        cache: The dtype of the cache of keys and values, and its size in bytes.
        traces: How often `generate` was traced in two calls.
    """

    tokens: np.ndarray
    logits: np.ndarray
    cache: tuple[str, int]
    traces: int


@functools.cache
def text() -> np.ndarray:
    """The text to learn as numbers below 128."""
    source = inspect.getsource(json.decoder).encode("ascii", "ignore")
    return np.frombuffer(source, np.uint8).astype("int32")


def make(name: str, sampler: Any = "greedy", **compiled: Any) -> Any:
    """Makes a compiled model with random weights.

    Args:
        name: A key of `MODELS`.
        sampler: KerasHub's name of one, or a sampler.
        **compiled: Other arguments of `compile`.
    """
    import keras
    import keras_hub

    backbone = getattr(keras_hub.models, f"{name}Backbone")(**MODELS[name])
    task = getattr(keras_hub.models, f"{name}CausalLM")
    model = task(backbone=backbone, preprocessor=None)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), sampler=sampler, **compiled)
    return model


@functools.cache
def learned(name: str) -> tuple[np.ndarray, ...]:
    """The weights of a model that has learned the text, in float32."""
    import keras

    keras.utils.set_random_seed(0)
    model, random = make(name), np.random.default_rng(0)
    starts = random.integers(0, len(text()) - LENGTH - 1, _EXAMPLES)
    x, y = (np.stack([text()[s + i : s + i + LENGTH] for s in starts]) for i in (0, 1))
    model.fit(_inputs(x), y, batch_size=_BATCH, epochs=_EPOCHS, shuffle=False, verbose=0)
    return tuple(model.get_weights())


def trained(name: str, sampler: Any = "greedy", **compiled: Any) -> Any:
    """Makes a model with the weights it has learned, under the policy in force."""
    model = make(name, sampler, **compiled)
    model.set_weights(learned(name))
    return model


def at_level(name: str, way: str, dtype: str, sampler: Any = "greedy") -> Any:
    """Makes a trained model under a policy, or puts it on a level."""
    import tfamp

    if way == "policy":
        with tfamp.policy_scope(f"mixed_{dtype}"):
            return trained(name, sampler)
    low = None if dtype == "float32" else dtype
    return tfamp.prepare(trained(name, sampler), level=way, dtype=low).model


def prompts() -> dict[str, np.ndarray]:
    """Beginnings of texts, padded."""
    tokens = np.zeros((TEXTS, LENGTH), "int32")
    tokens[:, :PROMPT] = _texts()[:, :PROMPT]
    return {"token_ids": tokens, "padding_mask": np.arange(LENGTH) < PROMPT * np.ones_like(tokens)}


def generate(model: Any) -> np.ndarray:
    """The tokens that a model generates after the prompts."""
    return np.asarray(model.generate(prompts(), stop_token_ids=None)["token_ids"])[:, PROMPT:]


def logits(model: Any) -> np.ndarray:
    """Logits of whole texts, in float32."""
    return np.asarray(model.predict(_inputs(_texts()), verbose=0), "float32")


def graph_of(model: Any) -> Any:
    """The concrete function of `generate`, which has run."""
    import tensorflow as tf

    inputs = {name: tf.constant(value) for name, value in prompts().items()}
    return model.generate_function.get_concrete_function(inputs, stop_token_ids=None)


def measured(model: Any) -> Generated:
    """Generates twice."""
    tokens = generate(model)
    if not np.array_equal(generate(model), tokens):
        raise ArithmeticError("two runs of a greedy sampler differ")
    cache = cache_of(graph_of(model))
    traces = model.generate_function.experimental_get_tracing_count()
    return Generated(tokens, logits(model), cache, traces)


def cache_of(function: Any) -> tuple[str, int]:
    """The dtype of the cache in the graph, and its size: the only floats that its loop keeps."""
    import tensorflow as tf

    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    for node in nodes:
        if node.op in ("While", "StatelessWhile"):
            dtypes = [tf.as_dtype(each) for each in node.attr["T"].list.type]
            for dtype, shape in zip(dtypes, node.attr["output_shapes"].list.shape, strict=True):
                if dtype.is_floating:
                    sizes = [TEXTS if each.size < 0 else each.size for each in shape.dim]
                    return dtype.name, math.prod(sizes) * dtype.size
    raise ValueError("the graph has no loop with floats: nothing is generated with a cache")


def _texts() -> np.ndarray:
    starts = range(100, 100 + 700 * TEXTS, 700)
    return np.stack([text()[start : start + LENGTH] for start in starts])


def _inputs(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens, bool)}


def equal(actual: np.ndarray, expected: np.ndarray) -> float:
    """The share of equal tokens."""
    return float(np.mean(actual == expected))


def table(names: Sequence[str]) -> Table:
    """One row a model and way."""
    rows = []
    with reporting("generate", len(names) * len(WAYS)) as progress:
        for name in names:
            exact = measured(trained(name))
            for way, dtype in WAYS:
                progress(f"{name} {way} {dtype}")
                found = measured(at_level(name, way, dtype))
                error = difference([found.logits], [exact.logits])
                shares = (
                    equal(found.logits.argmax(-1), exact.logits.argmax(-1)),
                    equal(found.tokens, exact.tokens),
                )
                cells = [f"{error:.1e}" if error else "0", *(f"{each:.1%}" for each in shares)]
                kept, size = found.cache
                rows.append((name, way, dtype, *cells, kept, f"{size // 1024}", str(found.traces)))
    headers = (
        *("model", "way", "dtype", "logits' error", "equal next tokens", "equal texts"),
        *("cache", "KiB of cache", "traces"),
    )
    return Table("Generated text next to float32's", headers, tuple(rows), left=3)


def main() -> int:
    """Prints the table, and writes it into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="M")
    parser.add_argument("--page", type=Path, help="a page with the two marks of a benchmark")
    options = parser.parse_args()
    result = table(options.models)
    show([result])
    if options.page:
        report.put_section(options.page, to_markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
