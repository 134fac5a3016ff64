"""tf.distribute: every strategy with every way of mixed precision, each in a process of its own."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "helpers" / "replica_program.py"
WAYS = ("policy", "float16_reduce", "masters", "autocast", "rewrite", "scaler")


def start(kind, ways, steps, **environment):
    paths = [str(TESTS), str(Path(tfamp.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), kind, ",".join(ways), str(steps)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results_of(processes):
    try:
        outputs = [process.communicate(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        assert "RESULT" in out, err[-3000:]
    return [json.loads(out.partition("RESULT")[2]) for out, _ in outputs]


@functools.cache
def one_process(kind, ways, steps):
    return results_of([start(kind, ways, steps)])[0]


@functools.cache
def several_workers(count, ways, steps):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    cluster = {"worker": addresses}
    tasks = [{"type": "worker", "index": rank} for rank in range(count)]
    configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
    return results_of([start("workers", ways, steps, TF_CONFIG=each) for each in configs])


def check(result, steps, replicas):
    """What the program itself checks at every step: copies equal and finite, counts exact."""
    assert result["replicas"] == replicas
    assert "float16" in result["seen"]
    assert result["applied"] == result["good"]
    assert result["applied"] + result["skipped"] == steps == len(result["digests"])
    assert 0 < result["skipped"] < steps
    assert 2.0**-10 < result["scale"] < 2.0**30
    # A step that is skipped changes the scale, one that is not the weights.
    assert len(set(result["digests"])) == steps
    assert result["traces"] == 1


CASES = [
    ("mirrored2", WAYS, 12, 2),
    ("mirrored4", ("policy", "scaler"), 12, 4),
    ("central2", ("policy",), 12, 2),
    ("one", ("policy",), 25, 1),
    pytest.param("mirrored4", WAYS, 500, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "ways", "steps", "replicas"), CASES)
def test_custom_loops_with_random_faults(kind, ways, steps, replicas):
    results = one_process(kind, ways, steps)
    for way in ways:
        check(results[way], steps, replicas)


@pytest.mark.parametrize(("kind", "replicas"), [("mirrored2", 2), ("mirrored4", 4), ("one", 1)])
def test_fit_skips_what_one_replica_finds(kind, replicas):
    result = one_process(kind, ("fit",), 0)["fit"]
    assert result == {"same": True, "scale": 2.0**6, "replicas": replicas}


WORKER_CASES = [
    (2, ("policy", "scaler"), 50),
    (3, ("policy",), 12),
    pytest.param(2, WAYS, 500, marks=pytest.mark.slow),
    pytest.param(3, WAYS, 500, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("count", "ways", "steps"), WORKER_CASES)
def test_workers_hold_the_same_after_every_step(count, ways, steps):
    workers = several_workers(count, ways, steps)
    for way in ways:
        for result in workers:
            check(result[way], steps, count)
            # Digests of weights, slots, scale and counters, bit for bit.
            assert result[way]["digests"] == workers[0][way]["digests"]
