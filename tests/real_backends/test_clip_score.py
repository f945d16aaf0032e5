"""CLIP score on a small random model, compared with the definition written out."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from diffcache.eval.metrics import clip, weights
from tests.real_backends.files import pictures, save_clip, seen_by_clip

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
    with pytest.raises(weights.MissingWeightsError, match=r"huggingface\.co/openai/clip"):
        clip.ClipScore(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not a folder with a CLIP model"):
        clip.ClipScore(tmp_path)
    with pytest.raises(ValueError, match="2 pictures need as many prompts, not 1"):
        clip.ClipScore(clip_folder)(pictures(2), ["a ring"])
