"""Low-precision weights without masters: accuracy of each rounding, and supported optimizers."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tfamp
from helpers.cases import first_of, tiers
from helpers.tolerances import assert_all_equal
from helpers.training import assert_identical, data, small_model, snapshot
from tfamp.core.dtypes import float_format
from tfamp.training import fused_update

ROUNDINGS = ["stochastic", "split"]
SHAPES = [(7, 5), (5,), (2, 3, 4)]
INNER = {
    "SGD": lambda: optimizers.SGD(0.05),
    "AdamW": lambda: optimizers.AdamW(0.01),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
    "Lion": lambda: optimizers.Lion(0.01, weight_decay=0.1),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "clipnorm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.5),
}
# Kinds of one class, and an option.
KINDS = {"momentum", "nesterov", "clipnorm"}
NIGHTLY = [name for name in INNER if name not in ("SGD", "AdamW", "Adafactor")]


def weights(dtype="bfloat16", **arguments):
    random = np.random.default_rng(3)
    return [keras.Variable(random.standard_normal(s), dtype=dtype, **arguments) for s in SHAPES]


def gradients(number, dtype="bfloat16", skips=True):
    random = np.random.default_rng(number)
    found = [tf.cast(random.standard_normal(shape), dtype) for shape in SHAPES]
    if skips and number % 7 == 3:
        found[0] = found[0] * tf.cast(np.inf, dtype)
    return found


def trained(inner, steps=6, dtype="bfloat16", how="function", seed=1, **arguments):
    keras.utils.set_random_seed(seed)
    own = weights(dtype)
    optimizer = tfamp.LossScaleOptimizer(inner(), loss_scale=1.0, **arguments)
    optimizer.build(own)

    def step(*grads):
        optimizer.apply(list(grads), own, unscaled=True)

    if how != "eager":
        step = tf.function(step, jit_compile=how == "compiled")
    for number in range(steps):
        step(*gradients(number, dtype))
    return own, optimizer


@functools.cache
def with_masters(name):
    """Weights after training with float32 masters, which several roundings are compared with."""
    return trained(INNER[name], master_weights=True)[0]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(*(v.numpy().view("uint16") for v in (one, other)))


@pytest.mark.parametrize("name", tiers(["SGD", "AdamW"], ["Adafactor"], NIGHTLY))
@pytest.mark.parametrize("steps", tiers([6], [100], [1000]))
def test_split_is_training_with_masters_bit_for_bit(name, steps):
    split, optimizer = trained(INNER[name], steps, weight_rounding="split")
    masters, _ = trained(INNER[name], steps, master_weights=True)
    assert_same(split, masters)
    assert int(optimizer.skipped_steps) == (steps + 3) // 7
    assert {v.dtype for v in optimizer.variables if v.path.endswith("_split")} == {"int16"}


@pytest.mark.parametrize("name", tiers(["SGD"], ["AdamW", "Adafactor"], NIGHTLY))
def test_every_way_to_run_a_step_gives_the_same(name):
    traced, optimizer = trained(INNER[name], weight_rounding="stochastic")
    other, _ = trained(INNER[name], weight_rounding="stochastic", seed=2)
    assert any((a.numpy() != b.numpy()).any() for a, b in zip(traced, other, strict=True))
    for how in ("eager", "compiled"):
        assert_same(trained(INNER[name], weight_rounding="stochastic", how=how)[0], traced)
    slots = [v for v in optimizer.inner_optimizer.variables if v.shape in (SHAPES[0], SHAPES[2])]
    assert {v.dtype for v in slots} <= {"bfloat16"}
    for one, other in zip(traced, with_masters(name), strict=True):
        one, other = (v.numpy().astype("float32") for v in (one, other))
        # Signs, and steps of their size, may differ where a momentum is about zero.
        assert np.mean(np.abs(one - other)) < 0.03


@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
def test_updates_below_half_a_spacing_add_up(dtype):
    keras.utils.set_random_seed(0)
    weight = keras.Variable(np.ones(1000), dtype=dtype)
    optimizer = tfamp.LossScaleOptimizer(optimizers.SGD(1.0), weight_rounding="stochastic")
    optimizer.build([weight])

    @tf.function
    def step():
        for _ in tf.range(1000):
            optimizer.apply([tf.fill([1000], 1e-4)], [weight], unscaled=True)

    step()
    mean = np.mean(weight.numpy().astype("float64"))
    eps = float_format(dtype).eps
    # Of 1000 weights that each went 1000 random steps of eps / 2.
    assert abs(mean - 0.9) < 5 * np.sqrt(0.1 * eps / 2 / 1000)


@pytest.mark.parametrize("rounding", first_of(ROUNDINGS))
def test_a_nonfinite_step_moves_nothing(rounding):
    own, optimizer = trained(INNER["AdamW"], 3, weight_rounding=rounding)
    before = snapshot(optimizer.inner_optimizer), [v.numpy() for v in own]
    optimizer.apply(gradients(3), own, unscaled=True)
    assert int(optimizer.skipped_steps) == 1
    assert_identical(snapshot(optimizer.inner_optimizer), before[0])
    assert_all_equal(own, before[1])
    again, _ = trained(INNER["AdamW"], 5, weight_rounding=rounding)
    optimizer.apply(gradients(4), own, unscaled=True)
    assert_same(own, again)


def test_where_xla_does_not_work_the_same_is_computed(monkeypatch):
    compiled, _ = trained(INNER["AdamW"], weight_rounding="stochastic")
    monkeypatch.setattr(fused_update, "xla_works", lambda device: False)
    assert_same(trained(INNER["AdamW"], weight_rounding="stochastic")[0], compiled)


def test_variables_and_steps_are_rounded_differently():
    keras.utils.set_random_seed(0)
    two = [keras.Variable(np.ones(100), dtype="bfloat16") for _ in range(2)]
    optimizer = tfamp.LossScaleOptimizer(optimizers.SGD(1.0), weight_rounding="stochastic")
    moved = []
    for _ in range(2):
        before = [v.numpy().astype("float32") for v in two]
        optimizer.apply([tf.fill([100], 2.0**-9)] * 2, two, unscaled=True)
        moved += [v.numpy().astype("float32") != b for v, b in zip(two, before, strict=True)]
    assert len({each.tobytes() for each in moved}) == 4


@pytest.mark.parametrize("rounding", first_of(ROUNDINGS))
def test_a_restored_checkpoint_goes_on_bit_for_bit(rounding, tmp_path):
    whole, _ = trained(INNER["AdamW"], 12, weight_rounding=rounding, seed=5)
    own, optimizer = trained(INNER["AdamW"], 6, weight_rounding=rounding, seed=5)
    path = tf.train.Checkpoint(optimizer=optimizer, weights=own).save(str(tmp_path / "saved"))
    own, optimizer = trained(INNER["AdamW"], 0, weight_rounding=rounding, seed=9)
    tf.train.Checkpoint(optimizer=optimizer, weights=own).restore(path).assert_consumed()
    for number in range(6, 12):
        optimizer.apply(gradients(number), own, unscaled=True)
    assert_same(own, whole)


@pytest.mark.parametrize("name", tiers(["SGD"], ["AdamW", "Lion", "Adafactor"]))
def test_on_gpus_split_weights_are_stored_in_a_program_apart_with_the_same_bits(name, monkeypatch):
    written_by, assign = set(), tf.raw_ops.AssignVariableOp

    def recorded(resource, value):
        if value.dtype == tf.int16:
            written_by.add(value.graph.name)
        return assign(resource=resource, value=value)

    monkeypatch.setattr(fused_update, "device_kind_of", lambda device: "gpu")
    monkeypatch.setattr(tf.raw_ops, "AssignVariableOp", recorded)
    split, _ = trained(INNER[name], weight_rounding="split")
    assert_same(split, with_masters(name))
    # On an H100 weights were wrong where one program read and wrote both parts.
    assert written_by
    assert not any("update_all" in program for program in written_by)


@pytest.mark.parametrize("rounding", tiers([], ["split"], ["stochastic"]))
def test_a_keras_file_and_a_configuration_go_on_bit_for_bit(rounding, tmp_path):
    x, y = data()
    with tfamp.policy_scope("bfloat16"):
        model = small_model()
    arguments = {"weight_rounding": rounding, "slots": "bfloat16"}
    model.compile(tfamp.LossScaleOptimizer(INNER["AdamW"](), **arguments), "mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = tfamp.LossScaleOptimizer.from_config(model.optimizer.get_config())
    for each in (loaded.optimizer, again):
        assert (each.weight_rounding, each.slots) == (rounding, "bfloat16")
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_same(loaded.trainable_variables, model.trainable_variables)


@pytest.mark.parametrize("name", tiers(["AdamW"], [], ["clipnorm"]))
@pytest.mark.parametrize("rounding", first_of(ROUNDINGS))
def test_replicas_agree_and_do_as_one(two_replicas, name, rounding):
    def in_replica(*grads):
        # Halves add up to the gradient exactly.
        optimizer.apply([g * tf.cast(0.5, g.dtype) for g in grads], own, unscaled=True)

    with two_replicas.scope():
        own, optimizer = trained(INNER[name], 0, weight_rounding=rounding)
    step = tf.function(lambda *grads: two_replicas.run(in_replica, args=grads))
    for number in range(6):
        step(*gradients(number))
    for variable in [*own, *optimizer.inner_optimizer.variables]:
        np.testing.assert_array_equal(*(value.numpy() for value in variable.value.values))
    if name != "clipnorm":  # Keras clips what each replica has.
        assert_same(own, trained(INNER[name], 6, weight_rounding=rounding)[0])


@pytest.mark.parametrize("name", tiers(["AdamW"], ["Adafactor", "clipnorm"], ["momentum", "Lion"]))
def test_sparse_gradients_clipped_with_float32_variables_do_as_with_masters(name):
    def values(**how):
        table = keras.Variable(np.linspace(-2, 2, 24).reshape(6, 4), dtype="bfloat16")
        wide = keras.Variable(np.ones(3), dtype="float32", name="wide")
        wide.constraint = keras.constraints.NonNeg()
        optimizer = tfamp.LossScaleOptimizer(INNER[name](), loss_scale=1.0, **how)
        optimizer.build([table, wide])

        @tf.function
        def step(values):
            rows = tf.IndexedSlices(values, tf.constant([1, 4, 1]), tf.constant([6, 4]))
            optimizer.apply([rows, tf.fill([3], 0.7)], [table, wide], unscaled=True)

        for number in range(4):
            step(tf.fill([3, 4], tf.cast(number + 0.3, "bfloat16")))
        assert int(optimizer.iterations) == 4
        return table, wide

    (low, wide), (masters, other) = values(weight_rounding="split"), values(master_weights=True)
    assert_same([low], [masters])
    np.testing.assert_allclose(wide, other, rtol=1e-6)


@pytest.mark.parametrize("rounding", first_of(ROUNDINGS))
def test_constraints_hold_when_those_of_masters_do(rounding):
    def values(**how):
        low = keras.Variable(np.linspace(-2, 2, 7), dtype="bfloat16")
        low.constraint = keras.constraints.NonNeg()
        optimizer = tfamp.LossScaleOptimizer(optimizers.SGD(0.3), **how)
        step = tf.function(lambda gradient: optimizer.apply([gradient], [low], unscaled=True))
        for number in range(4):
            step(tf.fill([7], tf.cast(number - 1.3, "bfloat16")))
            yield low.numpy()

    found = values(weight_rounding=rounding), values(master_weights=True)
    for own, expected in zip(*found, strict=True):
        if rounding == "split":
            np.testing.assert_array_equal(own, expected)
        assert (own >= 0).all()


@pytest.mark.parametrize("how", [{"weight_rounding": "split"}, {}])
def test_a_variable_given_twice_is_updated_twice(how):
    """As the weights of two models that share a layer are; others may have no elements."""
    dtype = "bfloat16" if how else "float32"
    shared, plain = (keras.Variable(np.ones(3), dtype=each) for each in (dtype, "float32"))
    other = keras.Variable(np.ones(0), dtype=dtype)
    optimizer = tfamp.LossScaleOptimizer(optimizers.Adam(0.25), **how)
    bare = optimizers.Adam(0.25)
    step = tf.function(lambda *g: optimizer.apply(list(g), [shared, shared, other], unscaled=True))
    optimizer.build([shared, other])
    for number in range(3):
        values = [tf.fill([3], tf.cast(number - each, dtype)) for each in (0.5, 2.0)]
        step(*values, tf.ones(0, dtype))
        bare.apply([tf.cast(value, "float32") for value in values], [plain, plain])
    rounding = float_format(dtype).eps if how else 1e-6
    np.testing.assert_allclose(shared.numpy().astype("float32"), plain.numpy(), rtol=rounding)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_one_compiled_pass_and_no_float32_copy_in_the_graph(name):
    own, optimizer = trained(INNER[name], 0, weight_rounding="stochastic")
    step = tf.function(lambda *g: optimizer.apply(list(g), own, unscaled=True))
    library = step.get_concrete_function(*gradients(0)).graph.as_graph_def().library
    nodes = [node for each in library.function for node in each.node_def]
    # The slots of each variable, and then the variable.
    assert sum(node.attr["_XlaMustCompile"].b for node in nodes) == 2 * len(SHAPES)


@pytest.mark.parametrize(("rounding", "most"), [("stochastic", 6.3), ("split", 8.3)])
def test_bytes_a_parameter(rounding, most):
    own = [keras.Variable(np.zeros((1000, 1000)), dtype="bfloat16")]
    optimizer = tfamp.LossScaleOptimizer(
        optimizers.AdamW(), weight_rounding=rounding, slots="bfloat16"
    )
    optimizer.build(own)
    assert sum(v.value.numpy().nbytes for v in [*own, *optimizer.variables]) / 1e6 < most


@pytest.mark.parametrize("rounding", tiers([], ["stochastic"], ["split"]))
def test_prepare_at_level_o3(rounding):
    x, y = data()
    model, optimizer = tfamp.prepare(
        small_model(),
        optimizers.AdamW(0.01),
        level="O3",
        dtype="bfloat16",
        weight_rounding=rounding,
    )
    assert (optimizer.weight_rounding, optimizer.master_weights) == (rounding, False)
    assert {v.dtype for v in model.variables} == {"bfloat16"}
    settings = tfamp.precision_settings(model)
    assert settings.weight_rounding == rounding
    model.compile(optimizer, "mse")
    slots = "float32" if rounding == "split" else "bfloat16"
    assert tfamp.precision_settings(model).slots == slots
    assert f", {slots} slots" in str(tfamp.precision_settings(model))
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, epochs=5, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before
    assert tfamp.prepare(model, level="O3", dtype="bfloat16", weight_rounding=rounding)[0] is model


@pytest.mark.parametrize("how", [{"weight_rounding": "split"}, {"master_weights": True}])
def test_prepared_weights_start_from_the_exact_ones(how):
    def model():
        made = small_model()
        made.weights[0].assign(tf.fill(made.weights[0].shape, 1 + 2.0**-8))  # a tie in bfloat16
        return made

    pair = tfamp.prepare(model(), optimizers.SGD(), level="O3", dtype="bfloat16", **how)
    back, _ = tfamp.prepare(*pair, level="O0")
    assert_all_equal(back.get_weights(), model().get_weights())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_rounding": "kahan"}, "must be one of 'stochastic', 'split'; got 'kahan'"),
        ({"weight_rounding": "split", "slots": "int8"}, "'bfloat16', 'float16', 'float32'"),
        ({"slots": "bfloat16"}, "give weight_rounding"),
        ({"weight_rounding": "split", "master_weights": True}, "Leave one of the two out"),
        ({"weight_rounding": "split", "slots": "float16"}, "Give slots='bfloat16'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfamp.LossScaleOptimizer(optimizers.Adam(), **arguments)


def test_every_rule_is_tested_and_listed_where_it_can_be_read():
    """A rule that is deleted or added without its tests and pages fails here."""
    assert set(fused_update.FUSED_OPTIMIZERS) == set(INNER) - KINDS
    listed = (
        f"{', '.join(fused_update.FUSED_OPTIMIZERS[:-1])} and {fused_update.FUSED_OPTIMIZERS[-1]}"
    )
    page = Path(__file__).parents[2] / "docs" / "guides" / "memory.md"
    for text in (tfamp.LossScaleOptimizer.__doc__, page.read_text("utf-8")):
        assert f"Keras's {listed}" in " ".join(text.split())


def test_nadam_goes_on_from_its_product_of_momenta():
    """float32 variables, in which the rule is that of Keras bit for bit but for rounding."""
    own, theirs = weights("float32"), weights("float32")
    optimizer = tfamp.LossScaleOptimizer(optimizers.Nadam(0.01), loss_scale=1.0)
    bare = optimizers.Nadam(0.01)
    for number in range(6):
        grads = gradients(number, "float32", skips=False)
        optimizer.apply(grads, own, unscaled=True)
        bare.apply(grads, theirs)
    product, expected = (o._u_product.numpy() for o in (optimizer.inner_optimizer, bare))
    np.testing.assert_allclose(product, expected, rtol=1e-6)
    for one, other in zip(own, theirs, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


class OwnAdam(optimizers.Adam):
    """An optimizer as users write them, which may compute something else."""


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (optimizers.RMSprop, r"\(RMSprop\)"),
        (OwnAdam, r"\(OwnAdam\)"),
        (lambda: optimizers.Adam(amsgrad=True), r"\(Adam\) with amsgrad=True"),
        (lambda: optimizers.SGD(use_ema=True), r"\(SGD\) with use_ema=True"),
        (lambda: optimizers.Lion(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
    ],
)
def test_optimizers_without_a_rule_are_refused(make, given):
    *names, last = fused_update.FUSED_OPTIMIZERS
    message = f"{', '.join(names)} and {last} .* got .*{given}.* give master_weights=True"
    with pytest.raises(ValueError, match=message):
        tfamp.LossScaleOptimizer(make(), weight_rounding="split")
    with pytest.raises(ValueError, match=message):
        tfamp.prepare(small_model(), make(), level="O3", dtype="bfloat16", weight_rounding="split")


def test_low_weights_are_not_updated_under_a_strategy_without_copies():
    strategy = tf.distribute.experimental.CentralStorageStrategy()
    with strategy.scope():
        own = weights()
        optimizer = tfamp.LossScaleOptimizer(INNER["AdamW"](), weight_rounding="split")
        optimizer.build(own)
    with pytest.raises(ValueError, match="CentralStorageStrategy.* master_weights=True"):
        strategy.run(lambda: optimizer.apply(gradients(0), own, unscaled=True))


def test_split_refuses_float16_and_a_built_optimizer_is_refused():
    own = weights("float16")
    with pytest.raises(ValueError, match="Give weight_rounding='stochastic'"):
        tfamp.LossScaleOptimizer(optimizers.SGD(), weight_rounding="split").build(own)
    inner = optimizers.Adam()
    inner.build(own)
    with pytest.raises(ValueError, match="Create a new inner optimizer"):
        tfamp.LossScaleOptimizer(inner, weight_rounding="split").build(own)


def test_a_second_build_keeps_the_lower_halves_of_split_weights():
    own, optimizer = trained(INNER["SGD"], steps=1, how="eager", weight_rounding="split")
    before = [variable.numpy() for variable in optimizer.variables]
    optimizer.build(own)
    assert len(optimizer.variables) == len(before)
    for variable, kept in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), kept)


def test_low_weights_follow_the_look_ahead_of_a_nesterov_momentum():
    weight = keras.Variable(np.ones(2), dtype="bfloat16")
    inner = optimizers.SGD(0.25, momentum=0.5, nesterov=True)
    optimizer = tfamp.LossScaleOptimizer(inner, loss_scale=1.0, weight_rounding="split")
    for expected in (0.625, 0.1875):  # Numbers that bfloat16 has.
        optimizer.apply([tf.ones(2, "bfloat16")], [weight], unscaled=True)
        assert weight.numpy().tolist() == [expected] * 2
