"""The wrapped constructors come and go without a trace; every private Keras symbol is there."""

import contextlib

import keras
import numpy as np
import pytest

import tfamp
from tfamp.interop import keras_hooks, patching


def test_a_constructor_keeps_configurations_and_errors_and_converts_tfamps_policies():
    class Scale(keras.layers.Layer):
        def __init__(self, factor, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

    plain = Scale(2.0, dtype="float32", name="s").get_config()
    with tfamp.policy_scope("mixed_float16"):
        assert Scale(2.0, dtype="float32", name="s").get_config() == plain
        with pytest.raises(ValueError, match="Unrecognized keyword arguments"):
            keras.layers.Layer(wrong=1)
        with pytest.raises(TypeError, match="positional argument"):
            keras.layers.Layer("positional")
        with pytest.raises(ValueError, match="must be KerasTensors"):
            keras.Model(inputs=[1], outputs=[2])
        layer = keras.layers.Dense(1, dtype=tfamp.Policy("mixed_bfloat16"))
    assert type(layer.dtype_policy) is keras.DTypePolicy
    assert layer.dtype_policy.name == "mixed_bfloat16"


def test_the_policy_source_comes_and_goes_and_passes_other_attributes_through():
    from keras.src.dtype_policies import dtype_policy as module

    original = module.global_state
    with keras_hooks.policy_source(lambda: keras.DTypePolicy("float64"), lambda: None).held():
        assert keras.config.dtype_policy().name == "float64"
        assert module.global_state.clear_session is keras.utils.clear_session
        module.global_state.set_global_attribute("tfamp_test", 3)
        assert module.global_state.get_global_attribute("tfamp_test") == 3
        assert module.global_state.get_global_attribute("absent", 4) == 4
    assert module.global_state is original
    assert keras.config.dtype_policy().name == "float32"


# One test per private symbol: a Keras release that changes one fails here first.


def test_private_thread_policy():
    keras.config.set_dtype_policy("float64")
    assert keras_hooks.thread_policy().name == "float64"
    keras_hooks.set_thread_policy(None)
    assert keras_hooks.thread_policy() is None
    assert keras.config.dtype_policy().name == "float32"


def test_activity_losses_are_averaged_where_keras_does():
    layer = keras.layers.Identity(activity_regularizer=keras.ops.sum)
    layer(np.ones((4, 2), "float32"))
    assert float(layer.losses[0]) == (2.0 if keras_hooks.averages_activity_losses() else 8.0)


def test_private_logits():
    logits = keras.ops.full((2, 1), 3.0)
    probabilities = keras.activations.sigmoid(logits)
    assert keras_hooks.logits_of(probabilities) is logits
    assert keras_hooks.logits_of(logits) is None
    halves = keras.ops.full((2, 1), 0.5)
    keras_hooks.set_logits(halves, logits)
    loss = keras.losses.binary_crossentropy(keras.ops.zeros((2, 1)), halves)
    np.testing.assert_allclose(loss, np.log1p(np.exp(3.0)), rtol=1e-6)


def test_private_session():
    before = keras_hooks.session()
    assert keras_hooks.session() is before
    keras.utils.clear_session(free_memory=False)
    assert keras_hooks.session() is not before


def test_private_global_seed_generator():
    keras.utils.set_random_seed(1)
    assert keras_hooks.global_seed_generator() is None
    keras.random.uniform(())
    before = keras_hooks.global_seed_generator().state.numpy().tolist()
    keras.random.uniform(())
    assert keras_hooks.global_seed_generator().state.numpy().tolist() != before


def test_private_calling_layers():
    seen = []
    inner = keras.layers.Lambda(lambda x: seen.append(keras_hooks.calling_layers()) or x)
    outer = keras.Sequential([inner])
    outer(np.ones((1, 1), "float32"))
    assert seen[-1][0] is outer
    assert seen[-1][-1] is inner
    assert keras_hooks.calling_layers() == []


def test_private_calls_symbolically():
    seen = []
    layer = keras.layers.Lambda(lambda x: seen.append(keras_hooks.calls_symbolically()) or x)
    layer(keras.Input((1,)))
    assert seen
    assert all(seen)
    seen.clear()
    layer(np.ones((1, 1), "float32"))
    assert seen == [False]


def test_private_functional_of_and_sublayers():
    model = keras.Sequential([keras.layers.Dense(1)])
    assert keras_hooks.functional_of(model) is None
    model.build((None, 2))
    assert type(keras_hooks.functional_of(model)) is keras_hooks.functional_class()
    layer = keras.layers.TimeDistributed(keras.layers.Dense(1))
    assert keras_hooks.sublayers(layer) == (layer.layer,)


def test_private_seed_generators_and_own_metrics():
    class Measured(keras.layers.Dropout):
        def __init__(self):
            super().__init__(0.5)
            self._tracker.unlock()
            self.mean = keras.metrics.Mean()

    layer = Measured()
    assert keras_hooks.seed_generators(layer) == (layer.seed_generator,)
    assert keras_hooks.own_metrics(layer) == (layer.mean,)
    model = keras.Sequential([layer])
    assert (keras_hooks.seed_generators(model), keras_hooks.own_metrics(model)) == ((), ())


def test_private_replacement_of_a_generator():
    layer, other = keras.layers.Dropout(0.5), keras.random.SeedGenerator(1)
    layer.build((1, 2))
    keras_hooks.replace_generator(layer, layer.seed_generator, other)
    assert layer.seed_generator is other
    assert [each.path for each in layer.variables] == [other.state.path]


def test_private_paths():
    model, other = (keras.Sequential([keras.layers.Dense(1)], name=name) for name in "ab")
    model.build((None, 2))
    other.build((None, 2))
    for old, new in zip((model, *model.weights), (other, *other.weights), strict=True):
        keras_hooks.place_like(old, new)
        assert new.path == old.path
    assert model.weights[0].path.startswith("a/")


def test_private_mode_of_rematerialization():
    with keras.RematScope("full"):
        layer = keras.layers.Dense(1)
    other = keras.layers.Dense(1)
    assert (keras_hooks.rematerializes(layer), keras_hooks.rematerializes(other)) == (True, False)
    keras_hooks.rematerialize_like(layer, other)
    assert keras_hooks.rematerializes(other)


def test_private_nodes_producer_and_symbolic_dtype():
    x = keras.Input((2,))
    layer = keras.layers.Dense(1)
    y = layer(x)
    (node,) = keras_hooks.inbound_nodes(layer)
    assert (node.operation, node.outputs, node.input_tensors) == (layer, [y], [x])
    assert (node.arguments.args, node.arguments.kwargs) == ((x,), {})
    assert keras_hooks.producer(y) == (layer, node)
    assert keras_hooks.outbound_nodes(keras_hooks.producer(x)[0]) == (node,)
    x = keras.KerasTensor((2,))  # Nothing made it.
    keras.ops.abs(x)
    assert keras_hooks.producer(x) == (None, None)
    keras_hooks.set_symbolic_dtype(x, "float16")
    assert x.dtype == "float16"


def test_private_outputs_of_and_set_outputs():
    x = keras.Input((2,))
    model = keras.Model(x, {"a": x + 1.0, "b": x})
    returned = list(model.outputs)
    model.outputs.append(x - 1.0)
    assert all(a is b for a, b in zip(keras_hooks.outputs_of(model), returned, strict=True))
    model.outputs.pop()
    names = model.output_names
    doubled = [keras.ops.multiply(tensor, 2.0) for tensor in model.outputs]
    keras_hooks.set_outputs(model, doubled)
    assert model.outputs == doubled
    assert model.output_names == names
    result = model(np.ones((1, 2), "float32"))
    assert result["a"].numpy().tolist() == [[4.0, 4.0]]
    assert type(model.output) is dict
    layer = keras.layers.Activation("linear")
    keras_hooks.set_outputs(model, [layer(doubled[0]), doubled[1]])
    assert [*keras_hooks.sublayers(model)] == model.layers == [model.layers[0], layer]
    keras_hooks.set_outputs(model, doubled)
    assert [*keras_hooks.sublayers(model)] == model.layers == [model.layers[0]]
    assert keras.Model.from_config(model.get_config()).output_shape == model.output_shape


def test_private_copy_annotations():
    x = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    y = keras.ops.cast(x, "float64")
    keras_hooks.copy_annotations(x, y)
    assert y._keras_mask.numpy().tolist() == [[True, False]]
    keras_hooks.copy_annotations(keras.ops.ones((1,)), y)
    assert y._keras_mask is not None
    low = keras.activations.softmax(keras.ops.ones((1, 2), "float16"))
    keras_hooks.copy_annotations(low, y)
    assert (y._keras_logits.dtype, y._keras_logits.numpy().tolist()) == ("float64", [[1.0, 1.0]])


def test_private_logs_of_epochs_but_not_of_evaluations():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1))
    end = keras_hooks.add_to_epoch_logs(model, lambda: {"figure": 7.0, "loss": -1.0})
    history = model.fit(x, y, validation_data=(x, y), verbose=0).history
    assert history.keys() == {"figure", "loss", "val_loss"}
    assert history["figure"] == [7.0]
    assert history["loss"] != [-1.0], "what Keras has stays"
    end()
    assert not {"evaluate", "_get_metrics_result_or_logs"} & set(vars(model))


def test_private_compile_arguments_and_optimizer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    first, second = keras.optimizers.SGD(), keras.optimizers.Adam()
    model.compile(first, "mse", metrics=["mae"], jit_compile=False)
    arguments = keras_hooks.compile_arguments(model)
    assert (arguments["optimizer"], arguments["loss"], arguments["metrics"]) == (
        first, "mse", ["mae"]
    )  # fmt: skip
    keras_hooks.set_compiled_optimizer(model, second)
    assert model.optimizer is second
    assert model.get_compile_config()["optimizer"]["class_name"] == "Adam"
    # What was asked for is a copy.
    assert arguments["optimizer"] is first


def test_private_jit_compile_of_a_compiled_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert keras_hooks.automatic_jit_compile(model) == model.jit_compile
    given = not model.jit_compile
    model.compile("sgd", "mse", jit_compile=given)
    assert keras_hooks.automatic_jit_compile(model) != given
    assert model.jit_compile == given, "it stays compiled as it is"
    keras_hooks.set_jit_compile(model, not given)
    assert model.jit_compile != given
    assert model.get_compile_config()["jit_compile"] != given


def test_a_missing_symbol_says_which_and_what_to_install(monkeypatch):
    message = f"_no_such.* is not in Keras {keras.__version__}; tfamp was tested with Keras 3"
    with pytest.raises(tfamp.UnsupportedVersionError, match=message):
        keras_hooks.keras_symbol(keras.layers.Dense(1), "_no_such")
    with pytest.raises(tfamp.UnsupportedVersionError, match=r"keras\.src\.gone is not in Keras"):
        patching.foreign("keras.src.gone:name")


def test_a_policy_is_replaced_and_given_back():
    layer = keras.layers.Dense(2, dtype="float16")
    layer.build((None, 3))
    own = layer.dtype_policy
    restore = keras_hooks.replace_policy(layer, keras.DTypePolicy("float32"))
    assert (layer.compute_dtype, layer.variable_dtype) == ("float32", "float16")
    assert layer(np.ones((1, 3))).dtype == "float32"
    restore()
    assert layer.dtype_policy is own


def test_losses_are_given_back():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(np.ones((1, 3)))
    before = list(layer.losses)
    restore = keras_hooks.replace_losses(layer)
    layer(np.zeros((1, 3)))
    assert layer.losses[0] is not before[0]
    restore()
    assert layer.losses[0] is before[0]


def test_an_input_layer_is_fed_in_another_dtype():
    model = keras.Sequential([keras.Input((3,), dtype="float16"), keras.layers.Identity()])
    keras_hooks.set_fed_dtype(model._layers[0], "float32")
    assert [x.dtype for x in (model.inputs[0], model._layers[0])] == ["float32"] * 2
    assert model._layers[0].get_config()["dtype"] == "float32"
    assert np.isfinite(model(np.full((1, 3), 1e6))).all()


def test_a_call_begins_before_inputs_are_cast():
    layer = keras.layers.Identity(dtype="mixed_float16")
    name = keras_hooks.first_method_of_call(layer)
    assert layer(np.ones((1, 3), "float32")).dtype == "float16"

    def begin():
        layer.autocast = False

    object.__setattr__(layer, name, begin)
    assert layer(np.ones((1, 3), "float32")).dtype == "float32"


# ---- Optimizers ----------------------------------------------------------------------------------


@pytest.fixture
def variables():
    return [keras.Variable(np.ones((2, 3), "float32"), name=name) for name in ("kernel", "bias")]


def test_variables_and_slots_are_found_by_place(variables):
    optimizer = keras.optimizers.Adam(weight_decay=0.1)
    optimizer.build(variables)
    built = keras_hooks.built_for(optimizer)
    assert all(v is own for v, own in zip(variables, built, strict=True))
    assert [keras_hooks.index_of(optimizer, v) for v in variables] == [0, 1]
    assert keras_hooks.slot(optimizer, "momentums", 1).shape == (2, 3)
    key = keras_hooks.key_of(optimizer)
    assert key(variables[0]) != key(variables[1])
    adafactor = keras.optimizers.Adafactor()
    adafactor.build(variables)
    assert [keras_hooks.slot(adafactor, name, 0).shape for name in "rcv"] == [(2,), (3,), (2, 3)]


def test_nadams_product_of_momenta_begins_with_1(variables):
    optimizer = keras.optimizers.Nadam()
    optimizer.build(variables)
    assert float(keras_hooks.momentum_product(optimizer)) == 1.0
    optimizer.apply([np.ones((2, 3), "float32")] * 2, variables)
    expected = 0.9 * (1 - 0.5 * 0.96)
    assert float(keras_hooks.momentum_product(optimizer)) == pytest.approx(expected, rel=1e-6)


def test_decay_and_what_is_left_out_of_it(variables):
    optimizer = keras.optimizers.Adam(weight_decay=0.1)
    assert keras_hooks.excluded_from_decay(optimizer) == (set(), None)
    optimizer.exclude_from_weight_decay(variables[:1])
    keras_hooks.exclude_pattern(optimizer, None)
    optimizer.build(variables)
    assert [keras_hooks.decays(optimizer, v) for v in variables] == [False, True]
    assert not keras_hooks.decays(keras.optimizers.Adam(), variables[0])
    keys, pattern = keras_hooks.excluded_from_decay(optimizer)
    assert (keys, pattern) == ({keras_hooks.key_of(optimizer)(variables[0])}, None)


def test_gradients_are_left_out_and_clipped_as_keras_does(variables):
    optimizer = keras.optimizers.SGD(clipvalue=0.5)
    with pytest.warns(UserWarning, match="bias"):
        kept = keras_hooks.without_missing(optimizer, [np.ones((2, 3), "float32"), None], variables)
    assert [len(each) for each in kept] == [1, 1]
    (gradient,) = keras_hooks.clipped(optimizer, kept[0])
    np.testing.assert_array_equal(gradient, np.full((2, 3), 0.5))


def test_a_private_symbol_that_is_missing_is_named():
    sgd = keras.optimizers.SGD()
    with pytest.raises(tfamp.UnsupportedVersionError, match="_velocities"):
        keras_hooks.slot(sgd, "velocities", 0)


def test_a_view_counts_elsewhere_and_takes_gradients_as_they_are(variables):
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(variables)
    assert keras_hooks.inner_optimizers(optimizer) == [optimizer]
    other = keras.Variable(5, dtype="int32")
    view = keras_hooks.applying_view(optimizer, summed=True, counter=lambda counter: other)
    view.apply([np.ones((2, 3), "float32")] * 2, variables)
    np.testing.assert_array_equal(variables[0], np.full((2, 3), 0.5))
    assert (int(other), int(keras_hooks.step_counter(optimizer))) == (6, 0)
    assert float(optimizer.learning_rate) == 0.5


class Counting(keras.layers.Layer):
    """A layer with a weight and a counter."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(2,), name="weight")
        self.counter = self.add_weight(shape=(), trainable=False, name="counter")


def test_state_is_what_was_created_not_to_be_trained():
    layer = Counting()
    layer.build((2, 2))
    layer.trainable = False
    assert keras_hooks.state_of(layer) == [layer.counter]
    assert not keras_hooks.is_of_keras(layer)
    assert keras_hooks.is_of_keras(keras.layers.Dense(1))


def test_a_variable_is_read_low_in_a_low_scope_unless_it_is_read_as_stored():
    layer = Counting()
    layer.build((2, 2))
    assert keras_hooks.reading_dtype() is None
    assert not keras_hooks.reads_low(layer.counter)
    with keras_hooks.reading_variables_in("bfloat16"):
        assert keras_hooks.reading_dtype() == "bfloat16"
        assert keras_hooks.reads_low(layer.counter)
        with keras_hooks.read_as_stored_in([layer.counter]):
            assert layer.counter.value.dtype == "float32" == layer.counter.dtype
        assert layer.counter.value.dtype == "bfloat16"
        keras_hooks.read_as_stored(layer.counter)
        assert layer.counter.value.dtype == "float32"
        assert layer.weight.value.dtype == "bfloat16"


def test_gradients_of_low_variables_are_summed_in_float32_where_it_was_asked_for():
    low = [keras.Variable(np.ones(2), dtype=dtype) for dtype in ("float16", "float64")]
    for context, expected in (
        (contextlib.nullcontext, "float16"),
        (keras_hooks.float32_gradient_sums, "float32"),
    ):
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
        with context():
            assert keras_hooks.gradient_sums(optimizer) == []
            optimizer.build(low)
        variables, sums = zip(*keras_hooks.gradient_sums(optimizer), strict=True)
        assert all(a is b for a, b in zip(variables, low, strict=True))
        assert [total.dtype for total in sums] == [expected, "float64"]


def test_a_function_reads_the_variables_of_a_layer_also_when_its_call_runs_again():
    layer = Counting()
    layer.build((2, 2))
    with keras_hooks.reading_by(lambda value: (value, "read"), layer, "bfloat16"):
        assert keras_hooks.reads_float32()
        assert keras_hooks.reads_low(layer.counter)
        assert layer.counter.value[1] == "read"
        assert layer.counter.dtype == "float32"
        again = keras_hooks.reading_again()
    assert not keras_hooks.reads_float32()
    with again():
        assert layer.counter.value[1] == "read"
    with keras_hooks.reading_again()():
        assert not keras_hooks.reads_low(layer.counter)
