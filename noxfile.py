"""Runs the tests that depend on other people's releases, one environment per row of the matrix.

    nox                         every row
    nox -s "compat(oldest)"     one row
    nox -s upcoming             tf-nightly and keras-nightly, on the Python that runs nox
    nox -s kerashub             KerasHub's backbones; writes docs/kerashub.md
    nox -l                      the rows

Each row is an environment of its own under `.nox/`, with tfamp installed as a wheel is. A row whose
Python is not installed is skipped. docs/compatibility.md says what came out.
"""

from __future__ import annotations

import re

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"

# Name -> Python, and what pip is asked for. "oldest" holds the floors of pyproject.toml; a test
# compares the two, and docs/compatibility.md with this table.
ROWS = {
    "oldest": ("3.10", ["tensorflow==2.19.*", "keras==3.12.*", "numpy==1.26.*"]),
    "middle": ("3.11", ["tensorflow==2.20.*", "keras==3.13.*"]),
    "keras314": ("3.12", ["tensorflow==2.20.*", "keras==3.14.*"]),
    "newest": ("3.13", ["tensorflow==2.21.*", "keras==3.15.*"]),
    "jax": ("3.11", ["tensorflow==2.21.*", "keras==3.15.*", "jax"]),
    "torch": ("3.11", ["tensorflow==2.21.*", "keras==3.15.*", "torch"]),
}
# What a release of Python, TensorFlow, Keras or NumPy can break; the rest is tfamp's own.
TESTS = [
    "tests/test_public_api.py",
    "tests/test_policy.py",
    "tests/layers/test_policy_in_force.py",
    "tests/core/test_loss_scale.py",
    "tests/test_optimizer.py",
    "tests/test_optimizer_saving.py",
    "tests/torch_style/test_grad_scaler.py",
    "tests/torch_style/test_context.py",
    "tests/interop/test_keras_hooks.py",
    "tests/interop/test_tf_private.py",
    "tests/rewriting/test_function.py",
    "tests/graph/test_op_lists.py",
    "tests/graph/test_rewrite.py",
]
BACKEND_TESTS = ["tests/test_keras_backend.py"]


def _quick_tests(session: nox.Session, tests: list[str]) -> None:
    session.run("python", "-m", "pip", "list", "--format=freeze", silent=False)
    # Not python -m pytest: that puts the folder first on the path, and so the checkout before the
    # wheel.
    session.run(
        "pytest",
        "-q",
        *(session.posargs or ["-n", "2"]),
        *tests,
        env={"TF_CPP_MIN_LOG_LEVEL": "3"},
    )


@nox.session
@nox.parametrize(
    "python,row", [nox.param(python, name, id=name) for name, (python, _) in ROWS.items()]
)
def compat(session: nox.Session, row: str) -> None:
    """The quick tests on one row; arguments after `--` go to pytest."""
    _, packages = ROWS[row]
    # One resolution for all of it: a second pip call could move what the first one chose.
    session.install(*packages, ".[test]")
    _quick_tests(session, BACKEND_TESTS if row in ("jax", "torch") else TESTS)


@nox.session(default=False)
def upcoming(session: nox.Session) -> None:
    """The quick tests on tonight's TensorFlow and Keras; arguments after `--` go to pytest."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    released = ("keras", "tensorflow")
    others = [name for name in wanted if re.split(r"[^\w-]", name)[0] not in released]
    session.install("--upgrade", "tf-nightly", "keras-nightly", *others)
    # Without the dependencies, which would install the releases over the nightly builds.
    session.install("--no-deps", ".")
    _quick_tests(session, TESTS)


@nox.session(python="3.11", default=False)
def kerashub(session: nox.Session) -> None:
    """Every backbone of KerasHub; arguments after `--` go to benchmarks.kerashub."""
    session.install(*ROWS["newest"][1], "-e", ".[models]", "rich>=13")
    session.run(
        "python",
        "-m",
        "benchmarks.kerashub",
        *(session.posargs or ["--page", "docs/kerashub.md"]),
        env={"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
