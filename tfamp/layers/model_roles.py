"""The roles of managed layers in models: which ones make float32 outputs, and how.

A layer whose dtype came from a mixed policy is *managed*. Two rules decide; each is applied
again whenever what it depends on has changed:

- A layer's dtype follows from its *places* in Functionals (a Sequential has one inside). One
  that makes outputs, and is an interior layer of none, is *raised* to float32; any other has
  its mixed policy. `_follow_places` applies it.
- A model's outputs follow from the dtypes of its layers. One that is low and should be float32
  gets a linear Activation of dtype float32, the *cast*, appended. `_settle_outputs` applies it.

A model that becomes part of another one makes no outputs any more: its output layers are
interior, and it has no casts.

An example, under mixed_float16. `base = Model(x, head(body(x)))` has the hidden layer `body`,
float16, and the output layer `head`, raised to float32. `Model(x, top(head.output))` makes
`head` an interior layer: it is float16 again, `top` is raised, and `base` now ends with the
cast. Called as a layer, in `Model(z, last(base(z)))`, `base` loses the cast too: its output is
float16, and `last` makes the float32 one.

`model_calls` does the same while a model runs, for subclassed models and models in layers.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator

import keras

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.kinds import Functional, KerasNode, Layer, Model, Operation, Tensor
from tfamp.interop import keras_hooks
from tfamp.interop.patching import wrap_method
from tfamp.layers.layer_dtypes import (
    float_policy,
    give_policy,
    in_float32,
    is_built_in,
    policy_with,
)
from tfamp.layers.layer_plan import Assignment, assigned, role_in_models
from tfamp.layers.layer_record import (
    ModelGraph,
    Places,
    assignment_of,
    graph_of,
    managed_by,
    note,
    places_of,
    record_of,
)
from tfamp.layers.symbolic_dtypes import FAILURES, copy_dtypes, respecify, specs_now

# Models are built by many threads, and a layer may be part of models of several.
_lock = threading.RLock()


def assign(layer: Layer, assignment: Assignment | None) -> None:
    """Gives a layer an assignment, or none, and with it no place in a model yet."""
    note(layer, assignment=assignment, places=None)


def leave_to_holder(layer: Layer) -> None:
    """Ends the managing of a layer that is float32 as a part of another layer."""
    assignment = assignment_of(layer)
    if assignment is None or assignment.before is None:
        assign(layer, None)
        return
    exact = dataclasses.replace(assignment, policy_name="float32", role="exact", policy=None)
    assign(layer, exact)


def settle(functional: Functional, owner: Model | None = None) -> bool:
    """Gives every layer of a new Functional the dtype of its role; returns whether it did.

    `owner` is the Sequential that it is inside of, if known.
    """
    layers = [op for op in functional.operations if isinstance(op, keras.Layer)]
    with _lock:
        graph = record_of(functional).graph
        is_new = graph is None and any(managed_by(op) or graph_of(op) for op in layers)
        if is_new:
            graph = ModelGraph(functional)
            note(functional, graph=graph)
            _give_roles(graph, layers)
        if graph is not None and owner is not None:
            graph.owner = weakref.ref(owner)
            note(owner, inside=weakref.ref(functional))
    return is_new


def _give_roles(graph: ModelGraph, layers: list[Layer]) -> None:
    for layer in layers:
        models_below_become_parts(layer)
    for layer in _output_makers(graph):
        if managed_by(layer) is not None and record_of(layer).places is not None:
            # Another thread may have changed its dtype between its call and this moment.
            _retype(layer)
    makers = {id(layer) for layer in _output_makers(graph)}
    # Interior layers first: an output is cast only if its layer stays low.
    for layer in sorted(layers, key=lambda layer: id(layer) in makers):
        _place(layer, graph.functional, makes_output=id(layer) in makers)
    _settle_outputs(graph)


def forget_dropped(sequential: Model) -> None:
    """Ends the roles in a Sequential's last Functional, if it has been replaced.

    A layer that stops being an output layer gets its policy back.
    """
    last = record_of(sequential).inside
    functional = None if last is None else last()
    if functional is None or functional is keras_hooks.functional_of(sequential):
        return
    note(sequential, inside=None)
    with _lock:
        note(functional, graph=None)
        for layer in functional.operations:
            graph = graph_of(layer)
            if graph is not None:
                graph.output_of.pop(functional, None)
            if managed_by(layer) is not None:
                places = places_of(layer)
                places.interior_of.pop(functional, None)
                places.output_of.pop(functional, None)
                _follow_places(layer)


def become_part(model: Model) -> None:
    """Makes a Functional or Sequential part of another model: its outputs become low."""
    with _lock:
        graph = graph_of(model)
        if graph is None or graph.nested:
            return
        graph.nested = True
        for layer in _output_makers(graph):
            _place(layer, graph.functional, makes_output=False)
        _settle_outputs(graph)


def wants_float32(layer: Layer) -> bool:
    """Whether a layer's output should be float32 if it is a model's output.

    True for managed layers, and for models with an output made by one. False if the user gave
    the dtype, also by setting `layer.dtype_policy` later.
    """
    graph = graph_of(layer)
    if graph is not None:
        return any(map(wants_float32, _output_makers(graph)))
    assignment = assignment_of(layer)
    if assignment is None or assignment.policy is None or not assignment.policy.float32_outputs:
        return False
    return float_policy(layer) == assignment.policy_name


def dissolve(functional: Functional) -> None:
    """Removes a Functional from the registry, and the casts appended to it.

    Its layers keep their dtypes.
    """
    with _lock:
        graph = record_of(functional).graph
        if graph is not None:
            if graph.casts:
                keras_hooks.set_outputs(functional, _uncast_outputs(graph))
            note(functional, graph=None)


def models_below_become_parts(layer: Layer) -> None:
    """Makes models in a layer, as in TimeDistributed(model), its parts before its first call.

    A subclassed model may train the models that it holds, so they are not made its parts.
    """
    if graph_of(layer) is None:
        for sub in keras_hooks.sublayers(layer):
            if not isinstance(layer, keras.Model):
                become_part(sub)
            models_below_become_parts(sub)


def is_subclassed_model(layer: Layer) -> bool:
    """Whether a layer is a model whose class has code that calls its layers."""
    return isinstance(layer, keras.Model) and not is_graph(layer)


def is_graph(layer: Layer) -> bool:
    """Whether a layer is a Functional or Sequential: of these the layers inside compute."""
    return isinstance(layer, keras.Sequential | keras_hooks.functional_class())


def float32_made_of_low(model: Model) -> list[bool]:
    """Returns for each output of a Functional or Sequential if its policy made it float32."""
    graph = graph_of(model)
    if graph is None or graph.nested:
        return []
    outputs = zip(keras_hooks.outputs_of(graph.functional), _uncast_outputs(graph), strict=True)
    return [
        output.dtype == "float32" and any(map(wants_float32, output_makers([before])))
        for output, before in outputs
    ]


def _place(layer: Layer, functional: Functional, *, makes_output: bool) -> None:
    """Makes a layer or model an output layer of a Functional, or an interior one."""
    graph = graph_of(layer)
    if graph is not None:
        if makes_output:
            graph.output_of[functional] = None
        else:
            become_part(layer)
    elif managed_by(layer) is not None:
        places = places_of(layer)
        if makes_output:
            places.output_of[functional] = None
        else:
            places.output_of.pop(functional, None)
            places.interior_of[functional] = None
        _follow_places(layer)


def _follow_places(layer: Layer) -> None:
    """Gives a managed layer the role that its places demand, and the dtype of it.

    A layer quantized to int8 meanwhile stays float32 if its policy is float16.
    """
    places, assignment = places_of(layer), assignment_of(layer)
    if assignment is None or assignment.policy is None:
        return
    if float_policy(layer) != assignment.policy_name:
        return  # a user has set its dtype since
    usual = assigned(type(layer), assignment.policy, assignment.by, fused=True)
    role = role_in_models(
        usual.role,
        makes_outputs=bool(places.output_of),
        is_interior=bool(places.interior_of),
        float32_outputs=bool(assignment.policy.float32_outputs),
    )
    if (role == "output") == bool(places.raised):
        if assignment.refusal:  # it makes no output any more
            note(layer, assignment=dataclasses.replace(assignment, refusal=""))
        return
    if role == "output":
        refusal = why_not_raised(layer) or _raise(layer, assignment)
        now = dataclasses.replace(assignment_of(layer) or assignment, refusal=refusal)
        note(layer, assignment=now)
    else:
        _lower(layer, usual)
        _retype(layer)
    _settle_models(places)


def why_not_raised(layer: Layer) -> str:
    """Why float32 would change more of a layer than its arithmetic; "" if it would not.

    A user's layer with sublayers may hold a whole network, like a model.
    """
    if isinstance(layer, keras.Model):
        return "it is a model"
    if policy_with(layer, "float32") is None:
        return "it has no float32 counterpart"
    inner = keras_hooks.sublayers(layer)
    if inner and not is_built_in(layer):
        return "it may hold a network"
    return next(filter(None, map(why_not_raised, inner)), "")


def _raise(layer: Layer, assignment: Assignment) -> str:
    """Sets float32 on a layer and its sublayers; their variables are float32 already.

    A user's code may need the low dtype. Then nothing changes, and the reason is returned.
    """
    places = places_of(layer)
    places.raised = list(_carrying(layer, assignment.policy_name))
    for part in places.raised:
        give_policy(part, "float32")
    raised = dataclasses.replace(assignment, policy_name="float32", role="output")
    note(layer, assignment=raised)
    try:
        specs = _specs(layer)
    except FAILURES as error:
        _lower(layer, assignment)
        # What fails in the low dtype too is an error of its own, and raised here.
        _specs(layer)
        # Keras introduces errors of users' code by a line of its own.
        lines = filter(None, map(str.strip, str(error).splitlines()))
        message = next((line for line in lines if not line.endswith(":")), "")
        return f"its code fails in float32 ({type(error).__name__}: {message})"
    _take_over(specs, layer)
    return ""


def _lower(layer: Layer, usual: Assignment) -> None:
    """Gives a raised layer and its sublayers the policy back that they had before."""
    places, raised = places_of(layer), assignment_of(layer) or usual
    for part in places.raised:
        give_policy(part, usual.policy_name)
    places.raised = []
    lowered = dataclasses.replace(raised, policy_name=usual.policy_name, role=usual.role)
    note(layer, assignment=lowered)


def _carrying(layer: Layer, policy_name: str) -> Iterator[Layer]:
    """Yields the layer and its sublayers that have the policy."""
    if float_policy(layer) == policy_name:
        yield layer
    for sub in keras_hooks.sublayers(layer):
        yield from _carrying(sub, policy_name)


def output_makers(tensors: list[Tensor]) -> list[Layer]:
    """Returns the layers that make symbolic float tensors, looking through ops except Casts.

    The user chose the dtype of a Cast.
    """
    makers: dict[int, Layer] = {}
    pending, seen = list(tensors), set()
    while pending:
        tensor = pending.pop(0)
        if id(tensor) in seen or tensor.dtype not in FLOAT_DTYPES:
            continue
        seen.add(id(tensor))
        operation, node = keras_hooks.producer(tensor)
        if isinstance(operation, keras.Layer):
            makers[id(operation)] = operation
        elif operation is not None and type(operation).__name__ != "Cast":
            pending.extend(node.input_tensors)
    return list(makers.values())


def _output_makers(graph: ModelGraph) -> list[Layer]:
    return output_makers(_uncast_outputs(graph))


def _uncast_outputs(graph: ModelGraph) -> list[Tensor]:
    """Returns a model's outputs without the appended casts."""
    outputs = keras_hooks.outputs_of(graph.functional)
    for i in graph.casts:
        outputs[i] = keras_hooks.producer(outputs[i])[1].input_tensors[0]
    return outputs


def _settle_outputs(graph: ModelGraph) -> None:
    """Gives a model a cast at every low output that should be float32, and at no other."""
    before, outputs = keras_hooks.outputs_of(graph.functional), _uncast_outputs(graph)
    casts = {id(outputs[i]): before[i] for i in graph.casts}
    graph.casts = {
        i
        for i, tensor in enumerate(outputs)
        if not graph.nested
        and tensor.dtype in LOW_PRECISION
        and any(map(wants_float32, output_makers([tensor])))
    }
    for i in sorted(graph.casts):
        tensor = outputs[i]
        if id(tensor) not in casts:
            casts[id(tensor)] = _cast(tensor)
        outputs[i] = casts[id(tensor)]
    if any(x is not y for x, y in zip(before, outputs, strict=True)):
        keras_hooks.set_outputs(graph.functional, outputs)
        graph.inner = _inner_operations(graph)
    _update_outer(graph)


def _inner_operations(graph: ModelGraph) -> set[int]:
    """The `id`s of producers of outputs that are cast and that other layers or ops consume."""
    casts = set(map(id, appended_casts(graph.functional)))
    ops = [op for op in graph.functional.operations if id(op) not in casts]
    nodes = [node for op in ops for node in keras_hooks.inbound_nodes(op)]
    consumed = {id(tensor) for node in nodes for tensor in node.input_tensors}
    outputs = _uncast_outputs(graph)
    inner = [outputs[i] for i in graph.casts if id(outputs[i]) in consumed]
    return {id(keras_hooks.producer(tensor)[0]) for tensor in inner}


def _cast(tensor: Tensor) -> Tensor:
    # Not keras.ops.cast: an op drops the mask, and the loss would include padding. Not
    # Identity: its output spec has the input's dtype.
    layer = keras.layers.Activation("linear", dtype="float32", autocast=False)
    # Layer.__call__ would cast too, but drop a softmax's logits, from which the loss is made.
    wrap_method(layer, "call", lambda original, x: original(in_float32(x)))
    # Unique, as the name that Keras made is, and in a summary it shows what it belongs to.
    layer.name = f"{keras_hooks.producer(tensor)[0].name}_{layer.name}"
    return layer(tensor)


def _retype(layer: Layer) -> None:
    """Corrects the dtypes of a layer's symbolic outputs, in every model it is part of."""
    _take_over(_specs(layer), layer)


def _specs(layer: Layer) -> list[tuple[list[Tensor], KerasNode]]:
    """The specs of a layer's outputs as they would be now, with the calls that they are of."""
    return [(specs_now(node), node) for node in keras_hooks.inbound_nodes(layer)]


def _take_over(specs: list[tuple[list[Tensor], KerasNode]], layer: Layer) -> None:
    for outputs, node in specs:
        copy_dtypes(outputs, node.outputs)
    retype_followers(layer)


def retype_followers(operation: Operation) -> None:
    """Corrects the symbolic outputs of the ops after a layer, up to the next layers.

    Most layers cast their inputs, so their outputs do not change.
    """
    pending = [operation]
    while pending:
        for node in keras_hooks.outbound_nodes(pending.pop(0)):
            follower = node.operation
            if isinstance(follower, keras.Layer) and not follows_input(follower):
                continue
            if respecify(node):
                pending.append(follower)
                if managed_by(follower) is not None:
                    _settle_models(places_of(follower))


def follows_input(layer: Layer) -> bool:
    """Whether a layer is a managed BatchNormalization that its policy keeps in float32.

    While it is not raised, its output has the dtype of its input.
    """
    policy = managed_by(layer)
    return policy is not None and policy.keeps_float32(type(layer))


def _settle_models(places: Places | ModelGraph) -> None:
    """Settles the outputs of the models in which a layer or model makes one."""
    for graph in map(graph_of, list(places.output_of)):
        if graph is not None:
            _settle_outputs(graph)


def _update_outer(graph: ModelGraph) -> None:
    """Propagates changed output dtypes of a model to the models it is called in."""
    owner, outputs = graph.owner(), keras_hooks.outputs_of(graph.functional)
    model = graph.functional if owner is None else owner
    # A list, as any() of a generator would stop at the first: every call has to be corrected.
    changed = [copy_dtypes(outputs, node.outputs) for node in keras_hooks.inbound_nodes(model)]
    if any(changed):
        retype_followers(model)
        _settle_models(graph)


def appended_casts(model: Model) -> list[Layer]:
    """Returns the casts appended to a Functional or Sequential."""
    graph = graph_of(model)
    if graph is None:
        return []
    outputs = keras_hooks.outputs_of(graph.functional)
    # A cast may make several outputs.
    return list(dict.fromkeys(keras_hooks.producer(outputs[i])[0] for i in sorted(graph.casts)))
