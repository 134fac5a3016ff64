"""Processes killed at any moment leave whole files, and training goes on with the same bits."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.cases import tiers
from helpers.training import small_model
from tfamp.core.profile import builtin_profile
from tfamp.graph import MachineProfile

TESTS = Path(__file__).resolve().parents[1]


def start(program, *arguments):
    paths = [str(TESTS), str(Path(tfamp.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]


def kill_after(process, seconds):
    """Kills a process some time after its first line; whether it was still running."""
    assert process.stdout.readline(), process.stderr.read()[-3000:]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    running = process.poll() is None
    process.kill()
    process.communicate()
    return running


# ---- Training ------------------------------------------------------------------------------------

_TRAINING = """
import os, signal, sys, time
import keras, numpy as np, tensorflow as tf, tfamp
from helpers.training import small_model

how, kill_at, folders = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
tf.config.experimental.enable_op_determinism()

def batch(number):
    x = np.random.default_rng(number).standard_normal((8, 4)).astype("float32")
    return x * np.float32(np.nan if number % 9 == 4 else 1.0)

def with_checkpoint(model, optimizer, folder):
    optimizer.build(model.trainable_variables)
    done = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32) - 1.0))
            scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    print("training", flush=True)
    for number in range(int(done), 60):
        step(tf.constant(batch(number)))
        time.sleep(0.01)
        done.assign(number + 1)
        if number % 3 == 2:
            manager.save()

class Kill(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.model._initial_epoch:
            self.seen = max(self.seen, self.model._initial_epoch * 10)
        if self.seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen += 1

def with_backup(model, optimizer, folder):
    x = np.concatenate([batch(number) for number in range(10)])
    model.compile(optimizer, "mse", jit_compile=False)
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    options = {"batch_size": 8, "epochs": 5, "shuffle": False, "verbose": 0}
    model.fit(x, np.ones((80, 1), "float32"), callbacks=[backup, Kill()], **options)

for folder in folders:
    with tfamp.policy_scope("mixed_bfloat16"):
        model = small_model()
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=5
    )
    train = with_checkpoint if how == "checkpoint" else with_backup
    train(model, optimizer, folder)
    np.savez(folder + ".npz", *[v.numpy() for v in model.variables + optimizer.variables])
"""


def assert_goes_on_as_if_never_killed(killed, how):
    """Ends the training that was killed and, in the same process, makes the whole one again."""
    whole = killed.with_name("whole")
    finish(start(_TRAINING, how, -1, killed, whole))
    with np.load(f"{killed}.npz") as actual, np.load(f"{whole}.npz") as expected:
        assert actual.files == expected.files
        for name in expected.files:
            np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.parametrize("kills", tiers([], [1], [20]))
def test_killed_at_random_moments_and_resumed_from_a_checkpoint(tmp_path, kills):
    moments, hits = random.Random(kills), 0
    folder = tmp_path / "checkpoints"
    for _ in range(kills):
        killed = start(_TRAINING, "checkpoint", -1, folder)
        hits += kill_after(killed, moments.uniform(0.0, 8.0 / kills))
    assert hits
    assert_goes_on_as_if_never_killed(folder, "checkpoint")


@pytest.mark.parametrize(
    "batches", tiers([], [[27]], [sorted(random.Random(1).sample(range(50), 20))]), ids=len
)
def test_killed_at_batches_and_resumed_by_keras_callback(tmp_path, batches):
    for at in batches:
        killed = start(_TRAINING, "backup", at, tmp_path / "backup")
        killed.communicate(timeout=600)
        assert killed.returncode == -signal.SIGKILL
    assert_goes_on_as_if_never_killed(tmp_path / "backup", "backup")


# ---- Files ---------------------------------------------------------------------------------------

_REWRITING = """
import sys
from tfamp import rewrite_saved_model
source, target = sys.argv[1:]
rewrite_saved_model(source, target + ".first", dtype="bfloat16")  # All is imported and traced.
print("writing", flush=True)
for number in range(10**6):
    dtype = "float16" if number % 2 else "bfloat16"
    rewrite_saved_model(source, target, dtype=dtype, device="cpu", overwrite=True)
"""


# Every kill is a process that starts TensorFlow.
@pytest.mark.parametrize("kills", tiers([], [1], [20]))
def test_killed_while_a_saved_model_is_replaced(tmp_path, kills):
    saved_models.module(tmp_path / "source")
    target = tmp_path / "target"
    tfamp.rewrite_saved_model(tmp_path / "source", target, dtype="bfloat16")
    moments = random.Random(kills)
    for number in range(kills):
        seconds = moments.uniform(0.0, 1.5)
        assert kill_after(start(_REWRITING, tmp_path / "source", target), seconds)
        if not target.exists():  # It was killed between the two renames.
            (old,) = tmp_path.glob(".target-*.old")
            old.rename(target)
        # The one before or the one after: each loads and runs.
        signature = tf.saved_model.load(str(target)).signatures["serving_default"]
        result = signature(x=tf.constant(saved_models.FLOATS), count=tf.constant(number))
        assert int(result["count"]) == number + 1
        first = target.with_name("target.first")
        if first.exists():
            first.rename(tmp_path / f"first{number}")


_SAVING = """
import os, sys
from helpers.training import small_model
import keras, tfamp
model = small_model()
model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
path = sys.argv[1]
print("writing", flush=True)
while True:
    model.save(path + ".new.keras")
    os.replace(path + ".new.keras", path)
"""


@pytest.mark.parametrize("kills", tiers([], [1], [20]))
def test_killed_while_a_model_is_saved_beside_and_renamed(tmp_path, kills):
    """The recipe of docs/guides/distributed.md: Keras overwrites the file that is there."""
    path, moments = tmp_path / "model.keras", random.Random(kills)
    model = small_model()
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.save(path)
    for _ in range(kills):
        assert kill_after(start(_SAVING, path), moments.uniform(0.0, 0.5))
        loaded = keras.models.load_model(path)
        assert isinstance(loaded.optimizer, tfamp.LossScaleOptimizer)


_CACHING = """
import sys, dataclasses
from pathlib import Path
from tfamp.core.profile import builtin_profile
from tfamp.machine.file_replacing import replace_text

print("writing", flush=True)
for number in range(10**9):
    profile = dataclasses.replace(builtin_profile("cpu"), name="x" * (number % 2 * 100_000 + 1))
    replace_text(Path(sys.argv[1]), profile.to_json())
"""


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.nightly)])
def test_killed_while_the_cache_is_written(tmp_path, kills):
    path, moments = tmp_path / "machine.json", random.Random(kills)
    path.write_text(builtin_profile("cpu").to_json())
    for _ in range(kills // 2):
        two = [start(_CACHING, path) for _ in range(2)]
        assert all(kill_after(each, moments.uniform(0.0, 0.1)) for each in two)
        assert MachineProfile.from_json(path.read_text("utf-8"))
