"""CLIP score on a small random model, compared with the definition written out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.eval.metrics import clip, weights

ROOT = Path(__file__).parents[2]


def pictures(count: int, height: int = 40, width: int = 48, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


LONGEST = 12


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random CLIP model with the tokenizer of the shipped pipeline."""
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = AutoTokenizer.from_pretrained(
        ROOT / "assets" / "models" / "shapes-flux" / "tokenizer"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={
            **sizes,
            "num_attention_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": LONGEST,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _, processor, _ = clip.classes()
    sides = {"height": 32, "width": 32}
    processor(size={"shortest_edge": 32}, crop_size=sides).save_pretrained(folder)
    return folder


def test_clip_score_is_a_hundred_times_the_cosine(clip_folder: Path) -> None:
    from transformers import CLIPModel

    scorer = clip.ClipScore(clip_folder)
    given, prompts = pictures(3, 32, 32), ["a small red ring", "a large blue cross", "green"]
    found = scorer(given, prompts, batch_size=2)

    model = CLIPModel.from_pretrained(clip_folder, local_files_only=True).eval()
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    spread = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    for place, prompt in enumerate(prompts):
        tokens = scorer.tokenizer([prompt], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model(
                input_ids=tokens, pixel_values=((given[place] / 255 - mean) / spread)[None]
            )
        cosine = (output.image_embeds * output.text_embeds).sum()
        torch.testing.assert_close(
            found[place].float(), 100 * cosine.clamp(min=0), rtol=1e-4, atol=1e-3
        )
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
