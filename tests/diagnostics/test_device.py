"""`device_report`: the facts of the machine, its text and JSON, and the measurement of float16."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp import diagnostics
from tfamp.machine import hardware, profile_measure

PLAIN_CPU = hardware.Hardware("My CPU", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
GPU = hardware.Gpu("A100", (8, 0))


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine, and how slow float16 is measured to be on it."""

    def configure(slowdown=7.04, **facts):
        found = dataclasses.replace(PLAIN_CPU, **facts)
        monkeypatch.setattr(hardware, "detect", lambda: found)
        monkeypatch.setattr(profile_measure, "float16_slowdown", lambda: slowdown)
        return found

    return configure


def test_report_holds_versions_facts_and_the_policy_auto_picks(machine):
    found = machine()
    report = diagnostics.device_report()
    assert report.versions["tensorflow"] == tf.__version__
    assert report.versions["keras"] == keras.__version__
    assert report.versions["tfamp"] == tfamp.__version__
    assert report.hardware == found
    assert (report.policy, report.reason) == hardware.automatic_policy(found)
    assert report.float16_slowdown == 7.04
    assert report.problems == ()
    assert "float16 takes  7.0 times as long as float32" in report.to_text()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.policy = "float16"


@pytest.mark.parametrize("facts", [{"cpu_float16": True}, {"gpus": (GPU,)}, {"tpu": True}], ids=str)
def test_float16_is_measured_only_where_it_is_emulated(machine, facts):
    machine(**facts)
    assert diagnostics.device_report().float16_slowdown is None
    assert "float16 takes" not in diagnostics.device_report().to_text()


def test_text_and_json_say_the_same(machine):
    machine(gpus=(GPU, hardware.Gpu("mystery", None)))
    report = diagnostics.device_report()
    text, facts = report.to_text(), json.loads(report.to_json())
    for line in ("A100, compute capability 8.0", "mystery, compute capability unknown", "My CPU"):
        assert line in text
    assert "bfloat16  native" in text
    assert "float16   not native" in text
    assert facts["hardware"]["gpus"][0] == {"name": "A100", "capability": [8, 0]}
    assert facts["auto_policy"] == {"name": report.policy, "reason": report.reason}
    assert report.policy in text
    assert report.reason in text
    assert facts["versions"] == dict(report.versions)


def test_the_measurement_is_made_once_and_eagerly_while_a_graph_is_made(monkeypatch):
    dtypes = []
    matmul = tf.raw_ops.MatMul

    def watched(**inputs):
        dtypes.append(inputs["a"].dtype.name)
        return matmul(**inputs)

    monkeypatch.setattr(tf.raw_ops, "MatMul", watched)
    profile_measure.float16_slowdown.cache_clear()
    with tf.Graph().as_default() as graph:
        first = profile_measure.float16_slowdown()
    assert 0.05 < first < 1000
    assert not graph.get_operations()
    assert set(dtypes) == {"float32", "float16"}
    monkeypatch.setattr(tf.raw_ops, "MatMul", lambda **_: pytest.fail("measured again"))
    assert profile_measure.float16_slowdown() == first
