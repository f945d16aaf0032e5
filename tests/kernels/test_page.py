"""The page and the table of choices are those of the rows and of the record."""

from diffcache.eval.kernels.case import all_cases
from diffcache.eval.workshop.kernels import page
from diffcache.kernels import dense, dispatch


def test_the_page_and_the_choices_are_up_to_date() -> None:
    assert page.main(["--check"]) == 0, "python -m diffcache.eval.workshop.kernels.page --write"


def test_every_operator_has_a_row_and_a_caller() -> None:
    listed = {case.operator for case in all_cases()}
    assert listed == {*dispatch.OPERATORS, dense.NAME}


def test_measured_times_stand_in_the_row_and_misses_are_told(tmp_path) -> None:
    case = all_cases()[0]
    ways = {name: {"error": 0.0, "us": [1.0, 2.0, 3.0]} for name in case.ways}
    row = {"limit_us": 1.5, "ways": ways, "targets": [{"against": "plain", "wanted": 4.0, "got": 1.0, "met": False}]}
    line = page._line(case, row, "nobody")
    assert line[3:6] == ["1.5", "-", "2.0; aim 4 of plain, 1"]
    ways["kernel"]["called_us"], ways["plain"] = [4.0, 5.0, 6.0], {"error": "no"}
    del ways[left := list(ways)[-1]]  # `measure` does not time torch.compile
    line = page._line(case, row, "nobody")
    assert line[5].startswith("2.0 (5.0)") and "plain failed" in line[6] and f"{left} -" in line[6]
    assert page._line(case, None, "nobody")[5] == page.UNKNOWN
