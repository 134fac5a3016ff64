"""Random damage to graphs: bytes changed anywhere, and nodes, attributes and functions changed.

Every function takes a `random.Random`, which Hypothesis can provide and shrink.
"""

from __future__ import annotations

from typing import Any

_NAMES = ("", "x", "x:0", "^x", ":", "a:b:c", "x:-1", "x:99999999999", "\u00e9", "no/such:output:7")
_OPS = ("MatMul", "Exp", "While", "If", "Const", "PartitionedCall", "TensorListReserve", "NoSuchOp")
_TYPES = (0, 1, 3, 14, 19, 20, 21, 101, 120, 9999)


def damage_bytes(random: Any, data: bytes, changes: int = 8) -> bytes:
    """Returns bytes with some changed, cut out, doubled, or the end missing."""
    changed = bytearray(data)
    for _ in range(random.randint(1, changes)):
        if not changed:
            break
        place = random.randrange(len(changed))
        length = random.randint(1, 16)
        kind = random.randrange(5)
        if kind == 0:
            changed[place] = random.randrange(256)
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = changed[place : place + length]
        elif kind == 3:
            changed[place:place] = bytes(random.randrange(256) for _ in range(length))
        elif random.randrange(4) == 0:
            del changed[place:]
    return bytes(changed)


def damage_graph(random: Any, graph_def: Any, changes: int = 4) -> None:
    """Changes some nodes, attributes, signatures and functions of a graph, in place."""
    for _ in range(random.randint(1, changes)):
        functions = list(graph_def.library.function)
        if functions and random.randrange(4) == 0:
            _damage_function(random, random.choice(functions))
        else:
            scopes = [graph_def.node, *(each.node_def for each in functions)]
            nodes = random.choice([scope for scope in scopes if len(scope)] or [graph_def.node])
            if len(nodes):
                _damage_nodes(random, nodes)


def _damage_nodes(random: Any, nodes: Any) -> None:
    node = random.choice(nodes)
    kind = random.randrange(9)
    if kind == 0:
        nodes.remove(node)
    elif kind == 1:
        nodes.add().CopyFrom(node)
    elif kind == 2:
        node.op = random.choice((random.choice(nodes).op, *_OPS))
    elif kind == 3 and node.input:
        node.input[random.randrange(len(node.input))] = _name(random, nodes)
    elif kind == 4:
        node.input.append(_name(random, nodes))
    elif kind == 5 and node.input:
        del node.input[random.randrange(len(node.input))]
    elif kind == 6:
        node.device = random.choice(("/device:GPU:7", "nonsense", "/job:x/task:3/cpu:0"))
    elif kind == 7:
        node.name = _name(random, nodes)
    else:
        _damage_attributes(random, node, nodes)


def _name(random: Any, nodes: Any) -> str:
    name = random.choice((random.choice(nodes).name, random.choice(_NAMES)))
    return random.choice(("", "", "^")) + name + random.choice(("", "", ":0", ":1", ":z:0"))


def _damage_attributes(random: Any, node: Any, nodes: Any) -> None:
    names = sorted(node.attr)
    if not names:
        return
    attr = node.attr[random.choice(names)]
    kind = random.randrange(7)
    if kind == 0:
        del node.attr[random.choice(names)]
    elif kind == 1:
        attr.type = random.choice(_TYPES)
    elif kind == 2:
        attr.i = random.choice((-1, 0, 1, 7, 2**20, 2**62))
    elif kind == 3:
        attr.s = random.choice((b"", b"\xff\xfe", b"NHWC", b"ij,jk->ik"))
    elif kind == 4:
        attr.func.name = _name(random, nodes)
    elif kind == 5:
        attr.list.type[:] = [random.choice(_TYPES) for _ in range(random.randint(0, 3))]
    else:
        other = random.choice(nodes)
        for name in sorted(other.attr):
            node.attr[name].CopyFrom(other.attr[name])


def _damage_function(random: Any, function: Any) -> None:
    kind = random.randrange(7)
    arguments = random.choice((function.signature.input_arg, function.signature.output_arg))
    if kind == 0:
        function.ret[random.choice(sorted(function.ret) or [""])] = random.choice(_NAMES)
    elif kind == 1:
        function.signature.name = random.choice(_NAMES)
    elif kind == 2 and len(arguments):
        random.choice(arguments).type = random.choice(_TYPES)
    elif kind == 3 and len(arguments):
        arguments.remove(random.choice(arguments))
    elif kind == 4 and len(arguments):
        arguments.add().CopyFrom(random.choice(arguments))
    elif kind == 5:
        function.ret.clear()
    else:  # It calls itself.
        node = function.node_def.add(name="itself", op="PartitionedCall")
        node.attr["f"].func.name = function.signature.name
