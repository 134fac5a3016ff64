"""`tfamp.tune`: its choice, its report, and that it leaves the state unchanged."""

import collections
import dataclasses
import itertools
import math
import random
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import assert_computes_in, op_dtypes
from helpers.seeds import set_random_seed
from helpers.tolerances import assert_close
from tfamp.core.profile import builtin_profile
from tfamp.interop import keras_hooks
from tfamp.rewriting import measured_runs, pipeline, tuning
from tfamp.rewriting.tune_report import TuneReport, TuneRow

CANDIDATES = ("float32", "lists", "min_cut")
WIDTH = 16
# For tests in which the times do not matter.
QUICK = {"dtype": "bfloat16", "candidates": CANDIDATES, "rounds": 1}


def batch(size=8):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((size, WIDTH)).astype("float32")
    return x, generator.integers(0, 4, size)


def make_model():
    layers = keras.layers
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(4),
        ]
    )


def make_step(model, optimizer):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def bits(*owners):
    """The bytes of all variables, including Dropout's seeds."""
    return [np.asarray(each).tobytes() for owner in owners for each in owner.variables]


def next_draws():
    """Draws the next random number of every generator."""
    return (
        random.random(),
        np.random.random(),
        float(keras.random.uniform(())),
        float(tf.random.uniform(())),
    )


def candidate_of(call):
    """The candidate that a call belongs to; float32's may be a plain function."""
    settings = getattr(call.func, "settings", None)
    is_float32 = settings is None or settings.dtype == "float32"
    return "float32" if is_float32 else settings.placement


@pytest.fixture(autouse=True)
def nothing_is_native(monkeypatch):
    """Makes float32 what level "auto" takes, and what is timed first, on every machine."""
    monkeypatch.setattr(tuning, "low_dtype", lambda dtype: dtype)


@pytest.fixture
def timed(monkeypatch):
    """Fakes the times of candidates, which still run."""
    seconds = {"float32": 2.0, "lists": 0.5, "min_cut": 1.0}

    def together(call, count):
        del count
        call()
        return seconds.get(candidate_of(call), 9.0)

    monkeypatch.setattr(measured_runs, "together", together)
    return seconds


# ---- Nothing is left changed ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_train_step_is_tuned_and_what_its_first_call_makes_is_as_it_is_made(timed):
    """test_tuning_state shows what is restored, and after which errors."""
    tuned, untouched = [(make_model(), keras.optimizers.Adam(0.1)) for _ in range(2)]
    step = make_step(*tuned)
    report = tfamp.tune(step, *batch(), **QUICK)
    assert step.experimental_get_tracing_count() == 0
    assert not any(np.any(np.asarray(slot)) for slot in tuned[1].variables[2:])
    assert [row.low_nodes > 0 for row in report.rows] == [False, True, True]
    # Dropout drops the same values in each of them.
    assert [0 < row.error < 0.05 for row in report.rows] == [False, True, True]
    step(*batch())
    make_step(*untouched)(*batch())
    assert bits(*tuned) == bits(*untouched)
    assert report.chosen.candidate == "lists"
    report.best(*batch())
    assert bits(*tuned) != bits(*untouched)


def test_float32_is_timed_as_it_is_written(monkeypatch):
    """A trace to rewrite has the fused op of BatchNormalization."""
    ops = {}

    def together(call, count):
        ops[candidate_of(call)] = op_dtypes(call.func.get_concrete_function(*call.args))
        return 1.0

    monkeypatch.setattr(measured_runs, "together", together)
    tfamp.tune(make_step(make_model(), keras.optimizers.SGD()), *batch(), **QUICK)
    fused = {name: "FusedBatchNormV3" in found for name, found in ops.items()}
    assert fused == {"float32": False, "lists": True}


def test_ops_that_hold_a_random_state_go_on_where_they_were(timed):
    def make():
        tf.random.set_seed(3)
        return tf.function(lambda x: tf.nn.dropout(x @ tf.ones((WIDTH, WIDTH)), 0.5))

    x = tf.constant(batch()[0])
    step = make()
    expected = [step(x).numpy(), step(x).numpy()]
    step = make()
    first = step(x).numpy()
    report = tfamp.tune(step, x, **QUICK)
    assert (np.array([first, step(x).numpy()]) == np.array(expected)).all()
    # All candidates use the graph's seeds, so they drop the same values.
    assert max(row.error for row in report.rows) < 0.05
    dropped = report.best(x).numpy() == 0
    assert (dropped == (expected[0] == 0)).all(), "the best one has drawn nothing yet"


@pytest.mark.parametrize("is_seeded", [True, False])
def test_unseeded_random_ops_are_named_as_a_reason_of_the_errors(timed, is_seeded):
    tf.random.set_seed(None)
    x = tf.constant(batch()[0])
    seed = 7 if is_seeded else None
    report = tfamp.tune(lambda x: x @ tf.random.normal((WIDTH, WIDTH), seed=seed), x, **QUICK)
    named = () if is_seeded else ("RandomStandardNormal",)
    assert (report.rows[1].error > 0.5, report.unseeded) == (not is_seeded, named)
    text = "RandomStandardNormal drew other numbers in each run, and errors include that"
    assert (text in report.to_text()) is not is_seeded


def test_variables_that_are_arguments_are_as_they_were():
    variable, generator = tf.Variable(tf.ones((2, 2))), tf.random.Generator.from_seed(3)
    state = generator.state.numpy().tolist()

    def step(variable, generator):
        product = variable @ generator.normal((2, 2))
        variable.assign_add(product)
        return product

    report = tfamp.tune(step, variable, generator, **QUICK)
    assert report.rows[1].low_nodes > 0
    assert variable.numpy().tolist() == [[1.0, 1.0]] * 2
    assert generator.state.numpy().tolist() == state


def test_a_generator_of_keras_is_made_by_the_program_and_not_by_tuning(timed):
    x = tf.ones((WIDTH, WIDTH))
    set_random_seed(5)
    expected = next_draws()
    set_random_seed(5)
    report = tfamp.tune(lambda x: x @ x + keras.random.normal(()), x, **QUICK)
    assert next_draws() == expected
    assert report.chosen.candidate == "lists"
    state = keras_hooks.global_seed_generator().state
    before = state.numpy().tolist()
    report.best(x)
    assert state.numpy().tolist() != before, "what is left draws from the program's"


def test_a_calibrated_function_is_tuned_and_its_state_is_as_it_was(x, timed):
    count = tf.Variable(0)

    def step(x):
        count.assign_add(1)
        return tf.matmul(x * 1e3, x, transpose_b=True)

    calibrated = tfamp.rewrite(step, dtype="float16", calibration=[(x,)] * 3)
    report = tfamp.tune(calibrated, x, candidates=CANDIDATES, rounds=1)
    assert [row.low_nodes for row in report.rows] == [0, 0, 0]
    assert count.numpy() == 0


def test_what_cannot_be_restored_is_refused():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    table.insert(tf.constant([1], tf.int64), [2.0])
    keys, x = tf.constant([1], tf.int64), tf.ones((2, 2))
    data = tf.data.Dataset.from_tensors(x).repeat(3)
    iterator = iter(data)

    def reads(x):
        return x @ x * table.lookup(keys)

    def writes(x):
        table.insert(keys, tf.reduce_sum(x, keepdims=True)[0])
        return reads(x)

    assert tfamp.tune(reads, x, **QUICK).rows[1].error == 0
    for function, args, message in (
        (writes, (x,), "a lookup table .*LookupTableInsertV2.*restored"),
        (lambda x: next(iterator) @ x, (x,), "a resource of type .*Iterator.*next"),
        (lambda it: next(it) @ x, (iterator,), "a resource of type .*Iterator.*next"),
        (lambda x: data.reduce(x, tf.matmul), (x,), "a dataset.*restored"),
    ):
        with pytest.raises(ValueError, match=f"uses {message}"):
            tfamp.tune(function, *args, **QUICK)
    assert table.lookup(keys).numpy().tolist() == [2.0]
    assert next(iterator).numpy().tolist() == [[1.0, 1.0]] * 2


# ---- What is chosen ------------------------------------------------------------------------------


@pytest.fixture
def layer():
    """A function that is less exact in low precision."""
    weights = tf.Variable(np.random.default_rng(1).standard_normal((64, 64)).astype("float32"))

    @tf.function
    def layer(x):
        return tf.nn.relu(x @ weights), x

    return layer


@pytest.fixture
def cut_layer(layer):
    """The same with slow Casts in the profile: unlike "lists", "min_cut" converts nothing."""
    slow = dataclasses.replace(builtin_profile("cpu"), cast_bandwidth=1.0, least_gain=0.0)
    return tfamp.rewrite(layer, dtype="bfloat16", profile=slow)


@pytest.fixture
def x():
    return tf.constant(np.random.default_rng(2).standard_normal((8, 64)).astype("float32"))


def test_the_fastest_within_the_bound_is_chosen_and_the_report_says_why(layer, cut_layer, x, timed):
    report = tfamp.tune(cut_layer, x, max_error=0.1, **QUICK | {"rounds": 3})
    assert [row.candidate for row in report.rows] == [*CANDIDATES]
    assert [row.chosen for row in report.rows] == [False, True, False]
    assert [row.seconds for row in report.rows] == [2.0, 0.5, 1.0]
    assert report.rows[0].quartiles == (2.0, 2.0)
    assert report.rows[0].error == 0
    assert 1e-4 < report.rows[1].error < 1e-2
    assert (report.speed_up, report.rounds, report.dtype) == (4.0, 2, "bfloat16")
    assert_computes_in("bfloat16", report.best.concrete(x))
    assert_close(report.best(x)[0], layer(x)[0], "bfloat16", depth=64)
    assert "chosen: lists, 4.00 times as fast as float32" in report.to_text()
    exact = tfamp.tune(layer, x, max_error=0, **QUICK)
    assert exact.best is layer
    assert "low precision does not pay here: lists is 4.00 times as fast, but" in exact.to_text()


def test_a_terminal_shows_progress(layer, x, timed, monkeypatch, capsys):
    tfamp.tune(layer, x, **QUICK)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    report = tfamp.tune(layer, x, **QUICK)
    # The first call of each graph, and one round; how many graphs differ is not known before.
    runs = 2 * sum(not row.same_as for row in report.rows)
    assert f"\r      {runs}/" in capsys.readouterr().out


def test_float32_is_always_a_candidate_and_never_made_slower(layer, x, timed):
    timed["lists"] = 2.5
    report = tfamp.tune(layer, x, dtype="bfloat16", candidates=["lists", "lists"], rounds=1)
    assert [row.candidate for row in report.rows] == ["float32", "lists"]
    assert report.best is layer
    assert "low precision does not pay here: no candidate" in report.to_text()
    plain = tfamp.tune(lambda x: layer(x), x, dtype="bfloat16", candidates=(), rounds=1)
    assert_computes_in("float32", plain.best, x)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([1.0, 1.0, 1.0, 1.0], "float32"),
        ([0.9, 0.9, 3.0, 3.0, 0.9], "float32"),  # Its median is less, in noise.
        ([0.5, 0.5, 3.0, 0.5, 0.5], "lists"),
        ([0.9, 0.9, 0.9], "lists"),
    ],
)
def test_a_gain_that_may_be_noise_leaves_float32(seconds, chosen, layer, x, monkeypatch):
    clock = itertools.chain(*((1.0, each) for each in seconds))
    monkeypatch.setattr(measured_runs, "together", lambda call, count: next(clock))
    report = tfamp.tune(layer, x, dtype="bfloat16", candidates=["lists"], rounds=len(seconds))
    assert report.chosen.candidate == chosen


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, (2, 8)),
        ({"rounds": 1}, (1, 1)),
        ({"seconds": 0.0}, (1, 1)),  # float32 is not among the fastest.
        ({"max_error": 0.0}, (2, 2)),  # lists is not exact, and min_cut is far from float32.
    ],
)
def test_only_those_that_may_be_the_fastest_go_on(choices, expected, cut_layer, x, monkeypatch):
    """Times of lists and min_cut, which are far from float32's, overlap up to the last round."""
    runs = collections.Counter()

    def together(call, count):
        placement = candidate_of(call)
        runs[placement] += 1
        return 2.0 if placement == "float32" else 1.0 + runs[placement] % 2 / 100

    monkeypatch.setattr(measured_runs, "together", together)
    options = {"dtype": "bfloat16", "candidates": CANDIDATES, "rounds": 8} | choices
    report = tfamp.tune(cut_layer, x, **options)
    far, near = expected
    assert runs == {"float32": far, "lists": near, "min_cut": near}
    assert report.rounds == near


def test_calls_that_warm_up_do_not_count(cut_layer, x, monkeypatch):
    """As on an H100, where second calls took up to a thousand times as long as later ones."""
    cold = {"float32": [2.3, 0.4], "lists": [0.1], "min_cut": [0.1]}
    warm = {"float32": 0.002, "lists": 0.004, "min_cut": 0.003}
    counts = collections.defaultdict(list)

    def together(call, count):
        placement = candidate_of(call)
        counts[placement].append(count)
        return cold[placement].pop(0) if cold[placement] else warm[placement]

    monkeypatch.setattr(measured_runs, "together", together)
    report = tfamp.tune(cut_layer, x, dtype="bfloat16", candidates=CANDIDATES, rounds=8)
    assert {row.candidate: row.seconds for row in report.rows} == warm
    assert report.chosen.candidate == "float32"
    # A cold call took long enough alone. How many warm ones a round needs was found again.
    assert counts["float32"][:2] == [1, 1]
    assert counts["float32"][-1] == 2


def test_candidates_with_the_same_graph_are_timed_once(layer, x, timed, monkeypatch):
    calls, together = [], measured_runs.together
    monkeypatch.setattr(measured_runs, "together", lambda *run: calls.append(run) or together(*run))
    report = tfamp.tune(layer, x, **QUICK)
    assert len(calls) == 2
    assert [row.same_as for row in report.rows] == ["", "", "lists"]
    assert report.rows[2] == dataclasses.replace(
        report.rows[1], candidate="min_cut", same_as="lists", chosen=False
    )
    assert report.to_text().splitlines()[3].endswith("same graph as lists")


def test_a_candidate_that_compiles_too_long_is_dropped(cut_layer, x, timed, monkeypatch):
    # This thread's clock: first calls, in another, take no time whenever they run.
    clock, here = itertools.chain([0, 1, 1, 13, 13], itertools.repeat(14)), threading.get_ident()
    time = types.SimpleNamespace(
        monotonic=lambda: next(clock) if threading.get_ident() == here else 14
    )
    for module in (tuning, measured_runs):
        monkeypatch.setattr(module, "time", time)
    report = tfamp.tune(cut_layer, x, **QUICK)
    assert report.dropped == ("lists",)
    assert [row.candidate for row in report.rows] == ["float32", "min_cut"]
    assert "dropped: lists takes too long to compile" in report.to_text()


def test_results_that_overflow_are_not_chosen_and_without_any_no_error_is_told(timed):
    ones, given = tf.ones((4, 4)), {**QUICK, "dtype": "float16"}
    report = tfamp.tune(lambda x: (x * 1e5) @ ones * 1e-5, ones, **given)
    assert report.rows[1].error == math.inf
    assert report.chosen.error == 0
    # Where float32 is not finite either, the others' values say nothing.
    some = tfamp.tune(lambda x: (x @ ones) / [1.0, 0.0, 1.0, 1.0], ones, **given)
    assert [row.error for row in some.rows] == [0, 0, 0]
    for result in (lambda y: None, lambda y: y / 0.0):
        report = tfamp.tune(lambda x, result=result: result(x @ ones), ones, **QUICK)
        assert all(math.isnan(row.error) for row in report.rows)
        assert report.chosen.candidate == "lists"
        assert "the errors are unknown" in report.to_text()
    bound = tfamp.tune(lambda x: (x @ ones) / 0.0, ones, max_error=1, **QUICK)
    assert bound.chosen.candidate == "float32"
    assert "but its error is nan" in bound.to_text()


def test_the_arguments_of_a_rewritten_function_hold_for_all_candidates(layer, x, timed):
    fast = tfamp.rewrite(layer, dtype="bfloat16", keep_float32=["matmul", "Relu"])
    with pytest.warns(tfamp.TfampWarning, match="'Relu' has no effect"):
        report = tfamp.tune(fast, x, candidates=CANDIDATES, rounds=1)
    assert (report.dtype, [row.low_nodes for row in report.rows]) == ("bfloat16", [0, 0, 0])
    assert "it computes in float32" in report.to_text()


def test_models_and_concrete_functions_take_arrays(x, timed):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    concrete = tf.function(lambda x: model(x)).get_concrete_function(x)
    for fn, given in ((model, x.numpy()), (concrete, x)):
        report = tfamp.tune(fn, given, **QUICK)
        assert 0 < report.rows[1].error < 0.03
        assert report.best(given).dtype == "float32"


def test_a_call_runs_what_was_traced_also_where_a_tape_is_around_it(layer, x, timed, monkeypatch):
    traces, prepared, prepare = [], [], pipeline.index_after_passes

    def counted(x):
        traces.append(x)
        return layer(x)[0]

    def counted_prepare(*args):
        prepared.append("once")
        return prepare(*args)

    monkeypatch.setattr(pipeline, "index_after_passes", counted_prepare)

    with tf.GradientTape():
        report = tfamp.tune(counted, x.numpy(), **QUICK)
    assert len(traces) == 1, "one for all candidates"
    assert prepared == ["once"]
    with tf.GradientTape() as tape:
        y = report.best(x)
    (variable,) = tape.watched_variables()
    assert tape.gradient(y, variable) is not None


def test_wrong_arguments_say_what_is_expected(layer, x):
    with pytest.raises(ValueError, match="candidates must be one of float32, .*; got 'fast'"):
        tfamp.tune(layer, x, candidates=["fast"])
    with pytest.raises(TypeError, match="a collection of strings; got the string 'lists'"):
        tfamp.tune(layer, x, candidates="lists")
    with pytest.raises(TypeError, match="candidates must be a collection .* got 3"):
        tfamp.tune(layer, x, candidates=3)
    for symbolic in (tf.TensorSpec((2, 64)), keras.Input((64,))):
        with pytest.raises(TypeError, match="Tuning runs layer .* must have values"):
            tfamp.tune(layer, symbolic)
    with pytest.raises(ValueError, match="rounds must be at least 1; got 0"):
        tfamp.tune(layer, x, rounds=0)
    with pytest.raises(ValueError, match="seconds must be a number in"):
        tfamp.tune(layer, x, seconds=-1)
    with pytest.raises(ValueError, match="max_error must be a number in"):
        tfamp.tune(layer, x, max_error=-1)
    with pytest.raises(TypeError, match="got the class"):
        tfamp.tune(keras.Model, x)
    with pytest.raises(ValueError, match="min_cut, lists, fused; got 'tune'. .* use tfamp.tune"):
        tfamp.rewrite(layer, placement="tune")
    with pytest.raises(tfamp.RewriteError, match="no function is being traced"):
        tf.function(lambda x: tfamp.tune(layer, x))(x)
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(tfamp.RewriteError, match="run_functions_eagerly"):
            tfamp.tune(layer, x)
    finally:
        tf.config.run_functions_eagerly(False)


# ---- The report ----------------------------------------------------------------------------------


def report_of(*seconds, **facts):
    rows = tuple(
        TuneRow(name, time, (time / 2, time * 2), 0.01 * i, time == min(seconds), low_nodes=i)
        for i, (name, time) in enumerate(zip(CANDIDATES, seconds, strict=False))
    )
    return TuneReport("step", "bfloat16", rows, max_error=None, rounds=5, **facts)


def test_text_and_html_are_a_table_with_a_verdict():
    lines = report_of(3e-3, 2.5, 9e-6).to_text().splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["float32", "3", "ms"],
        ["lists", "2500", "ms"],
        ["min_cut", "0.009", "ms"],
    ]
    assert lines[3].endswith("<- chosen")
    overlapping = report_of(3e-3, 2.9e-3)
    rows = [dataclasses.replace(row, chosen=row.candidate == "float32") for row in overlapping.rows]
    text = dataclasses.replace(overlapping, rows=tuple(rows)).to_text()
    assert "lists is 1.03 times as fast, but not in three quarters" in text

    page = dataclasses.replace(overlapping, function="<lambda>")._repr_html_()
    assert page.startswith("<div")
    assert all(each not in page for each in ("http", "<script", "<link", "src=", "<lambda>"))
    assert page.count("<tr>") == 3
