"""The documentation pages: what they link to and name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from datamodules import AirFRANSDataModule, DrivAerMLDataModule
from globe_lightning.module import NETWORK_ARGUMENTS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("configs", "datamodules", "globe_lightning", "notebooks", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are derived from the text."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith(("https://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists() and target.is_relative_to(ROOT), f"{name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name} links to {link}, which has no such heading"


def test_the_readme_links_to_every_long_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"configs/SETTINGS.md", "datamodules/AIRFRANS.md", "datamodules/DRIVAERML.md"} <= linked


@pytest.mark.parametrize(("page", "module"), [("AIRFRANS", AirFRANSDataModule), ("DRIVAERML", DrivAerMLDataModule)])
def test_a_dataset_s_page_names_its_whole_schema(page: str, module: type) -> None:
    text = (ROOT / "datamodules" / f"{page}.md").read_text(encoding="utf-8").replace("\\|", "|")
    schema = module(root="samples").schema
    for names in (
        schema.output_field_ranks,
        schema.boundary_source_data_ranks,
        schema.reference_length_names,
        schema.global_data_ranks,
    ):
        for name in names:
            assert f"`{name}`" in text, f"{page}.md does not name {name}"


def test_the_page_of_settings_names_arguments_that_exist() -> None:
    text = (ROOT / "configs" / "SETTINGS.md").read_text(encoding="utf-8")
    known = {*NETWORK_ARGUMENTS, "prediction_chunk_size", "pointwise_prediction"}
    named = set(re.findall(r"`model\.(\w+)`", text))
    assert named and named <= known, f"SETTINGS.md names {sorted(named - known)}"
