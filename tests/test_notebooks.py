"""Every notebook runs from top to bottom, and is committed with what it shows."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from nbmake.nb_run import NotebookRun

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_figures(path: Path) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it from top to bottom"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_public_names_are_used(path: Path) -> None:
    """Of our packages a notebook imports what they list as public, and touches nothing with an underscore."""
    code = "\n".join(cell.source for cell in code_cells(nbformat.read(path, as_version=4)))
    tree = ast.parse("\n".join(line for line in code.splitlines() if not line.startswith("%")))
    ours = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("globe_lightning", "datamodules"):
            assert node.module in ("globe_lightning", "datamodules"), f"{node.module} is no public module"
            names = {alias.name for alias in node.names}
            assert names <= set(import_module(node.module).__all__), names
            ours += 1
        elif isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"globe_lightning", "datamodules"}
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), node.attr
    assert ours


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # from a folder of its own: nothing beside it is needed
    result = NotebookRun(path, default_timeout=1200).execute()
    assert result.error is None, result.error
