"""The site: every page in its navigation, every link to something, the notebook runs."""

import ast
import json
import posixpath
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import diffcache
from diffcache.eval.workshop.website import LINK, PACKAGES, Website
from diffcache.registry import rows_of
from tests.pages.blocks import ROOT

NOTEBOOK = ROOT / "docs" / "tour.ipynb"
# What the notebook says -> what runs here instead.
CHEAPER = {
    "STEPS = 28": "STEPS = 6",
    "STEPS = 14": "STEPS = 6",
    "steps=14": "steps=6",
    "rounds=1": "rounds=0",
    "    PROMPTS,\n": "    PROMPTS[:1],\n",
    '"true_cfg_scale": 3.0': '"true_cfg_scale": 1.0',
    "psnr=18": "psnr=5",
    "(2, 3)": "(2,)",
}


@cache
def site() -> Website:
    return Website()


def places(nav: list[Any]) -> list[str]:
    """Return the pages of a navigation, in their order."""
    values = [next(iter(e.values())) if isinstance(e, dict) else e for e in nav]
    return [page for v in values for page in (places(v) if isinstance(v, list) else [v])]


def test_the_navigation_names_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert Counter(places(nav)) == Counter(list(site().pages))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them."""
    plain = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in found)
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def test_every_link_leads_to_a_page_a_heading_or_a_file() -> None:
    for place, text in site().pages.items():
        assert str(ROOT) not in text and str(Path.home()) not in text
        for found in LINK.finditer(text):
            if found["to"] is None or re.match("[a-z]+:", found["to"]):
                continue
            path, _, anchor = found["to"].partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
            target = target if path else place
            assert target in site().pages or site().files[target].is_file()
            assert not anchor or anchor in anchors(site().pages[target]), f"{place}: {found['to']}"


def test_a_dead_link_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"README\.md: a link to docs/none\.md, which is not"):
        site()._with_links("index.md", "README.md", "`[a](b)` [a](docs/kv.md) [b](docs/none.md)")


def test_the_reference_has_every_public_name() -> None:
    text = site().pages["api/diffcache.md"]
    methods = {row.load().__name__ for row in rows_of("method").values()}
    named = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: diffcache.")}
    assert named == {*diffcache.__all__} - methods - {*PACKAGES}
    assert all(f"::: diffcache.{name}\n" in site().pages[f"api/{name}.md"] for name in PACKAGES)
    assert all(site().pages[f"api/{name}.md"].count("\n::: ") > 4 for name in PACKAGES)


def test_compatibility_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = re.findall(r"\[`(\w+)`\]\(\.\./(tests/\S+\.py)\)", text)
    assert len(named) >= 20
    for name, file in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert any(isinstance(n, ast.FunctionDef) and n.name == name for n in tree.body), name


def test_the_notebook_was_executed_and_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert "error" not in shown and "image/png" in shown and str(ROOT) not in shown
    text = "\n".join("".join(cell["source"]) for cell in cells)
    for said, cheaper in CHEAPER.items():
        assert said in text
        text = text.replace(said, cheaper)
    names: dict[str, Any] = {"print": lambda *said: None}
    exec(compile(text, NOTEBOOK.name, "exec"), names)
    assert names["best"].guarantee.samples == 10
