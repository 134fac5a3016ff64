"""The page about a user's process says what holds: fixture, processes, patches and files."""

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import tfamp
from tfamp.interop.patching import SYMBOLS, locate

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "your_process.md"
TESTS = """
import keras
import tfamp

def test_one_sets_a_policy():
    tfamp.set_global_policy("mixed_float16")
    assert keras.layers.Dense(1).compute_dtype == "float16"

def test_the_next_has_float32():
    assert tfamp.global_policy().name == keras.config.dtype_policy().name == "float32"
    assert keras.layers.Dense(1).compute_dtype == "float32"
"""


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests")
def test_the_fixture_of_the_page_keeps_a_policy_out_of_the_next_test(tmp_path):
    (fixture,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    (tmp_path / "test_policies.py").write_text(TESTS, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"]
    root = str(Path(tfamp.__file__).parents[1])
    outcomes = []
    for text in ("", fixture):
        (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {root!r})\n{text}")
        run = subprocess.run(
            [*command, str(tmp_path), str(tmp_path)], capture_output=True, text=True, check=False
        )
        outcomes.append(run.stdout.splitlines()[-1])
    assert "1 failed, 1 passed" in outcomes[0]  # Without it the policy leaks.
    assert "2 passed" in outcomes[1]


def name_of_policy():
    return tfamp.global_policy().name


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [False, True])
def test_a_spawned_process_has_float32_unless_it_is_told(is_told):
    told = {"initializer": tfamp.set_global_policy, "initargs": ("mixed_bfloat16",)}
    with tfamp.policy_scope("float32"):
        tfamp.set_global_policy("mixed_bfloat16")
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, **(told if is_told else {})) as pool:
            found = pool.apply_async(name_of_policy).get(timeout=120)
    assert found == ("mixed_bfloat16" if is_told else "float32")


def replaced():
    """The names under which symbols are replaced now."""
    values = [(name, vars(owner)[key]) for name, s in SYMBOLS for owner, key in [locate(s)]]
    return {name for name, value in values if "_tfamp_replaced" in getattr(value, "__dict__", {})}


def test_what_a_policy_replaces_is_put_back_after_its_scope():
    before = replaced()
    with tfamp.policy_scope("float32"):
        assert replaced() >= {"policy_module"}
        assert replaced() - before <= {"policy_module"}
    mixed = {"policy_module", "layer_init", "functional_init", "fit"}
    with tfamp.policy_scope("mixed_bfloat16"):
        assert replaced() >= mixed
        assert replaced() - before <= mixed
    with tfamp.policy_scope("mixed_float16"):
        expected = mixed | {"step", "paused", "scaled_step", "keras_scaling_init", "load_optimizer"}
        assert replaced() >= mixed
        assert replaced() - before <= expected
        keras.layers.Dense(1)
    assert replaced() <= before
