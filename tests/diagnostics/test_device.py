"""`device_report`: the facts of the machine, its text and JSON."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp import diagnostics
from tfamp.machine import hardware

PLAIN_CPU = hardware.Hardware("My CPU", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
GPU = hardware.Gpu("A100", (8, 0))


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine."""

    def configure(**facts):
        found = dataclasses.replace(PLAIN_CPU, **facts)
        monkeypatch.setattr(hardware, "detect", lambda: found)
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
    assert report.problems == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.policy = "float16"


def test_text_and_json_say_the_same(machine):
    machine(gpus=(GPU, hardware.Gpu("mystery", None)))
    report = diagnostics.device_report()
    text, facts = report.to_text(), json.loads(report.to_json())
    for line in ("A100, compute capability 8.0", "mystery, compute capability unknown", "My CPU"):
        assert line in text
    words = " ".join(text.split())
    assert "CPU bfloat16 native CPU float16 not native" in words
    assert facts["hardware"]["gpus"][0] == {"name": "A100", "capability": [8, 0]}
    assert facts["auto_policy"] == {"name": report.policy, "reason": report.reason}
    assert report.policy in text
    assert report.reason in text
    assert facts["versions"] == dict(report.versions)
