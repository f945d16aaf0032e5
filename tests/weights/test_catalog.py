"""The table of metrics and its page."""

from pathlib import Path

import pytest

from diffcache.eval.metrics import catalog
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.weights import WEIGHTS

ROOT = Path(__file__).parents[2]


def test_every_metric_is_described() -> None:
    for key, metric in METRICS.items():
        assert metric.key == key and metric.title and metric.definition and metric.source
        assert metric.call and metric.direction in ("up", "down", "none")
        assert not metric.stand_in or METRICS[metric.stand_in].is_lite
        assert set(metric.weights) <= set(WEIGHTS)
        for name in metric.weights:
            assert not metric.is_lite, f"{key}: a stand-in needs no published weights"
            assert WEIGHTS[name].used_by.count(key) <= 1
        if metric.is_lite:
            assert "-lite" in metric.title, f"{key}: the title must say what it is"
    for name, weight in WEIGHTS.items():
        for key in weight.used_by:
            assert name in METRICS[key].weights or name == "inception-clean"


def test_the_vbench_dimensions_are_those_of_the_suite() -> None:
    suite = pytest.importorskip("diffcache.eval.vbench.suite")
    listed = {key: metric for key, metric in METRICS.items() if key.startswith("vbench_")}
    assert set(listed) == {f"vbench_{name}" for name in suite.DIMENSIONS} and len(listed) == 16
    for name, dimension in suite.DIMENSIONS.items():
        assert {weight.name for weight in dimension.files} == set(listed[f"vbench_{name}"].weights)


def test_the_page_holds_the_table() -> None:
    page = ROOT / "docs" / "evaluation.md"
    assert catalog.main(["--check", str(page)]) == 0, "run --write docs/evaluation.md"
    text = page.read_text()
    assert all(f"| `{key}` |" in text for key in METRICS)


def test_the_table_is_written_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert catalog.main(["--check", str(page)]) == 2
    page.write_text("no markers")
    assert catalog.main(["--write", str(page)]) == 2
    assert "needs the lines" in capsys.readouterr().err
    page.write_text(f"above\n{catalog.BEGIN}\nold\n{catalog.END}\nbelow\n")
    assert catalog.main(["--check", str(page)]) == 1
    assert catalog.main(["--write", str(page)]) == 0
    assert catalog.main(["--check", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("above\n") and written.endswith("\nbelow\n") and "old" not in written
    for line in written.splitlines():
        if line.startswith("|"):
            assert line.count("|") == len(catalog.TITLES) + 1, line
