"""Measuring a machine: the contents of a profile and where measuring works, on tiny sizes.

How fast anything is is not tested: machines differ, and are busy.
"""

import math

import pytest
import tensorflow as tf

import tfamp
from tfamp.core.profile import DTYPES, KINDS, builtin_profile
from tfamp.graph import MachineProfile
from tfamp.interop import tf_private
from tfamp.machine import profile_measure
from tfamp.machine.profile_measure import NO_KERNEL, SIZES, works

TINY = {"matmuls": ((8, 8, 8),), "convolutions": ((1, 4, 2, 2, 3),), "elements": 64, "traffic": 64}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(profile_measure, "SIZES", dict.fromkeys(SIZES, TINY))


def measure():
    return profile_measure.measure_profile(seconds=0.01)


def check(profile):
    assert isinstance(profile, MachineProfile)  # whose constructor checks every figure
    figures = [profile.peaks[kind][dtype] for kind in KINDS for dtype in DTYPES]
    figures += [profile.bandwidth, profile.cast_bandwidth]
    assert figures == [float(f"{figure:.1e}") for figure in figures]
    usual = builtin_profile("cpu")
    assert profile.ops.keys() == usual.ops.keys()
    assert (profile.least_gain, profile.op_overhead) == (usual.least_gain, usual.op_overhead)
    assert tf.__version__ in profile.name
    assert MachineProfile.from_json(profile.to_json()) == profile


def test_every_kind_is_timed_in_every_dtype_wherever_it_is_asked_for(monkeypatch):
    results = []
    matmul = tf.raw_ops.MatMul

    def watched(**inputs):
        result = matmul(**inputs)
        results.append((tf.executing_eagerly(), result.dtype.name))
        return result

    monkeypatch.setattr(tf.raw_ops, "MatMul", watched)
    with tf.Graph().as_default() as graph, tfamp.autocast("bfloat16"), tf.device("CPU:1"):
        check(measure())
    assert not graph.get_operations()
    assert {eager for eager, _ in results} == {True}
    # Each dtype as it is: an autocast would have made bfloat16 of float32's.
    dtypes = [dtype for _, dtype in results]
    assert set(dtypes) == set(DTYPES)
    last = [len(dtypes) - 1 - dtypes[::-1].index(dtype) for dtype in DTYPES]
    assert max(dtypes.index(dtype) for dtype in DTYPES) < min(last)  # in rounds
    assert {work.kind for work in works(**TINY)} == {*KINDS, "traffic", "cast traffic"}


def without_kernel(monkeypatch, op, dtype, error):
    kernel = getattr(tf.raw_ops, op)

    def refuses(**inputs):
        if any(getattr(each, "dtype", None) == dtype for each in inputs.values()):
            raise error(None, None, "no kernel")
        return kernel(**inputs)

    monkeypatch.setattr(tf.raw_ops, op, refuses)


def test_a_dtype_without_a_kernel_counts_as_very_slow(monkeypatch):
    without_kernel(monkeypatch, "Conv2DBackpropFilter", tf.float16, tf.errors.UnimplementedError)
    without_kernel(monkeypatch, "Conv2DBackpropInput", tf.float16, tf.errors.UnimplementedError)
    without_kernel(monkeypatch, "ReluGrad", tf.float16, tf.errors.NotFoundError)
    profile = measure()
    check(profile)
    speed = {kind: each["float16"] / each["float32"] for kind, each in profile.peaks.items()}
    assert speed["conv_gradient"] == pytest.approx(NO_KERNEL, rel=0.2)
    # One op leaves the others of its kind.
    assert min(speed["elementwise"], speed["conv"]) > 5 * NO_KERNEL


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(tf.float32, tf.errors.UnimplementedError), (tf.float16, tf.errors.ResourceExhaustedError)],
)
def test_what_cannot_be_measured_is_an_error_of_the_caller(dtype, error, monkeypatch):
    without_kernel(monkeypatch, "MatMul", dtype, error)
    with pytest.raises(error, match="no kernel"):
        measure()


def test_nothing_is_timed_where_it_was_not_asked_for(monkeypatch):
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    # Other threads run while it measures: what holds for the process stays as it is.
    changed = []
    monkeypatch.setattr(tf.config, "set_soft_device_placement", changed.append)
    # The GPU is not there: TensorFlow's soft placement takes the CPU instead.
    with pytest.raises(tf.errors.OpError, match="GPU"):
        measure()
    assert not changed


def test_a_dtype_that_runs_on_another_device_has_no_kernel(monkeypatch):
    multiply = tf.raw_ops.MatMul

    class Elsewhere:
        device = "/job:localhost/replica:0/task:0/device:GPU:0"

    def placed(a, b, **options):
        return Elsewhere() if a.dtype == tf.bfloat16 else multiply(a=a, b=b, **options)

    monkeypatch.setattr(tf.raw_ops, "MatMul", placed)
    speeds = measure().peaks["matmul"]
    assert speeds["bfloat16"] / speeds["float32"] == pytest.approx(NO_KERNEL, rel=0.2)


def test_it_waits_for_the_measured_device_only(monkeypatch):
    waited = []
    monkeypatch.setattr(tf.raw_ops, "SyncDevice", lambda: waited.append(tf.constant(0).device[-5:]))
    check(measure())
    assert set(waited) == {"CPU:0"}


def test_work_for_a_gpu_takes_far_longer_than_its_dispatch():
    profile = builtin_profile("gpu", name="H100")
    for work in works(**SIZES["gpu"]):
        moved = 2 * sum(map(math.prod, work.shapes.values()))  # Bytes in a low dtype.
        seconds = moved / profile.bandwidth
        if work.kind in ("matmul", "conv", "conv_gradient"):
            seconds = work.amount / profile.peaks[work.kind]["float16"]
        assert seconds > 2e-5  # Twice TensorFlow's dispatch.


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_measuring_holds_at_most_512_mib_at_once(device):
    with tf.Graph().as_default() as graph:  # Where tensors take no memory.
        held = {}
        for work, dtype in [(each, dtype) for each in works(**SIZES[device]) for dtype in DTYPES]:
            before = len(graph.get_operations())
            work.make(dtype)()
            tensors = [o for op in graph.get_operations()[before:] for o in op.outputs]
            size = sum(each.dtype.size * (each.shape.num_elements() or 0) for each in tensors)
            held[work.kind, dtype] = max(held.get((work.kind, dtype), 0), size)
    assert held["matmul", "float32"] > 2**20
    assert max(held.values()) <= 512 * 2**20


GPU = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")


@pytest.mark.parametrize(
    ("started", "growth", "changed"),
    [(False, None, [True]), (False, False, []), (False, True, []), (True, None, [])],
)
def test_memory_grows_where_tfamp_starts_the_runtime_but_not_of_a_divided_gpu(
    started, growth, changed, monkeypatch
):
    found = []

    def divided(gpu, value):
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    # The second of two GPUs is visible.
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [GPU] * (kind == "GPU"))
    monkeypatch.setattr(tf_private, "runtime_has_started", lambda: started)
    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "get_memory_growth", lambda gpu: growth)
    monkeypatch.setattr(experimental, "set_memory_growth", lambda gpu, value: found.append(value))
    profile_measure.let_memory_grow()
    assert found == changed
    monkeypatch.setattr(experimental, "set_memory_growth", divided)
    profile_measure.let_memory_grow()
