"""How nodes and tensors are named in a GraphDef: control inputs, first outputs, recorded shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# The attribute that holds the shapes of a node's outputs, in a graph exported with shapes.
SHAPES = "_output_shapes"


def is_control(name: str) -> bool:
    """Whether an input is a node that is waited for ("^node"), not a tensor."""
    return name.startswith("^")


def tensor_inputs(node: Any) -> list[str]:
    """Returns the tensors that a node takes."""
    return [name for name in node.input if not is_control(name)]


def control_inputs_of(node: Any) -> list[str]:
    """Returns the inputs that a node only waits for."""
    return [name for name in node.input if is_control(name)]


def first_output(name: str, in_function: bool, output: str = "output") -> str:
    """Returns the first tensor of a node: "node" in a graph, "node:output:0" in a function.

    In a function it has the name that the op gives this output, which for most is "output".
    """
    return f"{name}:{output}:0" if in_function else name


def renamed_output(names: Iterable[str], before: str, after: str) -> dict[str, str]:
    """Returns how the first tensors of nodes of a function are spelled, whose op has changed."""
    return {first_output(name, True, before): first_output(name, True, after) for name in names}
