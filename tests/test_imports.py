"""The direction of imports: backend -> pipeline -> stages -> rules, exchanges -> layout, call -> ops."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import spcompile
from spcompile import ops

PACKAGE = Path(spcompile.__file__).parent
OPS = Path(ops.__file__).parent
STAGES = {"capture", "sites", "infer", "rewrite", "verify", "inner", "pipeline", "backend", "dump"}


def imported_by(file: Path) -> set[str]:
    """Full names of the spcompile modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} has a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if name in MODULES} or {node.module}
    return {name for name in found if name.split(".")[0] == "spcompile"}


def _modules() -> dict[str, Path]:
    """Every module by its full name; a package by its ``__init__``."""
    folders = {"spcompile": PACKAGE, "spcompile.ops": OPS}
    folders |= {f"spcompile.{name}": PACKAGE / name for name in ("testing", "rules")}
    return {f"{name}.{f.stem}".removesuffix(".__init__"): f for name, at in folders.items() for f in at.glob("*.py")}


MODULES = _modules()


@pytest.mark.parametrize("file", sorted(OPS.glob("*.py")), ids=lambda f: f.name)
def test_ops_import_nothing_outside_ops(file):
    assert all(name.startswith("spcompile.ops") for name in imported_by(file))


BELOW = [
    n for n in MODULES if n.split(".")[1:2] in (["rules"], ["layout"], ["call"], ["errors"], ["report"], ["source"])
]


@pytest.mark.parametrize("name", BELOW)
def test_what_stages_build_on_imports_no_stage(name):
    assert not imported_by(MODULES[name]) & {f"spcompile.{stage}" for stage in STAGES}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"spcompile"}))
def test_nothing_imports_the_backend_or_the_package_itself(name):
    assert not imported_by(MODULES[name]) & {"spcompile", "spcompile.backend"}


@pytest.mark.parametrize("name", sorted(n for n in MODULES if not n.startswith("spcompile.testing")))
def test_nothing_imports_testing(name):
    assert not any(found.startswith("spcompile.testing") for found in imported_by(MODULES[name]))


def test_no_two_modules_import_each_other():
    graph = {name: imported_by(file) & set(MODULES) for name, file in MODULES.items()}
    tuple(TopologicalSorter(graph).static_order())


def test_the_reference_shares_nothing_with_the_ops():
    assert not imported_by(OPS / "reference.py")
    for file in OPS.glob("*.py"):
        if file.name != "__init__.py":
            assert "spcompile.ops.reference" not in imported_by(file)
