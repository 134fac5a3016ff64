"""Times of ops: what is run, where, how often; and the file they are kept in."""

import json
import math
import random
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_in
from tfamp.core.errors import TfampWarning
from tfamp.machine import op_times, op_timing
from tfamp.machine.op_timing import Given, OpWork, Turns


def work(op="Mul", dtype="float32", shape=(4, 4), inputs=2, **attrs):
    node = tf.compat.v1.NodeDef(op=op)
    node.attr["T"].type = tf.as_dtype(dtype).as_datatype_enum
    for name, value in attrs.items():
        node.attr[name].b = value
    return OpWork(node.SerializeToString(), (Given(dtype, shape),) * inputs, "cpu")


def pair(size, **options):
    works = (work(shape=(size, 4), **options), work(dtype="bfloat16", shape=(size, 4), **options))
    return Turns(works, 1e-6)


@pytest.fixture
def timed(monkeypatch):
    """What was timed, by a clock that takes no time: float32 takes 2 s, others 1 s."""
    calls = []

    def time_by_turns(turns):
        calls.append(turns)
        return {each: 2.0 if each.inputs[0].dtype == "float32" else 1.0 for each in turns.works}

    monkeypatch.setattr(op_timing, "time_by_turns", time_by_turns)
    return calls


def another_process():
    op_times._store.cache_clear()


# What is run


def test_an_op_is_timed_in_each_dtype():
    times = op_timing.time_by_turns(pair(8))
    assert [each.inputs[0].dtype for each in times] == ["float32", "bfloat16"]
    assert all(0 <= seconds < 10 for seconds in times.values())


def test_what_has_no_kernel_or_is_refused_has_no_time_and_is_no_obstacle():
    product = work("MatMul", inputs=2)
    without = work("MatMul", "bool", inputs=2)
    misfit = OpWork(product.node, (Given("float32", (2, 3)), Given("float32", (2, 3))), "cpu")
    times = op_timing.time_by_turns(Turns((product, without, misfit), 1e-6))
    assert times[product] is not None
    assert times[without] is times[misfit] is None


def test_a_constant_has_its_value_and_integers_are_valid_indices():
    axes = tf.make_tensor_proto([1]).SerializeToString()
    total = tf.compat.v1.NodeDef(op="Sum")
    total.attr["T"].type, total.attr["Tidx"].type = tf.float32.as_datatype_enum, 3
    node = total.SerializeToString(deterministic=True)
    whole = OpWork(node, (Given("float32", (4, 4)), Given("int32", (1,), axes)), "cpu")
    take = tf.compat.v1.NodeDef(op="Gather")
    take.attr["Tparams"].type, take.attr["Tindices"].type = tf.float32.as_datatype_enum, 3
    taken = OpWork(
        take.SerializeToString(deterministic=True),
        (Given("float32", (3, 2)), Given("int32", (5,))),
        "cpu",
    )
    times = op_timing.time_by_turns(Turns((whole, taken), 1e-6))
    assert None not in times.values()


def test_what_is_equal_has_one_key_and_what_differs_another():
    keys = [each.key() for each in (work(), work(), work(shape=(4, 5)), work(dtype="float16"))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def in_a_trace():
    @tf.function
    def function(x):
        times.append(op_times.op_times([pair(8)], 5.0))
        return x

    times = []
    graph = function.get_concrete_function(tf.TensorSpec((2,))).graph
    assert {op.type for op in graph.get_operations()} <= {"Placeholder", "Identity", "NoOp"}
    return times[0]


def in_a_graph():
    with tf.Graph().as_default() as graph:
        times = op_times.op_times([pair(8)], 5.0)
    assert not graph.get_operations()
    return times


def taped():
    with tf.GradientTape() as tape:
        times = op_times.op_times([pair(8)], 5.0)
    assert not tape.watched_variables()
    return times


def autocast():
    with tfamp.autocast("float16"), tfamp.policy_scope("mixed_float16"):
        return op_times.op_times([pair(8)], 5.0)


def eager_functions():
    tf.config.run_functions_eagerly(True)
    try:
        return op_times.op_times([pair(8)], 5.0)
    finally:
        tf.config.run_functions_eagerly(False)


def under_a_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return op_times.op_times([pair(8)], 5.0)


def pinned():
    with tf.device("CPU:1"):
        return op_times.op_times([pair(8)], 5.0)


WHERE = [in_a_trace, in_a_graph, taped, autocast, eager_functions, under_a_strategy, pinned]


@pytest.mark.parametrize("where", one_in(3, WHERE), ids=lambda f: f.__name__)
def test_ops_are_timed_wherever_it_is_asked_for_and_no_random_state_changes(where, times_folder):
    tf.random.set_seed(1)
    generator = tf.random.get_global_generator()
    random.seed(2)
    np.random.seed(3)
    before = generator.state.numpy(), random.getstate(), np.random.get_state()[1].copy()
    times = where()
    assert times.keys() == set(pair(8).works)
    np.testing.assert_array_equal(generator.state.numpy(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_array_equal(np.random.get_state()[1], before[2])
    after = tf.random.uniform(())
    tf.random.set_seed(1)
    assert tf.random.uniform(()) == after


# How often


def test_works_are_timed_until_two_times_agree_the_important_ones_first(times_folder, monkeypatch):
    factors = {1: [1.0, 1.01], 2: [9.0, 5.0, 1.0, 1.02], 3: [9.0 - n for n in range(9)]}
    order = []

    def time_by_turns(turns):
        (work, *_) = turns.works
        size = work.inputs[0].shape[0]
        order.append(size)
        return dict.fromkeys(turns.works, factors[size].pop(0))

    monkeypatch.setattr(op_timing, "time_by_turns", time_by_turns)
    times = op_times.op_times([pair(n) for n in (1, 2, 3)], 60.0)
    assert order == [1, 2, 3, 1, 2, 3, 2, 3, 2, 3, 3, 3]
    assert [times[pair(n).works[0]] for n in (1, 2, 3)] == [1.0, 1.0, 4.0]


def test_no_seconds_measure_nothing_and_give_what_is_known(times_folder, timed):
    assert op_times.op_times([pair(1)], 0) == {}
    op_times.op_times([pair(1)], 60.0)
    count = len(timed)
    assert op_times.op_times([pair(1), pair(2)], 0) == dict(
        zip(pair(1).works, (2.0, 1.0), strict=True)
    )
    assert len(timed) == count == 2


def test_ctrl_c_ends_measuring_soon_and_keeps_nothing(times_folder, monkeypatch):
    calls = []

    def time_by_turns(turns):
        calls.append(turns)
        if len(calls) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)  # Where the signal arrives.
        return dict.fromkeys(turns.works, 1.0)

    monkeypatch.setattr(op_timing, "time_by_turns", time_by_turns)
    # Processes that run tests beside each other may ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            op_times.op_times([pair(n) for n in range(1, 100)], 60.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(calls) < 99, "the rest was not timed"
    assert not times_folder.exists()
    monkeypatch.setattr(op_timing, "time_by_turns", lambda t: dict.fromkeys(t.works, 2.0))
    assert op_times.op_times([pair(1)], 60.0) == dict.fromkeys(pair(1).works, 2.0)


def test_a_terminal_shows_progress_when_it_takes_a_while(times_folder, timed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    op_times.op_times([pair(1)], 60.0)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(op_times, "_SILENT_SECONDS", 0.0)
    op_times.op_times([pair(2), pair(3)], 60.0)
    assert "4/4" in capsys.readouterr().out


def test_what_takes_too_long_is_left_out(times_folder, timed):
    long = Turns(pair(1).works, 1e3)
    times = op_times.op_times([long, pair(2)], 60.0)
    assert times.keys() == set(pair(2).works)


def test_what_cannot_be_timed_now_keeps_its_estimate_and_is_tried_again(times_folder, monkeypatch):
    def fails(turns):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    monkeypatch.setattr(op_timing, "time_by_turns", fails)
    assert op_times.op_times([pair(1)], 60.0) == {}
    (store,) = [op_times._store(tuple(op_times.machine_key().items()), times_folder)]
    assert not store.has(pair(1))


# The file


def test_a_second_process_measures_nothing(times_folder, timed):
    first = op_times.op_times([pair(1), pair(2)], 60.0)
    (path,) = times_folder.iterdir()
    assert path.name.startswith("ops-")
    count = len(timed)
    another_process()
    assert op_times.op_times([pair(2), pair(1)], 60.0) == first
    assert len(timed) == count


def test_what_has_no_kernel_is_known_as_such(times_folder, monkeypatch):
    calls = []

    def time_by_turns(turns):
        calls.append(turns)
        return {turns.works[0]: 1.0, turns.works[1]: None}

    monkeypatch.setattr(op_timing, "time_by_turns", time_by_turns)
    for _ in range(2):
        assert op_times.op_times([pair(1)], 60.0) == {pair(1).works[0]: 1.0}
        another_process()
    assert len(calls) == 2


def test_builtin_measures_nothing_and_measure_leaves_the_cache_alone(
    times_folder, timed, monkeypatch
):
    monkeypatch.setenv("TFAMP_PROFILE", "builtin")
    assert op_times.op_times([pair(1)], 60.0) == {}
    monkeypatch.setenv("TFAMP_PROFILE", "measure")
    for _ in range(2):
        assert len(op_times.op_times([pair(1)], 60.0)) == 2
    assert len(timed) == 2
    assert not times_folder.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\0" * 100,
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"format": 0}),
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        lambda text: json.dumps(json.loads(text) | {"seconds": 3}),
    ],
)
def test_a_file_that_cannot_be_read_is_measured_anew(spoil, times_folder, timed):
    first = op_times.op_times([pair(1)], 60.0)
    (path,) = times_folder.iterdir()
    path.write_text(spoil(path.read_text("utf-8")), "utf-8")
    another_process()
    assert op_times.op_times([pair(1)], 60.0) == first
    assert len(timed) == 4
    assert json.loads(path.read_text("utf-8"))["seconds"]


@pytest.mark.parametrize("value", [-1.0, 10**400, math.inf, math.nan, "1.0", True, [1.0], {}])
def test_a_damaged_entry_is_measured_anew_and_others_are_not(value, times_folder, timed):
    first = op_times.op_times([pair(1), pair(2)], 60.0)
    (path,) = times_folder.iterdir()
    found = json.loads(path.read_text("utf-8"))
    found["seconds"][pair(2).works[1].key()] = value
    path.write_text(json.dumps(found), "utf-8")
    timed.clear()
    another_process()
    assert op_times.op_times([pair(1), pair(2)], 60.0) == first
    assert set(timed) == {pair(2)}


def test_the_oldest_are_dropped(times_folder, timed, monkeypatch):
    monkeypatch.setattr(op_times, "MOST_KEPT", 4)
    for size in (1, 2, 3):
        op_times.op_times([pair(size)], 60.0)
    (path,) = times_folder.iterdir()
    kept = {each.key() for size in (2, 3) for each in pair(size).works}
    assert json.loads(path.read_text("utf-8"))["seconds"].keys() == kept


def test_a_cache_that_cannot_be_written_is_a_warning_and_the_times_hold(times_folder, timed):
    times_folder.parent.mkdir(exist_ok=True)
    times_folder.write_text("a file in the place of the folder")
    with pytest.warns(TfampWarning, match="times of ops cannot be kept"):
        first = op_times.op_times([pair(1)], 60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op_times.op_times([pair(1)], 60.0) == first
    assert len(timed) == 2


def test_writers_at_once_leave_a_whole_file_with_what_others_wrote_before(times_folder, timed):
    stores = [op_times._Store({"cpu": "mine"}, times_folder) for _ in range(4)]

    def write(number):
        for count in range(20):
            stores[number].add({f"{number} {count}": 1.0})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (path,) = times_folder.iterdir()
    found = json.loads(path.read_text("utf-8"))["seconds"]
    # Each knows what it wrote itself, so that at least the last writer's is all there.
    assert any({f"{number} {count}" for count in range(20)} <= found.keys() for number in range(4))
    late = op_times._Store({"cpu": "mine"}, times_folder)
    late.add({"late": 2.0})
    assert json.loads(path.read_text("utf-8"))["seconds"].keys() == {*found, "late"}


def test_another_job_on_the_gpu_is_not_disturbed(times_folder, timed, monkeypatch):
    monkeypatch.setattr(
        op_times.gpu_sharing, "used_by_others", lambda: "it is busy 90 % of the time"
    )
    with pytest.warns(TfampWarning, match="No times of ops are measured"):
        assert op_times.op_times([pair(1)], 60.0) == {}
    assert not timed
