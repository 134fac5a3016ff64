"""Every example runs at its smallest size and prints the results it promises.

The quick ones in CI, the longest nightly: they are whole programs.
"""

import importlib
import json
import os
import re
from pathlib import Path

import keras
import pytest

import tfamp
from helpers.cases import first_of

pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs an example's main in an empty directory; returns its exit code and what it printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        code = importlib.import_module(name).main(list(arguments))
        assert keras.config.dtype_policy().name == "float32", f"{name} left its policy behind"
        return code, capfd.readouterr().out

    return run


@pytest.fixture(scope="module")
def trained():
    """Models of digits by policy."""
    return {}


@pytest.fixture
def train_once(run, trained, monkeypatch):
    """Examples that train the same models take what another has trained."""
    train = importlib.import_module("digits_fit").train

    def once(policy, data, epochs, seed, display):
        if policy not in trained:
            trained[policy] = train(policy, data, epochs, seed, display)
        return trained[policy]

    for name in ("digits_fit", "accuracy_table"):
        monkeypatch.setattr(importlib.import_module(name), "train", once)


def table(text):
    """Returns the cells of the rows of a table that was printed."""
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]


def percent(pattern, text):
    """Returns the one percentage that follows `pattern`, as a number."""
    (found,) = re.findall(pattern + r"\D*?(\d+\.\d+) ?%", text)
    return float(found)


@pytest.mark.nightly  # CI runs it as README does.
@pytest.mark.usefixtures("train_once")
def test_the_main_job_prints_plain_text_where_there_is_no_terminal(run):
    pytest.importorskip("matplotlib")
    code, printed = run("digits_fit", "--small", "--epochs", "1", "--plot", "digits.png")
    assert code == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", printed)
    assert re.search(r"│ float32 .*%.*│ +- │ +- │ +0 of 8 \(0%\)", printed)
    assert re.search(r"│ mixed_float16 .*%.*│ +32768 │ +0 │ +4 of 8 \(50%\)", printed)
    assert f"│ {tfamp.Policy('auto').name} (auto) " in printed
    assert re.search(r"float32 [\d.]+ ms(, tfamp's best way|: \w+ does not pay here)", printed)
    assert "On a GPU, auto picks" in printed
    assert Path("digits.png").read_bytes().startswith(b"\x89PNG")
    heads = [line for line in printed.splitlines() if "policy" in line and "┃" in line]
    # What README says that its first command prints.
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```", readme, re.M | re.S)[1]
    assert set(re.findall(r"\w+", heads[0])) <= set(re.findall(r"\w+", shown))


@pytest.mark.slow
def test_the_custom_loop_takes_one_step_per_group_of_micro_batches(run):
    code, printed = run("digits_custom_loop", "--small", "--epochs", "1", "--micro-batches", "6")
    assert code == 0
    for policy in ("float32", "mixed_float16"):
        line = next(x for x in printed.splitlines() if x.startswith(f"{policy} ") and "steps" in x)
        steps, skipped = re.search(r"steps (\d+)  skipped (\d+)", line).groups()
        assert int(steps) + int(skipped) == 1198 // (6 * 32)
        assert percent("accuracy", line) > 10


@pytest.mark.nightly
def test_the_transformer_learns_and_writes(run):
    code, printed = run("char_transformer", "--small")
    assert code == 0
    bits = re.findall(r"^(\w+) +(\d\.\d+) bits per character", printed, re.M)
    assert [policy for policy, _ in bits] == ["float32", "mixed_float16"]
    assert all(float(value) < 5.5 for _, value in bits)  # log2(96) = 6.6 before training
    assert "\ndef " in printed


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lenet_is_within_a_point_of_float32_at_every_level(run, dtype):
    code, printed = run("lenet_levels", "--dtype", dtype, "--settings")
    assert code == 0
    assert [row[0] for row in table(printed)] == ["O0", "O1", "O2", "O2 + masters", "O3"]
    assert "O1 (graph rewrite in graph mode, autocast when eager)" in printed
    differences = [float(x) for x in re.findall(r"([+-]\d+\.\d+) points", printed)]
    assert len(differences) == 5
    assert all(abs(difference) <= 1 for difference in differences)


@pytest.mark.slow
def test_scaling_keeps_the_gradients_that_float16_flushes(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, printed = run("underflow_demo", "--small", "--epochs", "1", "--plot", "gradients.png")
    assert code == 0
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    flushed = {row[0]: float(row[-1].rstrip("%")) for row in table(printed)}
    assert flushed.keys() == {"float32", "mixed_float16, no scaling", "mixed_float16, tfamp"}
    assert flushed["float32"] == 0
    assert flushed["mixed_float16, no scaling"] > 95
    assert flushed["mixed_float16, tfamp"] < 5


@pytest.mark.nightly
def test_masters_learn_what_pure_float16_loses(run):
    code, printed = run("master_weights", "--small")
    assert code == 0
    names, _, losses, moved, sizes = zip(*(row[:5] for row in table(printed)), strict=True)
    assert names == ("float32", "float16", "float16, masters", "float16, stochastic")
    wide, low, *others = (float(loss) for loss in losses)
    assert max(others) < wide + 0.01 < low, "of one seed, and far apart"
    assert [int(share.rstrip("%")) > 60 for share in moved] == [True, False, True, True]
    wide, _, masters, stochastic = (int(size.replace(",", "")) for size in sizes)
    assert stochastic < wide < masters


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16", "float32"]))
def test_the_torch_style_loop_draws_digits_and_scales_only_float16(run, dtype, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--small", "--epochs", "2", "--dtype", dtype, "--plot", "gan.png"]
    code, printed = run("torch_style_loop", *arguments)
    assert code == 0
    assert (tmp_path / "gan.png").read_bytes().startswith(b"\x89PNG")
    scale, iterations = re.search(r"loss scale ([\d,]+)  iterations (\d+)", printed).groups()
    assert (scale == "1") == (dtype != "float16")
    assert int(iterations) == 2 * (1198 // 128)
    picture = printed.splitlines()[-8:]
    assert {len(line) for line in picture} == {5 * 8 * 2}
    assert set("".join(picture)) <= set(" .:-=+*#%@")


@pytest.mark.nightly
def test_the_gradient_penalty_helps_in_float16_as_in_float32(run):
    code, printed = run("gradient_penalty", "--small", "--epochs", "8")
    assert code == 0
    names, _, attacked = zip(*(row[:3] for row in table(printed)), strict=True)
    attacked = [float(each.rstrip("%")) for each in attacked]
    assert names == ("float32, no penalty", "float32, penalty", "float16, penalty")
    assert min(attacked[1:]) > attacked[0] + 5
    assert abs(attacked[1] - attacked[2]) < 5


@pytest.mark.slow
def test_the_monitored_digits_leave_a_log_and_pictures(run, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "pictures").mkdir()
    code, printed = run("monitor_digits", "--small", "--epochs", "1", "--docs", "pictures")
    assert code == 0
    assert re.search(r"skipped [1-9]\d* steps", printed)
    made = tmp_path / "monitor_digits"
    records = [json.loads(line) for line in (made / "numerics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 10, 15]
    assert records[0]["loss_scale"] < 2.0**24
    pictures = [made / "loss_scale.png", made / "exponents.png"]
    pictures += [tmp_path / "pictures" / f"monitor_{path.name}" for path in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16"]))
def test_a_converted_model_is_as_good_and_a_frozen_one_smaller(run, dtype):
    code, printed = run("convert_saved_model", "--small", "--dtype", dtype)
    assert code == 0
    names, accuracies, sizes = zip(*(row[:3] for row in table(printed)), strict=True)
    assert names == ("float32", dtype, f"{dtype}_frozen")
    percents = [float(text.rstrip("%")) for text in accuracies]
    assert percents[0] > 50
    assert max(percents) - min(percents) < 1
    assert int(sizes[2]) < 0.6 * int(sizes[0])


@pytest.mark.slow
def test_the_layer_that_float16_ruins_is_found_and_repaired(run):
    code, printed = run("compare_layers", "--small")
    assert code == 0
    assert printed.splitlines()[1].startswith("digits/energy")
    assert re.search(r"with these in float32, proved by a run.*\n  digits/energy\n", printed)
    rows = [percent(r"│", line) for line in printed.splitlines() if line.startswith("│")]
    assert rows[1] < 20 < 80 < rows[0]
    assert abs(rows[2] - rows[0]) < 1


@pytest.mark.nightly
def test_two_workers_skip_together_and_end_with_the_same_weights(run, monkeypatch):
    paths = [str(Path(tfamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    code, printed = run("multi_worker", "--small")
    assert code == 0
    configs = re.findall(r"^TF_CONFIG='(.*)'$", printed, re.M)
    assert [json.loads(each)["task"]["index"] for each in configs] == [0, 1]
    lines = [line for line in printed.splitlines() if line.startswith("worker ")]
    assert sorted(line.split()[1] for line in lines) == ["0", "1"]
    assert len({line.partition("of 2")[2] for line in lines}) == 1, "not the same: " + str(lines)
    assert "steps 35  skipped 1  loss scale 16,384" in lines[0]
    assert percent("accuracy", lines[0]) > 40


@pytest.mark.slow
@pytest.mark.usefixtures("train_once")
def test_the_accuracy_table_is_markdown_and_written_only_on_request(run, tmp_path):
    code, printed = run("accuracy_table", "--small", "--output", "table.md")
    assert code == 0
    assert [percent(f"`{p}`", printed) > 10 for p in ("float32", "mixed_float16")]
    assert {line.count("|") for line in printed.splitlines()} == {5}
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == printed


@pytest.mark.slow
def test_the_nan_is_found_and_the_mended_model_trains(run):
    code, printed = run("find_nan", "--small")
    assert code == 0
    assert re.findall(r"^([\w, .e-]+): all is finite", printed, re.M) == [
        "float32, 1e-08",
        "mixed_float16, 0.0001",
    ]
    assert re.search(r"^mixed_float16, 1e-08: underflow in forward: Rsqrt in layer", printed, re.M)
    assert [row[1] == "nan" for row in table(printed)] == [False, True, False]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_number_of_epochs_is_a_usage_error(run, name):
    with pytest.raises(SystemExit) as exit_:
        run(name, "--epochs", "0")
    assert exit_.value.code == 2


@pytest.mark.slow
def test_a_tuned_step_leaves_the_model_as_it_was_and_trains_it(run, tmp_path):
    code, printed = run("tune_step", "--small", "--html", "tuned.html")
    assert code == 0
    assert printed.count("<- chosen") == 1
    assert "the model is as before: True" in printed
    assert percent("", printed.splitlines()[-1]) > 15
    assert "<table" in (tmp_path / "tuned.html").read_text(encoding="utf-8")


def test_the_readme_lists_every_example():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"python examples/(\w+)\.py", readme))) == SCRIPTS
