"""Networks of published metrics, with small files in the place of their weights."""

import dataclasses
import importlib.machinery
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from diffcache.errors import MissingError
from diffcache.eval.metrics import clip, i3d, inception, lpips, reward, weight_files
from diffcache.eval.metrics.sets import quality
from diffcache.eval.runs.extractors import at_hand
from diffcache.eval.runs.record import describe
from tests.real_backends.files import accept, fake_module, pictures, save_clip, seen_by_clip

SIZES = [(64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3)]
PLACES = [0, 3, 6, 8, 10]


def alexnet() -> dict[str, Tensor]:
    """Return random weights under the names of torchvision's file."""
    state = {}
    for place, (out, into, side) in zip(PLACES, SIZES, strict=True):
        state[f"features.{place}.weight"] = torch.randn(out, into, side, side) / (into * side**2) ** 0.5
        state[f"features.{place}.bias"] = torch.randn(out) / 10
    state["classifier.1.weight"] = torch.zeros(2, 2)
    return state


def written_out(state: dict[str, Tensor], heads: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
    """LPIPS of one pair by its formula, in float64."""

    def maps(picture: Tensor) -> list[Tensor]:
        x = picture[None].double() / 127.5 - 1
        shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        x = (x - shift.double().view(1, 3, 1, 1)) / scale.double().view(1, 3, 1, 1)
        found = []
        for level, (place, stride, padding) in enumerate(zip(PLACES, (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), strict=True)):
            if level in (1, 2):
                x = functional.max_pool2d(x, 3, 2)
            weight, bias = (state[f"features.{place}.{kind}"].double() for kind in ("weight", "bias"))
            x = functional.conv2d(x, weight, bias, stride=stride, padding=padding).clamp(min=0)
            found.append(x)
        return found

    total = torch.zeros((), dtype=torch.float64)
    for level, (one, other) in enumerate(zip(maps(a), maps(b), strict=True)):
        weight = heads[f"lin{level}.model.1.weight"].double().flatten()
        for y in range(one.shape[2]):
            for x in range(one.shape[3]):
                u, v = one[0, :, y, x], other[0, :, y, x]
                u, v = u / (u.square().sum() + 1e-8).sqrt(), v / (v.square().sum() + 1e-8).sqrt()
                total = total + (weight * (u - v) ** 2).sum() / (one.shape[2] * one.shape[3])
    return total


def test_lpips_is_its_formula(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = alexnet()
    file = tmp_path / "alexnet.pth"
    torch.save(state, file)
    with pytest.raises(weight_files.WrongWeightsError, match="is not alexnet-owt"):
        lpips.load(file)
    accept(monkeypatch, "alexnet", file)
    network = lpips.load(file)
    heads = torch.load(lpips.heads_file(), map_location="cpu", weights_only=True)
    a, b = pictures(3), pictures(3, seed=1)
    found = network.distances(a, b, batch_size=2)
    expected = torch.stack([written_out(state, heads, *pair) for pair in zip(a, b, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert found.min() > 0.01
    assert network.distances(a, a).abs().max() == 0
    assert network.entry()["sha256"] == weight_files.sha256(file)


def test_lpips_heads_are_those_of_version_0_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert weight_files.sha256(lpips.heads_file()) == lpips.HEADS_SHA256
    file = tmp_path / "alexnet.pth"
    torch.save(alexnet(), file)
    accept(monkeypatch, "alexnet", file)
    monkeypatch.setattr(lpips, "HEADS_SHA256", "0" * 64)
    with pytest.raises(weight_files.WrongWeightsError, match="another version of torchmetrics"):
        lpips.load(file)


class FakeI3D(nn.Module):
    """Called as StyleGAN-V's torchscript is; its features show how."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        flags = float(rescale) + 2 * float(resize) + 4 * float(return_features)
        found = torch.zeros(x.shape[0], self.width)
        found[:, 0] = flags
        found[:, 1] = x[:, 0, 1].mean(dim=(1, 2))
        found[:, 2] = float(x.shape[2])
        return found


def i3d_file(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int = 400) -> Path:
    file = folder / "i3d_torchscript.pt"
    torch.jit.script(FakeI3D(width)).save(str(file))
    accept(monkeypatch, "i3d", file)
    return file


def test_i3d_is_called_as_stylegan_v_calls_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = i3d.I3D(i3d_file(monkeypatch, tmp_path))
    films = [pictures(16, 8, 8, seed=seed) for seed in range(5)]
    found = network.features(films, batch_size=2)
    assert found.shape == (5, 400)
    assert found[:, 0].tolist() == [7.0] * 5  # rescale, resize and return_features, all of them
    expected = [film[1, 0].float().mean().item() for film in films]  # red of the second frame
    assert found[:, 1].tolist() == pytest.approx(expected)
    assert found[:, 2].tolist() == [16.0] * 5
    assert network.entry()["sha256"] == weight_files.sha256(tmp_path / "i3d_torchscript.pt")


def test_i3d_refuses_films_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = i3d.I3D(i3d_file(monkeypatch, tmp_path))
    with pytest.raises(ValueError, match="there are none"):
        network.features([])
    with pytest.raises(ValueError, match="film 1 is"):
        network.features([pictures(16, 8, 8), pictures(17, 8, 8)])
    with pytest.raises(ValueError, match="9 frames: FVD needs films of 10"):
        network.features([pictures(9, 8, 8)])
    other = i3d.I3D(i3d_file(monkeypatch, tmp_path, width=5))
    with pytest.raises(ValueError, match=r"returned \[1, 5\], not \[1, 400\]"):
        other.features([pictures(10, 8, 8)])


POOL, CLASSES = 2048, 1008


class FakeExtractor(nn.Module):
    """Takes what torch-fidelity's extractor takes; its features show what it was called with."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path: str):
        super().__init__()
        assert features_list == ["2048", "logits_unbiased"]
        self.scale = torch.load(feature_extractor_weights_path, weights_only=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.dtype == torch.uint8 and not self.training
        mean = x.float().mean(dim=(1, 2, 3))[:, None] * self.scale
        return mean.expand(-1, POOL), torch.arange(CLASSES) / CLASSES * mean / 255


@pytest.fixture
def inception_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / weight_files.WEIGHTS["inception"].file
    torch.save(torch.tensor(2.0), file)
    accept(monkeypatch, "inception", file)
    return file


def test_inception_hands_on_the_very_bytes(monkeypatch: pytest.MonkeyPatch, inception_file: Path) -> None:
    fake_module(monkeypatch, "torch_fidelity")
    fake_module(monkeypatch, "torch_fidelity.feature_extractor_inceptionv3", FeatureExtractorInceptionV3=FakeExtractor)
    network = dataclasses.replace(inception.load(inception_file), batch_size=2)
    given = pictures(5)
    found = network(given)
    assert found.pool.shape == (5, POOL) and found.logits is not None
    torch.testing.assert_close(found.pool[:, 0], 2 * given.float().mean(dim=(1, 2, 3)))
    probabilities = found.probabilities()
    assert probabilities.dtype == torch.float64
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(probabilities.log().diff().mean(1), found.logits.double().diff().mean(1))
    assert network.entry()["convention"] == "torch-fidelity"
    with pytest.raises(ValueError, match="must be uint8"):
        network(given.float() / 255)
    with pytest.raises(ValueError, match="convention='cleaner': must be one of torch-fid"):
        inception.load(inception_file, "cleaner")


@pytest.mark.skipif(importlib.util.find_spec("torch_fidelity") is not None, reason="torch-fidelity is installed")
def test_inception_without_its_library_says_what_to_install(inception_file: Path) -> None:
    with pytest.raises(inception.MissingPackageError, match=r"diffcache\[fid\]"):
        inception.load(inception_file)


def test_inception_is_torch_fidelitys_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", exc_type=ImportError)
    extractor = module.FeatureExtractorInceptionV3
    plain = object.__new__(extractor)  # its weights are only known once it has them
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda *a, **k: {})
    monkeypatch.setattr(extractor, "load_state_dict", lambda self, state: None)
    plain.__init__("x", ["2048", "logits_unbiased"])
    monkeypatch.undo()
    file = tmp_path / weight_files.WEIGHTS["inception"].file
    torch.save(plain.state_dict(), file)
    accept(monkeypatch, "inception", file)
    found = inception.load(file)(pictures(2))
    pool, logits = plain(pictures(2))
    torch.testing.assert_close(found.pool, pool)
    torch.testing.assert_close(found.logits, logits)


class Layers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)[:, :2048]


class CleanNetwork(nn.Module):
    """Has the parts of clean-fid's wrapper: resized pictures from 0 to 255 in, features out."""

    def __init__(self, path: str, download: bool, resize_inside: bool) -> None:
        super().__init__()
        assert not download and not resize_inside
        self.layers = torch.jit.load(str(Path(path) / "inception-2015-12-05.pt"))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (3, 299, 299) and x.dtype == torch.float32
        return self.layers((x - 128) / 128)


def clean_resizer(mode: str) -> object:
    assert mode == "clean"

    def resize(array: np.ndarray) -> np.ndarray:
        bands = [Image.fromarray(array[..., band].astype(np.float32)) for band in range(3)]
        resized = [np.asarray(band.resize((299, 299), Image.Resampling.BICUBIC)) for band in bands]
        return np.stack(resized, axis=2).clip(0, 255)

    return resize


def test_the_clean_convention_goes_through_clean_fid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_module(monkeypatch, "cleanfid")
    fake_module(monkeypatch, "cleanfid.resize", build_resizer=clean_resizer)
    fake_module(monkeypatch, "cleanfid.inception_torchscript", InceptionV3W=CleanNetwork)
    file = tmp_path / "inception-2015-12-05.pt"
    torch.jit.script(Layers()).save(str(file))
    accept(monkeypatch, "inception-clean", file)
    network = inception.load(file, "clean")
    given = pictures(3)
    found = network(given)
    assert found.pool.shape == (3, 2048) and found.logits is None
    red = np.asarray(
        Image.fromarray(given[1, 0].numpy().astype(np.float32)).resize((299, 299), Image.Resampling.BICUBIC)
    )
    row = (torch.from_numpy(red.clip(0, 255)).flatten()[:2048] - 128) / 128
    torch.testing.assert_close(found.pool[1], row)
    with pytest.raises(ValueError, match="the clean convention has no logits"):
        found.probabilities()
    other = shutil.copy(file, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"call the file inception-2015-12-05\.pt"):
        inception.load(other, "clean")


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder


def test_clip_score_is_a_hundred_times_the_cosine(clip_folder: Path) -> None:
    from transformers import CLIPModel

    scorer = clip.ClipScore(clip_folder)
    given, prompts = pictures(3, 32, 32), ["a fox left of an owl", "a car on grass", "a frog"]
    found = scorer(given, prompts, batch_size=2)

    model = CLIPModel.from_pretrained(clip_folder, local_files_only=True).eval()
    for place, prompt in enumerate(prompts):
        output = seen_by_clip(model, scorer.tokenizer, given[place], prompt)
        cosine = (output.image_embeds * output.text_embeds).sum()
        torch.testing.assert_close(found[place].float(), 100 * cosine.clamp(min=0), rtol=1e-4, atol=1e-3)
        cosines = functional.cosine_similarity(
            scorer.image_features(given[place : place + 1]), scorer.text_features([prompt])
        )
        torch.testing.assert_close(cosines[0].float(), cosine, rtol=1e-4, atol=1e-5)
        assert cosine.abs() > 0.001
    assert found.dtype == torch.float64 and found.min() >= 0 and found.max() <= 100
    assert scorer.entry()["extractor"] == clip_folder.name


def test_clip_score_is_clamped_at_zero(monkeypatch: pytest.MonkeyPatch, clip_folder: Path) -> None:
    scorer = clip.ClipScore(clip_folder)
    image = torch.eye(2, dtype=torch.float64)
    text = torch.tensor([[3.0, 4.0], [0.0, -2.0]], dtype=torch.float64)
    monkeypatch.setattr(scorer, "image_features", lambda these: image)
    monkeypatch.setattr(scorer, "text_features", lambda these: text)
    assert scorer(pictures(2), ["a", "b"]).tolist() == pytest.approx([60.0, 0.0])


def test_long_prompts_are_cut_and_said_so(clip_folder: Path) -> None:
    scorer = clip.ClipScore(clip_folder)
    prompt = "a small red ring " * 10
    with pytest.warns(UserWarning, match="1 of 2 prompts have more than 12 tokens"):
        found = scorer(pictures(2), [prompt, "a ring"])
    assert found.shape == (2,)
    cut = scorer.text_features([prompt])
    torch.testing.assert_close(cut, scorer.text_features([prompt + "blue cross"]))


def test_clip_score_refuses_what_is_not_there(clip_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(weight_files.MissingWeightsError, match=r"huggingface\.co/openai/clip"):
        clip.ClipScore(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not a folder with a CLIP model"):
        clip.ClipScore(tmp_path)
    with pytest.raises(ValueError, match="2 pictures need as many prompts, not 1"):
        clip.ClipScore(clip_folder)(pictures(2), ["a ring"])


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
    code = told["reward_bright"].pop("sha256")
    assert told["reward_bright"] == dict(
        title="bright", unit="", direction="up", backend="user", extractor="my_rewards:bright"
    )
    monkeypatch.setattr(reward.weight_files, "sha256", lambda file: "another")  # of code that was changed meanwhile
    assert at_hand("cpu", films=False, reward_name="my_rewards:bright").entries["reward_bright"]["sha256"] != code
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
    given, prompts = pictures(3, 32, 32), ["a fox left of an owl", "a car on grass", "1984"]
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
