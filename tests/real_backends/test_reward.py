"""Rewards: functions of the user's, PickScore, and packages in another interpreter."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval.metrics import geneval, reward, weights
from diffcache.eval.runs.extractors import at_hand
from diffcache.eval.runs.quality import quality
from diffcache.eval.runs.record import describe
from tests.real_backends.files import fake_module, pictures, save_clip, seen_by_clip

ROOT = Path(__file__).parents[2]


def brightness(these: Tensor, prompts: Sequence[str]) -> Tensor:
    return these.float().mean(dim=(1, 2, 3))


def test_a_reward_goes_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(monkeypatch, "my_rewards", bright=brightness, number=3)
    given = pictures(3)
    networks = at_hand("cpu", films=False, reward_name="my_rewards:bright")
    found = networks.of_pictures(given, ["a", "b", "c"])
    torch.testing.assert_close(
        found["reward_bright"], given.double().mean(dim=(1, 2, 3)), rtol=1e-6, atol=0
    )
    assert "image_reward" not in found
    rows = [{"fidelity": {}, "quality": quality(found, found | {}, None, is_film=False)}]
    told = describe(rows, networks, (40, 48))
    assert told["reward_bright"] == {
        "title": "my_rewards:bright", "unit": "", "direction": "up", "backend": "user",
        "extractor": "my_rewards:bright",
    }  # fmt: skip
    assert told["reward_bright_change"]["title"] == "my_rewards:bright, change"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            "my_rewards",
            "must be imagereward, hpsv2, pickscore, geneval, dpg-bench or module:function",
        ),
        ("my_rewards:dark", "has no function dark"),
        ("my_rewards:number", "has no function number"),
        ("no_such_module:f", "cannot be imported"),
        ("my_rewards:bright,my_rewards:bright", "two of them are reward_bright"),
    ],
)
def test_what_is_no_reward_is_an_error(
    names: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Packages that stand for the real ones: each score says what the model was made and asked with.
FAKES = {
    "ImageReward": """
import os
print("noise on the standard output")
class Model:
    def score(self, prompt, picture):
        from PIL import Image
        return len(prompt) + Image.open(picture).size[0] / 1000
def load(name, device, med_config):
    assert os.path.basename(name) == "ImageReward.pt" and device == "cpu"
    assert os.path.basename(med_config) == "med_config.json" and os.path.isfile(med_config)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write("loaded ")
    return Model()
""",
    "hpsv2": "",
    "hpsv2/src": "",
    "hpsv2/src/open_clip": """
import torch
class Model(torch.nn.Linear):
    def forward(self, image, text):
        assert not self.training
        features = torch.nn.functional.normalize(super().forward(image), dim=-1)
        return {"image_features": features, "text_features": text}
def create_model_and_transforms(name, device, precision, light_augmentation, output_dict):
    assert (name, precision, light_augmentation, output_dict) == ("ViT-H-14", "amp", True, True)
    prepare = lambda picture: torch.tensor([float(v) for v in picture.getpixel((0, 0))])
    return Model(3, 3, bias=False), None, prepare
def get_tokenizer(name):
    assert name == "ViT-H-14"
    return lambda texts: torch.eye(3)[[len(text) for text in texts]]
""",
    "mmdet": "",
    "mmdet/apis": """
import numpy
def init_detector(config, weights, device):
    assert config.endswith("configs/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py")
def inference_detector(network, picture):  # a dog on the left half of every picture
    mask = numpy.zeros((40, 48), dtype=bool)
    mask[:, :24] = True
    return [numpy.array([[0, 0, 24, 40, 0.95]]), numpy.zeros((0, 5))], [[mask], []]
""",
    "open_clip": """
import torch
class Model(torch.nn.Module):  # the color of the first corner, and the first words of a text
    encode_image = staticmethod(lambda images: images.flatten(1)[:, :3])
    encode_text = staticmethod(lambda texts: texts)
def create_model_and_transforms(name, pretrained, device):
    assert name == "ViT-L-14" and pretrained.endswith("ViT-L-14.pt")
    return Model(), None, lambda image: torch.tensor(image.getpixel((0, 0))).float()
def get_tokenizer(name):
    seen = {"red": [1.0, 0.1, 0.1], "green": [0.1, 1.0, 0.1], "blue": [0.1, 0.1, 1.0]}
    return lambda texts: torch.tensor(
        [next((v for k, v in seen.items() if k in text), [-1.0, -1, -1]) for text in texts])
""",
    "modelscope": "",
    "modelscope/utils": "",
    "modelscope/utils/constant": "class Tasks: visual_question_answering = 'vqa'",
    "modelscope/pipelines": """
def pipeline(task, model, device):
    assert (task, device) == ("vqa", "cpu")
    return lambda asked: {"text": "yes" if "dog" in asked["question"] else "no"}
""",
}
GENEVAL = (
    {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "dog"},
    {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "blue"}], "prompt": "blue"},
    {"tag": "counting", "include": [{"class": "dog", "count": 1}],
     "exclude": [{"class": "dog", "count": 2}], "prompt": "one dog"},
    {"tag": "two_object", "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}],
     "prompt": "dog and cat"},
)  # fmt: skip
ASKED = """item_id,text,proposition_id,dependency,question_natural_language
0,left out,1,0,Is this row left out?
1,a dog,1,0,Is there a dog?
1,a dog,2,1,Is the dog brown?
1,a dog,3,0,Is there a house?
1,a dog,4,3,Does the dog live in the house?
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weight files, and an interpreter with packages of the rewards' names."""
    for name, text in FAKES.items():
        folder = tmp_path / "other" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)
    (tmp_path / "ImageReward.pt").write_bytes(b"weights")
    (tmp_path / "med_config.json").write_text("{}")
    state = {"state_dict": {"weight": torch.eye(3)[[1, 0, 2]]}}
    torch.save(state, tmp_path / "HPS_v2.1_compressed.pt")
    (tmp_path / "evaluation_metadata.jsonl").write_text("\n".join(map(json.dumps, GENEVAL)))
    (tmp_path / "object_names.txt").write_text("dog\ncat\n")
    (tmp_path / "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.pth").write_bytes(b"weights")
    (tmp_path / "ViT-L-14.pt").write_bytes(b"weights")
    (tmp_path / "dpg_bench.csv").write_text(ASKED)
    mplug = tmp_path / "mplug_visual-question-answering_coco_large_en"
    mplug.mkdir()
    (mplug / "configuration.json").write_text("{}")
    monkeypatch.setitem(
        weights.WEIGHTS, "geneval-clip", replace(weights.WEIGHTS["geneval-clip"], sha256=None)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DIFFCACHE_WEIGHTS", str(tmp_path))
    for package in reward.PACKAGES.values():
        monkeypatch.setenv(package.variable, sys.executable)
    return tmp_path


def test_packages_are_asked_in_another_interpreter(elsewhere: Path) -> None:
    networks = at_hand("cpu", films=False, reward_name="imagereward, hpsv2")
    given = pictures(2)
    for _ in range(2):
        found = networks.of_pictures(given, ["a", "bc"])
        assert found["image_reward"].tolist() == [1.048, 2.048]
        corner = given[:, :, 0, 0].double()
        expected = [corner[0, 0], corner[1, 2]]  # rows 0 and 1 of the weights are swapped
        assert found["hps_v2"].tolist() == pytest.approx(
            [float(v / c.norm()) for v, c in zip(expected, corner, strict=True)], rel=1e-6
        )
    assert (elsewhere / "log").read_text() == "loaded "  # once, not for every batch
    told = describe([{"fidelity": {}, "quality": {"image_reward": {}, "hps_v2": {}}}], networks, (8, 8))  # fmt: skip
    assert [told[key]["title"] for key in ("image_reward", "hps_v2")] == ["ImageReward", "HPSv2.1"]
    assert {told[key]["backend"] for key in told} == {"real"}


def test_benchmarks_of_prompts_are_asked_in_another_interpreter(elsewhere: Path) -> None:
    given = torch.zeros(4, 3, 40, 48, dtype=torch.uint8)
    given[:, 2] = 255  # blue
    asked = [line["prompt"] for line in GENEVAL]
    geneval = reward.load("geneval")["geneval"]
    assert geneval(given, asked).tolist() == [1, 1, 1, 0]
    assert geneval(given.flip(1)[:2], asked[:2]).tolist() == [1, 0]  # red
    # Of the dog's questions two hold; the last one hangs on a house that is not there.
    assert reward.load("dpg-bench")["dpg_bench"](given[:1], ["a dog"]).tolist() == [0.5]
    with pytest.raises(reward.RewardError, match="none of GenEval's"):
        geneval(given[:1], ["a unicorn"])


def test_geneval_looks_at_directions_numbers_and_what_is_unwanted() -> None:
    left, right, above = (0, 10, 10, 20, 0.9), (40, 10, 50, 20, 0.9), (40, -40, 50, -30, 0.9)
    assert geneval.directions(left, right) == {"left of"}
    assert geneval.directions(right, left) == {"right of"}
    assert geneval.directions(above, right) == {"above"}
    assert geneval.directions(left, left) == set()
    assert geneval.directions((1, 10, 11, 20), left) == set()  # within a tenth of both sizes
    objects = {"dog": [(left, None), (right, None)], "cat": [(above, None)]}

    def right_for(*include: dict, exclude: tuple[dict, ...] = ()) -> bool:
        return geneval.is_right(
            objects, {"include": include, "exclude": exclude}, lambda found, name: ["red", "blue"]
        )

    two = {"class": "dog", "count": 2}
    assert right_for(two) and not right_for({"class": "dog", "count": 3})
    assert not right_for(two, exclude=({"class": "cat", "count": 1},))
    assert right_for(two, exclude=({"class": "cat", "count": 2},))
    assert right_for({"class": "dog", "count": 1, "color": "blue"})
    assert not right_for(two | {"color": "blue"})
    cat = {"class": "cat", "count": 1}
    one = {"class": "dog", "count": 1}
    assert right_for(one, cat | {"position": ["above", 0]})
    assert not right_for(one, cat | {"position": ["left of", 0]})
    assert not right_for({"class": "dog", "count": 3}, cat | {"position": ["above", 0]})
    boxes = [[(0, 0, 1, 1, 0.5), (0, 0, 1, 1, 0.8), (0, 0, 1, 1, 0.2)], [(0, 0, 1, 1, 0.1)]]
    assert geneval.kept(boxes, None, ["dog", "cat"], 0.3) == {
        "dog": [((0, 0, 1, 1, 0.8), None), ((0, 0, 1, 1, 0.5), None)]
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'No module named ImageReward' >&2; exit 3", "code 3.*No module named ImageReward"),
        ("exit 0", "ended with code 0.*nothing on its error output"),
        ("echo 'not JSON'; cat >/dev/null", "answered 'not JSON.*no numbers"),
        ("echo '[1.0]'; cat >/dev/null", r"returned \[1\], not \[2\]"),
        ("echo '[1.0, NaN]'; cat >/dev/null", "not a finite number"),
    ],
)
def test_an_interpreter_that_fails_is_quoted(
    elsewhere: Path, body: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = elsewhere / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("DIFFCACHE_REWARD_PYTHON", str(program))
    asked = reward.load("imagereward")["image_reward"]
    with pytest.raises(reward.RewardError, match=f"(?s){words}"):
        reward.score(asked, pictures(2), ["a", "b"])


@pytest.mark.parametrize(
    ("name", "variable", "file"),
    [
        ("imagereward", "DIFFCACHE_REWARD_PYTHON", "med_config.json"),
        ("hpsv2", "DIFFCACHE_HPSV2_PYTHON", "HPS_v2.1_compressed.pt"),
        ("pickscore", "", "PickScore_v1"),
    ],
)
def test_a_reward_says_what_is_missing(
    name: str, variable: str, file: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(elsewhere))
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / file).unlink(missing_ok=True)
    with pytest.raises(MissingError, match=f"{file}.* get it from https://huggingface.co/"):
        reward.load(name)
    if variable:
        monkeypatch.setenv(variable, str(elsewhere / "none"))
        with pytest.raises(MissingError, match="there is no such interpreter"):
            reward.load(name)
        monkeypatch.delenv(variable)
        with pytest.raises(MissingError, match=f"pip install .* set {variable} to its python"):
            reward.load(name)
