"""`prepare`: what each level makes of a model, and that every way leads back to float32."""

import gc
import json
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, one_in, one_of_each, tiers
from helpers.graph_asserts import op_dtypes
from helpers.level_models import KINDS, Stubborn, Subclassed, compiled, computes, data, leaves
from helpers.output_models import MODELS
from helpers.output_models import X as ROWS
from helpers.tolerances import tolerance
from helpers.training import assert_identical, snapshot

# Said of Adam at level O3, which most models here are compiled with; its own test is about that.
pytestmark = pytest.mark.filterwarnings("ignore:adam keeps running averages")

X, Y = data()
DTYPES = ("float16", "bfloat16")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def predict(model):
    """Returns the result of an eager call; test_preparation_fit has `model.predict`."""
    return np.asarray(model(X))


def assert_near(actual, expected, dtype):
    bound = tolerance(dtype, depth=64) * np.abs(expected).max()
    assert np.abs(np.asarray(actual, "float32") - expected).max() <= bound


class Around(keras.Model):
    """A model around another one, which is not built before it is called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def step_dtypes(model, name="train_step"):
    """The dtypes of the ops in the graph that Keras traces of a step."""
    batch = (tf.constant(X[:8]), tf.constant(Y[:8]))
    return op_dtypes(lambda: getattr(model, name)(batch))


@pytest.mark.parametrize(("kind", "dtype"), one_of_each(KINDS, DTYPES, quick=1))
def test_o1_rewrites_the_train_step_and_leaves_the_layers(kind, dtype):
    model = compiled(kind)
    before = predict(model)
    prepared, optimizer = tfamp.prepare(model, level="O1", dtype=dtype)
    assert prepared is model
    assert {layer.compute_dtype for layer in leaves(model)} == {"float32"}
    found = step_dtypes(model)
    assert (dtype in found["MatMul"], dtype in found["Conv2D"]) == (True, True)
    # Eager calls run under autocast.
    after = predict(model)
    assert after.dtype == "float32"
    np.testing.assert_array_equal(after, tf.cast(tf.cast(after, dtype), "float32"))
    assert_near(after, before, dtype)
    assert type(optimizer) is tfamp.LossScaleOptimizer
    assert optimizer.dynamic == (dtype == "float16")


@pytest.mark.parametrize(("kind", "dtype"), one_of_each(KINDS, DTYPES, quick=2))
def test_o2_sets_layer_policies_and_keeps_norms_outputs_and_weights(kind, dtype):
    model = compiled(kind)
    before, weights = predict(model), [w.numpy() for w in model.weights]
    prepared, optimizer = tfamp.prepare(model, level="O2", dtype=dtype)
    assert prepared is model
    found = computes(model)
    assert found["Conv2D"] == [dtype]
    assert found["BatchNormalization"] == ["float32"]
    # A subclassed model does not say which of its layers is the last: its outermost call casts.
    assert found["Dense"] == [dtype, dtype if kind == "subclassed" else "float32"]
    assert {w.dtype for w in model.weights} == {"float32"}
    for old, new in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    if kind != "subclassed":
        assert model.outputs[0].dtype == "float32"
    assert model.compute_output_spec(keras.KerasTensor((8, 6, 6, 1))).dtype == "float32"
    assert model(X[:8]).dtype == "float32"
    assert_near(predict(model), before, dtype)
    assert model.optimizer is optimizer


@pytest.mark.parametrize(("kind", "dtype"), one_of_each(KINDS, DTYPES, quick=2))
def test_o3_is_a_new_model_that_is_low_all_through(kind, dtype):
    model = compiled(kind)
    state, before = snapshot(model, model.optimizer), predict(model)
    made, optimizer = tfamp.prepare(model, level="O3", dtype=dtype, master_weights=False)
    assert made is not model
    assert {layer.compute_dtype for layer in leaves(made)} == {dtype}
    assert {w.dtype for w in made.weights} == {dtype}
    assert made(X[:8]).dtype == dtype
    assert_near(predict(made), before, dtype)
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    # The given model is left as it was, and so is its optimizer.
    assert_identical(snapshot(model, model.optimizer), state)
    assert {layer.compute_dtype for layer in leaves(model)} == {"float32"}
    np.testing.assert_array_equal(predict(model), before)


@pytest.mark.parametrize("kind", first_of(["nested", "subclassed"]))
def test_master_weights_go_with_low_weights_and_start_from_the_float32_ones(kind):
    model = compiled(kind)
    before, weights = predict(model), [w.numpy() for w in model.trainable_weights]
    made, optimizer = tfamp.prepare(model, level="O2", dtype="float16", master_weights=True)
    assert made is not model
    stored = {type(x).__name__: {w.dtype for w in x.weights} for x in leaves(made)}
    assert (stored["BatchNormalization"], stored["Conv2D"]) == ({"float32"}, {"float16"})
    assert made(X[:8]).dtype == "float32"
    assert_near(predict(made), before, "float16")
    pairs = zip(weights, made.trainable_weights, strict=True)
    low = [old for old, weight in pairs if weight.dtype == "float16"]
    for old, master in zip(low, optimizer.master_variables, strict=True):
        np.testing.assert_array_equal(old, master.numpy())
    back, plain = tfamp.prepare(made, level="O0")
    assert {w.dtype for w in back.weights} == {"float32"}
    assert type(plain) is keras.optimizers.Adam
    # The weights of the way back are the masters: float32, not rounded.
    kernel = next(x for x in leaves(back) if isinstance(x, layers.Conv2D)).kernel.numpy()
    assert (kernel != kernel.astype("float16")).any()


@pytest.mark.parametrize(("kind", "level"), one_of_each(KINDS, ["O1", "O2"]))
def test_o0_leads_back_to_the_very_predictions_of_before(kind, level, tmp_path):
    model = compiled(kind)
    before, optimizer = predict(model), model.optimizer
    layer = leaves(model)[0]
    own = {name: vars(layer).get(name) for name in ("call", "build", "compute_output_spec")}
    tfamp.prepare(model, level=level, dtype="float16")
    assert (predict(model) != before).any()
    if (level, kind) == ("O1", "functional"):  # It leaves no trace in a file.
        model.save(tmp_path / "model.keras")
        read = keras.models.load_model(tmp_path / "model.keras")
        assert {x.dtype_policy.name for x in read._flatten_layers()} == {"float32"}
        np.testing.assert_array_equal(predict(read), before)
    back = tfamp.prepare(model, level="O0")
    assert (back.model, back.optimizer, model.optimizer) == (model, optimizer, optimizer)
    assert {x.dtype_policy.name for x in model._flatten_layers()} == {"float32"}
    assert {name: vars(layer).get(name) for name in own} == own
    np.testing.assert_array_equal(predict(model), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_preparing_twice_is_preparing_once(level):
    model, optimizer = tfamp.prepare(compiled("nested"), level=level, dtype="float16")
    again = tfamp.prepare(model, optimizer, level=level, dtype="float16")
    assert (again.model, again.optimizer) == (model, optimizer)


def test_levels_follow_each_other_in_any_order():
    model = compiled("functional")
    before = predict(model)
    for level, dtype in [("O2", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16"), ("O0", None)]:
        tfamp.prepare(model, level=level, dtype=dtype)
        assert computes(model)["Conv2D"] == [{"O2": dtype}.get(level, "float32")]
    np.testing.assert_array_equal(predict(model), before)
    pure, _ = tfamp.prepare(compiled("sequential"), level="O3", dtype="float16")
    mixed, _ = tfamp.prepare(pure, level="O2", dtype="bfloat16")
    assert computes(mixed)["Conv2D"] == ["bfloat16"]
    assert computes(mixed)["BatchNormalization"] == ["float32"]
    assert {w.dtype for w in mixed.weights} == {"float32"}
    assert_near(predict(mixed), predict(pure).astype("float32"), "bfloat16")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_without_variables_yet_is_prepared_for_when_it_has_some(level):
    model = Subclassed()
    with pytest.raises(ValueError, match=r"model\.build\(input_shape\)"):
        tfamp.prepare(model, level="O3", dtype="float16")
    around = Around(keras.Sequential([keras.Input((4,)), layers.Dense(1)]))
    with pytest.raises(ValueError, match="is not built, .* also if its layers are built"):
        tfamp.prepare(around, level="O3", dtype="float16")
    model, optimizer = tfamp.prepare(model, "sgd", level=level, dtype="bfloat16")
    model.compile(optimizer, LOSS)
    assert "bfloat16" in step_dtypes(model)["MatMul"]
    assert {w.dtype for w in model.weights} == {"float32"}


def test_a_fresh_model_that_is_not_compiled_gets_its_optimizer_later():
    model = KINDS["sequential"]()
    assert tfamp.prepare(model, dtype="float16", loss_scale=512.0).optimizer is None
    model.compile("sgd", LOSS)
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    assert float(model.optimizer.loss_scale) == 512.0
    plain = keras.optimizers.SGD()
    model.compile(plain, "mse", auto_scale_loss=False)
    assert model.optimizer is plain


class Lazy(keras.Model):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.inner = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def test_layers_made_in_build_get_the_policy_of_the_level():
    model, _ = tfamp.prepare(Lazy(), level="O2", dtype="float16")
    assert model(X.reshape(-1, 36)).dtype == "float32"
    assert computes(model) == {"Dense": ["float16"] * 2, "BatchNormalization": ["float32"]}
    assert keras.config.dtype_policy().name == "float32"
    tfamp.prepare(model, level="O0")
    assert {x.compute_dtype for x in leaves(model)} == {"float32"}


@pytest.mark.parametrize("name", one_in(3, sorted(set(MODELS) - {"with_cast"})))
def test_o2_is_what_the_policy_would_have_made_of_the_model(name):
    keras.utils.set_random_seed(1)
    with tfamp.policy_scope("mixed_float16"):
        made = MODELS[name]()
        expected = keras.tree.flatten(made(ROWS))
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    before = [np.asarray(each) for each in keras.tree.flatten(model(ROWS))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfamp.NothingConvertedWarning)  # one has a single layer
        tfamp.prepare(model, level="O2", dtype="float16")
    policies = [x.dtype_policy.name for x in leaves(made)]
    assert [x.dtype_policy.name for x in leaves(model)] == policies
    assert [x.dtype for x in model.outputs] == [x.dtype for x in made.outputs]
    for actual, wanted in zip(keras.tree.flatten(model(ROWS)), expected, strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_array_equal(actual, wanted)
    tfamp.prepare(model, level="O0")
    assert {x.dtype for x in model.outputs} == {"float32"}
    for actual, wanted in zip(keras.tree.flatten(model(ROWS)), before, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_prepared_model_that_nobody_holds_is_gone(level):
    model = compiled("nested")
    tfamp.prepare(model, level=level, dtype="bfloat16")
    model(X)
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_dtype_of_the_users_own_wins_that_of_a_mixed_model_too(policy):
    own = "float32" if policy == "mixed_float16" else "mixed_float16"
    with tfamp.policy_scope(policy):
        dense = [layers.Dense(4), layers.Dense(4, dtype=own), layers.Dense(4), layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,)), *dense])
    kept = dense[1].compute_dtype
    for level, other in (("O2", "bfloat16"), ("O0", "float32")):
        tfamp.prepare(model, level=level, dtype="bfloat16")
        assert [x.compute_dtype for x in dense] == [other, kept, other, "float32"]
    model = keras.Sequential([keras.Input((4,), dtype="float64"), layers.Dense(4, dtype="float64")])
    with pytest.warns(tfamp.NothingConvertedWarning, match="no layer of it computes in float16"):
        tfamp.prepare(model, level="O2", dtype="float16")
    assert model.layers[0].compute_dtype == "float64"


def test_a_policy_set_by_hand_since_is_kept_but_by_o0():
    model, _ = tfamp.prepare(KINDS["sequential"](), level="O2", dtype="float16")
    model.layers[0].dtype_policy = "float32"
    model.layers[-1].dtype_policy = "mixed_float16"
    assert tfamp.prepare(model, level="O2", dtype="float16")[0] is model
    assert model.layers[0].compute_dtype == "float32"
    # The symbolic output is corrected with it.
    assert model.outputs[0].dtype == "float16"
    assert model(X).dtype == "float16"
    tfamp.prepare(model, level="O0")
    assert {x.compute_dtype for x in leaves(model)} == {"float32"}
    assert model.outputs[0].dtype == "float32"
    tfamp.prepare(model, level="O2", dtype="float16")
    assert model.layers[0].compute_dtype == "float16"


class Prepares(keras.Model):
    """Standardizes what float16 cannot hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.prepare = layers.Normalization()
        self.head = layers.Dense(2, kernel_initializer="ones")

    def call(self, x):
        return self.head(self.prepare(x))


@pytest.mark.parametrize("arguments", [{"level": "O2"}, {"level": "O3"}, {"master_weights": True}])
@pytest.mark.parametrize("subclassed", [True, False])
def test_what_prepares_data_gets_it_as_it_is_and_keeps_what_it_adapted_to(subclassed, arguments):
    x = np.array([[1e6], [2e6], [3e6]], "float32")
    model = Prepares()
    if not subclassed:
        ones = [layers.Dense(2, kernel_initializer="ones") for _ in range(2)]
        model = keras.Sequential([layers.Normalization(), *ones])
    model.layers[0].adapt(x)
    before = np.asarray(model(x))
    assert np.abs(before).max() < 3
    made, _ = tfamp.prepare(model, dtype="float16", **arguments)
    np.testing.assert_allclose(made(x), before, rtol=tolerance("float16"))
    assert made.layers[0].compute_dtype == "float32"
    assert made.layers[1].compute_dtype == "float16"
    back, _ = tfamp.prepare(made, level="O0")
    assert (np.asarray(back(x)) == before).all()
    assert back.autocast


def test_keep_float32_takes_names_patterns_classes_and_layers():
    names = ("one", "two_a", "two_b", "three", "four", "last")
    dense, norm = [layers.Dense(4, name=name) for name in names], layers.LayerNormalization
    model = keras.Sequential([keras.Input((4,)), *dense, norm(name="norm"), layers.Dense(4)])
    kept = ["one", "^two_", layers.LayerNormalization, model.get_layer("four")]
    settings = tfamp.prepare(model, level="O2", dtype="bfloat16", keep_float32=kept).settings
    low = [x.name for x in model.layers if x.compute_dtype == "bfloat16"]
    assert low == ["three", "last"]
    assert settings.keep_float32 == tuple(
        f"{model.name}/{name}" for name in ("one", "two_a", "two_b", "four", "norm")
    )
    tfamp.prepare(model, level="O2", dtype="bfloat16", keep_float32="one")
    assert [x.name for x in model.layers if x.compute_dtype == "float32"][:1] == ["one"]
    model = KINDS["nested"]()
    with pytest.warns(tfamp.NothingConvertedWarning):
        tfamp.prepare(model, level="O2", dtype="float16", keep_float32=keras.Sequential)
    assert {x.compute_dtype for x in leaves(model.layers[1])} == {"float32"}


def test_of_layers_with_one_name_those_are_kept_that_were_named():
    blocks = [
        keras.Sequential([keras.Input((4,)), layers.Dense(4, name="d")], name=name) for name in "ab"
    ]
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(blocks[1](blocks[0](inputs))))
    model, _ = tfamp.prepare(model, level="O2", dtype="bfloat16", keep_float32="a/d")
    assert [block.layers[0].compute_dtype for block in blocks] == ["float32", "bfloat16"]
    settings = tfamp.precision_settings(model)
    assert settings.keep_float32 == ("a/d",)
    assert [row.why == "keep_float32" for row in settings.layers if row.path in ("a/d", "b/d")] == [
        True,
        False,
    ]


def test_kept_layers_are_float32_in_the_graphs_of_o1_and_stored_so_at_o3():
    model = compiled("sequential")
    tfamp.prepare(model, level="O1", dtype="bfloat16", keep_float32=[layers.Dense])
    found = step_dtypes(model)
    assert "bfloat16" in found["Conv2D"]
    assert found["MatMul"] == {"float32"}
    # And where autocast takes the place of the rewrite.
    found = op_dtypes(tf.function(model), tf.constant(X))
    assert (found["Conv2D"], found["MatMul"]) == ({"bfloat16"}, {"float32"})
    made, _ = tfamp.prepare(model, level="O3", dtype="float16", keep_float32=[layers.Conv2D])
    assert computes(made)["Conv2D"] == ["float32"]
    assert made.layers[0].kernel.dtype == "float32"
    assert {w.dtype for x in made.layers[1:] for w in x.weights} == {"float16"}


def test_settings_print_as_a_table():
    clip = {"max_norm": 35, "norm_type": 2}
    prepared = tfamp.prepare(
        KINDS["functional"](), keras.optimizers.SGD(), dtype="float16", grad_clip=clip
    )
    model, optimizer = prepared
    assert (prepared.model, prepared.optimizer) == (model, optimizer)
    text = str(prepared.settings)
    assert "O2 (layer policies)" in text
    assert "gradients       clipped to norm 35 of type 2" in text
    rows = {row.kind: row for row in prepared.settings.layers}
    assert (rows["Conv2D"].compute_dtype, rows["Conv2D"].why) == ("float16", "level O2")
    assert (rows["BatchNormalization"].compute_dtype, rows["Dense"].why) == ("float32", "output")
    assert all(row.path in text for row in prepared.settings.layers)
    assert str(tfamp.precision_settings(model)) == text
    plain = tfamp.prepare(KINDS["sequential"](), dtype="float16").settings
    assert "gradients       not clipped\n" in str(plain)
    assert "not clipped" in plain._repr_html_()


def test_a_configuration_is_taken_as_object_dict_or_file(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    path.write_text('{"dtype": "float16", "loss_scale": 512.0}')
    values = {"dtype": "float16", "loss_scale": 512.0}
    for config in (values, tfamp.PrecisionConfig.from_dict(values), path, str(path)):
        _, optimizer = tfamp.prepare(KINDS["sequential"](), "sgd", config=config)
        assert float(optimizer.loss_scale) == 512.0
    # What is given to the call wins.
    _, optimizer = tfamp.prepare(KINDS["sequential"](), "sgd", config=values, loss_scale=8)
    assert float(optimizer.loss_scale) == 8.0


@pytest.mark.parametrize("kind", ["dict", "file"])
def test_a_configuration_is_checked_together_with_the_arguments(tmp_path, kind):
    def prepare(values, **arguments):
        path = tmp_path / "p.json"
        path.write_text(json.dumps({"tfamp": values}))
        config = values if kind == "dict" else path
        return tfamp.prepare(KINDS["sequential"](), config=config, **arguments)

    assert prepare({"placement": "lists"}, level="O1", dtype="bfloat16").settings.level == "O1"
    assert prepare({"level": "O1", "dtype": "float32"}, dtype="float16").settings.dtype == "float16"
    wrong = {"weight_rounding": "split", "master_weights": True, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="Leave one of the two out"):
        prepare(wrong, level="O3")
    assert prepare(wrong, level="O3", master_weights=False).settings.weight_rounding == "split"
    with pytest.raises(ValueError, match="placement='lists' goes with level O1"):
        prepare({"level": "O1", "placement": "lists"}, level="O2")
    with pytest.raises(ValueError, match=r"no key 'levl'; did you mean 'level'"):
        prepare({"levl": "O1"}, level="O2")


def test_unknown_environment_variables_are_ignored_with_a_warning(monkeypatch):
    monkeypatch.setenv("TFAMP_LEVEL", "O0")
    monkeypatch.setenv("TFAMP_CACHE", "off")
    calls = [
        lambda: tfamp.prepare(KINDS["sequential"](), config={"level": "O1"}, dtype="bfloat16"),
        lambda: tfamp.rewrite(tf.tanh, dtype="bfloat16"),
        lambda: tfamp.set_global_policy("float32"),
    ]
    made = []
    for call in calls:
        with pytest.warns(tfamp.TfampWarning, match="'TFAMP_LEVEL' is not one of.*config=") as seen:
            made.append(call())
        assert len(seen) == 1
    assert made[0].settings.level == "O1"


def test_a_wrapped_optimizer_is_not_wrapped_again():
    inner = keras.optimizers.SGD()
    given = tfamp.LossScaleOptimizer(inner, initial_scale=64.0)
    for level in ("O2", "O1"):
        _, same = tfamp.prepare(KINDS["sequential"](), given, level=level, dtype="float16")
        assert same is given
    _, changed = tfamp.prepare(KINDS["sequential"](), given, level="O2", loss_scale=8.0)
    assert changed is not given
    assert changed.inner_optimizer is inner
    assert tfamp.prepare(KINDS["sequential"](), given, level="O0")[1] is inner
    # What it does in float32 too stays.
    clipped = tfamp.LossScaleOptimizer(inner, initial_scale=64.0, grad_clip=0.5)
    _, kept = tfamp.prepare(KINDS["sequential"](), clipped, level="O0")
    assert kept.grad_clip == clipped.grad_clip
    assert (float(kept.loss_scale), kept.inner_optimizer) == (1.0, inner)
    # Keras's own is replaced, and its scale goes on.
    given = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=7)
    _, optimizer = tfamp.prepare(KINDS["sequential"](), given, level="O2", dtype="float16")
    assert type(optimizer) is tfamp.LossScaleOptimizer
    assert optimizer.inner_optimizer is inner
    assert (float(optimizer.loss_scale), optimizer.dynamic_growth_steps) == (64.0, 7)


class FailsOnSave(keras.Sequential):
    def get_config(self):
        raise NotImplementedError("no configuration")


def _stubborn():
    inputs = keras.Input((8,))
    x = Stubborn(name="stubborn")(layers.Dense(8)(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(4)(x)))


def _overflowing():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(3)])
    model.layers[0].kernel.assign(tf.fill((8, 8), 1e5))
    return model


def _without_config():
    return FailsOnSave([keras.Input((8,)), layers.Dense(8), layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *tiers([], [(_stubborn, {"level": "O2"}, r"keep_float32=\['stubborn'\]")]),
        (_overflowing, {"level": "O3"}, "holds 100000, and float16 holds up to 65504"),
        *tiers([], [(_without_config, {"level": "O3"}, "no configuration")]),
    ],
)
def test_where_it_raises_nothing_has_changed(make, arguments, message):
    model = make()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = np.ones((4, 8), "float32"), np.zeros((4, 3), "float32")
    if make is not _overflowing:
        model.fit(x, y, verbose=0)
    before, state = model.predict(x, verbose=0), snapshot(model, optimizer)
    function = model.predict_function
    with pytest.raises(ValueError, match=message):
        tfamp.prepare(model, optimizer, dtype="float16", **arguments)
    assert model.optimizer is optimizer
    assert model.predict_function is function
    assert {x.dtype_policy.name for x in model._flatten_layers()} == {"float32"}
    assert model.outputs[0].dtype == "float32"
    assert_identical(snapshot(model, optimizer), state)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    if make is _stubborn:  # Also where it is prepared already.
        tfamp.prepare(model, level="O2", dtype="float16", keep_float32="stubborn")
        before = [x.dtype_policy.name for x in model.layers]
        with pytest.raises(ValueError, match=message):
            tfamp.prepare(model, level="O2", dtype="bfloat16")
        assert [x.dtype_policy.name for x in model.layers] == before
        assert tfamp.precision_settings(model).dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keep_float32": ["stuborn"]}, ValueError, "'stubborn'"),
        ({"keep_float32": layers.Conv2D}, ValueError, "no layer"),
        ({"keep_float32": ["("]}, ValueError, r"^keep_float32 holds '\(', which is not a regular"),
        ({"keep_float32": [3]}, TypeError, "keep_float32 takes"),
        ({"level": "O9"}, ValueError, "level must be one of"),
        ({"loss_scale": -1}, ValueError, "scale must be"),
        ({"config": {"levl": "O1"}}, ValueError, "did you mean 'level'"),
        ({"config": 3}, TypeError, "config must be"),
        ({"optimizer": 3}, TypeError, "optimizer must be"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        tfamp.prepare(_stubborn(), dtype="float16", **arguments)


def test_only_models_are_prepared_and_have_settings():
    for name in ("prepare", "precision_settings"):
        with pytest.raises(TypeError, match=rf"{name} takes a keras\.Model"):
            getattr(tfamp, name)(lambda x: x)


def test_a_layer_kept_at_o1_computes_in_float32_in_eager_calls_too():
    read = []

    class Reads(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            # Beside a low tensor a variable is low; a kept layer gets a float32 one.
            read.append(keras.ops.convert_to_tensor(x * self.scale).dtype)
            return x * self.scale

    inner = [layers.Dense(4), Reads(name="reads"), layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *inner])
    for kept, dtype in (([], "float16"), (["reads"], "float32")):
        tfamp.prepare(model, level="O1", dtype="float16", keep_float32=kept)
        model(np.ones((2, 4), "float32"))
        assert read[-1] == dtype


def test_o2_takes_a_layer_whose_call_is_a_function():
    class Product(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4))

        @tf.function
        def call(self, x):
            return x @ self.kernel

    model = keras.Sequential([keras.Input((8,)), Product(), layers.Dense(1)])
    tfamp.prepare(model, level="O2", dtype="bfloat16")
    assert "bfloat16" in op_dtypes(tf.function(model), tf.ones((2, 8)))["MatMul"]
