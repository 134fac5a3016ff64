"""The benchmark of what models learn that are stored in 16 bits: its runs and its table."""

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("benchmarks", reason="the benchmarks are not in the package")

from benchmarks import learning
from benchmarks.learning import FLOAT32, OPTIMIZERS, TASKS, learn, learn_all, table
from helpers.cases import first_of
from helpers.optimizers import plain_optimizers


@pytest.mark.slow
@pytest.mark.parametrize("task", first_of(sorted(TASKS), pytest.mark.nightly))
def test_a_run_that_is_made_again_learns_the_same(task, monkeypatch):
    monkeypatch.setattr(learning, "_UNSEEN", range(10**9, 10**9 + 2))
    ways = [FLOAT32, "bfloat16, stochastic"]
    found = learn_all([task], ways, 1, 2)
    assert [run.way for run in found] == ways
    assert found[1].size < 0.7 * found[0].size
    assert learn(task, ways[1], 0, 2) == found[1]
    exact, _ = table(task, found).rows
    assert exact[:2] + exact[3:4] == (FLOAT32, "1", "+0.00%")


def test_the_table_of_optimizers_has_every_one_of_keras():
    assert set(OPTIMIZERS) == set(plain_optimizers())


@pytest.mark.slow
def test_a_pure_policy_learns_as_float32_with_masters_only():
    (row,) = learning.optimizers_table(["Adam"], 1, 40).rows
    name, exact, plain, low, *_ = row
    assert name == "Adam"
    assert float(low) < 1.2 * float(exact) < float(plain)
