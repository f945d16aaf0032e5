"""The README says what its record says."""

from pathlib import Path

from diffcache.eval.report.docs import update

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_readme_is_that_of_its_record() -> None:
    assert not update(ROOT / "README.md", [ROOT / "assets/bench/eval-shapes-flux.json"], check=True)
