"""Code that runs in float32 runs under autocast, whichever of its float tensors are low.

First every op of TensorFlow's that takes several tensors of one dtype; then the functions that
look at dtypes themselves, or that run what is not TensorFlow's.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.tolerances import assert_close
from tfamp.interop import tf_private
from tfamp.machine.hardware import onednn_dtypes
from tfamp.planning import kernels
from tfamp.planning.kernels import OpCall

DTYPES = ("float16", "bfloat16")
RAW = tf.raw_ops

# ---- Every op ------------------------------------------------------------------------------------

ATTRIBUTES = {
    "type": tf.float32,
    "float": 1.0,
    "bool": False,
    "string": "",
    "shape": tf.TensorShape(None),
    "list(int)": [1, 1, 1, 1],
    "list(type)": [tf.float32],
    "list(shape)": [tf.TensorShape(None)],
}


def shared_float_attrs(definition):
    """The type attributes that may be float32 and that several tensors of an op share."""
    slots = [
        each.type_attr
        for each in definition.input_arg
        for _ in range(2 if each.number_attr else 1)
        if each.type_attr and not each.is_ref
    ]
    return {
        attr.name
        for attr in definition.attr
        if attr.type == "type" and slots.count(attr.name) > 1 and admits_float32(attr)
    }


def admits_float32(attr):
    allowed = attr.allowed_values.list.type
    return not allowed or tf.float32.as_datatype_enum in allowed


def other_attributes(definition):
    """Values for the attributes that have no default and do not follow from the inputs."""
    used = {name for each in definition.input_arg for name in (each.type_attr, each.number_attr)}
    found = {}
    for attr in definition.attr:
        if attr.name in used or attr.HasField("default_value"):
            continue
        if attr.type == "string" and attr.allowed_values.list.s:
            found[attr.name] = attr.allowed_values.list.s[0].decode()
        elif attr.type == "int":
            found[attr.name] = max(attr.minimum, 1)
        else:
            found[attr.name] = ATTRIBUTES[attr.type]
    return found


def built(op, dtypes, chosen=()):
    """The node of an op type built, in the default graph, with float inputs of alternating dtypes.

    Those of the chosen type attributes; else of such as several tensors share.
    """
    definition = tf_private.op_definition(op)
    shared, dtypes = chosen or shared_float_attrs(definition), itertools.cycle(dtypes)
    attrs = {attr.name: attr for attr in definition.attr}

    def placeholder(argument):
        attr = attrs.get(argument.type_attr)
        if argument.type_attr in shared:
            dtype = next(dtypes)
        elif attr is None:
            dtype = argument.type
        else:
            dtype = tf.float32 if admits_float32(attr) else attr.allowed_values.list.type[0]
        if dtype == tf.resource:
            return RAW.VarHandleOp(dtype=tf.float32, shape=tf.TensorShape(None))
        return tf.compat.v1.placeholder(dtype)

    inputs = {
        each.name: [placeholder(each) for _ in range(2)] if each.number_attr else placeholder(each)
        for each in definition.input_arg
    }
    getattr(RAW, op)(**inputs, **other_attributes(definition))
    made = reversed(tf.compat.v1.get_default_graph().get_operations())
    return next(each for each in made if each.type == op)


def joining_ops():
    """The op types with public names that take several float tensors of one dtype."""
    definitions = {name: tf_private.op_definition(name) for name in dir(RAW)}
    return [name for name, each in definitions.items() if each and shared_float_attrs(each)]


@pytest.mark.slow
def test_every_op_that_takes_several_tensors_of_one_dtype_takes_mixed_ones():
    low_lists = {dtype: tfamp.OpLists.default(dtype).low for dtype in DTYPES}
    walked, refused = 0, {}
    for op in joining_ops():
        with tf.Graph().as_default():
            try:
                built(op, ["float32"])
            except (KeyError, NotImplementedError, TypeError, ValueError):
                continue  # It needs known shapes, functions or attributes that fit together.
            walked += 1
            for low, first in itertools.product(DTYPES, (0, 1)):
                order = (low, "float32") if first else ("float32", low)
                try:
                    with tfamp.autocast(low):
                        node = built(op, order)
                except (TypeError, ValueError) as error:
                    refused[op, order] = str(error)
                    continue
                shared = shared_float_attrs(tf_private.op_definition(op))
                found = {node.get_attr(name).name for name in shared}
                strided = "strides" in node.node_def.attr
                attrs = {"strides": node.get_attr("strides")} if strided else {}
                call = OpCall(op, attrs=attrs)
                fact = kernels.fact_about(call, low, "cpu", onednn_dtypes())
                is_low = op in low_lists[low] and fact is None
                assert found == {low if is_low else "float32"}, op
    assert not refused
    assert walked > 200


# ---- By the device -------------------------------------------------------------------------------


@pytest.fixture
def with_gpu(monkeypatch):
    """As where TensorFlow sees a GPU and places on it what has a kernel there."""
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")


def only_float32_on_gpus(low):
    """The public ops, each with a type attribute, whose low kernels are all for CPUs."""
    for op in dir(RAW):
        for attr in {each.type_attr for each in tf_private.op_inputs(op)} - {None}:
            has = {
                (device, dtype): tf_private.has_kernel(op, device, ((attr, (dtype,)),))
                for device in ("cpu", "gpu")
                for dtype in (low, "float32")
            }
            if sum(has.values()) == 3 and not has["gpu", low]:
                yield op, attr


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="no kernels of GPUs are registered")
@pytest.mark.parametrize("low", first_of(DTYPES))
def test_what_only_the_cpu_computes_in_low_precision_stays_float32_on_a_gpu(low, with_gpu):
    lists, walked = tfamp.OpLists.default(low), set()
    for op, attr in only_float32_on_gpus(low):
        with tf.Graph().as_default():
            try:
                built(op, [low], {attr})
            except (KeyError, NotImplementedError, TypeError, ValueError):
                continue  # It needs known shapes, functions or attributes that fit together.
            with tfamp.autocast(low):
                node = built(op, [low], {attr})
                with tf.device("CPU:0"):
                    on_cpu = built(op, [low], {attr})
        found = node.get_attr(attr).name, on_cpu.get_attr(attr).name
        writes = any(each.dtype == tf.resource for each in tf_private.op_inputs(op))
        assert found[0] == "float32", op
        if not kernels.facts_of(op, low, "cpu", onednn_dtypes()):  # Else it depends on shapes.
            assert found[1] == ("float32" if writes or op in lists.float32 else low), op
        walked.add(op)
    assert walked >= {"RGBToHSV", "TensorScatterAdd", "TensorScatterUpdate"}
    assert low == "float16" or walked >= {"FloorMod", "MulNoNan", "Softsign"}


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="no kernels of GPUs are registered")
def test_the_device_is_that_of_the_block_around_the_op_or_around_the_call(with_gpu):
    x = tf.ones((1, 1, 1, 3), "float16")
    inner = tf.function(lambda x: RAW.RGBToHSV(images=x))

    @tf.function
    def outer(x):
        with tf.device("CPU:0"):
            on_cpu = inner(x), RAW.RGBToHSV(images=x)
        return *on_cpu, inner(x)

    with tfamp.autocast("float16"):
        for run in (inner, inner.python_function):
            for _ in range(2):  # The second time what was traced is at hand.
                assert run(x).dtype == tf.float32
                with tf.device("CPU:0"):
                    assert run(x).dtype == tf.float16
                    with tf.device(None):
                        assert run(x).dtype == tf.float32
        assert [each.dtype.name for each in outer(x)] == ["float16", "float16", "float32"]


# ---- Functions -----------------------------------------------------------------------------------


def doubled(x):
    return x * 2


def ragged(x):
    """Two matrices, of one row and of all."""
    return tf.ragged.stack([x[:1], x])


def rows(x):
    return tf.RaggedTensor.from_row_lengths(x[0], [1, 3])


def image(x):
    return tf.tile(tf.reshape(x, (1, 4, 4, 1)), (1, 3, 3, 1))


def traced(function):
    return tf.function(function, autograph=False)


VARIABLE = tf.Variable(tf.zeros((4, 4)))


def written(write):
    """The value of a float32 variable after a write."""

    def call(f, x):
        VARIABLE.assign(f)
        write(VARIABLE, x)
        return VARIABLE.read_value()

    return call


# Of a float32 matrix `f` and a low one `x`.
FUNCTIONS = {
    # Lists of tensors of one dtype, and tensors that become one.
    "shape_n": lambda f, x: tf.shape_n([f, x]),
    "accumulate_n": lambda f, x: tf.math.accumulate_n([x, f, x]),
    "stacked by an op": lambda f, x: tf.reduce_max([x, f], 0),
    "stacked by a conversion": lambda f, x: tf.convert_to_tensor([[x[0, 0], 1.0], [f[0, 0], 2.0]]),
    "ragged stack and concat": lambda f, x: tf.concat([ragged(x), ragged(f)], 0).flat_values,
    # Several tensors of one dtype.
    "ssim": lambda f, x: tf.image.ssim(image(x), image(x + f * 0), 1.0),
    "ssim_multiscale": lambda f, x: tf.image.ssim_multiscale(
        image(x), image(f), 1.0, power_factors=(0.5, 0.5), filter_size=3
    ),
    "non_max_suppression": lambda f, x: tf.image.non_max_suppression(x, f[0], 4),
    "edit_distance": lambda f, x: tf.edit_distance(
        tf.sparse.from_dense(x), tf.sparse.from_dense(f)
    ),
    "unique of two": lambda f, x: tf.compat.v1.setdiff1d(x[0], f[0] + 2)[0],
    "searchsorted with a dtype by name": lambda f, x: RAW.LowerBound(
        sorted_inputs=tf.sort(x), values=f, out_type="int64"
    ),
    "where of ragged": lambda f, x: tf.where(rows(f) > 0, rows(x), rows(f)).flat_values,
    "dropout at a rate": lambda f, x: tf.nn.dropout(x, f[0, 0] * 0),
    # No kernel, or no shape function, of one dtype at least.
    "poisson": lambda f, x: tf.random.stateless_poisson((4, 4), (1, 2), x * 0, tf.int32),
    "isotonic_regression": lambda f, x: tf.nn.isotonic_regression(x)[0],
    "dct": lambda f, x: [tf.signal.dct(x, kind) for kind in (1, 2, 3, 4)],
    "mfccs": lambda f, x: tf.signal.mfccs_from_log_mel_spectrograms(x),
    "assert_near": lambda f, x: [tf.debugging.assert_near(x, tf.identity(x)), x][1:],
    "matrix_rank": lambda f, x: tf.linalg.matrix_rank(x),
    "pinv": lambda f, x: tf.linalg.pinv(x + 2 * tf.eye(4, dtype=x.dtype)),
    "pinv of a product": lambda f, x: tf.linalg.pinv(tf.matmul(f, f) + 2 * tf.eye(4)),
    "lstsq of Keras": lambda f, x: keras.ops.lstsq(x + 2 * tf.eye(4, dtype=x.dtype), f),
    "ragged range": lambda f, x: tf.ragged.range(x[0] * 0 + 3).flat_values,
    # Ragged matmuls; the last two run map_fn.
    "matmul of ragged and dense": lambda f, x: tf.matmul(ragged(x), tf.stack([f, f])).flat_values,
    "matmul of ragged and low": lambda f, x: tf.matmul(ragged(f), tf.stack([x, x])).flat_values,
    "matmul of ragged and an array": lambda f, x: (
        tf.matmul(
            ragged(x), np.stack([f, f]) if tf.executing_eagerly() else tf.stack([f, f])
        ).flat_values
    ),
    "matmul of two ragged": lambda f, x: (
        tf.matmul(
            tf.ragged.stack([f[:1, :2], f]), tf.ragged.stack([f[:2], f]), output_type=None
        ).flat_values
    ),
    "matmul of a transposed ragged": lambda f, x: (
        tf.matmul(ragged(x), tf.ragged.stack([f[:1], f]), transpose_a=True).flat_values
    ),
    "map_fn that says its dtype": lambda f, x: tf.map_fn(
        lambda row: tf.linalg.matvec(x, row), f, fn_output_signature=tf.TensorSpec((4,))
    ),
    "map_fn that says its ragged dtype": lambda f, x: (
        tf.map_fn(
            lambda row: tf.RaggedTensor.from_row_lengths(tf.linalg.matvec(x, row), [1, 3]),
            f,
            fn_output_signature=tf.RaggedTensorSpec((2, None), tf.float32),
        ).flat_values
    ),
    # Python with declared dtypes.
    "py_function": lambda f, x: tf.py_function(doubled, [tf.matmul(f, x)], tf.float32),
    "py_function of several": lambda f, x: tf.py_function(
        lambda a: (doubled(a), len(a)), [x], [tf.float32, tf.int32]
    ),
    "py_function of ragged": lambda f, x: (
        tf.py_function(
            doubled, [ragged(x)], tf.RaggedTensorSpec((2, None, None), ragged_rank=2)
        ).flat_values
    ),
    "numpy_function": lambda f, x: tf.numpy_function(doubled, [tf.matmul(f, x)], tf.float32),
    # A variable's dtype.
    "scatter_nd_update": written(lambda v, x: v.scatter_nd_update([[1]], x[:1])),
    "scatter_add": written(lambda v, x: v.scatter_add(tf.IndexedSlices(x[:1], [2]))),
    "assign of a slice": written(lambda v, x: v[:2].assign(x[:2])),
    "raw assignment": written(lambda v, x: RAW.AssignAddVariableOp(resource=v.handle, value=x)),
}


@pytest.mark.parametrize(("name", "run"), one_of_each(FUNCTIONS, [lambda f: f, traced], quick=11))
def test_a_function_that_runs_in_float32_runs_with_low_tensors_too(name, run):
    values = np.random.default_rng(0).uniform(0.25, 0.75, (2, 4, 4))
    f = tf.constant(values[0], tf.float32)
    for dtype in DTYPES:
        x = tf.constant(values[1], dtype)
        call = run(FUNCTIONS[name])
        expected = tf.nest.flatten(call(f, tf.cast(x, tf.float32)))
        with tfamp.autocast(dtype):
            found = tf.nest.flatten(call(f, x))
        for one, other in zip(found, expected, strict=True):
            assert one.dtype.is_floating == other.dtype.is_floating
            assert_close(one, other, dtype, depth=16)


def test_the_gradient_of_python_with_a_declared_dtype():
    x = tf.Variable(np.random.default_rng(0).uniform(0.25, 0.75, (4, 4)), dtype=tf.float32)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape, tfamp.autocast("bfloat16"):
            low = tf.matmul(x, x)
            loss = tf.reduce_sum(tf.py_function(doubled, [low], tf.float32))
        assert (low.dtype, loss.dtype) == (tf.bfloat16, tf.float32)
        return tape.gradient(loss, x)

    ones = np.full((4, 4), 2.0, "float32")
    assert_close(gradient(), ones @ x.numpy().T + x.numpy().T @ ones, "bfloat16", depth=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_list_of_arrays_takes_the_dtype_of_a_tensor(dtype):
    rows = [np.float32([1, 2]), np.float32([3, 4])]
    with tfamp.autocast(dtype):
        product = tf.ones((2, 2), dtype) * rows
    assert product.dtype == dtype
    np.testing.assert_array_equal(tf.cast(product, tf.float32), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_tensors_of_all_float_dtypes_in_one_op_lose_nothing(dtype, traced):
    values = [[1 + 2.0**-10], [2.0**100], [1 + 2.0**-20]]  # each needs its dtype
    names = ("float16", "bfloat16", "float32")
    tensors = [tf.constant(value, name) for value, name in zip(values, names, strict=True)]

    def joined(*tensors):
        with tfamp.autocast(dtype):
            return tf.concat(tensors, 0)

    result = (tf.function(joined) if traced else joined)(*tensors)
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, np.ravel(values))
