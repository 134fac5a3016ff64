"""The benchmark of what models learn that are stored in 16 bits: its runs and its table."""

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("benchmarks", reason="the benchmarks are no part of the package")

from benchmarks import learning
from benchmarks.learning import FLOAT32, RUNS, TASKS, Learnt, learn, learn_all, table
from helpers.cases import first_of

TASK = "LeNet-5, Adam"


def a_run(way, seed, loss):
    return Learnt(TASK, way, seed, loss, 0.5, 16.0)


def test_a_loss_is_told_in_ratios_to_that_of_the_same_seed():
    runs = [
        *(a_run(FLOAT32, seed, loss) for seed, loss in enumerate((1.0, 2.0))),
        *(a_run(RUNS[1], seed, loss) for seed, loss in enumerate((1.1, 2.0))),
    ]
    exact, low = table(TASK, runs).rows
    assert exact == (FLOAT32, "2", "1.5000", "+0.00%", "50.00%", "+0.00%", "16.0")
    assert low[:6] == (RUNS[1], "2", "1.5500", "+0.00% to +10.00%", "50.00%", "+0.00%")


@pytest.mark.slow
@pytest.mark.parametrize("task", first_of(sorted(TASKS), pytest.mark.nightly))
def test_a_run_that_is_made_again_learns_the_same(task, monkeypatch):
    monkeypatch.setattr(learning, "_UNSEEN", range(10**9, 10**9 + 2))
    ways = [FLOAT32, "bfloat16, stochastic"]
    found = learn_all([task], ways, 1, 2)
    assert [run.way for run in found] == ways
    assert found[1].size < 0.7 * found[0].size
    assert learn(task, ways[1], 0, 2) == found[1]
