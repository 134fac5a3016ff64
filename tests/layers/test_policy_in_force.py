"""Which policy is in force where: process, scopes, threads, and Keras's own setter."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.config import dtype_policy as imported_long_ago

import tfamp
from tfamp.layers.policy_in_force import constructors

MIXED = ["mixed_float16", "mixed_bfloat16"]
NAMES = ["float16", "bfloat16", "float32", "float64", *MIXED]


def in_thread(function, *args):
    """Runs in a new thread, so with none of Keras's thread-local state."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(timeout=60)


def keras_name():
    return keras.config.dtype_policy().name


@contextlib.contextmanager
def worker_thread():
    """A thread that is already running, for calls in it later."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(keras_name).result(timeout=60)  # Keras has stored its default in it by now.
        yield lambda function, *args: pool.submit(function, *args).result(timeout=60)


def test_auto_is_in_force_under_its_concrete_name_and_a_policy_as_given():
    tfamp.set_global_policy("auto")
    assert tfamp.global_policy().name == keras_name() != "auto"
    policy = tfamp.Policy("mixed_float16", float32_layers=["Softmax"])
    tfamp.set_global_policy(policy)
    assert tfamp.global_policy() is policy
    with tfamp.policy_scope(policy) as given:
        assert given == tfamp.global_policy() == policy


def test_global_policy_reaches_new_and_running_threads():
    with worker_thread() as worker:
        tfamp.set_global_policy("mixed_float16")
        for run in (worker, in_thread):
            assert run(keras_name) == "mixed_float16"
            assert run(tfamp.global_policy) == tfamp.Policy("mixed_float16")
            assert run(lambda: keras.layers.Dense(1).dtype_policy.name) == "mixed_float16"
        tfamp.set_global_policy("float32")
        assert worker(keras_name) == "float32"


def test_one_scope_object_can_be_entered_again_inside_itself_decorates_and_ends_by_an_error():
    scope = tfamp.policy_scope("mixed_float16")

    @scope
    def depth(n):
        return [keras_name()] if n == 0 else [keras_name(), *depth(n - 1), keras_name()]

    with pytest.raises(ZeroDivisionError, match="by zero"), scope:
        tfamp.set_global_policy("mixed_bfloat16")
        assert depth(2) == ["mixed_float16"] * 5
        assert keras_name() == "mixed_bfloat16"
        1 / 0  # noqa: B018
    assert keras_name() == "float32"
    assert not constructors.users


def test_scope_is_of_its_thread_only():
    with worker_thread() as worker, tfamp.policy_scope("mixed_float16"):
        assert worker(keras_name) == "float32"
        assert worker(lambda: keras.layers.Dense(1).compute_dtype) == "float32"
        worker(tfamp.set_global_policy, "mixed_bfloat16")
        # The scope hides the process's policy, whoever sets it.
        assert keras_name() == "mixed_float16"
        tfamp.set_global_policy("float64")  # Of this scope.
        assert (keras_name(), worker(keras_name)) == ("float64", "mixed_bfloat16")
    assert keras_name() == "mixed_bfloat16"


@pytest.mark.parametrize("bad", ["mixed_flaot16", "", None, 16, float, keras.DTypePolicy("int8")])
def test_bad_input_changes_nothing(bad):
    tfamp.set_global_policy("mixed_float16")
    for use in (tfamp.set_global_policy, tfamp.policy_scope):
        with pytest.raises((TypeError, ValueError), match="must be"):
            use(bad)
    assert tfamp.global_policy() == tfamp.Policy("mixed_float16")
    assert keras_name() == "mixed_float16"


class RulesOfItsOwn(keras.DTypePolicy):
    pass


POLICY_MAP = keras.dtype_policies.DTypePolicyMap
INT8 = keras.dtype_policies.QuantizedDTypePolicy("int8", "float32")


@pytest.mark.parametrize("name", NAMES)
def test_keras_agrees_with_the_global_policy_and_its_policies_mean_those_of_their_names(name):
    same = keras.DTypePolicy(name)
    for policy in (name, same, keras.FloatDTypePolicy(name)):
        with tfamp.policy_scope(policy) as given:
            assert given == tfamp.global_policy() == tfamp.Policy(name)
        tfamp.mixed_precision.set_global_policy(policy)
        assert tfamp.global_policy() == tfamp.Policy(name)
        assert type(keras.config.dtype_policy()) is keras.DTypePolicy
        assert keras_name() == imported_long_ago().name == name
        assert keras.layers.Dense(1).dtype_policy.name == name
        tfamp.set_global_policy("float32")


@pytest.mark.parametrize(
    "policy",
    [
        POLICY_MAP(keras.DTypePolicy("mixed_float16"), {"a/b": keras.DTypePolicy("float32")}),
        INT8,
        RulesOfItsOwn("mixed_float16"),
    ],
    ids=["map", "quantized", "subclass"],
)
def test_a_keras_policy_that_means_more_is_refused_with_advice_and_hidden_by_a_scope(policy):
    message = r"(?s)must be one of .*cannot express.*by model\.quantize.*pattern="
    for use in (tfamp.set_global_policy, tfamp.policy_scope):
        with pytest.raises(ValueError, match=message):
            use(policy)
    keras.config.set_dtype_policy(policy)
    with pytest.raises(ValueError, match=message):
        tfamp.global_policy()
    with tfamp.policy_scope("mixed_float16"):
        assert keras_name() == "mixed_float16"
    assert keras.config.dtype_policy() is policy


@pytest.mark.parametrize("first_out", [0, 1])
def test_scopes_left_in_any_order_leave_nothing_behind(first_out):
    names = ["mixed_float16", "mixed_bfloat16"]
    scopes = [tfamp.policy_scope(name) for name in names]
    for scope in scopes:
        scope.__enter__()
    keras.config.set_dtype_policy("float64")  # of the inner one
    assert keras_name() == "float64"
    scopes.pop(first_out).__exit__(None, None, None)
    assert keras_name() == ("mixed_float16" if first_out else "float64")
    scopes.pop().__exit__(None, None, None)
    assert keras_name() == "float32"
    assert not constructors.users


def test_generators_that_take_turns_leave_the_policy_of_their_caller():
    def layers_of(name):
        with tfamp.policy_scope(name):
            for _ in range(2):
                yield keras.layers.Dense(1).compute_dtype

    tfamp.set_global_policy("float64")
    first, second = layers_of("mixed_float16"), layers_of("mixed_bfloat16")
    assert (next(first), next(second)) == ("float16", "bfloat16")
    assert next(first, "the end") != "the end"
    assert next(first, "the end") == "the end"
    assert keras_name() == "mixed_bfloat16"  # The second one is still inside its scope.
    assert list(second) == ["bfloat16"]
    assert keras_name() == "float64"
    assert not constructors.users


def test_a_scope_left_in_another_thread_is_over_in_its_own():
    def layers_of(name):
        with tfamp.policy_scope(name):
            keras.config.set_dtype_policy("float64")
            yield keras_name()

    running = layers_of("mixed_float16")
    assert next(running) == "float64"
    assert in_thread(keras_name) == "float32"
    in_thread(running.close)
    assert keras_name() == "float32"
    assert keras.layers.Dense(1).compute_dtype == "float32"
    assert not constructors.users


def test_coroutines_of_one_thread_have_policies_of_their_own():
    async def under(name):
        seen = [keras_name()]
        with tfamp.policy_scope(name):
            for _ in range(3):
                seen.append(keras.layers.Dense(1).dtype_policy.name)
                await asyncio.sleep(0)
        return [*seen, keras_name()]

    @tfamp.policy_scope("float64")
    async def decorated():
        await asyncio.sleep(0)
        return keras_name()

    async def main():
        return await asyncio.gather(*map(under, MIXED), decorated())

    *found, of_decorated = asyncio.run(main())
    assert found == [["float32", *[name] * 3, "float32"] for name in MIXED]
    assert of_decorated == "float64"
    assert not constructors.users


def test_leaving_more_often_than_entering_is_an_error_and_generators_are_not_decorated():
    scope = tfamp.policy_scope("mixed_float16")
    for _ in range(2):
        with scope:
            assert keras_name() == "mixed_float16"
        with pytest.raises(RuntimeError, match="policy_scope was left .*`with` statement"):
            scope.__exit__(None, None, None)
    assert keras_name() == "float32"

    def generate():
        yield

    with pytest.raises(TypeError, match=r"got .*generate.*with tfamp\.policy_scope\("):
        scope(generate)


def test_layers_do_not_share_a_policy_that_someone_may_change():
    tfamp.set_global_policy("mixed_float16")
    changed = keras.layers.Dense(1).dtype_policy
    changed._compute_dtype = "float64"  # As a test of Keras's own does.
    norm = keras.layers.BatchNormalization().dtype_policy
    norm._name = "changed"
    for _ in range(2):
        assert keras.layers.Dense(1).compute_dtype == "float16"
        assert keras.layers.BatchNormalization().dtype_policy.name == "float32"
        assert keras.config.dtype_policy() == keras.DTypePolicy("mixed_float16")
        keras.utils.clear_session(free_memory=False)
    assert keras_name() == "mixed_float16"


def test_keras_setter_wins_in_its_thread_until_tfamps_next():
    tfamp.set_global_policy("mixed_float16")
    keras.config.set_dtype_policy("bfloat16")
    assert keras_name() == "bfloat16"
    assert tfamp.global_policy() == tfamp.Policy("bfloat16")
    assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    assert in_thread(keras_name) == "mixed_float16"
    tfamp.set_global_policy("mixed_bfloat16")
    assert keras_name() == "mixed_bfloat16"


@pytest.mark.parametrize("name", MIXED)
def test_keras_setter_of_a_mixed_policy_is_keras_mixed_precision(name):
    tfamp.set_global_policy("mixed_float16")
    keras.config.set_dtype_policy(name)
    assert tfamp.global_policy() == tfamp.Policy(name, float32_layers=(), float32_outputs=False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    assert model.outputs[0].dtype == tfamp.Policy(name).compute_dtype


def test_keras_setter_in_a_running_thread_is_overridden_by_tfamps_next():
    with worker_thread() as worker:
        for name in ("mixed_float16", "mixed_bfloat16"):
            worker(keras.config.set_dtype_policy, "bfloat16")
            assert worker(keras_name) == "bfloat16"
            tfamp.set_global_policy(name)
            assert worker(keras_name) == name


def test_a_thread_that_dies_in_a_scope_leaves_nothing():
    thread = threading.Thread(target=lambda: tfamp.policy_scope("mixed_float16").__enter__())
    thread.start()
    thread.join(timeout=60)
    tfamp.set_global_policy("float32")
    assert not constructors.users
    assert keras_name() == "float32"


_steps = st.lists(
    st.sampled_from(["set", "keras", "enter", "exit", "clear"]).flatmap(
        lambda step: st.tuples(st.just(step), st.sampled_from(NAMES))
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(_steps)
def test_any_sequence_of_calls_follows_a_stack(steps):
    """Reference: a stack of [tfamp's policy, Keras's or None], restored entry by entry."""
    tfamp.set_global_policy("float32")
    stack, scopes = [["float32", None]], []
    for step, name in steps:
        if step == "set":
            tfamp.set_global_policy(name)
            stack[-1] = [name, None]
        elif step == "keras":
            keras.config.set_dtype_policy(name)
            stack[-1][1] = name
        elif step == "enter":
            scopes.append(tfamp.policy_scope(name))
            scopes[-1].__enter__()
            stack.append([name, None])
        elif step == "exit" and scopes:
            scopes.pop().__exit__(None, None, None)
            stack.pop()
        elif step == "clear":
            keras.utils.clear_session(free_memory=False)
            stack[-1][1] = None
        assert keras_name() == (stack[-1][1] or stack[-1][0])
    while scopes:
        scopes.pop().__exit__(None, None, None)


def test_hooks_are_in_place_exactly_while_a_mixed_policy_is():
    original = keras.layers.Layer.__init__
    tfamp.set_global_policy("bfloat16")
    assert keras.layers.Layer.__init__ is original
    with tfamp.policy_scope("mixed_float16"):
        tfamp.set_global_policy("float32")
        assert not constructors.users
        tfamp.set_global_policy("mixed_float16")
        assert constructors.users
    assert keras.layers.Layer.__init__ is original
    tfamp.set_global_policy("mixed_float16")
    with tfamp.policy_scope("float32"):
        assert constructors.users  # other threads are under the mixed policy
    tfamp.set_global_policy("float32")
    assert keras.layers.Layer.__init__ is original


# ---- A model that was built before ---------------------------------------------------------------


def compiled(dtype=None):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, dtype=dtype), keras.layers.Dense(1)]
    )
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def warnings_of_fit(model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    return [x for x in found if issubclass(x.category, tfamp.NothingConvertedWarning)]


def test_a_model_built_before_the_policy_was_set_is_named_once():
    model = compiled()
    with tfamp.policy_scope("mixed_bfloat16"):
        (found,) = warnings_of_fit(model)
        assert not warnings_of_fit(model)
    assert model.name in str(found.message)
    assert "mixed_bfloat16" in str(found.message)
    assert "prepare" in str(found.message)
    assert found.filename == __file__
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


class Subclassed(keras.Model):
    """A model that makes its layers at once, or as it is built."""

    def __init__(self, late=False):
        super().__init__()
        self.late = late
        if not late:
            self.make()

    def make(self):
        self.hidden, self.out = keras.layers.Dense(8), keras.layers.Dense(1)

    def build(self, shape):
        if self.late:
            self.make()
        self.hidden.build(shape)
        self.out.build((*shape[:-1], 8))

    def call(self, x):
        return self.out(self.hidden(x))


def subclassed(**arguments):
    keras.utils.set_random_seed(0)
    model = Subclassed(**arguments)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def deferred():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize("make", [subclassed, deferred])
def test_a_model_that_is_built_after_the_policy_was_set_but_made_before_is_named_once(make):
    model = make()
    assert not model.built
    with tfamp.policy_scope("mixed_bfloat16"):
        (found,) = warnings_of_fit(model)
        assert not warnings_of_fit(model)
    assert f"{model.name} was made before the policy 'mixed_bfloat16'" in str(found.message)
    assert found.filename == __file__
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    # The fit was in float32, bit for bit.
    other = make()
    for _ in range(2):
        other.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    for weight, value in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, value)


def test_a_model_that_makes_its_layers_as_it_is_built_is_not():
    model = subclassed(late=True)
    with tfamp.policy_scope("mixed_bfloat16"):
        assert not warnings_of_fit(model)
    assert model.hidden.compute_dtype == "bfloat16"


def test_a_model_of_the_policy_or_of_a_level_or_with_low_layers_is_not():
    with tfamp.policy_scope("mixed_bfloat16"):
        models = [compiled(), compiled()]
    models += [compiled("bfloat16"), tfamp.prepare(compiled(), level="O1", dtype="bfloat16")[0]]
    with tfamp.policy_scope("mixed_bfloat16"):
        # All layers make outputs: float32 by the policy.
        output = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        output.compile("sgd", "mse", run_eagerly=True)
        for model in [*models, output]:
            assert not warnings_of_fit(model)
    with tfamp.policy_scope("float32"):
        assert not warnings_of_fit(compiled())
