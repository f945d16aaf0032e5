"""A page says what its record says."""

from pathlib import Path

from diffcache.eval.report.docs import update

ROOT = Path(__file__).parents[2]


def test_the_table_of_choosing_is_that_of_its_record() -> None:
    record = ROOT / "assets/bench/eval-shapes-flux.json"
    assert not update(ROOT / "docs/choosing.md", [record], check=True)
