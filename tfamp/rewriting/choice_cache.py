"""The user's cache of choices that `tune` has measured: one file per program and machine.

The name of a file is a hash of the program, the versions, the hardware and the arguments of
`tune`. The program is a graph or, without a trace of seconds, the configuration of a Keras
model. In the file are times and errors of the candidates. Nothing else of the program is
stored. Of more than `_MOST_FILES` files, those that were not used for the longest time are
deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

import tfamp
from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import AttrValue, GraphDef, Model, Nest
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.nodes import SHAPES
from tfamp.graph.ops import FLOAT_TYPES
from tfamp.interop.keras_hooks import decays, layers_of, rematerializes
from tfamp.interop.patching import level_of_user
from tfamp.machine import hardware
from tfamp.machine.hardware import keep_in_cache
from tfamp.planning.structures import FLOAT32, MAIN_GRAPH, node_name
from tfamp.rewriting.tune_report import TuneRow

_Plain: TypeAlias = Any  # A value that JSON can hold.

# Increased when the contents of a file, or the measurement, change.
_FORMAT = 5
# A choice: of 1 kB each, and more than the programs that one user tunes at a time.
_MOST_FILES = 256
# Attributes that the time of an op does not depend on.
_IGNORED = ("shared_name", "seed", "seed2")
# Keys of a Keras configuration that have names of layers, and classes that run what is not in
# it.
_NAMES = {"name", "keras_history", "input_layers", "output_layers"}
_PACKAGES = ("keras", "keras_hub")  # Their configurations say what their code does.
_OPAQUE = ("Lambda", "__lambda__", "TFSMLayer", "TorchModuleWrapper")


def choice_file(program: str, arguments: Mapping[str, Any]) -> Path | None:
    """Returns the file of the choice for a program; None if TFAMP_CACHE is "off".

    Args:
        program: What `fingerprint` or `keras_program` returns for the function in float32.
        arguments: Other values that the choice depends on; their `repr` is the same in every
            process.
    """
    if not hardware.keeps_files():
        return None
    facts = {
        **hardware.machine_facts(),
        "tfamp": f"{tfamp.__version__} {_FORMAT}",
        "program": program,
        **{name: repr(value) for name, value in arguments.items()},
    }
    return hardware.cache_folder() / f"choice-{_hash(facts)[:20]}.json"


# ---- The file ------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The measured part of a report."""

    rows: tuple[TuneRow, ...]
    rounds: int
    dropped: tuple[str, ...]
    unseeded: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    incumbent: str = FLOAT32
    noise: float = math.nan
    redrawn: tuple[str, ...] = ()
    source: str = "measured now"


def kept_choice(path: Path | None, candidates: Iterable[str]) -> Choice | None:
    """Reads a choice among candidates; a damaged file is a warning and counts as missing."""
    if path is None:
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields is None:
            return None
        rows = tuple(map(TuneRow.of, fields["rows"]))
        names = set(candidates)
        (_,) = (row for row in rows if row.chosen and row.candidate in names)  # Exactly one.
        source = f"measured before, kept in {path}"
        names_of = ("dropped", "unseeded", "left_out", "redrawn")
        lists = {name: tuple(map(str, fields[name])) for name in names_of}
        incumbent, noise = str(fields["incumbent"]), float(fields["noise"])
        rounds = int(fields["rounds"])
        choice = Choice(rows, rounds, incumbent=incumbent, noise=noise, source=source, **lists)
        with contextlib.suppress(OSError):  # Another user's, or in a read-only folder.
            os.utime(path)  # It is in use, so `_delete_unused` deletes others first.
        return choice
    except OSError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = f"{path} is damaged or not a file of tfamp's, so tune measures again: {error!r}"
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())
        return None


def keep_choice(path: Path | None, choice: Choice) -> Choice:
    """Writes a choice to its file; returns it with its origin."""
    if path is None:
        return choice
    fields = {name: value for name, value in choice._asdict().items() if name != "source"}
    text = json.dumps({**fields, "rows": [dataclasses.asdict(row) for row in choice.rows]})
    costs = "The choice of tune cannot be kept, so the next start of the program measures again"
    source = keep_in_cache(path, text, costs, f'set {hardware.CACHE_VARIABLE} to "off"')
    _delete_unused(path)
    return choice._replace(source=source)


def _delete_unused(newest: Path) -> None:
    """Deletes the choices that were not used for the longest time, if there are too many.

    A file that another process is about to read costs that process a measurement. One that
    cannot be deleted stays.
    """
    used: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):  # There is no folder.
        for path in newest.parent.glob("choice-*.json"):
            with contextlib.suppress(OSError):  # Another process has deleted it.
                used.append((path.stat().st_mtime, path))
    used.sort()
    # The clock of a shared folder may differ from that of this machine.
    for _, path in [each for each in used if each[1] != newest][: -(_MOST_FILES - 1)]:
        with contextlib.suppress(OSError):
            path.unlink()


def _hash(value: _Plain) -> str:
    """A hash of plain values, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


# ---- A graph -------------------------------------------------------------------------------------


def fingerprint(graph_def: GraphDef) -> str:
    """Returns a hash of the ops, attributes and edges of a graph and its called functions.

    It ignores names, seeds and values of float constants.
    """
    contents = {body.scope: body for body in Graph(graph_def).bodies}
    nothing = Body(tf.compat.v1.GraphDef())
    hashes: dict[str, str] = {}

    def called(name: str) -> str:
        if name not in hashes:
            hashes[name] = "recursive"  # Until it is known.
            hashes[name] = _hash(_described(contents.get(name, nothing), called))
        return hashes[name]

    return called(MAIN_GRAPH)


def _described(body: Body, called: Callable[[str], str]) -> list[_Plain]:
    """The nodes of a graph or function, with numbers instead of names.

    `called` returns the hash of the function with a name.
    """
    entries = (*body.arguments, *body.nodes)
    numbers = {entry.name: f"{number}" for number, entry in enumerate(entries)}

    def end(tensor: str) -> str:
        name = node_name(tensor)
        return tensor.replace(name, numbers[name], 1)

    def value(attribute: AttrValue) -> list[str]:
        functions = [*attribute.list.func, *([attribute.func] if attribute.func.name else ())]
        if attribute.tensor.dtype in FLOAT_TYPES:
            attribute = attribute.tensor.tensor_shape
        plain = () if functions else (attribute.SerializeToString(deterministic=True).hex(),)
        return [*plain, *(called(function.name) for function in functions)]

    lines: list[_Plain] = []
    for node in body.nodes:
        kept = (key for key in node.attr if key[0] != "_" or key == SHAPES)
        values = {key: value(node.attr[key]) for key in kept if key not in _IGNORED}
        lines.append([node.op, node.device, [*map(end, node.input)], values])
    return [*lines, [end(body.returned[result.name]) for result in body.results]]


# ---- A Keras model -------------------------------------------------------------------------------


def keras_program(model: Model, batch: Nest) -> str:
    """Returns a hash of what the train step of a built and compiled model is made of, untraced.

    It ignores names of layers and the learning rate. It is "" unless all code that is traced is
    Keras's or KerasHub's: for others only the graph shows what they do.
    """
    layers = layers_of(model)
    parts = [*layers, model.optimizer]
    values = [value for part in parts for value in vars(part).values()]
    kinds = types.FunctionType | types.MethodType
    functions = [value for value in values if isinstance(value, kinds)]
    sources = (*map(type, parts), *functions)
    code = [f"{source.__module__}.{source.__qualname__}" for source in sources]
    if not model.built or not all(map(_is_keras, code)):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns about lambdas.
            config = keras.saving.serialize_keras_object([model, model.optimizer])
    except (TypeError, ValueError, NotImplementedError):
        return ""  # A part has no configuration.
    written = keras.tree.flatten_with_path(config)
    registered = keras.saving.get_registered_object  # All that is written of it is its name.
    modules = [value for path, value in written if path[-1] == "module"]
    objects = (registered(value) for _, value in written)
    modules += [known.__module__ for known in objects if known]
    if any(value in _OPAQUE for _, value in written) or not all(map(_is_keras, modules)):
        return ""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    facts = [
        *(sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules),
        *(keras.config.floatx(), keras.config.image_data_format()),
        *(code, str(model.jit_compile), tf.zeros(()).device, _without_names(written)),
        *([layer.trainable, layer.autocast, rematerializes(layer)] for layer in layers),
        *(str([v.shape, v.dtype, v.trainable, type(v.regularizer)]) for v in model.variables),
        *(decays(optimizer, weight) for weight in model.trainable_variables),
    ]
    return _hash([*facts, repr(keras.tree.map_structure(tf.type_spec_from_value, batch))])


def _is_keras(name: str) -> bool:
    return name.partition(".")[0] in _PACKAGES


def _without_names(written: Sequence[tuple[Any, Any]]) -> list[_Plain]:
    """A configuration with numbers instead of names, which depend on what was built before."""
    names = dict.fromkeys(value for path, value in written if not _NAMES.isdisjoint(path))
    numbers = {name: f"#{number}" for number, name in enumerate(names)}
    return [
        [
            [numbers.get(key, key) for key in path],
            [value] if _NAMES.isdisjoint(path) else numbers[value],
        ]
        for path, value in written
        if path[-1] != "learning_rate"
    ]
