"""The hardware, the policy auto and the measured profile, and their cost in time and memory."""

import json
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import pytest
import tensorflow as tf

from helpers.acceptance import describe_gpu, used_memory

pytestmark = pytest.mark.gpu

# Less than a CUDA context alone takes.
CONTEXT_MIB = 100
# Growth of the job that runs beside doctor.
GROWTH_MIB = 2048


def doctor(device, **environment):
    """Runs `tfamp doctor`; returns its report, its seconds and the peak of MiB in use meanwhile."""
    before, most, done = used_memory(), [0.0], threading.Event()

    def watch():
        while before is not None and not done.wait(0.2):
            most[0] = max(most[0], used_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    process = device.tfamp("doctor", "--json", **environment)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout), seconds, most[0]


@pytest.fixture(scope="module")
def two_reports(device):
    # The first process reads files from disk and compiles kernels.
    warm_up = device.size(1, 0)
    return [doctor(device, TFAMP_PROFILE="measure") for _ in range(warm_up + 2)][warm_up:]


def expected_policy(device):
    if device.toy:
        info = Path("/proc/cpuinfo")
        flags = set(info.read_text().split()) if info.exists() else set()
        native = flags & {"avx512_bf16", "amx_bf16", "bf16"}
        return "mixed_bfloat16" if native else "float32"
    names = [describe_gpu(each)[0] for each in tf.config.list_physical_devices("GPU")]
    if device.capability < (7, 0) or any("GTX 16" in name for name in names):
        return "float32"
    return "mixed_bfloat16" if device.capability >= (8, 0) else "mixed_float16"


@pytest.mark.long
def test_doctor(device, check, two_reports):
    """`tfamp doctor` and the policy auto are right."""
    (found, seconds, memory), _ = two_reports
    names = [gpu["name"] for gpu in found["hardware"]["gpus"]]
    check("GPUs that doctor names", len(names), equals=0 if device.toy else device.count)
    # Assumes GPUs of one kind: else the weakest decides.
    check("the policy auto", found["auto_policy"]["name"], equals=expected_policy(device))
    start = time.perf_counter()
    device.program("import keras, tensorflow")
    imports = time.perf_counter() - start
    check("imports of TensorFlow and Keras", imports, unit="s")
    doctors = seconds - imports
    check("doctor without these, measuring included", doctors, at_most=10.0, unit="s", timing=True)
    if device.toy:
        check.leave_out("GPU memory that measuring takes", "a CPU has none")
    else:
        check("GPU memory that measuring takes", memory, unit="MiB")


IDLE_PROGRAM = """
import sys
import keras, tensorflow as tf, tfamp
tfamp.set_global_policy("auto")
from tensorflow.python.eager import context
print("policy", tfamp.global_policy().name, context.context()._initialized, flush=True)
sys.stdin.readline()
"""


def test_idle(device, check):
    """Importing tfamp and setting the policy auto starts no device and takes no memory."""
    before = used_memory()
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE_PROGRAM],
        env=device.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    memory = used_memory()
    _, err = process.communicate("\n", timeout=60)
    assert line.startswith("policy"), err[-3000:]
    _, policy, started = line.split()
    check("the policy auto", policy, equals=expected_policy(device))
    check("TensorFlow started its devices", started == "True", equals=False)
    if device.toy or memory is None:
        check.leave_out("GPU memory taken", "a CPU has none" if device.toy else "no nvidia-smi")
    else:
        check("GPU memory taken", memory - before, at_most=CONTEXT_MIB, unit="MiB")


@pytest.mark.long
def test_doctor_beside_a_job(device, check):
    """`tfamp doctor` runs beside a job with memory growth, which grows meanwhile."""
    device.needs_gpu("a CPU's memory belongs to no process")
    job, refused = [], 0
    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(doctor, device, TFAMP_PROFILE="measure")
        while not running.done():
            try:
                if len(job) < GROWTH_MIB // 128:
                    with tf.device(device.name):
                        job.append(tf.zeros(32 * 2**20))  # 128 MiB
            except tf.errors.ResourceExhaustedError:
                refused += 1
            time.sleep(0.1)
        found, _, memory = running.result()
    check("the policy auto", found["auto_policy"]["name"], equals=expected_policy(device))
    check("the job was refused memory", refused, equals=0, unit="times")
    check("peak of doctor and the job", memory, unit="MiB")


VISIBLE_PROGRAM = """
import keras, numpy as np, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
{choose}
import tfamp
report = tfamp.diagnostics.device_report()
tfamp.set_global_policy("auto")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(10)])
model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(np.ones((64, 64)), np.ones((64, 10)), verbose=0)
where = model.trainable_variables[0].value.device.rpartition("/device:")[2]
print("RESULT", len(report.hardware.gpus), where, report.policy, report.profile.name, sep="|")
"""
# Statements of a program, the number of GPUs they need, and the device of its variables.
CHOICES = {
    "none": ("tf.config.set_visible_devices([], 'GPU')", 0, "CPU:0"),
    "only the second": ("tf.config.set_visible_devices(gpus[1:2], 'GPU')", 2, "GPU:0"),
    "two logical ones": (
        "part = tf.config.LogicalDeviceConfiguration(memory_limit=4096)\n"
        "tf.config.set_visible_devices(gpus[:1], 'GPU')\n"
        "tf.config.set_logical_device_configuration(gpus[0], [part, part])",
        *(1, "GPU:0"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("choice", CHOICES)
def test_visible_gpus(device, check, choice):
    """Only the GPUs that a program makes visible count, and are measured."""
    statement, needed, where = CHOICES[choice]
    if needed > (0 if device.toy else device.count):
        pytest.skip(f"needs {needed} GPUs")
    program = VISIBLE_PROGRAM.format(choose=statement)
    process = device.program(program, TFAMP_PROFILE="measure")
    assert process.returncode == 0, process.stderr[-3000:]
    count, found, policy, profile = process.stdout.partition("RESULT|")[2].split("|")
    check("GPUs seen", int(count), equals=min(needed, 1))
    check("device of the variables", found, equals=where)
    check("the policy auto there", policy)
    check("profile measured", profile.strip())


@pytest.mark.long
def test_measured_twice(device, check, two_reports):
    """Two measurements of the machine agree."""
    first, second = (found["machine_profile"] for found, *_ in two_reports)
    pairs = {
        kind: [(first["peaks"][kind][dtype], second["peaks"][kind][dtype]) for dtype in peaks]
        for kind, peaks in first["peaks"].items()
    }
    pairs["memory"] = [(first["bandwidth"], second["bandwidth"])]
    for name, each in pairs.items():
        worst = max(max(a, b) / min(a, b) - 1 for a, b in each)
        check(f"{name}: relative difference", worst, at_most=0.2, timing=True)
