"""Rewards: functions of the user's, and PickScore."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval.metrics import reward
from diffcache.eval.runs.extractors import at_hand
from diffcache.eval.runs.quality import quality
from diffcache.eval.runs.record import describe
from tests.real_backends.files import fake_module, pictures, save_clip, seen_by_clip


def brightness(these: Tensor, prompts: Sequence[str]) -> Tensor:
    return these.float().mean(dim=(1, 2, 3))


def test_a_reward_goes_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(monkeypatch, "my_rewards", bright=brightness, number=3)
    given = pictures(3)
    networks = at_hand("cpu", films=False, reward_name="my_rewards:bright")
    found = networks.of_pictures(given, ["a", "b", "c"])
    torch.testing.assert_close(found["reward_bright"], given.double().mean(dim=(1, 2, 3)), rtol=1e-6, atol=0)
    rows = [{"fidelity": {}, "quality": quality(found, found | {}, None, is_film=False)}]
    told = describe(rows, networks, (40, 48))
    assert told["reward_bright"] == {
        "title": "bright",
        "unit": "",
        "direction": "up",
        "backend": "user",
        "extractor": "my_rewards:bright",
    }
    assert told["reward_bright_change"]["title"] == "bright, change"


def test_a_reward_of_films_is_given_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(
        monkeypatch, "my_rewards", moves=lambda films, prompts: films.double().diff(dim=1).abs().amax((1, 2, 3, 4))
    )
    networks = at_hand("cpu", films=True, reward_name="my_rewards:moves")
    still = pictures(1, 64, 64).expand(17, -1, -1, -1)
    moved = still.clone()
    moved[9:] = 255 - still[9:]
    found = networks.of_films([still, moved], ["a", "b"])["reward_moves"]
    assert found[0] == 0 and found[1] > 0
    with pytest.raises(reward.RewardError, match=r"returned \[1, 17\], not \[1\]"):
        reward.score(lambda films, prompts: films.double().mean((2, 3, 4)), still[None], ["a"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("my_rewards", "must be pickscore or module:function"),
        ("my_rewards:dark", "has no function dark"),
        ("my_rewards:number", "has no function number"),
        ("no_such_module:f", "cannot be imported"),
        ("my_rewards:bright,my_rewards:bright", "two of them are reward_bright"),
    ],
)
def test_what_is_no_reward_is_an_error(names: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(monkeypatch, "my_rewards", bright=brightness, number=3)
    with pytest.raises(ValueError, match=f"reward {names}: .*{words}"):
        reward.load(names)


def test_what_a_reward_returns_is_checked() -> None:
    given = pictures(2)
    with pytest.raises(reward.RewardError, match=r"returned \[\], not \[2\]"):
        reward.score(lambda pictures, prompts: torch.tensor(1.0), given, ["a", "b"])
    with pytest.raises(reward.RewardError, match="reward of picture 1 is not a finite number"):
        reward.score(lambda pictures, prompts: torch.tensor([0.0, torch.nan]), given, ["a", "b"])
    with pytest.raises(ValueError, match="2 pictures need as many prompts, not 1"):
        reward.score(brightness, given, ["a"])


def test_pick_score_is_the_scaled_cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = save_clip(tmp_path / "PickScore_v1", logit_scale_init_value=4.6)
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path))
    networks = at_hand("cpu", films=False, reward_name="pickscore")
    given, prompts = pictures(3, 32, 32), ["a fox left of an owl", "a car on grass", "a frog"]
    found = networks.of_pictures(given, prompts)["pick_score"]
    # CLIP's own logits are what PickScore's model card computes: exp(logit scale) times cosines.
    for place, prompt in enumerate(prompts):
        logits = seen_by_clip(model, tokenizer, given[place], prompt).logits_per_image
        assert float(found[place]) == pytest.approx(float(logits), rel=1e-4)
    told = describe([{"fidelity": {}, "quality": {"pick_score": {}}}], networks, (32, 32))
    assert told["pick_score"]["title"] == "PickScore"
    assert told["pick_score"]["extractor"] == "PickScore_v1"


def test_a_reward_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFCACHE_WEIGHTS", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(MissingError, match="PickScore_v1.* get it from https://huggingface.co/"):
        reward.load("pickscore")
