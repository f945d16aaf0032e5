"""The table of methods on the small policy: intervals, costs, rows, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffcache.features.combine import Combine
from diffcache.features.interval import Interval
from diffcache.features.parts.when import Every
from diffcache.pipelines.small import measure_reach, method_cost, method_rows, reach

NAMES = ("interval:every=4", "bac:count=5,union=3,official=True")


# Parts that both tables share ----------------------------------------------------------------


def test_wilson() -> None:
    """Against published values."""
    assert measure_reach.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert measure_reach.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_intervals() -> None:
    """As wide as the normal approximation; a paired one knows when nothing differs."""
    flags = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.9
    same = method_rows.change(flags, flags)
    assert (same["value"], same["low"], same["high"], same["n"]) == (0, 0, 0, 300)
    worse = flags & (torch.arange(300) % 5 > 0)
    found = method_rows.change(worse, flags)
    assert found["value"] == pytest.approx(float(worse.double().mean() - flags.double().mean()))
    assert found["low"] < found["value"] < found["high"] < 0
    spread = 1.96 * float((worse.double() - flags.double()).std()) / 300**0.5
    assert found["high"] - found["low"] == pytest.approx(2 * spread, rel=0.1)
    alone = method_rows.interval(flags)
    assert alone["value"] == pytest.approx(float(flags.float().mean()))
    assert torch.equal(method_rows.flags_of(method_rows.text_of(flags)), flags)
    for bad in (torch.ones(1), torch.ones(2, 2), torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match="at least two finite numbers"):
            method_rows.interval(bad)


def test_seconds_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The untimed round first, then one call of each; ratios of the same round."""
    now, calls = [0.0], []

    def taking(name: str, seconds: list[float]) -> Any:
        def call(number: int) -> None:
            calls.append((name, number))
            now[0] += seconds[number]

        return call

    monkeypatch.setattr(method_cost.time, "perf_counter", lambda: now[0])
    plain, cached = taking("plain", [9, 6, 8, 6]), taking("cached", [9, 2, 2, 1])
    found = method_cost.ratio_in_turn(plain, cached, 3)
    assert found == {"median": 4.0, "q1": 3.5, "q3": 5.0, "n": 3}
    assert calls == [(name, number) for number in range(4) for name in ("plain", "cached")]
    with pytest.raises(ValueError, match="rounds=1: must be at least 2"):
        method_cost.ratio_in_turn(plain, cached, 1)


def test_operations_of_a_call() -> None:
    """Two for every weight and row; the arguments are those of the first call."""
    layer = nn.Linear(8, 4)
    found = method_cost.denoiser_flops(
        layer, lambda: (layer(torch.ones(3, 8)), layer(torch.ones(8)))
    )
    assert found == 2 * 3 * 8 * 4
    assert not layer._forward_pre_hooks


def test_names_are_those_of_the_command_line() -> None:
    assert method_rows.named("first-block", {}) == "first-block"
    assert method_rows.named("bac", {"count": 5, "official": True}) == "bac:count=5,official=True"


# The policy ----------------------------------------------------------------------------------


def test_cost_counts_what_a_run_computes() -> None:
    """Without a cache a chunk is `steps` calls; a cache saves modules and nothing else."""
    pipe = reach.load() if reach.DIRECTORY.exists() else reach.build()
    plain = measure_reach.cost(pipe, None, 4)
    half = measure_reach.cost(pipe, Combine(Every(2), site="module"), 4)
    assert plain["flops_ratio"] == 1 and plain["computed_steps"] == 4 and not plain["held_bytes"]
    assert half["computed_steps"] == 2
    layers, width, tokens, seen = 4, 64, reach.HORIZON, reach.OBSERVED + 1
    assert half["held_bytes"] == 3 * layers * tokens * width * 4
    attend = 8 * tokens * width**2 + 4 * tokens**2 * width
    cross = 4 * (tokens + seen) * width**2 + 4 * tokens * seen * width
    modules = layers * (attend + cross + 16 * tokens * width**2)
    rest = 2 * width * (2 * tokens + reach.OBSERVED * reach.OBSERVATION + 2 * tokens)
    rest += seen * 16 * width**2
    assert plain["flops"] == 4 * (modules + rest)
    assert half["flops"] == 4 * rest + 2 * modules


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> measure_reach.Measurement:
    """An untrained policy, few episodes and steps."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    reach.build().save_pretrained(folder)
    return measure_reach.Measurement(folder, episodes=4, steps=12, rounds=2)


@pytest.fixture(scope="module")
def report(small: measure_reach.Measurement, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "reach-policy-methods.json"
    measure_reach.run(small, path, NAMES)
    return path


def test_rows_hold_what_was_measured(report: Path) -> None:
    found = json.loads(report.read_text())
    assert [row["name"] for row in found["rows"]] == ["uncached", *NAMES]
    assert (found["samples"], found["steps"], found["quality"]["key"]) == (4, 12, "success_rate")
    plain, *others = found["rows"]
    check_rows(found)
    for row in others:
        assert row["flops_ratio"] > 1 and row["held_bytes"] > 0 and row["computed_steps"] < 12
        assert row["fidelity"]["action_error"]["value"] > 0
        assert row["seconds_ratio"]["n"] == 2 and row["seconds_ratio"]["median"] > 0
        assert "Tables" not in row["method"]
    assert plain["flops_ratio"] == 1 and "fidelity" not in plain


def test_rows_are_kept(
    small: measure_reach.Measurement, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run measures only what is missing, another measurement everything."""
    asked: list[str] = []

    def row(self: object, name: str, *_: object) -> dict[str, Any]:
        asked.append(name)
        return {"name": name, "outcomes": "0011", "flops_ratio": 2.0,
                "quality": {"success_rate": {"value": 0.5, "low": 0.2, "high": 0.7}}}  # fmt: skip

    monkeypatch.setattr(measure_reach.Measurement, "row", row)
    before = report.read_text()
    measure_reach.run(small, report, NAMES)
    assert not asked and report.read_text() == before
    more = report.with_name("more.json")
    more.write_text(before)
    rows = measure_reach.run(small, more, ["interval:every=4,site=module"])
    assert asked == ["interval:every=4,site=module"] and len(rows) == 4
    other = measure_reach.Measurement(small.directory, 4, 1, 12, 2)
    assert len(measure_reach.run(other, more, NAMES[:1])) == 2
    assert asked[1:] == ["uncached", NAMES[0]]


def test_a_method_that_is_off_acts_as_the_uncached_policy(
    small: measure_reach.Measurement, report: Path
) -> None:
    base = method_rows.flags_of(json.loads(report.read_text())["rows"][0]["outcomes"])
    with pytest.warns(match="skipped nothing"):
        row = small.row("interval:every=1", Interval(every=1), base)
    assert row["fidelity"]["action_error"]["high"] == 0 and row["flops_ratio"] == 1
    assert row["quality"]["success_rate_change"]["value"] == 0 and row["computed_steps"] == 12


def test_a_plot_lies_beside_the_report(report: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    with Image.open(report.with_suffix(".png")) as picture:
        assert picture.size[0] > 500
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_unknown_rows_are_refused(small: measure_reach.Measurement, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only='nothing': must be one of interval:every=4, "):
        measure_reach.run(small, tmp_path / "none.json", ["nothing"])


def test_the_shipped_figures_can_be_made_again() -> None:
    """From the outcomes of the episodes that the report keeps."""
    if not measure_reach.REPORT.exists():
        pytest.skip(f"{measure_reach.REPORT.name} is not measured yet")
    found = json.loads(measure_reach.REPORT.read_text(encoding="utf-8"))
    assert found["samples"] >= 256
    check_rows(found)


def check_rows(found: dict[str, Any]) -> None:
    """Compare rates, intervals and changes with the outcomes that the rows keep."""
    key = found["quality"]["key"]
    base = method_rows.flags_of(found["rows"][0]["outcomes"])
    for row in found["rows"]:
        outcome = method_rows.flags_of(row["outcomes"])
        assert len(outcome) == found["samples"]
        assert row["quality"][key] == pytest.approx(method_rows.interval(outcome), abs=1e-4)
        expected = measure_reach.wilson(int(outcome.sum()), len(outcome))
        assert row["wilson_95"] == pytest.approx(expected, abs=1e-4)
        if row["method"] is not None:
            again = method_rows.change(outcome, base)
            assert row["quality"][f"{key}_change"] == pytest.approx(again, abs=1e-4)
