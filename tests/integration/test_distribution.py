"""tf.distribute: every strategy with every way of mixed precision, each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import pytest

import tfamp

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "helpers" / "replica_program.py"
WAYS = (
    *("policy", "float16_reduce", "bfloat16_reduce", "masters", "autocast"),
    *("rewrite", "rewrite_all", "level", "scaler"),
)


def start(kind, ways, steps, **environment):
    return start_program([str(PROGRAM), kind, ",".join(ways), str(steps)], **environment)


def start_program(arguments, **environment):
    paths = [str(TESTS), str(Path(tfamp.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process):
    out, err = process.communicate(timeout=1200)
    assert "RESULT" in out, err[-3000:]
    return json.loads(out.partition("RESULT")[2])


def results_of(processes):
    # All are read while they run: a pipe that nobody reads holds 64 kB, then its writer waits.
    with futures.ThreadPoolExecutor(len(processes)) as readers:
        try:
            results = [readers.submit(result_of, each) for each in processes]
            done, _ = futures.wait(results, return_when=futures.FIRST_EXCEPTION)
        finally:
            # A worker that is left alone waits for the others for ever.
            for process in processes:
                process.kill()
    for each in done:
        each.result()  # What failed first, not those that were killed for it.
    return [each.result() for each in results]


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
    """Checks the counts; the program checks that copies are equal and finite at every step."""
    assert result["replicas"] == replicas
    assert "float16" in result["products"]
    assert result["applied"] == result["good"]
    assert result["applied"] + result["skipped"] == steps == len(result["digests"])
    assert 0 < result["skipped"] < steps
    assert 0.0 < result["scale"] <= 2.0**8
    # A step that is skipped changes the scale, one that is not the weights.
    assert len(set(result["digests"])) == steps
    assert result["traces"] == 1


# Strategies of one process, after the one with the most devices; ways of training; steps.
CASES = [
    pytest.param("xla2", ("masters", "scaler", "fit"), 12, marks=pytest.mark.slow),
    pytest.param("mirrored2", ("policy", "rewrite", "rewrite_all"), 12, marks=pytest.mark.slow),
    pytest.param("xla2", ("clipped", *WAYS), 12, marks=pytest.mark.nightly),
    pytest.param("central1+one", ("policy", "scaler", "fit"), 12, marks=pytest.mark.nightly),
    pytest.param("mirrored4", (*WAYS, "fit"), 500, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("kinds", "ways", "steps"), CASES)
def test_random_faults_of_one_replica_in_one_process(kinds, ways, steps):
    (results,) = results_of([start(kinds, ways, steps)])
    for kind in kinds.split("+"):
        replicas = int(kind[-1]) if kind[-1].isdecimal() else 1
        for way in set(ways) - {"fit"}:
            check(results[f"{kind} {way}"], steps, replicas)
        if "fit" in ways:
            # An epoch of four good batches, then one of four with a bad row for the last replica.
            fitted = {"same": True, "scale": 2.0**6, "replicas": replicas}
            assert results[f"{kind} fit"] == fitted


WORKER_CASES = [
    pytest.param(
        2, ("float16_reduce", "bfloat16_reduce", "rewrite_all", "level"), 12, marks=pytest.mark.slow
    ),
    pytest.param(4, ("bfloat16_reduce",), 12, marks=pytest.mark.nightly),
    pytest.param(3, WAYS, 500, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("count", "ways", "steps"), WORKER_CASES)
def test_workers_hold_the_same_after_every_step(count, ways, steps):
    workers = several_workers(count, ways, steps)
    for way in ways:
        for result in workers:
            check(result[f"workers {way}"], steps, count)
            # Digests of weights, slots, scale and counters, bit for bit.
            assert result[f"workers {way}"]["digests"] == workers[0][f"workers {way}"]["digests"]
