"""A configuration is read from dicts and files; mistakes name key and cure."""

import copy
import importlib.util
import json
import sys

import numpy as np
import pytest

from tfamp import DynamicLossScale, FixedLossScale, GradClip, PrecisionConfig

FULL = {
    "level": "O2",
    "dtype": "float16",
    "loss_scale": 512.0,
    "grad_clip": {"max_norm": 35.0, "norm_type": 2},
    "keep_float32": ["head", "^block1_"],
    "master_weights": True,
}


def test_a_configuration_goes_to_a_dict_and_back_comes_from_json_and_does_not_change(tmp_path):
    config = PrecisionConfig.from_dict(FULL)
    assert config.to_dict() == FULL
    assert PrecisionConfig.from_dict(config.to_dict()) == config
    sums = {"level": "O2", "float32_outputs": "sums"}
    assert PrecisionConfig.from_dict(sums).to_dict() == sums
    rounded = {"level": "O3", "weight_rounding": "stochastic", "slots": "bfloat16"}
    assert PrecisionConfig.from_dict(rounded).to_dict() == rounded
    placed = {"level": "O1", "placement": "fused", "master_weights": False}
    assert PrecisionConfig.from_dict(placed).to_dict() == placed
    assert config.grad_clip == GradClip(35)
    assert (config.keep_float32, config.master_weights) == (("head", "^block1_"), True)
    assert PrecisionConfig.from_dict({}) == PrecisionConfig()
    path = tmp_path / "precision.json"
    path.write_text(json.dumps(FULL))
    assert PrecisionConfig.from_file(path) == config
    with pytest.raises(AttributeError, match="level"):
        config.level = "O3"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (512, 512.0),
        ("dynamic", "dynamic"),
        ("none", "none"),
        ({"scale": 8.0, "skip_nonfinite": False}, FixedLossScale(8.0, skip_nonfinite=False)),
        ({"init_scale": 8.0}, DynamicLossScale(initial_scale=8.0)),
        ({"init_scale": 8.0, "mode": "dynamic"}, DynamicLossScale(initial_scale=8.0)),
        (
            {"loss_scale_window": 3000, "min_loss_scale": 1.0, "hysteresis": 2},
            DynamicLossScale(growth_steps=3000, min_scale=1.0, hysteresis=2),
        ),
        (
            {"growth_interval": 7, "growth_factor": 4.0},
            DynamicLossScale(growth_steps=7, growth_factor=4.0),
        ),
        (DynamicLossScale(), DynamicLossScale()),
    ],
)
def test_a_loss_scale_is_read_as_other_systems_write_it(given, meant):
    values = {"loss_scale": given}
    before = copy.deepcopy(values)
    assert PrecisionConfig.from_dict(values).loss_scale == meant
    assert values == before


@pytest.mark.parametrize("scale", [FixedLossScale(8.0), DynamicLossScale(growth_steps=3), "none"])
@pytest.mark.parametrize("clip", [None, GradClip(1.0, norm_type=float("inf"))])
def test_every_loss_scale_and_clipping_can_be_written_to_a_file(scale, clip):
    config = PrecisionConfig(loss_scale=scale, grad_clip=clip)
    assert PrecisionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("dtype", "auto", None),
        ("dtype", np.float16, "float16"),
        ("level", "o1", "O1"),
        ("level", "AUTO", "auto"),
    ],
)
def test_dtypes_and_levels_are_read_liberally(name, given, meant):
    assert getattr(PrecisionConfig(**{name: given}), name) == meant


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"los_scale": 1}, ValueError, "no key 'los_scale'; did you mean 'loss_scale'"),
        ({"level": "02"}, ValueError, "one of 'O0', 'O1', 'O2', 'O3', 'auto'; got '02'"),
        ({"level": 1.5}, TypeError, "level must be one of"),
        ({"dtype": "flaot16"}, ValueError, "dtype must be one of float16, bfloat16"),
        ({"loss_scale": -1}, ValueError, "scale must be a number in"),
        ({"loss_scale": "dynamik"}, ValueError, "loss_scale must be"),
        ({"loss_scale": [1]}, TypeError, "loss_scale must be"),
        ({"loss_scale": {"init_scal": 1}}, ValueError, "did you mean 'init_scale'"),
        (
            {"loss_scale": {"init_scale": 512.0, "mode": "static"}},
            ValueError,
            "loss_scale .*mode 'static'.* give 'dynamic'.* loss_scale=512.0",
        ),
        ({"loss_scale": {"scale": 1, "hysteresis": 2}}, ValueError, "no key 'hysteresis'"),
        ({"loss_scale": {"init_scale": 1, "initial_scale": 2}}, ValueError, "twice"),
        ({"grad_clip": {"norm_type": 2}}, ValueError, "max_norm"),
        ({"grad_clip": {"max_norm": 1, "norm_type": 3}}, ValueError, "norm_type"),
        ({"master_weights": 1}, TypeError, "master_weights must be"),
        ({"level": "O1", "master_weights": True}, ValueError, "goes with level O2 or O3"),
        ({"level": "O2", "placement": "lists"}, ValueError, "give level='O1', or leave placement"),
        ({"level": "O2", "dtype": "float32"}, ValueError, "level='O0'"),
        ({"level": "O3", "weight_rounding": "split2"}, ValueError, "one of 'stochastic', 'split'"),
        ({"level": "O3", "slots": "float8"}, ValueError, "slots must be"),
        (
            {"float32_outputs": "Sums"},
            TypeError,
            "float32_outputs must be True or False, or 'sums'",
        ),
        ({"float32_outputs": False}, ValueError, "Give True or 'sums', level='O3'"),
        ({"level": "O1", "float32_outputs": "sums"}, ValueError, "goes with level O2"),
        ({"float32_outputs": "sums", "master_weights": True}, ValueError, "give one of the two"),
        ([], TypeError, "PrecisionConfig must be a dict"),
    ],
)
def test_mistakes_are_errors_that_name_key_and_cure(values, error, message):
    with pytest.raises(error, match=message):
        PrecisionConfig.from_dict(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"initial_scale_power": 16}, ["{'initial_scale': 65536.0}", "2**16"]),
        ({"loss_scale": {"initial_scale_power": 16}}, ["'initial_scale': 65536.0", "2**16"]),
        ({"loss_scale": {"initial_scale_power": 999}}, ["'initial_scale': 2.0**n"]),
        ({"loss_scale": 0}, ["dynamic"]),
        ({"loss_scale": {"loss_scale": 0}}, ["dynamic", "leave DeepSpeed's 0 out"]),
        ({"loss_scale_window": 1000}, ["'loss_scale': {'growth_steps': 1000}"]),
        ({"hysteresis": 2}, ["'loss_scale': {'hysteresis': 2}"]),
        ({"min_loss_scale": 1}, ["'loss_scale': {'min_scale': 1}"]),
        ({"fp16": {"enabled": True}}, ["'dtype': 'float16'", "'master_weights': True"]),
        ({"bf16": {"enabled": True}}, ["'dtype': 'bfloat16'"]),
        ({"gradient_clipping": 1.0}, ["'grad_clip': 1.0"]),
        ({"opt_level": "O1"}, ["'level': 'O1'"]),
        ({"keep_batchnorm_fp32": True}, ["O2 keeps BatchNormalization", "keep_float32="]),
        ({"init_scale": 2.0}, ["'loss_scale': {'initial_scale': 2.0}"]),
        ({"growth_interval": 7}, ["'loss_scale': {'growth_steps': 7}"]),
        ({"growth_factor": 4.0}, ["'loss_scale': {'growth_factor': 4.0}"]),
        ({"backoff_factor": 0.25}, ["'loss_scale': {'backoff_factor': 0.25}"]),
        ({"loss_scale": {"max_loss_scale": 8.0}}, ["'max_scale': 8.0"]),
        ({"enabled": False}, ["'level': 'O0'"]),
    ],
)
def test_settings_of_other_systems_are_translated_with_their_values(values, words):
    with pytest.raises(ValueError, match="loss_scale|PrecisionConfig") as error:
        PrecisionConfig.from_dict(values)
    message = str(error.value)
    assert all(word in message for word in words)
    assert "did you mean" not in message


@pytest.mark.parametrize("kept", ["(", ["head", "("], ["a["]])
def test_an_invalid_regular_expression_is_found_when_the_configuration_is_made(kept):
    for make in (lambda: PrecisionConfig(keep_float32=kept), lambda: from_dict(kept)):
        with pytest.raises(ValueError, match=r"keep_float32 holds '(\(|a\[)', .* give '"):
            make()
    assert PrecisionConfig(keep_float32=[r"\("]).keep_float32 == (r"\(",)


def from_dict(kept):
    return PrecisionConfig.from_dict({"keep_float32": kept})


@pytest.mark.parametrize("table", ["", "[tfamp]\n"])
def test_a_toml_file_is_read(tmp_path, table):
    path = tmp_path / "precision.toml"
    path.write_text(
        f'{table}loss_scale = 512.0\ngrad_clip = {{max_norm = 35, norm_type = "inf"}}\n'
    )
    config = PrecisionConfig.from_file(str(path))
    assert config.loss_scale == 512.0
    assert config.grad_clip == GradClip(35, norm_type=float("inf"))


@pytest.mark.parametrize("has_tomli", [True, False])
def test_python_3_10_reads_toml_with_tomli(tmp_path, monkeypatch, has_tomli):
    installed = [name for name in ("tomllib", "tomli") if importlib.util.find_spec(name)]
    module = importlib.import_module(installed[0])  # tomllib was tomli before Python 3.11
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", module if has_tomli else None)
    path = tmp_path / "precision.toml"
    path.write_text('level = "O1"')
    if has_tomli:
        assert PrecisionConfig.from_file(path) == PrecisionConfig(level="O1")
        return
    with pytest.raises(ImportError, match=r"precision\.toml is TOML.*Install tomli, .* as JSON"):
        PrecisionConfig.from_file(path)
    assert PrecisionConfig.from_dict({"level": "O1"}).level == "O1"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.yaml", "", r"\.json or \.toml"),
        ("p.json", "{", r"p\.json: Expecting"),
        ("p.json", '{"levl": "O1"}', r"p\.json.*did you mean 'level'"),
        ("p.toml", "level = ", r"p\.toml: "),
        ("p.toml", "tfamp = 3", r"p\.toml: PrecisionConfig must be a dict"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        PrecisionConfig.from_file(path)
