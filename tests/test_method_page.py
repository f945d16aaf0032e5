"""docs/methods.md is what the docstrings, the tested pipelines and the records say."""

from pathlib import Path

import pytest

from diffcache.catalog import METHODS, method_class
from diffcache.eval import method_page

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ROOT / "docs" / "methods.md"
    assert method_page.main(["--check", str(page)]) == 0, (
        "python -m diffcache.eval.method_page --write"
    )
    assert method_page.main(["--check", str(tmp_path / "none.md")]) == 1
    assert "out of date" in capsys.readouterr().err


def test_every_method_says_what_it_is() -> None:
    text = method_page.page()
    for name in METHODS:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        cls = method_class(name)
        assert cls.__name__ in section and cls.source
        for line in section.splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                assert cells[-1], f"{name}: {line} has no meaning in the docstring"
