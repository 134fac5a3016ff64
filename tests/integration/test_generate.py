"""KerasHub's `generate` at every level: the table of the page, and what sets a level when."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")
sys.path.append(str(Path(__file__).parents[2]))
pytest.importorskip("benchmarks", reason="the benchmarks are not in the package")
pytest.importorskip("keras_hub", reason="KerasHub is not installed")

import keras_hub

import tfamp
from benchmarks import generate
from benchmarks.outputs import difference
from helpers.cases import tiers
from helpers.graph_asserts import op_dtypes

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "generate.md"
# Four times the dtype's eps, about twice what a transformer of two layers loses.
BOUNDS = {"float32": 0.0, "float16": 4e-3, "bfloat16": 3.2e-2}
pytestmark = pytest.mark.slow


@functools.cache
def exact(name="GPT2"):
    return generate.measured(generate.trained(name))


@functools.cache
def rows():
    """The rows of the page's table, by model, way and dtype."""
    if not PAGE.is_file():
        pytest.skip("the documentation is not here")
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(each[:3]): each[3:] for each in cells if each[0] in generate.MODELS}


def test_the_page_has_a_row_for_every_way():
    assert set(rows()) == {(name, *way) for name in generate.MODELS for way in generate.WAYS}


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    tiers(
        [("GPT2", *way) for way in generate.WAYS],
        [],
        [("Gemma", *way) for way in generate.WAYS],
    ),
)
def test_a_row_of_the_page(name, way, dtype):
    expected = exact(name)
    model = generate.at_level(name, way, dtype)
    found = generate.measured(model)
    products = op_dtypes(generate.graph_of(model))
    assert dtype in products["MatMul"] | products["BatchMatMulV2"], products
    error = difference([found.logits], [expected.logits])
    next_tokens = generate.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    texts = generate.equal(found.tokens, expected.tokens)
    if dtype == "float32":
        assert (error, next_tokens, texts) == (0, 1, 1)
    else:
        assert 0 < error < BOUNDS[dtype]
        assert next_tokens > 0.97
        # Two likely tokens that change places change all that follow, so machines differ.
        assert texts > 0.5
    cells = rows()[name, way, dtype]
    kept, size = found.cache
    assert cells[3:] == [kept, str(size // 1024), str(found.traces)]
    assert error == pytest.approx(float(cells[0]), rel=0.7)
    assert next_tokens == pytest.approx(float(cells[1].rstrip("%")) / 100, abs=0.03)


@pytest.mark.parametrize("way", ["O1", "O2", "O3"])
def test_a_level_that_is_set_after_generate_is_in_force_and_goes_again(way):
    model = generate.trained("GPT2")
    before = generate.generate(model)
    low = tfamp.prepare(model, level=way, dtype="bfloat16").model
    generate.generate(low)
    products = op_dtypes(generate.graph_of(low))
    assert "bfloat16" in products["MatMul"]
    back = tfamp.prepare(low, level="O0").model
    after = generate.generate(back)
    assert op_dtypes(generate.graph_of(back))["MatMul"] == {"float32"}
    if way == "O3":  # Its weights were rounded.
        assert generate.equal(after, before) > 0.7
    else:
        np.testing.assert_array_equal(after, before)


def test_level_auto_generates_what_its_level_generates():
    model = generate.trained("GPT2")
    model, _ = tfamp.prepare(model, level="auto")
    settings = tfamp.precision_settings(model)
    dtype = "float32" if settings.level == "O0" else settings.dtype
    same = generate.at_level("GPT2", settings.level, dtype)
    np.testing.assert_array_equal(generate.generate(model), generate.generate(same))


def test_eager_generation_at_o1_computes_low():
    model = generate.trained("GPT2", run_eagerly=True)
    model, _ = tfamp.prepare(model, level="O1", dtype="float16")
    seen = []
    for layer in model.backbone.transformer_layers:
        layer._feedforward_intermediate_dense.activation = lambda x: seen.append(x.dtype) or x
    generate.generate(model)
    assert {each.name for each in seen} == {"float16"}


@pytest.mark.parametrize(
    ("way", "how"),
    tiers(
        [("O1", "jit_compile"), ("O3", "jit_compile"), ("O2", "run_eagerly")],
        [],
        [
            *(("policy", "jit_compile"), ("O2", "jit_compile")),
            *((way, "run_eagerly") for way in ("policy", "O1", "O3")),
        ],
    ),
)
def test_xla_and_eager_mode_generate_what_the_graph_does(way, how):
    text = generate.generate(generate.at_level("GPT2", way, "bfloat16"))
    model = generate.at_level("GPT2", way, "bfloat16")
    setattr(model, how, True)
    model.generate_function = None
    assert generate.equal(generate.generate(model), text) > 0.5


@pytest.mark.parametrize(("way", "dtype"), generate.WAYS)
def test_a_sampler_with_a_seed_draws_at_every_level_what_it_draws_in_float32(way, dtype):
    def drawn(model):
        assert type(model.sampler) is keras_hub.samplers.TopKSampler
        return generate.generate(model), generate.generate(model)

    def sampler():
        return keras_hub.samplers.TopKSampler(k=5, seed=3)

    first, second = drawn(generate.at_level("GPT2", way, dtype, sampler()))
    again, _ = drawn(generate.at_level("GPT2", way, dtype, sampler()))
    np.testing.assert_array_equal(first, again)
    assert generate.equal(first, second) < 0.9  # The sampler's state goes on.
    assert generate.equal(first, drawn(generate.trained("GPT2", sampler()))[0]) > 0.4
