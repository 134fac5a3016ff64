"""Trains under `tf.distribute` with random faults and prints a digest of the state at every step.

Run as a program, in a process of its own: TensorFlow aborts when a second MirroredStrategy over
CPUs is used eagerly in a process, and a worker has to start its servers before anything else.
The output is one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

os.environ["TFAMP_PROFILE"] = "builtin"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from helpers.graph_asserts import op_dtypes


def make_strategy(kind: str) -> tf.distribute.Strategy:
    """Returns a strategy by name: "mirrored4", "central2", "one", "workers" or "xla2".

    The last is a MirroredStrategy that behaves as over GPUs in a step that XLA compiles.
    """
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    count = int(kind[-1]) if kind[-1].isdecimal() else 1
    if count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{number}" for number in range(count)]
    if kind.startswith("mirrored"):
        return tf.distribute.MirroredStrategy(devices)
    if kind.startswith("xla"):
        strategy = tf.distribute.MirroredStrategy(devices)
        strategy.extended._use_merge_call = lambda: False
        return strategy
    if kind.startswith("central"):
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    return tf.distribute.OneDeviceStrategy("CPU:0")


def make_model(dtype: str | None = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", dtype=dtype),
            layers.Dense(1, dtype=dtype),
        ]
    )


class Training:
    """Base of the ways of training; the replicas' copies of `state` must stay equal."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        import tfamp

        self.tfamp, self.strategy = tfamp, strategy
        with strategy.scope():
            self.make()

    def make(self):
        self.model = make_model()
        self.opt = self.optimizer()
        self.opt.build(self.model.trainable_variables)

    def optimizer(self, **options):
        return self.tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(0.002, momentum=0.9),
            # Where float16 cannot overflow by itself, so that the faults are those given.
            initial_scale=2.0**4,
            min_scale=2.0**-4,
            max_scale=2.0**6,
            dynamic_growth_steps=7,
            **options,
        )

    def train_step(self, x, y):
        with tf.GradientTape() as tape:
            scaled = self.scaled(self.loss(x, y))
        self.apply(tape.gradient(scaled, [v.value for v in self.model.trainable_variables]))

    def loss(self, x, y):
        return tf.reduce_mean(tf.square(tf.cast(self.model(x, training=True), tf.float32) - y))

    def scaled(self, loss):
        return self.opt.get_scaled_loss(loss)

    def apply(self, gradients):
        gradients = self.opt.get_unscaled_gradients(gradients)
        self.opt.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def compiled(self, run):
        """The function that calls `strategy.run`, as it is called."""
        return tf.function(run)

    def state(self):
        return [*self.model.variables, *self.opt.variables]

    def counts(self):
        return int(self.opt.iterations), int(self.opt.skipped_steps), float(self.opt.loss_scale)


class Policy(Training):
    def make(self):
        with self.tfamp.policy_scope("mixed_float16"):
            self.model = make_model()
        self.opt = self.optimizer()
        self.opt.build(self.model.trainable_variables)


class Float16Reduce(Policy):
    def optimizer(self, **options):
        return super().optimizer(aggregate_in_float16=True, **options)


class Bfloat16Reduce(Policy):
    def optimizer(self, **options):
        return super().optimizer(aggregate_in="bfloat16", **options)


class Masters(Training):
    dtype = "float16"

    def make(self):
        self.model = make_model(self.dtype)
        self.opt = self.optimizer(master_weights=True)
        self.opt.build(self.model.trainable_variables)


class Clipped(Policy):
    def make(self):
        super().make()
        self.opt = self.tfamp.LossScaleOptimizer(
            keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)),
            initial_scale=2.0**4,
            grad_clip=0.5,
        )
        self.opt.build(self.model.trainable_variables)

    def state(self):  # Without the norm before clipping, which a skipped step leaves not finite.
        return [
            *self.model.variables,
            *self.opt.inner_optimizer.variables,
            self.opt.dynamic_scale,
            self.opt.step_counter,
        ]


class Bfloat16Masters(Masters):
    dtype = "bfloat16"


class Accumulated(Masters):
    """Two micro-batches a step, which a fault in either replica drops."""

    def make(self):
        super().make()
        self.accumulator = self.tfamp.GradientAccumulator(self.opt, steps=2)

    def apply(self, gradients):
        pairs = list(zip(gradients, self.model.trainable_variables, strict=True))
        self.accumulator.apply_gradients(pairs)
        self.accumulator.apply_gradients(pairs)


class Autocast(Training):
    def loss(self, x, y):
        with self.tfamp.autocast("float16"):
            hidden = self.model.layers[0](x)
            return tf.reduce_mean(tf.square(tf.cast(self.model.layers[1](hidden), tf.float32) - y))


class Rewrite(Training):
    """The loss is rewritten; the optimizer is outside, where it may speak to the other replicas."""

    def make(self):
        super().make()
        self.fast = self.tfamp.rewrite(super().loss, dtype="float16", placement="lists")

    def loss(self, x, y):
        return self.fast(x, y)


class RewriteAll(Training):
    """The function that calls `strategy.run` is rewritten, with the all-reduce and the update."""

    def compiled(self, run):
        return self.tfamp.rewrite(run, dtype="float16", placement="lists")


class Level(Training):
    """The train step of a model at level O1, as `fit` calls it."""

    def make(self):
        model = make_model()
        model.compile(self.optimizer(), "mse", jit_compile=False)
        self.model, self.opt = self.tfamp.prepare(model, level="O1", dtype="float16")
        self.opt.build(model.trainable_variables)

    def train_step(self, x, y):
        self.model.train_step((x, y))

    def state(self):  # Metrics are the sums of each replica.
        return [*self.model.trainable_variables, *self.opt.variables]


class Scaler(Policy):
    def make(self):
        super().make()
        self.scaler = self.tfamp.GradScaler(init_scale=2.0**4, growth_interval=12)
        self.bare = keras.optimizers.SGD(0.002, momentum=0.9)
        self.bare.build(self.model.trainable_variables)

    def scaled(self, loss):
        return self.scaler.scale(loss)

    def apply(self, gradients):
        gradients = self.scaler.unscale(self.bare, gradients)
        self.scaler.step(
            self.bare, list(zip(gradients, self.model.trainable_variables, strict=True))
        )
        self.scaler.update()

    def state(self):
        scale = self.strategy.run(self.scaler.get_scale)
        return [*self.model.variables, *self.bare.variables, scale]

    def counts(self):
        iterations = local_copies(self.strategy, self.bare.iterations)[0]
        return int(iterations), None, float(self.scaler.get_scale())


WAYS = {
    "policy": Policy,
    "float16_reduce": Float16Reduce,
    "bfloat16_reduce": Bfloat16Reduce,
    "masters": Masters,
    "bfloat16_masters": Bfloat16Masters,
    "clipped": Clipped,
    "accumulated": Accumulated,
    "autocast": Autocast,
    "rewrite": Rewrite,
    "rewrite_all": RewriteAll,
    "level": Level,
    "scaler": Scaler,
}


def local_copies(strategy, variable) -> list[np.ndarray]:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return [each.numpy() for each in strategy.experimental_local_results(value)]


def spread(strategy, rows):
    """One row for each replica; a worker has one replica and is given its own row."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return tf.constant(rows[strategy.cluster_resolver.task_id])
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )


def train(strategy, way: str, steps: int, *, jit_compile: bool = False) -> dict:
    """Trains; returns digests of all state after each step, and the counts."""
    training = WAYS[way](strategy)
    replicas = strategy.num_replicas_in_sync
    random, digests, good = np.random.default_rng(5), [], 0
    step = training.train_step
    if jit_compile or not strategy.extended._use_merge_call():
        # Then every replica traces the compiled function, in a thread of its own.
        compiled = tf.function(step, autograph=False, jit_compile=jit_compile or None)
        step = lambda x, y: compiled(x, y)  # noqa: E731
    run = training.compiled(lambda x, y: strategy.run(step, args=(x, y)))
    for number in range(steps):
        # The same numbers in every process: each takes its own rows.
        x = random.standard_normal((replicas, 4, 6)).astype("float32")
        y = x.sum(-1, keepdims=True)
        faults = random.random(replicas) < 0.08 / replicas
        faults[-1] |= number == 3
        x[faults, 0, 0] = random.choice([np.inf, -np.inf, np.nan])
        good += not faults.any()
        given = spread(strategy, x), spread(strategy, y)
        run(*given)
        digest = hashlib.sha256()
        for variable in training.state():
            copies = local_copies(strategy, variable)
            for copy in copies:
                np.testing.assert_array_equal(copy, copies[0])
                assert np.isfinite(copy.astype("float64")).all()
            digest.update(copies[0].tobytes())
        digests.append(digest.hexdigest())
        assert training.counts()[0] == good, (training.counts(), good)
    applied, skipped, scale = training.counts()
    return {
        "digests": digests,
        "good": good,
        "applied": applied,
        "skipped": steps - applied if skipped is None else skipped,
        "scale": scale,
        "products": sorted(op_dtypes(run, *given)["MatMul"]),
        "replicas": replicas,
        "traces": run.experimental_get_tracing_count(),
    }


def fit(strategy) -> dict:
    """Trains with `fit`: an epoch of good batches, then one with a bad row for the last replica."""
    import tfamp

    # XLA cannot compile sums over CPUs that are merged.
    jit_compile = False if strategy.extended._use_merge_call() else "auto"

    replicas = strategy.num_replicas_in_sync
    x = np.random.default_rng(0).standard_normal((4 * 4 * replicas, 6)).astype("float32")
    y = x.sum(-1, keepdims=True)
    with strategy.scope(), tfamp.policy_scope("mixed_float16"):
        model = make_model()
        inner = keras.optimizers.Adam(0.01)
        model.compile(
            tfamp.LossScaleOptimizer(inner, initial_scale=2.0**10), "mse", jit_compile=jit_compile
        )
    options = {"batch_size": 4 * replicas, "shuffle": False, "verbose": 0}
    model.fit(x, y, **options)
    before = model.get_weights()
    x[4 * replicas - 1 :: 4 * replicas] = np.inf
    model.fit(x, y, **options)
    same = all(
        np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)
    )
    return {"same": same, "scale": float(model.optimizer.loss_scale), "replicas": replicas}


def main(kinds: str, ways: str, steps: str) -> None:
    found = {}
    for kind in kinds.split("+"):  # The first has the most devices.
        strategy = make_strategy(kind)
        for way in ways.split(","):
            result = fit(strategy) if way == "fit" else train(strategy, way, int(steps))
            found[f"{kind} {way}"] = result
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
