"""The rules the code is held to by reading it: layers, forbidden imports, sizes, a light import."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

# The sources under test: the installed wheel where there is one, else the checkout.
PACKAGE = Path(importlib.util.find_spec("tfamp").submodule_search_locations[0])

# A module imports only from its own row and the rows before it. A new file gets a row here.
LAYERS = (
    (
        "errors",
        "dtypes",
        "options",
        "_library_code",
        "_tf_private",
        "machine.file_replacing",
        "autocasting.interception",
        "graph.autocast_lists",
        "graph.control_flow",
        "graph.grappler_lists",
        "graph.kernel_limits",
        "graph.name_search",
        "machine.directory_exchange",
        "converting.references",
        "graph.tensor_names",
    ),
    (
        "deprecation",
        "_tf_functions",
        "_tf_intercept",
        "levels.config_values",
        "levels.precision_config",
        "machine.hardware",
        "policy",
        "loss_scale",
        "graph.plan_page",
        "graph.plan_text",
        "graph.reason",
        "graph.structures",
        "graph.op_lists",
        "graph.maxflow",
        "machine.profile",
        "graph.flops",
    ),
    (
        "graph.regions",
        "graph.coloring",
        "graph.cost",
        "graph.placement",
        "graph.linking",
        "graph.plan",
        "graph.measuring.reductions",
        "graph.measuring.ranges",
    ),
    ("graph.function_names", "graph.op_signatures"),
    (
        "graph.request",
        "graph.index",
        "graph.transforms.inline",
        "graph.transforms.fold",
        "graph.transforms.loop_constants",
        "graph.transforms.loop_reads",
        "graph.transforms.bias_gradients",
        "graph.apply",
        "graph.verify",
        "graph.transforms.pruning",
        "graph.measuring.feeding",
        "graph.measuring.running",
        "graph.transforms.retype",
        "graph.measuring.instrument",
        "graph.measuring.tensor_stats",
        "graph.measuring.first_nonfinite",
        "graph.measuring.calibration_data",
    ),
    (
        "graph.rewrite",
        "graph.measuring.calibration",
        "graph.measuring.value_probes",
        "graph",
    ),
    (
        "autocasting.finished_graphs",
        "autocasting.state",
        "autocasting.trace_casts",
        "machine.profile_cache",
        "machine.profile_measure",
        "machine.profile_works",
        "keras_backend",
        "keras_hooks",
        "keras_intercept",
        "layers.methods",
        "layers.symbolic_dtypes",
        "tracing",
        "updates.apply",
        "updates.call_order",
        "updates.fused_update",
        "updates.gradients",
        "updates.replicas",
        "updates.scaling",
        "updates.weights",
    ),
    (
        "autocasting.rules",
        "machine.profile_choice",
        "layers.roles",
        "layers.output_dtypes",
        "layers.model_calls",
        "batch_norm",
        "layers.fused_norms",
    ),
    (
        "layers.policy_state",
        "optimizer",
        "rewriting.flat_call",
        "rewriting.custom_gradients",
        "rewriting.graft",
        "rewriting.weight_cache",
        "rewriting.graph_rewriter",
        "rewriting.traced_function",
        "rewriting.fused_tracing",
        "converting.files",
        "converting.graph",
        "converting.values",
        "converting.freeze",
        "converting.calibration",
    ),
    (
        "autocasting.context",
        "grad_scaler",
        "gradient_accumulator",
        "function",
        "saved_model",
        "diagnostics",
    ),
    ("mixed_precision",),
    (
        "levels.model_structure",
        "levels.layer_policies",
        "levels.model_state",
        "levels.model_copy",
        "levels.base_dtypes",
        "levels.meaning",
        "levels.step_rewriting",
        "levels.prepared_optimizer",
        "levels.compiled_model",
        "levels.application",
        "levels.effective_settings",
    ),
    ("levels.preparation", "levels.manual"),
    ("cli", "__main__"),
)
# Each module of these has a row of its own; the package itself is a docstring and nothing else.
PACKAGES = {
    "autocasting",
    "converting",
    "diagnostics.comparing",
    "diagnostics.estimating",
    "diagnostics.monitoring",
    "diagnostics.reporting",
    "diagnostics.searching",
    "graph.measuring",
    "graph.transforms",
    "layers",
    "levels",
    "machine",
    "rewriting",
    "updates",
}
FRAMEWORKS = {"tensorflow", "keras"}
FRAMEWORK_FREE = {
    "diagnostics.searching.fixes",
    "diagnostics.comparing.comparison",
    "diagnostics.estimating.gain_text",
    "diagnostics.comparing.heat_strip",
    "diagnostics.comparing.keep_search",
    "diagnostics.estimating.known_issues",
    "diagnostics.estimating.padding",
    "graph.reason",
    "diagnostics.monitoring.exponents",
    "diagnostics.reporting.figures",
    "diagnostics.reporting.histories",
    "diagnostics.monitoring.monitor_text",
    "diagnostics.reporting.plots",
    "diagnostics.reporting.report",
    "diagnostics.reporting.report_page",
    "errors",
    "machine.file_replacing",
    "deprecation",
    "dtypes",
    "options",
    "policy",
    "loss_scale",
    "machine.profile_cache",
    "graph.plan_page",
    "graph.plan_text",
    "graph.structures",
    "graph.autocast_lists",
    "graph.control_flow",
    "graph.grappler_lists",
    "graph.kernel_limits",
    "graph.name_search",
    "machine.directory_exchange",
    "converting.references",
    "graph.tensor_names",
    "graph.op_lists",
    "graph.maxflow",
    "machine.profile",
    "graph.flops",
    "graph.regions",
    "graph.coloring",
    "graph.cost",
    "graph.linking",
    "graph.placement",
    "graph.plan",
    "graph.measuring.reductions",
    "graph.measuring.ranges",
}
PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow.__internal__", "keras.src")
# _library_code only names such modules, to tell who asks for a cast.
PRIVATE_ALLOWED = {
    "_tf_private",
    "_tf_functions",
    "_tf_intercept",
    "_library_code",
    "keras_hooks",
    "keras_intercept",
}
MAX_BODY_LINES = 60
UNLIMITED_FUNCTIONS = {"build_parser"}


def _module_name(path: Path) -> str:
    """Name below tfamp, with dots: "policy", "graph.index", "graph"; the package itself is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [name for name in SOURCES if name]


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _runtime_nodes(node: ast.AST):
    """Every node below, leaving out what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from _runtime_nodes(other)
            continue
        yield child
        yield from _runtime_nodes(child)


def _imports(module: str) -> set[str]:
    """Full names of the modules a module imports, in functions too: {"tfamp.core.errors", "keras"}."""
    package = SOURCES[module].name == "__init__.py"
    found = set()
    for node in _runtime_nodes(_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, package, node)
            # "from tfamp import policy" may name a module or something in one.
            found |= {f"{base}.{alias.name}" for alias in node.names}
            found.add(base)
    return found


def _absolute(module: str, package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = ["tfamp", *([p for p in module.split(".") if p])]
    here = here[: len(here) - node.level + (1 if package else 0)]
    return ".".join([*here, *([node.module] if node.module else [])])


def _tfamp_imports(module: str) -> set[str]:
    own = {name.removeprefix("tfamp.") for name in _imports(module) if name.startswith("tfamp.")}
    return {name for name in own if name in SOURCES} - {module}


def _row(module: str) -> int:
    if module in PACKAGES:
        return 0
    # "graph.index" has a row of its own, "diagnostics.monitoring.monitor" has its package's.
    name = "diagnostics" if module.startswith("diagnostics.") else module
    for row, names in enumerate(LAYERS):
        if name in names:
            return row
    return pytest.fail(f"tfamp/{module.replace('.', '/')}.py is in no row of LAYERS; give it one")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_below(module):
    above = {name for name in _tfamp_imports(module) if _row(name) > _row(module)}
    assert not above, f"{module} (row {_row(module)}) imports {sorted(above)} from a higher row"


def test_every_package_is_known():
    packages = {name for name in MODULES if SOURCES[name].name == "__init__.py"}
    assert packages == PACKAGES | {"diagnostics", "graph"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_says_what_it_holds_loads_nothing_and_hides_no_public_name(package):
    tree = _tree(package)
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1, "a docstring and nothing else"
    # Importing tfamp.x sets the attribute x of tfamp.
    assert package not in runpy.run_path(str(SOURCES[""]))["__all__"]


def test_the_picture_of_the_layers_is_that_of_the_table():
    script = Path(__file__).resolve().parents[1] / "docs" / "draw_layers.py"
    if not script.is_file():
        pytest.skip("the documentation is not beside the tests")
    drawn = runpy.run_path(str(script))
    expected = drawn["picture"](LAYERS, FRAMEWORK_FREE)
    assert drawn["PICTURE"].read_text("utf-8") == expected, "run: python docs/draw_layers.py"


def test_no_import_cycles():
    graph = {module: _tfamp_imports(module) for module in MODULES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(FRAMEWORK_FREE & set(MODULES)))
def test_framework_free_modules_import_no_framework(module):
    roots = {name.partition(".")[0] for name in _imports(module)}
    assert not roots & FRAMEWORKS


@pytest.mark.parametrize("module", [m for m in MODULES if m.partition(".")[0] == "graph"])
def test_graph_never_imports_keras(module):
    assert "keras" not in {name.partition(".")[0] for name in _imports(module)}


@pytest.mark.parametrize("module", sorted(set(MODULES) - PRIVATE_ALLOWED))
def test_private_symbols_stay_in_their_files(module):
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
    assert not private, f"{module} uses {private}: move it to _tf_private.py or keras_hooks.py"


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("module", list(SOURCES))
def test_functions_are_short(module):
    functions = [
        node
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: n for f in functions if (n := _body_lines(f)) > MAX_BODY_LINES}
    assert not {name: n for name, n in long.items() if name not in UNLIMITED_FUNCTIONS}


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


def test_importing_tfamp_beside_tensorflow_loads_one_module_and_its_names_only_tfamps():
    # What an import costs, without a clock: `python -m benchmarks.import_time` has one.
    _run_python(
        "import sys, keras, tensorflow\n"
        "keras.layers, tensorflow.function\n"
        "before = set(sys.modules)\n"
        "import tfamp\n"
        "assert set(sys.modules) - before == {'tfamp'}\n"
        "for name in tfamp.__all__: getattr(tfamp, name)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "others = new - set(sys.stdlib_module_names) - {'tfamp', 'platformdirs'}\n"
        "assert not others, f'the names of tfamp loaded {others}'\n",
        warnings="ignore",
    )


@pytest.mark.parametrize("module", sorted(FRAMEWORK_FREE & set(MODULES)))
def test_framework_free_modules_import_where_no_framework_is_installed(module):
    _run_python(
        "import sys, importlib\n"
        "sys.modules.update(dict.fromkeys(['tensorflow', 'keras', 'numpy']))\n"
        f"importlib.import_module('tfamp.{module}')\n"
    )


def test_names_of_framework_free_modules_need_no_framework():
    _run_python(
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['tensorflow', 'keras', 'numpy']))\n"
        "import tfamp\n"
        "tfamp.Policy, tfamp.FixedLossScale, tfamp.DynamicLossScale, tfamp.TfampError\n"
    )
