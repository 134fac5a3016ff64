"""Which node of a damaged saved_model.pb it is that cannot be read.

Protobuf refuses a file as a whole. This reads its wire format down to the nodes, where lengths can
still be followed. Source: protobuf's encoding guide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import tensorflow as tf

from tfamp.interop import tf_private

# Numbers of fields: SavedModel -> MetaGraphDef -> GraphDef, and there the nodes, or the library's
# functions and their nodes. Numbers never change in protobuf.
_GRAPH = (2, 2)
_NODE, _LIBRARY, _FUNCTION, _FUNCTION_NODE = 1, 2, 1, 3
_NAME = 1
_VARINT, _EIGHT_BYTES, _MESSAGE, _FOUR_BYTES = 0, 1, 2, 5


def damaged_node(data: bytes) -> str | None:
    """Returns, as a clause, which node is the first that cannot be read; None if none is known."""
    for position, node in enumerate(_nodes(data)):
        try:
            tf.compat.v1.NodeDef.FromString(node)
        except tf_private.message_error():
            name = next(_messages(node, (_NAME,)), b"").decode(errors="backslashreplace")
            return f"its node {position}, named {name!r}, cannot be read"
    return None


def _nodes(data: bytes) -> Iterator[bytes]:
    for graph in _messages(data, _GRAPH):
        functions = _messages(graph, (_LIBRARY, _FUNCTION, _FUNCTION_NODE))
        yield from itertools.chain(_messages(graph, (_NODE,)), functions)


def _messages(data: bytes, path: tuple[int, ...]) -> Iterator[bytes]:
    """What is in the fields of these numbers, one inside the other."""
    for number, inside in _fields(data):
        if number == path[0]:
            yield from _messages(inside, path[1:]) if path[1:] else (inside,)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that hold bytes, with their numbers, as far as they can be told apart.

    The last is shorter than it says where the end of the data is missing.
    """
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _MESSAGE:
            length, place = _varint(data, place)
            yield tag >> 3, data[place : place + length]
            place += length
        elif kind == _VARINT:
            place = _varint(data, place)[1]
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            place += 8 if kind == _EIGHT_BYTES else 4
        else:
            return


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for count, byte in enumerate(data[place : place + 10]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    return value, len(data)
