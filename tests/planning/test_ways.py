"""Ways to run a step: which are tried, why others are not, and what is used without a time."""

import pytest

from tfamp.planning.ways import (
    POLICY,
    Way,
    incumbent_of,
    usual_ways,
    way_named,
    ways_of,
    why_not_here,
    why_not_worth_it,
)

XLA = Way("float32", is_compiled=True)
PLACEMENTS = ["float32", "lists", "min_cut", "fused"]
TRANSFORMER = {"MatMul": 15, "BatchMatMulV2": 24, "Einsum": 12, "Mul": 900}


def test_names_lead_to_ways_and_back():
    names = ("xla", "lists_xla", "min_cut_xla", *PLACEMENTS)
    assert {way.name for way in ways_of(names)} == set(names)
    assert all(way_named(way.name) == way for way in (*ways_of(names), Way(POLICY, True)))
    assert [way.name for way in ways_of(["lists", "xla", "lists"])] == ["float32", "lists", "xla"]
    with pytest.raises(ValueError, match="candidates must be one of float32, .*xla.*; got 'XLA'"):
        ways_of(["XLA"])


def test_accelerators_try_all_that_xla_compiles_and_cpus_float32():
    assert [way.name for way in usual_ways("cpu")] == [*PLACEMENTS, "xla"]
    for device in ("gpu", "tpu"):
        names = {way.name for way in usual_ways(device)}
        assert names == {*PLACEMENTS, "xla", "lists_xla", "min_cut_xla"}


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (TRANSFORMER, ""),
        ({**TRANSFORMER, "Conv2D": 1, "Conv2DBackpropFilter": 1}, ""),  # Patches of an image.
        ({"Conv2D": 53, "Conv2DBackpropInput": 52, "MatMul": 3}, "105 convolutions"),
        ({"DepthwiseConv2dNative": 1}, "1 convolutions"),
        ({**TRANSFORMER, "While": 2, "StatelessWhile": 1}, "3 loops"),
        ({"MatMul": 10, "Add": 9_990}, "compile for about 15 s"),
        ({"Add": 5}, ""),
    ],
)
def test_on_a_cpu_the_ops_decide(ops, reason):
    found = why_not_worth_it(XLA, "cpu", ops, 10.0)
    assert reason in found
    assert bool(found) == bool(reason)
    assert why_not_worth_it(XLA, "gpu", ops, 10.0) == ""
    assert why_not_worth_it(Way("fused"), "cpu", ops, 10.0) == ""


def test_convolutions_of_sequences_count_as_other_ops():
    ops = {"Conv2D": 6, "Conv2DBackpropInput": 6, "Conv2DBackpropFilter": 6, "MatMul": 3}
    assert "18 convolutions" in why_not_worth_it(XLA, "cpu", ops, 10.0)
    assert "1 convolutions" in why_not_worth_it(XLA, "cpu", ops, 10.0, along_one_axis=17)
    assert why_not_worth_it(XLA, "cpu", ops, 10.0, along_one_axis=18) == ""


def test_without_xla_or_with_a_choice_of_the_user_nothing_is_compiled():
    here = {"xla_works": True, "why_not_compiled": ""}
    assert why_not_here(XLA, **here) == why_not_here(Way("fused"), **here) == ""
    no_xla = {**here, "xla_works": False}
    assert "XLA does not work" in why_not_here(XLA, **no_xla)
    assert "XLA does not work" in why_not_here(Way("fused"), **no_xla)
    assert why_not_here(Way("lists"), **no_xla) == ""
    chosen = {**here, "why_not_compiled": "jit_compile=False"}
    assert why_not_here(XLA, **chosen) == "jit_compile=False"
    assert why_not_here(Way("fused"), **chosen) == ""


@pytest.mark.parametrize(
    ("device", "is_native", "missing", "name"),
    [
        ("cpu", True, (), "fused"),
        ("cpu", True, ("fused",), "min_cut"),
        ("cpu", True, ("fused", "min_cut"), "float32"),
        ("cpu", False, (), "float32"),
        ("gpu", True, (), "O2_xla"),
        ("gpu", True, ("O2_xla",), "O2"),
        ("gpu", True, ("O2_xla", "O2"), "min_cut_xla"),
        ("gpu", False, (), "xla"),
        ("gpu", False, ("xla",), "float32"),
    ],
)
def test_the_incumbent_is_what_auto_takes(device, is_native, missing, name):
    ways = [*usual_ways(device), *([Way(POLICY), Way(POLICY, True)] if device == "gpu" else ())]
    there = [way for way in ways if way.name not in missing]
    assert incumbent_of(there, is_native=is_native, device=device).name == name
