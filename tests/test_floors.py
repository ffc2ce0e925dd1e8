"""The floors of the house: who may import whom, read from the modules' own imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import datamodules
import globe_lightning

ROOTS = {"globe_lightning": Path(globe_lightning.__file__).parent, "datamodules": Path(datamodules.__file__).parent}

# Each room's floor; a room imports only from floors below its own, or from its neighbours in the same folder.
FLOORS = {
    "globe_lightning.fields": 0,
    "globe_lightning.memory": 0,
    "globe_lightning.native_code": 0,
    "globe_lightning.plain_values": 0,
    "globe_lightning.tree": 0,
    "globe_lightning.mesh": 0,
    "globe_lightning.sample": 1,
    "globe_lightning.validation": 1,
    "globe_lightning.models": 2,
    "globe_lightning.bad_batches": 2,
    "globe_lightning.forces": 2,
    "globe_lightning.losses": 2,
    "globe_lightning.metrics": 2,
    "globe_lightning.optim": 2,
    "globe_lightning.provenance": 2,
    "globe_lightning.model_card": 2,
    "globe_lightning.surfaces": 2,
    "globe_lightning.sensitivity": 3,
    "globe_lightning.stage_metrics": 3,
    "globe_lightning.training_sums": 3,
    "globe_lightning.loggers": 3,
    "globe_lightning.run_folder": 3,
    "globe_lightning.interop": 4,
    "globe_lightning.config_errors": 3,
    "globe_lightning.module": 4,
    "globe_lightning.callbacks": 4,
    "globe_lightning.sharing": 5,
    "globe_lightning.commands": 6,
    "globe_lightning.geometry": 5,
    "globe_lightning.geometry_arguments": 6,
    "globe_lightning.cli": 7,
    "globe_lightning.__main__": 8,
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
SCREENS = {"pyvista", "vtk", "matplotlib"}


def modules() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for package, root in ROOTS.items():
        for path in root.rglob("*.py"):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join([package, *parts])] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports anywhere, in functions too, but not for type checkers only."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def room(name: str) -> str | None:
    """The room that a module belongs to, e.g. globe_lightning.models for globe_lightning.models.kernel."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "globe_lightning" and len(parts) > 1 else None


def test_the_reader_of_imports_sees_them() -> None:
    assert "globe_lightning.models.kernel" in imports(MODULES["globe_lightning.models.multiscale"])
    assert "globe_lightning.module" not in imports(MODULES["globe_lightning"])
    assert len(MODULES) > 20


@pytest.mark.parametrize("name", sorted(n for n in MODULES if n.startswith("globe_lightning.")))
def test_floors(name: str) -> None:
    own = room(name)
    assert own in FLOORS, f"give the new room {own} a floor"
    for imported in imports(MODULES[name]):
        other = room(imported)
        if other is None or other == own or other not in FLOORS:
            continue
        assert FLOORS[other] < FLOORS[own], f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(n for n in MODULES if FLOORS.get(room(n) or "", 9) < 3))
def test_no_lightning_below_the_module(name: str) -> None:
    heads = {imported.split(".")[0] for imported in imports(MODULES[name])}
    assert not heads & LIGHTNING, name
    if room(name) in ("globe_lightning.models", "globe_lightning.tree", "globe_lightning.mesh"):
        assert not heads & SCREENS, name


def test_the_module_knows_no_data_and_the_data_no_module() -> None:
    allowed = {"globe_lightning.sample", "globe_lightning.mesh", "globe_lightning.fields"}
    for name, path in MODULES.items():
        for imported in imports(path):
            if name.startswith("datamodules") and room(imported) in FLOORS:
                assert room(imported) in allowed, f"{name} imports {imported}"
            if imported.split(".")[0] == "datamodules" and name.startswith("globe_lightning"):
                assert FLOORS[room(name) or ""] >= 5, f"{name} imports {imported}"


def test_every_module_and_public_name_has_a_docstring() -> None:
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), name
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}.{node.name}"


def loaded_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after running some code."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    heavy = LIGHTNING | SCREENS | {"torchmetrics", "jsonargparse"}
    names = loaded_after("import globe_lightning")
    assert not names & (heavy | {"torch"})


def test_public_names_resolve_and_others_do_not() -> None:
    for name in globe_lightning.__all__:
        assert getattr(globe_lightning, name).__name__ == name
    assert set(globe_lightning.__all__) <= set(dir(globe_lightning))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        globe_lightning.nothing  # noqa: B018
