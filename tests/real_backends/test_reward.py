"""Rewards: functions named by their entries, and ImageReward in another interpreter."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffcache.eval import weights
from diffcache.eval.metrics import reward


def pictures(count: int, height: int = 40, width: int = 48, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def brightness(these: Tensor, prompts: Sequence[str]) -> Tensor:
    return these.float().mean(dim=(1, 2, 3))


def test_a_reward_is_named_by_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(monkeypatch, "my_rewards", bright=brightness, number=3)
    given = pictures(3)
    found = reward.score(reward.load("my_rewards:bright"), given, ["a", "b", "c"])
    torch.testing.assert_close(found, given.double().mean(dim=(1, 2, 3)), rtol=1e-6, atol=0)
    for entry, words in {
        "my_rewards": "must be 'module:function'",
        "my_rewards:dark": "has no function dark",
        "my_rewards:number": "has no function number",
        "no_such_module:f": "cannot be imported",
    }.items():
        with pytest.raises(ValueError, match=words):
            reward.load(entry)


def test_what_a_reward_returns_is_checked() -> None:
    given = pictures(2)
    with pytest.raises(reward.RewardError, match=r"returned \[\], not \[2\]"):
        reward.score(lambda pictures, prompts: torch.tensor(1.0), given, ["a", "b"])
    with pytest.raises(reward.RewardError, match="reward of picture 1 is not a finite number"):
        reward.score(lambda pictures, prompts: torch.tensor([0.0, torch.nan]), given, ["a", "b"])
    with pytest.raises(ValueError, match="2 pictures need as many prompts, not 1"):
        reward.score(brightness, given, ["a"])


FAKE_PACKAGE = """
import os
class Model:
    def score(self, prompt, picture):
        return len(prompt) + os.path.getsize(picture) / 1000
def load(name, device, med_config):
    assert os.path.basename(name) == "ImageReward.pt" and device == "cpu"
    assert os.path.basename(med_config) == "med_config.json" and os.path.isfile(med_config)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    return Model()
"""


@pytest.fixture
def reward_folder(tmp_path: Path) -> Path:
    """The two weight files, two pictures and a package called ImageReward (and a light torch)."""
    (tmp_path / "ImageReward.pt").write_bytes(b"weights")
    (tmp_path / "med_config.json").write_text("{}")
    (tmp_path / "0.png").write_bytes(b"0" * 250)
    (tmp_path / "1.png").write_bytes(b"0" * 500)
    for name, body in {
        "ImageReward": FAKE_PACKAGE,
        "torch": "import contextlib\nno_grad = contextlib.nullcontext\n",
    }.items():
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text(body)
    return tmp_path


def test_image_reward_runs_in_another_interpreter(
    monkeypatch: pytest.MonkeyPatch, reward_folder: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(reward_folder / "other"))
    monkeypatch.setenv("DIFFCACHE_REWARD_PYTHON", sys.executable)
    files = [reward_folder / "0.png", reward_folder / "1.png"]
    found = reward.image_reward(files, ["abc", "Ringgröße"], folder=reward_folder)
    assert found.tolist() == [3.25, 9.5] and found.dtype == torch.float64


def fake_interpreter(folder: Path, body: str) -> Path:
    """Write a program that is called as `python -c DRIVER request answer`."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'No module named ImageReward' >&2; exit 3", "code 3.*No module named ImageReward"),
        ("exit 0", "ended with code 0.*nothing on its error output"),
        ("echo 'not JSON' > \"$4\"", "wrote something else than JSON"),
        ('echo \'{"scores": [1.0]}\' > "$4"', "not 2 scores"),
        ('echo \'{"scores": [1.0, NaN]}\' > "$4"', "not a finite number"),
    ],
)
def test_an_interpreter_that_fails_is_quoted(reward_folder: Path, body: str, words: str) -> None:
    program = fake_interpreter(reward_folder, body)
    files = [reward_folder / "0.png", reward_folder / "1.png"]
    with pytest.raises(reward.RewardError, match=f"(?s){words}"):
        reward.image_reward(files, ["a", "b"], program, reward_folder)


def test_the_request_names_pictures_and_prompts(reward_folder: Path) -> None:
    keep = reward_folder / "kept.json"
    program = fake_interpreter(
        reward_folder, f'cp "$3" {keep}\necho \'{{"scores": [1.5]}}\' > "$4"'
    )
    file = reward_folder / "0.png"
    assert reward.image_reward([file], ["a ring"], program, reward_folder).tolist() == [1.5]
    assert json.loads(keep.read_text())["pairs"] == [[str(file.resolve()), "a ring"]]


def test_image_reward_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, reward_folder: Path
) -> None:
    file = reward_folder / "0.png"
    monkeypatch.delenv("DIFFCACHE_REWARD_PYTHON", raising=False)
    with pytest.raises(reward.RewardError, match="set DIFFCACHE_REWARD_PYTHON to its python"):
        reward.image_reward([file], ["a"], folder=reward_folder)
    with pytest.raises(reward.RewardError, match="there is no such interpreter"):
        reward.image_reward([file], ["a"], reward_folder / "none", reward_folder)
    with pytest.raises(FileNotFoundError, match=r"2\.png: there is no such picture"):
        reward.image_reward([reward_folder / "2.png"], ["a"], sys.executable, reward_folder)
    with pytest.raises(ValueError, match="1 pictures and 2 prompts"):
        reward.image_reward([file], ["a", "b"], sys.executable, reward_folder)
    (reward_folder / "med_config.json").unlink()
    with pytest.raises(weights.MissingWeightsError, match="med_config.json"):
        reward.image_reward([file], ["a"], sys.executable, reward_folder)
