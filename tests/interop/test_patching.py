"""Patches of symbols and of objects: nothing of others' is lost and nothing of ours stays."""

import functools
import gc
import inspect
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

import tfamp
from tfamp.interop import patching
from tfamp.interop.patching import (
    SYMBOLS,
    Patch,
    patched_here,
    unwrap_methods,
    wrap_method,
    wrapped_methods,
)


def plus(number):
    return lambda original, *args, **kwargs: original(*args, **kwargs) + number


# ---- Symbols -------------------------------------------------------------------------------------


class Thing:
    """Stands for a class of a library."""

    def compute(self, x=0):
        """Computes."""
        return x


original = Thing.compute


@pytest.fixture(autouse=True)
def _symbol(monkeypatch):
    monkeypatch.setattr(patching, "SYMBOLS", (*SYMBOLS, ("compute", f"{__name__}:Thing.compute")))
    yield
    assert Thing.compute is original


def put_on_top():
    """Patches as another library does, which restores without a check."""
    below = Thing.compute

    @functools.wraps(below)
    def theirs(self, x=0):
        return below(self, x) + 1000

    Thing.compute = theirs

    def restore():
        Thing.compute = below

    return theirs, restore


@pytest.mark.parametrize("symbol", ["keras.gone:f", "keras:gone.f", "keras.layers:Layer.gone"])
def test_a_missing_symbol_says_which(symbol, monkeypatch):
    monkeypatch.setattr(patching, "SYMBOLS", (*patching.SYMBOLS, ("gone", symbol)))
    patch = Patch(compute=plus(1), gone=plus(1))
    for _ in range(2):
        with pytest.raises(tfamp.UnsupportedVersionError, match="gone.* is not in Keras 3"):
            patch.acquire()
        assert Thing.compute is original
        assert patch.users == 0


def test_a_name_that_no_table_has_is_an_error():
    for make in (Patch, patched_here):
        with pytest.raises(ValueError, match="under 'layer_calls': a patch replaces .*layer_call,"):
            make(layer_calls=plus(1))


def test_it_is_in_place_until_the_last_holder_lets_go():
    patch = Patch(compute=plus(1))
    with patch.held():
        ours = Thing.compute
        assert (ours.__name__, ours.__doc__) == ("compute", "Computes.")
        assert inspect.signature(ours) == inspect.signature(original)
        with patch.held():
            assert Thing.compute is ours
            assert Thing().compute() == 1
        assert Thing.compute is ours
        assert patch.users == 1
    assert Thing.compute is original
    assert ours(Thing()) == 0
    with pytest.raises(KeyError, match="inside"), patch.held():
        raise KeyError("inside")
    assert Thing.compute is original


def test_theirs_on_top_survives_and_ours_goes_quiet():
    patch = Patch(compute=plus(1))
    patch.acquire()
    theirs, restore = put_on_top()
    patch.release()
    assert Thing.compute is theirs
    assert Thing().compute() == 1000
    with patch.held():  # over theirs, and only once
        assert Thing().compute() == 1001
    assert Thing.compute is theirs
    restore()
    assert Thing().compute() == 0
    with patch.held():  # What they brought back of ours is gone after the next use.
        assert Thing().compute() == 1


def test_threads_that_hold_it_at_once_leave_nothing():
    patch, barrier = Patch(compute=plus(1)), threading.Barrier(4, timeout=60)

    def work(_):
        barrier.wait()
        for _ in range(200):
            with patch.held():
                assert Thing().compute() == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert patch.users == 0


def test_a_patch_of_one_thread_counts_there_and_two_end_in_any_order():
    entered = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]
    seen = {}

    def work(place):
        with patched_here(compute=plus(10**place)):
            seen[place] = Thing().compute()
            entered[place].set()
            leave[place].wait(60)
            seen[place] += Thing().compute()

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        assert event.wait(60)
    assert Thing().compute() == 0
    for thread, event in zip(threads, leave, strict=True):
        event.set()
        thread.join()
    assert seen == {0: 2, 1: 20}


def layers_of_wrappers():
    count, function = 0, Thing.compute
    while hasattr(function, "__wrapped__"):
        count, function = count + 1, function.__wrapped__
    return count


def test_patches_that_end_in_another_order_leave_no_wrapper_behind():
    ours = [Patch(compute=plus(1)), Patch(compute=plus(10)), Patch(compute=plus(100))]
    for patch in ours:
        patch.acquire()
    for turn in range(300):
        first = ours[turn % 3]
        first.release()
        assert layers_of_wrappers() == 2
        assert Thing().compute() == 111 - (1, 10, 100)[turn % 3]
        first.acquire()
        assert layers_of_wrappers() == 3
        assert Thing().compute() == 111
        assert inspect.unwrap(Thing.compute) is original
    for patch in ours:
        patch.release()


def test_a_user_that_ends_while_symbols_change_ends_after_that(monkeypatch):
    first, second = Patch(compute=plus(1)), Patch(compute=plus(10))
    first.acquire()
    put = patching._put

    def collected(*place):
        monkeypatch.setattr(patching, "_put", put)
        first.release()  # As garbage collection may do at any time.
        assert Thing.compute is not original
        put(*place)

    monkeypatch.setattr(patching, "_put", collected)
    with second.held():
        assert first.users == 0
        assert layers_of_wrappers() == 1
        assert Thing().compute() == 10


def test_threads_with_patches_of_one_symbol_leave_nothing():
    patches, barrier = [Patch(compute=plus(10**i)) for i in range(3)], threading.Barrier(6)

    def work(place):
        barrier.wait(60)
        for turn in range(200):
            with patches[place % 3].held(), patches[(place + turn) % 3].held():
                assert str(Thing().compute())[-1 - place % 3] == "1"

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert [patch.users for patch in patches] == [0, 0, 0]


def test_an_optional_symbol_that_is_missing_is_told_of_once(monkeypatch):
    gone = ("gone", "keras.layers:Layer.gone")
    monkeypatch.setattr(patching, "SYMBOLS", (*patching.SYMBOLS, gone))
    patch = Patch(optional={"gone": "nothing is counted."}, compute=plus(1), gone=plus(1))
    with (
        pytest.warns(tfamp.TfampWarning, match="Layer.gone is not in Keras 3.*nothing is counted"),
        patch.held(),
    ):
        assert Thing().compute() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with patch.held():
            assert Thing().compute() == 1


# ---- What is patched in TensorFlow and Keras -----------------------------------------------------


def test_scopes_and_optimizers_that_end_in_any_order_leave_no_wrapper():
    before = {symbol: getattr(*patching.locate(symbol)) for _, symbol in SYMBOLS}
    kept = []
    for turn in range(300):
        with tfamp.policy_scope("mixed_float16"):
            kept.append(tfamp.LossScaleOptimizer(keras.optimizers.SGD()))
            if turn % 3:
                kept.pop(0)
    kept.clear()
    gc.collect()
    after = {symbol: getattr(*patching.locate(symbol)) for _, symbol in SYMBOLS}
    assert [name for name in before if before[name] is not after[name]] == []


# ---- Single objects ------------------------------------------------------------------------------


class Layer(keras.layers.Layer):
    def call(self, x):
        return x

    def build(self, shape):
        pass


@pytest.mark.parametrize("name", ["call", "compute_output_spec", "build"])
def test_unwrapping_leaves_nothing(name):
    layer, other = Layer(), Layer()
    before = dict(vars(layer))
    wrap_method(layer, name, lambda original, *args: original(*args))
    wrap_method(layer, name, lambda original, *args: original(*args))
    assert set(wrapped_methods(layer)) == {name}
    assert not wrapped_methods(other)
    unwrap_methods(layer)
    assert vars(layer) == before
    assert not wrapped_methods(layer)


@pytest.mark.parametrize("first_out", [0, 1])
def test_each_is_taken_off_in_any_order(first_out):
    layer = Layer()
    layer.helper = lambda x: x  # The object's own function comes back too.
    before = dict(vars(layer))
    for name in ("call", "helper"):
        take_off = [wrap_method(layer, name, plus(number)) for number in (1, 10)]
        take_off.pop(first_out)()
        assert getattr(layer, name)(0) == (1 if first_out else 10)
        take_off.pop()()
    assert vars(layer) == before


@pytest.mark.parametrize("alone", [False, True])
def test_what_someone_else_put_on_top_is_left_alone(alone):
    layer = Layer()
    take_off = wrap_method(layer, "call", plus(1))
    ours = layer.call

    @functools.wraps(ours)
    def theirs(x):
        return ours(x) * 2

    object.__setattr__(layer, "call", theirs)
    if alone:
        take_off()
        assert layer.call(0) == 0
    else:
        unwrap_methods(layer)
        assert layer.call(0) == 2
    assert vars(layer)["call"] is theirs
