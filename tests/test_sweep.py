"""Sweeps and comparisons of records."""

from pathlib import Path

import pytest

from diffcache.eval.runs.compare import CompareError, changes, crossed, read_limit
from diffcache.eval.runs.sweep import read_sweep

TOML = """
model = "shapes-flux"
samples = 12
steps = [5, 7]
rounds = 0
[call]
height = 64
[[method]]
name = "taylorseer"
every = [3, 4]
order = [1, 2]
site = "stack"
[[method]]
name = "first-block"
"""
YAML = """
model: shapes-flux
samples: 12
steps: [5, 7]
rounds: 0
call: {height: 64}
method:
  - {name: taylorseer, every: [3, 4], order: [1, 2], site: stack}
  - first-block
"""


def written(tmp_path: Path, text: str, name: str = "sweep.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML)])
def test_every_list_is_swept(tmp_path: Path, name: str, text: str) -> None:
    plans = read_sweep(written(tmp_path, text, name), tmp_path / "runs")
    assert [plan.task.steps for plan in plans] == [5, 7]
    assert len({plan.out for plan in plans}) == 2
    for plan in plans:
        assert plan.task.call == {"height": 64} and plan.rounds == 0
        assert list(plan.methods) == [
            *(f"taylorseer:every={e},order={o},site=stack" for e in (3, 4) for o in (1, 2)),
            "first-block",
        ]
        assert [m.every for m in plan.methods.values() if hasattr(m, "every")] == [3, 3, 4, 4]


def test_a_key_can_be_replaced(tmp_path: Path) -> None:
    file = written(tmp_path, TOML)
    assert read_sweep(file, tmp_path, {"reward": "mine:score"})[0].reward == "mine:score"
    plans = read_sweep(file, tmp_path, {"device": "cuda"})
    assert {plan.task.device for plan in plans} == {"cuda"}
    assert not {plan.out for plan in plans} & {plan.out for plan in read_sweep(file, tmp_path)}


def test_same_sweep_same_folders_other_settings_other_folders(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    first = [p.out for p in read_sweep(written(tmp_path, TOML), out)]
    assert [p.out for p in read_sweep(written(tmp_path, TOML), out)] == first
    changed = TOML.replace("height = 64", "height = 32")
    assert not {p.out for p in read_sweep(written(tmp_path, changed), out)} & set(first)


def record(psnr: float = 30.0, low: float = 29.0, high: float = 31.0, steps: int = 28) -> dict:
    task = {
        "model": "m", "pipeline": "p", "prompts": {}, "samples": 8, "seed": 0, "steps": steps,
        "call": {},
    }  # fmt: skip
    entry = {"value": psnr, "low": low, "high": high, "n": 8}
    row = {"evaluations": 8.0, "held_bytes": 10, "quality": {}}
    return {
        "task": task,
        "rows": [
            {"name": "uncached", "fidelity": {}, **row},
            {"name": "taylorseer", "fidelity": {"psnr_db": entry}, **row},
        ],
    }


def test_changes_and_limits() -> None:
    found = changes(record(), record(psnr=28, low=27, high=28.5))
    (moved,) = [c for c in found if c.metric == "psnr_db"]
    assert (moved.before, moved.after, moved.apart) == (30, 28, True)
    assert crossed(found, [read_limit("psnr_db<-1")])
    assert not crossed(found, [read_limit("psnr_db<-2")])
    assert not crossed(found, [read_limit("psnr_db>+0.5")])
    assert not crossed(
        changes(record(), record()), [read_limit("psnr_db<-0"), read_limit("psnr_db>0")]
    )


def test_only_one_task_is_compared() -> None:
    with pytest.raises(CompareError, match="different tasks: steps 28 and 9"):
        changes(record(), record(steps=9))


def test_a_limit_of_no_metric() -> None:
    with pytest.raises(ValueError, match="no metric 'psnr'"):
        crossed(changes(record(), record()), [read_limit("psnr>1")])
