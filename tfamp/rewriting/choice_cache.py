"""The user's cache of choices that `tune` has measured: one file per program and machine.

The name of a file is a hash of the graph, the versions, the hardware and the arguments of `tune`;
in it are times and errors of the candidates. Nothing else of the program is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tfamp
from tfamp.graph.editor import FLOAT_TYPES, SHAPES
from tfamp.graph.functions import bodies
from tfamp.machine import hardware
from tfamp.planning.structures import node_name

VARIABLE = "TFAMP_CACHE"
# Increased when the contents of a file, or the measurement, change.
_FORMAT = 1
_IGNORED = ("shared_name", "seed", "seed2")  # Attributes that the time of an op does not depend on.


def choice_file(trace: Any, arguments: Mapping[str, Any]) -> Path | None:
    """Returns the file of the choice for a concrete function; None if TFAMP_CACHE is "off".

    Args:
        trace: The function, in float32.
        arguments: Other values that the choice depends on; their `repr` is the same in every
            process.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "off"):
        raise ValueError(f'{VARIABLE} must be "off", or unset for the cache; got {wanted!r}.')
    if wanted:
        return None
    facts = {
        **hardware.machine_facts(),
        "tfamp": f"{tfamp.__version__} {_FORMAT}",
        "graph": fingerprint(trace.graph.as_graph_def(add_shapes=True)),
        **{name: repr(value) for name, value in arguments.items()},
    }
    text = json.dumps(facts, sort_keys=True)
    name = f"choice-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
    return hardware.cache_folder() / name


def fingerprint(graph_def: Any) -> str:
    """Returns a hash of the ops, attributes and edges of a graph and its functions.

    It ignores names, seeds, values of float constants, and which call runs which function.
    """
    described = sorted(_described(nodes, function) for _, nodes, function in bodies(graph_def))
    return hashlib.sha256("".join(described).encode()).hexdigest()


def _described(nodes: Sequence[Any], function: Any) -> str:
    """The nodes of a graph or function, with numbers instead of names."""
    arguments = function.signature.input_arg if function else ()
    numbers = {each.name: f"{number}" for number, each in enumerate((*arguments, *nodes))}

    def end(tensor: str) -> str:
        name = node_name(tensor)
        return tensor.replace(name, numbers[name], 1)

    lines = []
    for node in nodes:
        kept = (key for key in sorted(node.attr) if key[0] != "_" or key == SHAPES)
        values = {key: _value(node.attr[key]) for key in kept if key not in _IGNORED}
        lines.append(f"{node.op} {node.device} {[*map(end, node.input)]} {values}")
    return "\n".join(lines)


def _value(attribute: Any) -> bytes:
    if attribute.HasField("func") or attribute.list.func:
        return b"functions"
    if attribute.tensor.dtype in FLOAT_TYPES:
        attribute = attribute.tensor.tensor_shape
    return bytes(attribute.SerializeToString(deterministic=True))
