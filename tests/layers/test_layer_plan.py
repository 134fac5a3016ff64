"""Plans of layers are values, made by one function, carried out by one wrapper a method."""

import dataclasses
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import wrapped_methods
from tfamp.layers.layer_plan import LayerFacts, LayerPlan, plan_layer
from tfamp.layers.model_calls import described_plan, plan_of

DENSE = LayerFacts(protected=True, managed=True, low="bfloat16", float32_outputs=True)


def functional(*hidden):
    """A model of a layer of each class, whose last layer is `head`."""
    x = inputs = keras.Input((4, 3))
    for layer in hidden:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def calls(settings):
    return {row.path.rpartition("/")[2]: row.calls for row in settings.layers}


def test_equal_facts_have_equal_plans_and_each_fact_changes_what_it_says():
    assert plan_layer(DENSE, "hidden") == plan_layer(dataclasses.replace(DENSE), "hidden")
    assert plan_layer(LayerFacts(), "") == LayerPlan()
    assert plan_layer(LayerFacts(), "").to_text() == ""
    changes = {
        "takes_ids": (True, "inputs", "ids"),
        "float32_inside": ("squares", "float32_inside", "squares"),
        "turns_positions": (True, "guarded", False),
        "adds_up": (False, "guarded", False),
        "is_regularized": (True, "regularized_in_float32", True),
        "holds": ("data", "inputs", "uncast"),
        "stays": (True, "float32_sublayers", "mixed_bfloat16"),
        "can_fuse": (True, "fused", "bfloat16"),
    }
    facts = dataclasses.replace(DENSE, policy_name="mixed_bfloat16")
    for name, (value, field, expected) in changes.items():
        plan = plan_layer(dataclasses.replace(facts, **{name: value}), "hidden")
        assert getattr(plan, field) == expected, name
        assert getattr(plan_layer(facts, "hidden"), field) != expected, name


def test_only_products_of_output_layers_are_low_and_only_if_the_policy_says_so():
    facts = dataclasses.replace(DENSE, low_products=True, has_product=True)
    assert plan_layer(facts, "output").low_product == "bfloat16"
    assert plan_layer(facts, "output").to_text().endswith("; product in bfloat16")
    assert plan_layer(facts, "hidden").low_product == ""
    for name in ("low_products", "has_product"):
        assert not plan_layer(dataclasses.replace(facts, **{name: False}), "output").low_product


def test_a_new_place_in_a_model_gives_a_new_plan(low):
    base = functional()
    head = base.get_layer("head")
    assert plan_of(head).role == "output"
    keras.Model(base.inputs, layers.Dense(1)(head.output))
    assert plan_of(head).role == "hidden"
    assert plan_of(head) == dataclasses.replace(plan_of(head), role="hidden")


def test_layers_with_the_same_facts_have_the_same_plan_however_they_got_there(low):
    under_policy = functional(layers.UnitNormalization(name="unit"))
    tfamp.set_global_policy("float32")
    model = functional(layers.UnitNormalization(name="unit"))
    prepared = tfamp.prepare(model, level="O2", dtype=low).model
    for name in ("unit", "head"):
        ours, theirs = plan_of(under_policy.get_layer(name)), plan_of(prepared.get_layer(name))
        assert (ours.role, ours.guarded) == (theirs.role, theirs.guarded)


@pytest.mark.parametrize("level", ["O1", "O0"])
def test_taking_a_level_back_leaves_no_wrapper_and_no_plan(level):
    model = functional(layers.BatchNormalization(), layers.Dense(4, activity_regularizer="l2"))
    before = {layer.name: dict(vars(layer)) for layer in model.layers}
    prepared = tfamp.prepare(model, level="O2", dtype="bfloat16").model
    assert any(wrapped_methods(layer) for layer in prepared.layers)
    again = tfamp.prepare(prepared, level="O0").model
    for layer in again.layers[1:]:  # An InputLayer computes nothing.
        assert not wrapped_methods(layer)
        assert plan_of(layer) is None
        assert set(before[layer.name]) <= set(vars(layer))


def test_each_method_has_one_wrapper(low):
    layer = layers.BatchNormalization(activity_regularizer="l2")
    model = keras.Sequential([keras.Input((3,)), layer, layers.Dense(2, activity_regularizer="l1")])
    model(np.ones((2, 3)))
    for each in (layer, model.layers[-1], model):
        for name, method in wrapped_methods(each).items():
            wrapped, count = method, 0
            while hasattr(wrapped, "__wrapped__") and "_tfamp_replaced" in vars(wrapped):
                wrapped, count = wrapped.__wrapped__, count + 1
            assert count == 1, name


def test_a_report_says_what_happens_in_the_calls_of_each_layer(low):
    norms = layers.BatchNormalization(name="norm"), layers.UnitNormalization(name="unit")
    model = functional(*norms)
    found = calls(tfamp.prepare(model, level="O2", dtype=low).settings)
    assert found["norm"] == f"statistics; fused kernel in {low}"
    assert found["head"] == f"output of {model.name}; exact sums"
    assert found["unit"] == "hidden; float32 inside, as it squares; exact sums"


class OfLow(layers.Layer):
    """Adds its weight to a tensor that its code casts to one dtype."""

    def __init__(self, dtype_inside, **kwargs):
        super().__init__(**kwargs)
        self.dtype_inside, self.runs = dtype_inside, 0

    def get_config(self):
        return {**super().get_config(), "dtype_inside": self.dtype_inside}

    def build(self, shape):
        self.bias = self.add_weight(shape=shape[-1:], name="bias")

    def call(self, x):
        self.runs += 1
        return tf.cast(x, self.dtype_inside) + tf.convert_to_tensor(self.bias)


def test_an_output_layer_whose_code_needs_its_low_dtype_stays_low_and_says_why(low):
    x = keras.Input((3,))
    hidden, odd = layers.Dense(3), OfLow(low, name="odd")
    model = keras.Model(x, odd(hidden(x)))
    assert odd.compute_dtype == low
    inputs = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)
    outputs = model(inputs)
    assert outputs.dtype == "float32"
    expected = inputs @ hidden.kernel.numpy() + odd.bias.numpy()
    np.testing.assert_allclose(outputs, expected, atol=0.03)
    np.testing.assert_allclose(tf.function(model)(inputs), outputs, atol=0.02)
    plan = plan_of(odd)
    assert plan.role == "hidden"
    assert "TypeError" in plan.refusal
    assert f"low, and cast behind it, as {plan.refusal}" in described_plan(odd)


def test_an_error_of_users_code_that_is_not_of_the_dtype_is_raised(low):
    class Once(OfLow):
        def call(self, x):
            if self.runs:
                raise ValueError("called again")
            return super().call(x)

    x = keras.Input((3,))
    y = Once(low)(layers.Dense(3)(x))
    with pytest.raises(ValueError, match="called again"):
        keras.Model(x, y)


def test_layers_that_may_hold_networks_say_why_they_are_cast_behind(low):
    class Holder(layers.Layer):
        def __init__(self):
            super().__init__(name="holder")
            self.inner = layers.Dense(2)

        def call(self, x):
            return self.inner(x)

    x = keras.Input((3,))
    holder = Holder()
    model = keras.Model(x, holder(x))
    assert (holder.compute_dtype, model.output.dtype) == (low, "float32")
    assert plan_of(holder).refusal == "it may hold a network"


def test_a_comparison_and_the_settings_print_plans(low):
    model = functional(layers.UnitNormalization(name="unit"))
    x = np.linspace(0.1, 1, 24, dtype="float32").reshape(2, 4, 3)
    comparison = tfamp.diagnostics.compare(model, x)
    plans = {row.layer.rpartition("/")[2]: row.plan for row in comparison.rows}
    assert plans["unit"] == "hidden; float32 inside, as it squares; exact sums"
    assert plans["head"] == f"output of {model.name}; exact sums"
    for text in (comparison.to_text(), comparison._repr_html_(), comparison.to_json()):
        assert plans["unit"] in text
    settings = tfamp.prepare(model, level="O2", dtype=low).settings
    for text in (str(settings), settings._repr_html_()):
        assert plans["unit"] in text


def test_a_plan_names_the_policy_that_the_layer_has(low):
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(image))
    x = layers.Flatten()(layers.BatchNormalization()(x))
    inner = keras.Model(image, layers.Dense(4)(x))
    model = keras.Sequential([inner, layers.Dense(3), layers.Softmax()])
    model(np.ones((1, 8, 8, 3)))
    planned = [layer for layer in layers_of(model) if plan_of(layer) and plan_of(layer).policy]
    names = {type(layer).__name__ for layer in planned}
    assert names >= {"Rescaling", "Conv2D", "BatchNormalization", "Dense", "Softmax", "Sequential"}
    for layer in planned:
        assert plan_of(layer).policy == layer.dtype_policy.name, layer.name
    assert {plan_of(layer).policy for layer in planned} == {f"mixed_{low}", "float32"}


def test_the_configuration_of_a_sequential_has_the_cast_behind_it(low):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), OfLow(low, name="odd")])
    config = model.get_config()
    names = [entry["class_name"] for entry in config["layers"]]
    assert names == ["InputLayer", "Dense", "OfLow", "Activation"]
    x = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)
    assert model(x).dtype == "float32"
    # A process without tfamp makes the model of it, and gets float32 too.
    tfamp.set_global_policy("float32")
    again = keras.Sequential.from_config(config, custom_objects={"OfLow": OfLow})
    again.set_weights(model.get_weights())
    assert again(x).dtype == "float32"
    np.testing.assert_allclose(again(x), model(x), atol=0.02)


def test_a_layer_that_makes_no_output_any_more_says_nothing_about_it(low):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), OfLow(low, name="odd")])
    odd = model.layers[-1]
    assert plan_of(odd).refusal
    model.pop()
    assert plan_of(odd).refusal == ""


def test_a_layer_that_another_thread_lowers_between_its_call_and_its_model_is_cast(low):
    x = keras.Input((8,))
    shared = layers.Dense(8)
    kept = keras.Model(x, shared(x))
    assert shared.compute_dtype == "float32"
    second = keras.Input((8,))
    with_float32 = shared(second)
    own_spec, computed, lowered = shared.compute_output_spec, threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        spec = own_spec(*args, **kwargs)
        if threading.current_thread().name == "late":
            computed.set()
            lowered.wait(60)
        return spec

    shared.compute_output_spec = slow
    made = []

    def make():
        with tfamp.policy_scope(f"mixed_{low}"):
            z = keras.Input((8,))
            made.append(keras.Model(z, shared(z)))

    late = threading.Thread(target=make, name="late")
    late.start()
    assert computed.wait(60)
    keras.Model(second, layers.Dense(2)(with_float32))
    lowered.set()
    late.join()
    inputs = np.linspace(-1, 1, 16, dtype="float32").reshape(2, 8)
    assert (made[0].output.dtype, made[0](inputs).dtype) == ("float32", "float32")
    np.testing.assert_allclose(made[0](inputs), kept(inputs), atol=0.02)


@pytest.mark.parametrize("kind", ["functional", "sequential", "model", "layer"])
def test_what_no_policy_manages_or_what_stays_float32_returns_its_own_dtype(kind):
    facts = LayerFacts(kind, managed=True, float32_outputs=True, low="bfloat16")
    of_kind = {"functional": "part", "sequential": "part or outermost", "model": "outermost"}
    assert plan_layer(facts, "hidden").outputs == of_kind.get(kind, "own")
    for change in ({"managed": False}, {"stays": True}):
        assert plan_layer(dataclasses.replace(facts, **change), "hidden").outputs == "own"
