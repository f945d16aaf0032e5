"""A film that is decoded in pieces is the film that is decoded at once, to the bit."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.utils.logging import disable_propagation, enable_propagation
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from diffcache.errors import AttachError
from diffcache.pipelines.small import wan
from diffcache.pipelines.streaming_vae import WanDecoder
from tests.video.test_checkpoint import published

CUTS = ([3, 3, 3], [1, 2, 6], [1] * 9)


def autoencoder(**settings: Any) -> Any:
    """Return a tiny causal autoencoder that makes four pictures of a latent frame."""
    torch.manual_seed(0)
    settings = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1,
                "temperal_downsample": [True, True], "latents_mean": [0.1, -0.7, 0.0, 1.5],
                "latents_std": [2.8, 1.4, 0.3, 1.0], **settings}  # fmt: skip
    return AutoencoderKLWan(**settings).eval()


def at_once(vae: Any, latents: Tensor) -> Tensor:
    """Return what an autoencoder makes of all latents at once, as WanPipeline gives them to it."""
    mean, std = (
        torch.tensor(x)[:, None, None, None]
        for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        made: Tensor = vae.decode(latents / (1 / std) + mean).sample
    return made.clamp(-1, 1)


def latents(seed: int = 0, frames: int = 9) -> Tensor:
    """Return latents of a film of two rows."""
    return torch.randn(2, 4, frames, 4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "settings",
    [{}, {"patch_size": 2, "out_channels": 12, "is_residual": True, "decoder_base_dim": 8}],
    ids=["wan 2.1", "wan 2.2"],
)
def test_any_cut_decodes_to_the_same_film(settings: dict[str, Any]) -> None:
    vae = autoencoder(**settings)
    films = [latents(seed) for seed in range(len(CUTS))]
    whole = [at_once(vae, film) for film in films]
    assert whole[0].shape[:3] == (2, 3, 33)
    streams = [WanDecoder(vae) for _ in CUTS]
    pictures: list[list[Tensor]] = [[] for _ in CUTS]
    pieces = [list(film.split(cut, 2)) for film, cut in zip(films, CUTS, strict=True)]
    while any(pieces):  # a piece of each film in turn
        for number, stream in enumerate(streams):
            if pieces[number]:
                pictures[number].append(stream.decode(pieces[number].pop(0)))
    for made, wanted, stream in zip(pictures, whole, streams, strict=True):
        assert torch.equal(torch.cat(made, 2), wanted)
        assert stream.frames == 9


def test_what_is_held_does_not_grow_and_a_failed_frame_can_be_given_again() -> None:
    vae, film = autoencoder(), latents()
    stream, other = WanDecoder(vae), WanDecoder(vae)
    assert stream.nbytes == 0
    stream.decode(film[:, :, :4])
    other.decode(film[:, :, :4])
    held = stream.nbytes
    stop = vae.decoder.conv_out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream.decode(film[:, :, 4:])
    stop.remove()
    assert torch.equal(stream.decode(film[:, :, 4:]), other.decode(film[:, :, 4:]))
    assert stream.nbytes == held > 0
    stream.reset()
    assert torch.equal(stream.decode(film), at_once(vae, film))


def test_what_does_not_fit_is_refused() -> None:
    stream = WanDecoder(autoencoder())
    with pytest.raises(ValueError, match=r"latents=\[2, 3, 9, 4, 6\]: must be .* C=4"):
        stream.decode(latents()[:, :3])
    stream.decode(latents())
    with pytest.raises(ValueError, match="this film is of B=2, H=4, W=6; reset"):
        stream.decode(latents()[:1])
    with pytest.raises(AttachError, match="AutoencoderKL: films are decoded in pieces by"):
        WanDecoder(AutoencoderKL())


def tiny_wan(folder: Path) -> tuple[Path, Path]:
    """Save a tiny WanPipeline of 16 channels with Wan's statistics, and causal weights for it."""
    torch.manual_seed(0)
    pipe = WanPipeline.from_pretrained(wan.DIRECTORY)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    text = UMT5EncoderModel(UMT5Config(vocab_size=len(pipe.tokenizer), **sizes))
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    transformer = WanTransformer3DModel(
        num_attention_heads=1, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=1
    )
    torch.nn.init.normal_(transformer.proj_out.weight)
    parts = {**pipe.components, "text_encoder": text, "vae": vae, "transformer": transformer}
    WanPipeline(**parts).save_pretrained(folder / "wan")
    torch.save({"generator_ema": published(transformer)}, folder / "causal.pt")
    return folder / "wan", folder / "causal.pt"


def test_the_documented_lines_make_the_pictures_of_the_pipeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "causal_video.md").read_text(encoding="utf-8")
    (lines,) = (x for x in re.findall(r"```python\n(.*?)```", docs, re.S) if "load_causal(" in x)
    folder, weights = tiny_wan(tmp_path)
    for name, here in {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": str(folder), "self_forcing_dmd.pt": str(weights),
        "cuda": "cpu", "size=(60, 104)": "size=(4, 6)",
        "decoder.decode(session.next())": "decoder.decode(latents := session.next())",
    }.items():  # fmt: skip
        assert lines.count(name) == 1
        lines = lines.replace(name, here)
    made: dict[str, Any] = {}
    enable_propagation()
    with caplog.at_level(logging.WARNING, "diffusers"):
        exec(lines, made)
    disable_propagation()
    assert "float32" not in caplog.text
    pipe, film = made["pipe"], made["latents"]
    assert made["text"].shape[:2] == (1, 512) and film.dtype == torch.bfloat16
    dtypes = {n: x.dtype for n, x in pipe.transformer.named_parameters() if x.dim() == 3}
    assert dtypes == dict.fromkeys(dtypes, torch.float32) and dtypes  # the modulation
    pipe.scheduler.step = lambda _, time, x, **rest: (x,)  # the latents are finished
    wanted = pipe(
        prompt_embeds=made["text"], guidance_scale=1.0, height=32, width=48, num_frames=9,
        num_inference_steps=1, latents=film, output_type="pt",
    ).frames  # fmt: skip
    assert torch.equal(made["pictures"].transpose(1, 2) * 0.5 + 0.5, wanted)
