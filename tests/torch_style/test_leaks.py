"""autocast leaves nothing behind: no replaced symbol, no mode elsewhere, no changed op."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.interop.patching import SYMBOLS, locate
from tfamp.torch_style.context import hooks
from tfamp.torch_style.modes import current_modes

OTHERS = {
    "layer_init", "layer_call", "functional_init", "variable_init", "batch_normalization",
    "policy_module", "constant", "gradient", "fit", "scaled_step", "slot",
    "keras_scale_loss", "keras_scaling_init", "load_optimizer",
}  # fmt: skip
PATCHED = [symbol for name, symbol in SYMBOLS if name not in OTHERS]


def symbols():
    """The current value of every symbol that is ever replaced."""
    return {symbol: value_of(symbol) for symbol in PATCHED}


def value_of(symbol):
    owner, name = locate(symbol)
    return vars(owner)[name]


def same(one, other):
    return {name: value is other[name] for name, value in one.items()}


@pytest.fixture
def a():
    return tf.constant(np.random.default_rng(0).uniform(-1, 1, (4, 4)), tf.float32)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = symbols()
    yield
    assert all(same(before, symbols()).values())
    assert hooks.users == 0


def test_every_symbol_is_replaced_inside_and_the_original_object_afterwards(a):
    before = symbols()
    with tfamp.autocast("bfloat16"):
        assert not any(same(before, symbols()).values())
        with tfamp.autocast(enabled=False), tfamp.autocast("float16"):
            tf.matmul(a, a)
        assert not any(same(before, symbols()).values())
    assert all(same(before, symbols()).values())


@pytest.mark.parametrize(
    "leave", [ValueError, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration]
)
def test_after_any_exception_and_after_an_op_or_a_trace_that_fails(a, leave):
    before = symbols()
    with pytest.raises(leave, match="inside"), tfamp.autocast("bfloat16"):
        tf.matmul(a, a)
        raise leave("inside")
    assert all(same(before, symbols()).values())
    for run in (lambda f: f, tf.function):
        fails = run(tfamp.autocast("bfloat16")(lambda x: tf.matmul(x, tf.ones((3, 3)))))
        with pytest.raises(
            (tf.errors.InvalidArgumentError, ValueError), match=r"(?i)matrix size|dimensions must"
        ):
            fails(a)
    assert dtype_of_matmul(a) == "float32"


# ---- Threads -------------------------------------------------------------------------------------


def test_eight_threads_with_different_dtypes_never_see_each_other(a):
    modes = ["bfloat16", "float16", None, "bfloat16", "off", "float16", None, "bfloat16"]
    barrier = threading.Barrier(len(modes), timeout=60)
    shared = tf.function(lambda x: tf.matmul(x, x))

    def work(mode):
        seen, own = set(), tf.function(lambda x: tf.matmul(x, x))
        context = tfamp.autocast("float16" if mode == "off" else mode, enabled=mode != "off")
        context = contextlib.nullcontext() if mode is None else context
        for _ in range(10):
            barrier.wait()
            with context:
                seen |= {dtype_of_matmul(a), own(a).dtype.name, shared(a).dtype.name}
            seen.add("after: " + dtype_of_matmul(a))
        return seen

    with ThreadPoolExecutor(len(modes)) as pool:
        for mode, seen in zip(modes, pool.map(work, modes), strict=True):
            low = mode if mode in ("bfloat16", "float16") else "float32"
            assert seen == {low, "after: float32"}


# ---- Coroutines ----------------------------------------------------------------------------------


def dtype_of_matmul(a):
    return tf.matmul(a, a).dtype.name


async def others_run():
    for _ in range(3):
        await asyncio.sleep(0)


def test_coroutines_of_one_thread_never_see_each_other(a):
    traced = tf.function(lambda x: tf.matmul(x, x))

    async def work():
        found = set()
        for _ in range(3):
            found |= {dtype_of_matmul(a), traced(a).dtype.name}
            await others_run()
        return found

    async def under(context):
        before = dtype_of_matmul(a)
        with context:
            inside = await work()
        await others_run()
        return before, inside, dtype_of_matmul(a)

    async def main():
        shared = tfamp.autocast("float16")  # in force in several coroutines at once
        contexts = [shared, tfamp.autocast("bfloat16"), tfamp.autocast(enabled=False), shared]
        return await asyncio.gather(*map(under, contexts), work())

    *found, plain = asyncio.run(main())
    expected = ["float16", "bfloat16", "float32", "float16"]
    assert found == [("float32", {each}, "float32") for each in expected]
    assert plain == {"float32"}
    assert current_modes.casts is None


def test_a_task_takes_the_autocast_it_was_started_in_along_until_that_is_left(a):
    async def child(left):
        first = dtype_of_matmul(a)
        with tfamp.autocast("float16"):
            await others_run()
            inner = dtype_of_matmul(a)
        await left.wait()
        return first, inner, dtype_of_matmul(a)

    async def main():
        left = asyncio.Event()
        with tfamp.autocast("bfloat16"):
            task = asyncio.ensure_future(child(left))
            in_thread = await asyncio.to_thread(dtype_of_matmul, a)
            await others_run()
            assert dtype_of_matmul(a) == "bfloat16"
        left.set()
        return in_thread, await task

    assert asyncio.run(main()) == ("float32", ("bfloat16", "float16", "float32"))


@pytest.mark.parametrize("close", ["in another task", "in another thread", "by the loop"])
def test_an_asynchronous_generator_closed_elsewhere_leaves_nothing(a, close):
    async def generate():
        with tfamp.autocast("bfloat16"):
            yield dtype_of_matmul(a)

    async def main():
        running = generate()
        started = [await asyncio.ensure_future(anext(running))]
        with tfamp.autocast("float16"):
            if close == "in another task":
                await asyncio.ensure_future(running.aclose())
            if close == "in another thread":
                await asyncio.to_thread(asyncio.run, running.aclose())
            return started, dtype_of_matmul(a)

    assert asyncio.run(main()) == (["bfloat16"], "float16")
    assert hooks.users == 0
    assert dtype_of_matmul(a) == "float32"


def test_a_context_that_kept_a_block_left_elsewhere_is_not_under_it(a):
    def generate():
        with tfamp.autocast("bfloat16"):
            yield dtype_of_matmul(a)

    context, running = contextvars.copy_context(), generate()
    assert context.run(next, running) == "bfloat16"
    assert context.run(dtype_of_matmul, a) == "bfloat16"  # as in a loop over such a generator
    assert dtype_of_matmul(a) == "float32"
    running.close()
    with tfamp.autocast("float16"):
        assert context.run(dtype_of_matmul, a) == "float32"


def test_leaving_more_often_than_entering_is_an_error(a):
    context = tfamp.autocast("bfloat16")
    with pytest.raises(RuntimeError, match="left more often than it was entered"):
        context.__exit__(None, None, None)
    with context:
        assert dtype_of_matmul(a) == "bfloat16"
