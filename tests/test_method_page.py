"""Methods from one word, and docs/methods.md, which says what docstrings, pipelines and records say."""

import json
import re
from pathlib import Path

import pytest

from diffcache import FirstBlock, TaylorSeer
from diffcache.catalog import make_method, method_class
from diffcache.eval.methods import parse_method, parse_row
from diffcache.eval.workshop import method_page
from diffcache.eval.workshop.compared import BEGIN, END, NONE
from diffcache.registry import rows_of

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ROOT / "docs" / "methods.md"
    assert method_page.main(["--check", str(page)]) == 0, "python -m diffcache.eval.workshop.method_page --write"
    assert method_page.main(["--check", str(tmp_path / "none.md")]) == 1
    assert "out of date" in capsys.readouterr().err


def test_every_method_says_what_it_is() -> None:
    text = method_page.page()
    for name in rows_of("method"):
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        cls = method_class(name)
        assert cls.__name__ in section and rows_of("method")[name].paper
        for setting, _, meaning in method_page.settings(cls):
            assert meaning, f"{name}: {setting} has no meaning in the docstring"
            assert f"- {setting}" in section


def test_comparisons_name_all_methods_and_their_tests() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| \[`(.*?)`\]\(.*?\) \| (.*?) \| .*? \| .*? \| (.*) \|$", table, re.MULTILINE)
    assert list(dict.fromkeys(name for name, _, _ in rows)) == list(rows_of("method")), (
        "python -m diffcache.eval.workshop.compared --write"
    )
    for name, source, files in rows:
        for file in re.findall(r"\(\.\./(.*?)\)", files):
            assert f'"{source}"' in (ROOT / file).read_text(encoding="utf-8"), (name, file)
        assert files or source == NONE


def test_rows_of_records(tmp_path: Path) -> None:
    """Each in its method's section, with the columns that its rows have."""
    folder = tmp_path / "assets" / "bench"
    folder.mkdir(parents=True)
    rows = [
        {"name": "uncached", "kind": "uncached", "steps": 28},
        {"name": "interval:every=4", "kind": "method", "steps": 28, "flops_ratio": 3.971},
        {"name": "interval:every=9", "kind": "method", "steps": 28, "flops_ratio": 8.5},
    ]
    ratio = {"median": 3.66, "q1": 3.595, "q3": 3.711, "n": 5}
    record = {
        "task": {"model": "models/sticker-flux", "samples": 256},
        "rows": rows,
        "timing": {"rows": {"interval:every=4": {"ratio": ratio}}},
    }
    (folder / "eval-sticker-flux-methods.json").write_text(json.dumps(record))
    row = {
        "name": "bac:count=5,union=3",
        "kind": "method",
        "steps": 100,
        "flops_ratio": 4.5,
        "quality": {"success_rate": {"value": 0.95, "low": 0.92, "high": 0.98, "n": 256}},
        "fidelity": {"action_error": {"value": 0.0012, "low": 0.0010, "high": 0.0014, "n": 256}},
    }
    other = {"task": {"model": "reach-policy", "samples": 256}, "rows": [row]}
    (folder / "eval-reach-policy-methods.json").write_text(json.dumps(other))
    sections = dict(part.partition("\n")[::2] for part in method_page.page(tmp_path).split("\n## ")[1:])
    timed, untimed = figures(sections["interval"])
    assert timed.startswith("| sticker-flux, 28 steps, 256 samples | `every=4` | 3.97 | 3.66 (3.")
    assert untimed.startswith("| sticker-flux, 28 steps, 256 samples | `every=9` | 8.50 |  |")
    (row,) = figures(sections["bac"])
    assert row.startswith("| reach-policy, 100 steps, 256 samples | `count=5,union=3` | 4.50 | 0.95")
    assert row.endswith("0.950 (0.920 to 0.980) | 0.0012 (0.001 to 0.0014) |")
    assert "| model | settings | FLOPs ratio | success rate | action error |" in sections["bac"]
    assert not figures(sections["taylorseer"])


def figures(section: str) -> list[str]:
    """Return the lines of a section that hold figures."""
    return [line for line in section.splitlines() if " samples | `" in line]


def test_methods_from_one_word():
    assert parse_method("taylorseer") == TaylorSeer()
    assert parse_method(" taylorseer : every=4, site=module") == TaylorSeer(every=4, site="module")
    assert parse_method("first-block:threshold=1e-1") == FirstBlock(threshold=0.1)
    assert parse_method("taylorseer:site='stack'") == TaylorSeer(site="stack")


def test_python_takes_the_words_of_the_command_line():
    assert make_method("taylorseer:every=4,site=module") == TaylorSeer(every=4, site="module")
    assert make_method("taylorseer:every=4", order=2) == TaylorSeer(every=4, order=2)


def test_even_steps_stand_beside_methods() -> None:
    found = parse_row("even:computed=13,steps=20,site=module")
    assert found.when.steps == tuple(i * 20 // 13 for i in range(13)) and found.when.total == 20
    assert len(set(found.when.steps)) == 13 and found.site.value == "module"
