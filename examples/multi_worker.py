"""Trains in mixed precision on several machines, or in several processes on one machine.

Without TF_CONFIG the script starts all workers on this machine and prints the TF_CONFIG of each. On
several machines, start it once on each with its own TF_CONFIG and the real addresses. In one step
one worker has a non-finite gradient: all workers skip the step, and their scales stay equal.

It uses a custom loop because Keras 3's `fit` does not run under MultiWorkerMirroredStrategy.

    python examples/multi_worker.py [--workers 3] [--dtype bfloat16] [--small]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from _common import make_parser, parse

BATCH = 32  # On each worker.
BAD_STEP = 5


def configurations(addresses: Sequence[str]) -> list[str]:
    """Returns the TF_CONFIG of each worker."""
    cluster = {"worker": list(addresses)}
    return [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        for rank in range(len(addresses))
    ]


def free_addresses(count: int) -> list[str]:
    """Returns free addresses on this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def launch(count: int, argv: Sequence[str]) -> int:
    """Starts the workers on this machine and waits for them; returns 1 if one fails."""
    workers = []
    for config in configurations(free_addresses(count)):
        print(f"TF_CONFIG='{config}'", flush=True)
        command = [sys.executable, os.path.abspath(__file__), *argv]
        workers.append(subprocess.Popen(command, env=os.environ | {"TF_CONFIG": config}))
    try:
        # Not in sequence: if one has failed, the others would wait for it forever.
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            time.sleep(0.1)
        return int(any(codes))
    finally:
        for worker in workers:
            worker.kill()


def work(args: argparse.Namespace) -> int:
    """Trains as one of the workers."""
    import tensorflow as tf

    # Before any other use of TensorFlow: it starts the servers of the workers.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras
    from _common import load_digits

    import tfamp

    rank, workers = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    digits, layers = load_digits(), keras.layers
    keras.utils.set_random_seed(args.seed)
    policy = "float32" if args.dtype == "float32" else f"mixed_{args.dtype}"
    with strategy.scope(), tfamp.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        optimizer.build(model.trainable_variables)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            # Gradients are summed, so Keras's losses divide by the number of replicas here.
            loss = cross_entropy(y, model(x, training=True))
            scaled_loss = optimizer.get_scaled_loss(loss)
        grads = tape.gradient(scaled_loss, [v.value for v in model.trainable_variables])
        grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    step = tf.function(lambda x, y: strategy.run(replica_step, args=(x, y)))
    # Each worker has its own share of the rows, all the same number of batches.
    rows = len(digits.x_train) // workers // BATCH * BATCH
    x, y = digits.x_train[rank::workers][:rows], digits.y_train[rank::workers][:rows]
    number = 0
    for _ in range(args.epochs):
        for first in range(0, rows, BATCH):
            images = x[first : first + BATCH]
            if number == BAD_STEP and rank == workers - 1:
                images = images * float("inf")
            step(tf.constant(images), tf.constant(y[first : first + BATCH]))
            number += 1
    weights = b"".join(v.numpy().tobytes() for v in model.variables)
    logits = model(tf.constant(digits.x_test)).numpy()
    accuracy = (logits.argmax(-1) == digits.y_test).mean()
    # One write each, so that the workers' lines do not mix.
    sys.stdout.write(
        f"worker {rank} of {workers}  test accuracy {accuracy:.1%}  "
        f"steps {int(optimizer.iterations)}  skipped {int(optimizer.skipped_steps)}  "
        f"loss scale {float(optimizer.loss_scale):,.0f}  "
        f"weights {hashlib.sha256(weights).hexdigest()[:16]}\n"
    )
    sys.stdout.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the workers, or is one."""
    parser = make_parser(__doc__, epochs=10, small_epochs=2)
    parser.add_argument("--workers", type=int, default=2, help="processes to start; default: 2")
    args = parse(parser, argv)
    if args.workers < 2:
        parser.error(f"--workers must be at least 2; got {args.workers}")
    if "TF_CONFIG" in os.environ:
        return work(args)
    return launch(args.workers, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
