"""Every name in inline code of a page exists: attributes, keywords, variables, tests and files.

Names are looked up in this repository and in the public APIs of TensorFlow, Keras and NumPy. Names
of the systems that a page compares with are listed in `THEIRS`, by page, and other words in
`WORDS`.
"""

import ast
import asyncio
import builtins
import copy
import functools
import inspect
import keyword
import re
import sys
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
if not DOCS.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    ROOT / "tfamp" / "graph" / "README.md",
    # All but the page of symbols that tfamp looks up, which has a test of its own.
    *sorted(set(DOCS.rglob("*.md")) - {DOCS / "missing_symbols.md"}),
]
CODE = ("noxfile.py", "tfamp", "tests", "examples", "benchmarks")
# Where a page's paths may begin.
PLACES = [ROOT, ROOT / "tests", ROOT / "tfamp", ROOT / "tfamp" / "graph"]
LIBRARIES = {
    "asyncio": asyncio, "copy": copy, "keras": keras, "np": np, "tf": tf, "tfamp": tfamp,
}  # fmt: skip

# Names of other systems, by the page that compares with them.
THEIRS = {
    "migrating/from_apex.md": """
        amp cast_model_outputs disable_casts keep_batchnorm_fp32 loss_id master_params
        max_loss_scale num_losses opt_level register_float_function
    """,
    "migrating/from_deepspeed.md": """
        communication_data_type consecutive_hysteresis deepspeed engine fp16 gradient_clipping
        initial_scale_power
    """,
    "migrating/from_mindspore.md": """
        DynamicLossScaleManager FixedLossScaleManager LossMonitor Momentum TrainOneStepCell amp
        amp_level black_list conv1 custom_mixed_precision
        drop_overflow_update keep_batchnorm_fp32 net_loss net_opt net_with_train network to_float
    """,
    "migrating/from_mmdetection.md": """
        Fp16OptimizerHook GradientCumulativeFp16OptimizerHook auto_fp16 bucket_size_mb coalesce
        copy_grads_to_fp32 copy_params_to_fp16 force_fp32 fp16 optimizer_config patch_norm_fp32
        register_training_hooks runner wrap_fp16_model zero_grad
    """,
    "migrating/from_paddle.md": """
        AmpScaler amp amp_guard auto_cast clear_grad custom_black_list custom_white_list
        decr_every_n_nan_or_inf decr_ratio dygraph enable excluded_layers fluid get_decr_ratio
        get_incr_every_n_steps get_incr_ratio get_init_loss_scaling incr_every_n_steps incr_ratio
        init_loss_scaling is_enable layer_norm master_weight paddle save_dtype
        set_init_loss_scaling unscale_ use_dynamic_loss_scaling use_promote
    """,
    "migrating/from_pytorch.md": """
        DistributedDataParallel amp cache_enabled clear_autocast_cache custom_bwd custom_fwd no_sync
        unscale_ zero_grad
    """,
    "migrating/from_tf_keras.md": "skip_gradients_aggregation",
    "equivalents.md": """
        AdamWeightDecay AmpScaler DistributedDataParallel DynamicLossScaleManager
        FixedLossScaleManager Fp16OptimizerHook LossMonitor Momentum TrainOneStepCell
        allreduce_grads amp amp_guard amp_level auto_cast cache_enabled conv1 copy_grads_to_fp32
        copy_params_to_fp16 custom_black_list custom_white_list device_type drop_overflow_update
        excluded_layers fp16 master_weight net_with_train network no_sync optimizer_config
        to_float unscale_ wrap_fp16_model
    """,
    "guides/levels.md": "to_float",
    "guides/loss_scaling.md": """
        DynamicLossScaleManager FixedLossScaleManager consecutive_hysteresis drop_overflow_update
        no_sync
    """,
    "guides/master_weights.md": "Fp16OptimizerHook",
}
# Programs with their arguments, examples of files and of nodes, and words of Keras's messages.
WORDS = {
    *("activate", "bash", "deploy", "docs", "install", "latest", "mike", "mkdocs", "mypy", "nox"),
    *("pip", "pre", "commit", "pytest", "ruff", "serve", "source", "actionlint", "py", "zizmor"),
    *("git", "origin", "push", "tag", "upcoming", "processor", "uname"),
    *("pyright", "--config-file", "--project", "--pythonpath"),
    *("disallow_subclassing_any", "ignore_missing_imports", "fork"),
    *("--cov", "--offline", "--push", "--strict", "--update-aliases", "-e", "-n", "-p", "-s"),
    *("FILE.npz", "conv2d/kernel", "gate/", "gate/cond/MatMul", "gpu.json", "numerics.jsonl"),
    *("precision.toml", "SomeLayer", "iterator", "loaded", "Cannot", "Tparams"),
    *("int8_from_float32", "int8_from_mixed_bfloat16"),
}

_FENCE = re.compile(r"^[ ]*```.*?^[ ]*```[ ]*$", re.M | re.S)
_TEST = re.compile(r"([\w/.]+)::(\w+)")
_SPAN = re.compile(r"(`+)(.+?)\1", re.S)
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_PATH = re.compile(r"[\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|txt|json|svg)\b")
_OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*")
_QUOTED = re.compile(r"\"([\w*.-]+)\"")


def spans(page):
    """Returns the pieces of inline code of a page, each once."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = (re.sub(r"\s+", " ", match[2]).strip() for match in _SPAN.finditer(text))
    return list(dict.fromkeys(span.replace("\\|", "|") for span in found))


# ---- What exists ---------------------------------------------------------------------------------


@functools.cache
def trees():
    """Returns the syntax trees of the repository's files but this one, by path."""
    places = [ROOT / name for name in CODE]
    files = [path for place in places for path in (place, *sorted(place.rglob("*.py")))]
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in files
        if path.is_file() and path != Path(__file__).resolve()
    }


def defined_in(tree):
    """Yields the names that a file defines: functions, classes, arguments, attributes, fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.ClassDef(name=name, body=body):
                yield name
                yield from assigned_in(body)
            case ast.Module(body=body):
                yield from assigned_in(body)


def assigned_in(body):
    """Yields the names that statements assign."""
    for statement in body:
        for target in getattr(statement, "targets", [getattr(statement, "target", statement)]):
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def strings_in(tree):
    """Yields the words among a file's strings: keys, options, values of settings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A table of ops or of arguments; else what a sentence quotes.
            names = node.value if is_table(node.value) else " ".join(_QUOTED.findall(node.value))
            yield from re.findall(r"[\w.-]+", names)


def is_table(text):
    """Whether a string consists of names, and not of a sentence."""
    return re.fullmatch(r"[\w\s*-]+", text) and not re.search(r"\b(?:the|a|is|of|in)\b", text)


def is_program(tree):
    """Whether a file parses options of its own."""
    imports = (node for node in tree.body if isinstance(node, ast.Import))
    return any(each.name == "argparse" for node in imports for each in node.names)


@functools.cache
def own_names():
    """Returns the names that this repository defines, and the names of its files and folders."""
    names = {ROOT.name}
    for path, tree in trees().items():
        names.update(defined_in(tree), path.relative_to(ROOT).parts, [path.stem])
        in_tests = "tests" in path.relative_to(ROOT).parts
        if not in_tests or path.name == "conftest.py" or is_program(tree):
            names.update(strings_in(tree))
    return frozenset(names)


@functools.cache
def library_names():
    """Returns the names of the public APIs of other libraries, with arguments and methods."""
    names, pending, seen = set(), [tf, keras, np], {tf.compat, tf.keras}
    while pending:
        owner = pending.pop()
        if owner in seen:
            continue
        seen.add(owner)
        for name in (name for name in dir(owner) if not name.startswith("_")):
            names.add(name)
            value = inspect.getattr_static(owner, name, None)
            if isinstance(value, ModuleType):
                is_public = value.__name__.startswith(("tensorflow", "keras"))
                pending += [value] if is_public else []
            elif isinstance(value, type) and isinstance(owner, ModuleType):
                pending.append(value)
            if callable(value) and owner is not tf.raw_ops:
                names.update(arguments_of(value))
    return frozenset(names)


def arguments_of(function):
    """Returns the arguments of a function by name; none if Python cannot tell them."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def public_functions():
    """Returns the public functions and classes of tfamp by the names that pages call them."""
    owners = (tfamp, tfamp.diagnostics, tfamp.graph)
    return {name: getattr(owner, name) for owner in owners for name in owner.__all__}


# ---- What is wrong -------------------------------------------------------------------------------


def faults(span, known):
    """Yields what is wrong with a piece of inline code, for a page that explains some names."""
    rest = span.replace("…", "...").replace(".venv/bin/", "")
    for file, name in _TEST.findall(rest):
        if not any(name in defined_in(tree) for path, tree in trees().items() if fits(path, file)):
            yield f"no test {file}::{name}"
    rest = _TEST.sub(" ", rest)
    for pattern, exists, kind in ((_PATH, is_path, "file"), (_OPTION, is_known, "option")):
        for name in pattern.findall(rest):
            rest = rest.replace(name, " ", 1)
            if not (exists(name) or name in known or name in WORDS):
                yield f"no {kind} {name}"
    for word in _WORD.findall(rest):
        yield from unknown_parts(word, known)
    yield from wrong_keywords(span)


def fits(path, name):
    """Whether a page may mean a file by a name, such as test_x, test_x.py or folder/test_x.py."""
    return f"/{path.with_suffix('')}".endswith(f"/{name.removesuffix('.py')}")


def is_path(name):
    """Whether a path exists, from one of the places where pages begin them; a file anywhere."""
    is_file = "/" not in name and any(path.name == name for path in trees())
    return is_file or any((place / name.rstrip("/")).exists() for place in PLACES)


def unknown_parts(word, known):
    """Yields the parts of a dotted name that do not exist."""
    root, *rest = word.split(".")
    if root in LIBRARIES:
        owner = LIBRARIES[root]
        for name in rest:
            owner = getattr(owner, name, None)
            if owner is None:
                yield f"{word} does not exist"
                return
        return
    for name in (root, *rest):
        if not (len(name) == 1 or name in known or name in WORDS or is_known(name)):
            yield f"unknown name {name}"


def is_known(name):
    """Whether Python, this repository, TensorFlow or Keras has a name."""
    is_pythons = keyword.iskeyword(name) or hasattr(builtins, name)
    is_pythons = is_pythons or name in sys.stdlib_module_names
    return is_pythons or name in own_names() or name in library_names()


def wrong_keywords(span):
    """Yields the keywords of calls of tfamp that the function called does not take."""
    code = re.sub(r"=(?=[,)])", "=...", span.replace("…", "...")).lstrip("@")
    code = re.sub(r"^with (.*?):?$", r"\1", code)
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        is_ours = owner in ("", "tfamp", "tfamp.diagnostics", "tfamp.graph")
        takes = arguments_of(public_functions().get(name)) if is_ours else {}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        for given in call.keywords:
            if takes and not takes_any and given.arg is not None and given.arg not in takes:
                yield f"{name} takes no {given.arg}="


def explained_in(page):
    """Returns the names of a page's blocks of code, which run, and the other systems' names."""
    blocks = " ".join(_FENCE.findall(page.read_text(encoding="utf-8")))
    theirs = THEIRS.get(str(page.relative_to(ROOT)).removeprefix("docs/"), "")
    return {*re.findall(r"\w+", blocks), *theirs.split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_inline_code_exists(page):
    known = explained_in(page)
    wrong = [f"`{span}`: {fault}" for span in spans(page) for fault in faults(span, known)]
    assert not wrong


@pytest.mark.parametrize(
    ("span", "fault"),
    [
        ("TestBehaviourOfNobody", "unknown name TestBehaviourOfNobody"),
        ("tests/test_nothing.py", "no file tests/test_nothing.py"),
        ("test_words::test_nothing", "no test test_words::test_nothing"),
        ("tf.nothing", "tf.nothing does not exist"),
        ("tfamp.prepare(model, levels=2)", "prepare takes no levels="),
        ("optimizer.skipped_stepz", "unknown name skipped_stepz"),
        ("--on-gpu-only", "no option --on-gpu-only"),
    ],
)
def test_a_name_that_does_not_exist_is_found(span, fault):
    assert list(faults(span, set())) == [fault]


def test_the_names_of_other_systems_are_on_their_pages():
    for name, words in THEIRS.items():
        text = " ".join(spans(DOCS / name))
        assert not [word for word in words.split() if not re.search(rf"\b{word}\b", text)]
