"""Records that are read, joined and refused, and what is said of them in words."""

from typing import Any

import pytest

from diffcache.eval.report import words
from diffcache.eval.report.records import Value, checked, join, ordered


def test_wrong_records_are_refused(make_record: Any) -> None:
    record = make_record()
    record["rows"][2]["name"] = "taylorseer"
    with pytest.raises(ValueError, match="names that differ"):
        checked(record)
    with pytest.raises(ValueError, match="'uncached'"):
        checked(make_record() | {"rows": make_record()["rows"][1:]})
    for timing in (
        7,
        {"rows": [None]},
        {"rows": {"interval": 7}},
        {"rows": {"interval": {"ratio": -1}}},
    ):
        with pytest.raises(ValueError, match="timing.rows: .* must be an object"):
            checked(make_record() | {"timing": timing})
    record = make_record()
    record["rows"][0]["fidelity"] = [None]
    with pytest.raises(ValueError, match=r"fidelity: \[None\] must be an object"):
        checked(record)


def test_runs_of_one_task_are_joined(make_record: Any, renamed: Any) -> None:
    first = make_record()
    joined = join([first, renamed(first, "interval", "taylorseer"), first])
    names = [row_["name"] for row_ in joined["rows"]]
    assert names == [row_["name"] for row_ in first["rows"]] + ["taylorseer (2)"]
    times = first["timing"]["rows"]
    assert joined["timing"]["rows"]["taylorseer (2)"] == times["interval"]
    assert joined["timing"]["rows"]["taylorseer"] == times["taylorseer"]
    assert join([first])["rows"] == first["rows"]


def test_matches_follow_a_new_name(make_record: Any) -> None:
    first, second = make_record(), make_record()
    for row_ in second["rows"][1:]:
        row_["hash"] = row_["hash"][::-1] + "x"
    joined = join([first, second])
    names = [row_["name"] for row_ in ordered(joined)]
    assert names[names.index("taylorseer (2)") + 1] == "uncached, 3 steps (2)"


@pytest.mark.parametrize(
    "task", [{"model": "other"}, {"samples": 8}, {"seed": 1}, {"reference": "x"}]
)
def test_runs_of_different_tasks_are_never_mixed(make_record: Any, task: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"different tasks.*{next(iter(task))}"):
        join([make_record(), make_record(**task)])


def test_times_of_different_machines_are_left_out(make_record: Any, renamed: Any) -> None:
    second = renamed(make_record(), "interval", "other")
    second["env"]["device"] = "another processor"
    joined = join([make_record(), second])
    assert joined["timing"]["rows"] == {}
    assert any("different machines" in text for text in joined["warnings"])


@pytest.mark.parametrize(
    ("one", "other", "direction", "outcome"),
    [
        (Value(3, 2, 4), Value(6, 5, 7), "up", -1),
        (Value(3, 2, 4), Value(6, 5, 7), "down", 1),
        (Value(3, 2, 5), Value(6, 5, 7), "down", 0),
        (Value(3), Value(6, 5, 7), "down", None),
        (None, Value(6, 5, 7), "down", None),
        (Value(3, 2, 4), Value(6, 5, 7), None, None),
    ],
)
def test_better_means_that_intervals_do_not_overlap(
    one: Any, other: Any, direction: Any, outcome: Any
) -> None:
    assert words.compare(one, other, direction) == outcome


def test_summary_says_whether_a_cache_beats_fewer_steps(make_record: Any) -> None:
    said = "\n".join(words.summary(make_record()))
    assert "64 pictures of shapes-flux at 12 steps." in said
    assert "taylorseer against uncached, 3 steps: better in FID-lite, PSNR" in said
    assert "first-block against uncached, 4 steps: worse in PSNR" in said
    assert "taylorseer: 3 evaluations a sample, FLOPs ratio 4, 4 times as fast" in said
