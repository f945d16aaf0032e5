"""Tables and pages of methods: cost, rows, resuming, what a page says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import diffcache
from diffcache import FirstBlock, TaylorSeer
from diffcache.catalog import method_class
from diffcache.eval.methods import parse_method, parse_row
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.record import FOLDER
from diffcache.eval.report.record_files import load
from diffcache.eval.workshop import figures, method_page
from diffcache.eval.workshop.compared import BEGIN, END, NONE
from diffcache.eval.workshop.shipped import reach as table
from diffcache.eval.workshop.shipped.reach import Policy
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Every
from diffcache.pipelines.small import reach
from diffcache.registry import rows_of

ON_POLICY = ("interval:every=4", "bac:count=5,union=3,official=True")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """An untrained policy, few episodes and steps."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    reach.build().save_pretrained(folder)
    return Policy(folder, episodes=2, steps=6)


@pytest.fixture(scope="module")
def of_policy(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("records") / "eval-reach-policy-methods.json"
    table.run(policy, file, "again", 2, ON_POLICY)
    return file


def test_cost_counts_what_a_run_computes(policy: Policy) -> None:
    """A cache saves modules and nothing else; what is outside of them runs at every step."""
    seen = torch.zeros(1, reach.OBSERVED, reach.OBSERVATION)
    with diffcache.wrapped(policy.pipe, Combine(Every(2), site="module")):
        policy.pipe(seen, 4, torch.Generator().manual_seed(0))
        report = diffcache.report(policy.pipe)
    plain, half = (table.cost(each, 4, policy.step_flops) for each in (None, report))
    assert plain["flops_ratio"] == 1 and plain["computed_steps"] == 4 and not plain["held_bytes"]
    assert half["computed_steps"] == 2
    layers, width, tokens, observed = 4, 64, reach.HORIZON, reach.OBSERVED + 1
    assert half["held_bytes"] == 3 * layers * tokens * width * 4
    attend = 8 * tokens * width**2 + 4 * tokens**2 * width
    cross = 4 * (tokens + observed) * width**2 + 4 * tokens * observed * width
    modules = layers * (attend + cross + 16 * tokens * width**2)
    rest = 2 * width * (2 * tokens + reach.OBSERVED * reach.OBSERVATION + 2 * tokens)
    rest += observed * 16 * width**2
    assert plain["flops"] == 4 * (modules + rest)
    assert half["flops"] == pytest.approx(4 * rest + 2 * modules, rel=1e-12)


def test_rows_of_the_policy_hold_what_was_measured(of_policy: Path) -> None:
    record = load(of_policy)
    assert [row["name"] for row in record["rows"]] == ["uncached", *ON_POLICY]
    assert (record["command"], record["seed"], record["finished"]) == ("again", 0, True)
    assert record["task"]["samples"] == 4 and record["commit"]
    check_rows(record, "success_rate")
    plain, *others = record["rows"]
    assert plain["flops_ratio"] == 1 and not plain["fidelity"]
    for row in others:
        assert row["flops_ratio"] > 1 and row["held_bytes"] > 0 and row["computed_steps"] < 6
        assert row["fidelity"]["action_error"]["value"] > 0 and "Tables" not in row["method"]
        times = record["timing"]["rows"][row["name"]]
        assert times["ratio"]["n"] == 2 and times["cpu_seconds"]["median"] > 0


def check_rows(record: dict[str, Any], key: str) -> None:
    """Compare shares, intervals and changes with the outcomes that the rows keep."""

    def outcomes(row: dict[str, Any]) -> torch.Tensor:
        found = torch.tensor([flag == "1" for flag in row["outcomes"][key]])
        assert len(found) == record["task"]["samples"]
        return found

    base = outcomes(record["rows"][0])
    for row in record["rows"]:
        assert row["quality"][key] == share_interval(outcomes(row)).to_dict()
        if row["kind"] == "method":
            again = share_change(base, outcomes(row)).to_dict()
            assert row["quality"][f"{key}_change"] == {**again, "paired": True}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("eval-*-methods*.json")), ids=lambda f: f.stem)
def test_shipped_rows_are_those_of_their_outcomes(file: Path) -> None:
    record = load(file)
    keys = record["rows"][0].get("outcomes", {})
    for key in keys:
        check_rows(record, key)
    assert all(row["fidelity"] for row in record["rows"] if row["kind"] == "method")


def test_rows_are_kept(policy: Policy, of_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run draws only what is missing, another measurement everything."""
    drawn: list[str] = []

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def note(self: Policy, *method: Any) -> Any:
            drawn.append(method[0].name if method else "uncached")
            return draw(self, *method)

        return note

    monkeypatch.setattr(Policy, "uncached", noting(Policy.uncached))
    monkeypatch.setattr(Policy, "draw", noting(Policy.draw))
    monkeypatch.setattr(table, "write_plot", lambda *given: None)
    before = json.loads(of_policy.read_text())
    more = tmp_path / "more.json"
    more.write_text(json.dumps(before))
    table.run(policy, more, "again", 1, ON_POLICY)
    assert not drawn
    record = table.run(policy, more, "again", 1, ["interval:every=4,site=module"])
    assert drawn == ["uncached", "interval"] and len(record["rows"]) == 4
    assert record["rows"][:3] == before["rows"]
    other = Policy(policy.directory, 4, 1, 6)
    assert len(table.run(other, more, "again", 1, ON_POLICY[:1])["rows"]) == 2


def test_pages_and_a_plot_are_made_of_the_records(of_policy: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    with Image.open(of_policy.with_suffix(".png")) as picture:
        assert picture.size[0] > 500
    text = figures.page(of_policy.parent)
    assert "## reach-policy" in text and "Success rate" in text and "Action error" in text
    lines = method_page._measured("bac", [load(of_policy)])
    assert lines[2].startswith("| reach-policy, 6 steps, 4 samples | ")


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


def test_methods_from_one_word():
    assert parse_method("taylorseer") == TaylorSeer()
    assert parse_method(" taylorseer : every=4, site=module") == TaylorSeer(every=4, site="module")
    assert parse_method("first-block:threshold=1e-1") == FirstBlock(threshold=0.1)
    assert parse_method("taylorseer:site='stack'") == TaylorSeer(site="stack")


def test_even_steps_stand_beside_methods() -> None:
    found = parse_row("even:computed=13,steps=20,site=module")
    assert found.when.steps == tuple(i * 20 // 13 for i in range(13)) and found.when.total == 20
    assert len(set(found.when.steps)) == 13 and found.site.value == "module"
