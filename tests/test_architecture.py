"""The rules the code is held to by reading it: packages, private symbols, sizes, a light import."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

# The sources under test: the installed wheel where there is one, else the checkout.
PACKAGE = Path(importlib.util.find_spec("tfamp").submodule_search_locations[0])

# Package, or module at the top -> the packages it may import. A new file needs no entry.
EDGES = {
    "core": "",
    "reports": "core",
    "planning": "core reports",
    "interop": "core",
    "machine": "core interop",
    "policy": "core machine",
    "graph": "core planning interop machine",
    "kernel_guard": "core planning interop machine",
    "state_guard": "core interop",
    "torch_style": ("core planning interop machine kernel_guard state_guard policy graph training"),
    "layers": "core planning interop machine kernel_guard state_guard policy training",
    "training": "core interop",
    "optimizer": "core interop training",
    "gradient_accumulator": "core interop training optimizer",
    "rewriting": (
        "core planning interop machine kernel_guard policy graph torch_style layers reports "
        "training"
    ),
    "levels": (
        "core reports planning interop machine policy torch_style layers training optimizer "
        "rewriting"
    ),
    "diagnostics": (
        "core reports planning interop machine policy graph torch_style layers training optimizer "
        "gradient_accumulator rewriting"
    ),
    "mixed_precision": "policy layers optimizer",
    "cli": "core machine rewriting diagnostics",
    "__main__": "cli",
}
# What decides: values in, values out, free of TensorFlow and Keras.
PURE = ("core", "planning", "reports")
FRAMEWORKS = {"tensorflow", "keras"}
PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow.__internal__", "keras.src")
# The only package that may use private symbols.
FOREIGN = "interop"
# These hand on public names; the other packages' `__init__` is a docstring.
FACES = ("", "graph", "diagnostics")
MAX_BODY_LINES = 60


def _module_name(path: Path) -> str:
    """Name below tfamp, with dots: "policy", "graph.index", "graph"; the package itself is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [name for name in SOURCES if name]


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _runtime_nodes(node: ast.AST):
    """Every node below, leaving out what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _runtime_nodes(other)
            continue
        yield child
        yield from _runtime_nodes(child)


@cache
def _imports(module: str) -> frozenset[str]:
    """Full names of what a module imports, in functions too: {"tfamp.core.errors", "keras"}."""
    found = set()
    for node in _runtime_nodes(_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            # "from tfamp import policy" may name a module or something in one.
            found |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return frozenset(found)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = SOURCES[module].name == "__init__.py"
    here = ["tfamp", *(part for part in module.split(".") if part)]
    here = here[: len(here) - node.level + is_package]
    return ".".join([*here, *([node.module] if node.module else [])])


def _tfamp_imports(module: str) -> set[str]:
    own = {name.removeprefix("tfamp.") for name in _imports(module) if name.startswith("tfamp.")}
    return {name for name in own if name in SOURCES} - {module}


def _roots(module: str) -> set[str]:
    return {name.partition(".")[0] for name in _imports(module)}


def test_packages_import_only_what_the_table_allows():
    assert {_package(module) for module in MODULES} == set(EDGES)
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(_tfamp_imports(module))
        if _package(other) not in (_package(module), *EDGES[_package(module)].split())
    ]
    assert not wrong


def test_every_package_has_a_folder_of_tests():
    packages = {package for package in EDGES if (PACKAGE / package).is_dir() and package}
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}
    assert packages <= folders


def test_there_are_no_import_cycles():
    for graph in (
        {package: set(allowed.split()) for package, allowed in EDGES.items()},
        {module: _tfamp_imports(module) for module in MODULES},
    ):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_what_decides_imports_no_framework_and_graph_no_keras():
    pure = [module for module in MODULES if _package(module) in PURE]
    assert not [module for module in pure if _roots(module) & FRAMEWORKS]
    graph = [module for module in MODULES if _package(module) == "graph"]
    assert not [module for module in graph if "keras" in _roots(module)]
    _run_python(
        "import sys, importlib\n"
        "sys.modules.update(dict.fromkeys(['tensorflow', 'keras', 'numpy']))\n"
        f"for name in {pure}: importlib.import_module('tfamp.' + name)\n"
        "import tfamp\n"
        "tfamp.Policy, tfamp.FixedLossScale, tfamp.DynamicLossScale, tfamp.TfampError\n"
    )


def test_a_package_says_what_it_holds_loads_nothing_and_hides_no_public_name():
    packages = [name for name in SOURCES if SOURCES[name].name == "__init__.py"]
    public = runpy.run_path(str(SOURCES[""]))["__all__"]
    for package in packages:
        assert ast.get_docstring(_tree(package)), package
        if package not in FACES:
            assert len(_tree(package).body) == 1, f"{package}: a docstring and nothing else"
            # Importing tfamp.x sets the attribute x of tfamp.
            assert package not in public


def test_the_picture_of_the_packages_is_that_of_the_table():
    script = Path(__file__).resolve().parents[1] / "docs" / "draw_layers.py"
    if not script.is_file():
        pytest.skip("the documentation is not beside the tests")
    drawn = runpy.run_path(str(script))
    expected = drawn["picture"](EDGES, PURE)
    assert drawn["PICTURE"].read_text("utf-8") == expected, "run: python docs/draw_layers.py"


def test_private_symbols_stay_in_one_package():
    wrong = {}
    for module in MODULES:
        if _package(module) == FOREIGN:
            continue
        tree = _tree(module)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        used = set(_imports(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(re.sub(r"^tf\.", "tensorflow.", ast.unparse(node)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # importlib.import_module("keras.src.layers") is an import too.
                used |= {node.value} if id(node) not in docstrings else set()
        private = sorted(n for n in used if any(n == p or n.startswith(f"{p}.") for p in PRIVATE))
        wrong |= {module: private} if private else {}
    assert not wrong, "move them to tfamp/interop"


def test_private_attributes_of_others_stay_in_one_package():
    wrong = [
        f"{SOURCES[module].relative_to(PACKAGE.parent)}:{line}: {name}"
        for module in MODULES
        if _package(module) != FOREIGN
        for name, line in sorted(_private_names_used(module).items())
        if name not in _own_private_names(module)
    ]
    assert not wrong, (
        f"{', '.join(wrong)}: a private attribute of an object of TensorFlow or Keras, or of "
        "another module of tfamp. Of theirs: add a function that reads it to "
        "tfamp/interop/tf_private.py or keras_hooks.py, with a test in tests/interop, and call "
        "that. Of ours: give it a public name in the module that sets it."
    )


def test_one_function_reads_the_layers_that_a_policy_keeps_in_float32():
    readers = {
        f"{SOURCES[module].relative_to(PACKAGE.parent)}:{node.lineno}"
        for module in MODULES
        if module != "policy"
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute) and node.attr == "float32_layers"
    }
    assert not readers, f"{', '.join(sorted(readers))}: ask Policy.keeps_float32(layer_class)"


# Of the standard library, whose documentation has them.
_DOCUMENTED = {"_replace", "_asdict", "_getframe", "_fields", "_make", "_field_defaults"}


# Names in the format of graphs and SavedModels, not of Python objects.
_IN_FILES = {
    *("_class", "_gradient_op_type", "_noinline", "_num_original_outputs", "_output_shapes"),
    *("_tpu_replicate", "_create_resource", "_destroy_resource", "_initialize"),
}
_OF_TEXTS = {"endswith", "partition", "removeprefix", "removesuffix", "startswith"}


def _private_names_used(module: str) -> dict[str, int]:
    """Private attributes of objects other than `self`, and strings, with their first lines."""
    tree = _tree(module)
    used: list[tuple[str, int]] = []
    texts = set()  # Of docstrings, and parts of texts.
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.JoinedStr):
            texts |= {id(child) for child in ast.iter_child_nodes(node)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _OF_TEXTS:
            texts |= set(map(id, node.args))
        elif isinstance(node, ast.Attribute) and not _is_of_self(node):
            used.append((node.attr, node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used += [(node.value, node.lineno)] if id(node) not in texts else []
    private = [(name, line) for name, line in used if re.fullmatch(r"_[a-z]\w*", name)]
    first_last = sorted(private, key=lambda each: -each[1])  # The first line of a name wins.
    return {name: line for name, line in first_last if name not in _DOCUMENTED | _IN_FILES}


def _own_private_names(module: str) -> set[str]:
    """Private names that classes of a module define, and attributes that it names itself."""
    own = set()
    for node in ast.walk(_tree(module)):
        if _is_set_on_self(node):
            own.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
            owner, name = node.args[:2]
            own |= {name.value} if isinstance(name, ast.Constant) and _is_self(owner) else set()
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                targets = getattr(member, "targets", [getattr(member, "target", None)])
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
                own |= {member.name} if isinstance(member, ast.FunctionDef) else set()
    # What tfamp sets on the objects of others begins with its name.
    return own | {name for name in _private_names_used(module) if name.startswith("_tfamp_")}


def _is_of_self(node: ast.Attribute) -> bool:
    return _is_self(node.value)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_set_on_self(node: ast.AST) -> bool:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and _is_of_self(node)


def test_functions_are_short():
    long = {
        f"{module}.{node.name}": lines
        for module in SOURCES
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := _body_lines(node)) > MAX_BODY_LINES
    }
    assert not long


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def _run_python(code: str, warnings: str = "error") -> None:
    result = subprocess.run(
        [sys.executable, "-W", warnings, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_importing_tfamp_loads_no_framework_and_changes_nothing():
    _run_python(
        "import sys, os, logging\n"
        "environment, handlers = dict(os.environ), list(logging.getLogger().handlers)\n"
        "import tfamp\n"
        "dir(tfamp)\n"
        "heavy = {'tensorflow', 'keras', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, f'import tfamp loaded {heavy}'\n"
        "assert dict(os.environ) == environment\n"
        "assert list(logging.getLogger().handlers) == handlers\n"
        "assert not logging.getLogger('tfamp').handlers\n"
    )


# What an import costs, without a clock.
_BESIDE_TENSORFLOW = """
import sys, keras, tensorflow
keras.layers, tensorflow.function
before = set(sys.modules)
import tfamp
assert set(sys.modules) - before == {"tfamp"}
for name in tfamp.__all__: getattr(tfamp, name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
others = new - set(sys.stdlib_module_names) - {"tfamp", "platformdirs"}
assert not others, f"the names of tfamp loaded {others}"

from tfamp.diagnostics.doctor import read_environment
from tfamp.interop import tf_private
from tfamp.machine import hardware

tfamp.set_global_policy("auto")
hardware.automatic_policy(hardware.detect())
read_environment(hardware.detect())
hardware.machine_facts()
tfamp.OpLists.default("float16")
assert not tf_private.runtime_has_started()
tensorflow.config.set_visible_devices([], "GPU")  # which is an error from then on
tensorflow.ones(())
assert tf_private.runtime_has_started()
"""


@pytest.mark.slow
def test_beside_tensorflow_one_module_is_loaded_its_names_load_only_tfamps_and_start_no_device():
    _run_python(_BESIDE_TENSORFLOW, warnings="ignore")
