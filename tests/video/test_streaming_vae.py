"""A film that is decoded in pieces is the film that is decoded at once, to the bit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel
from typer.testing import CliRunner

from diffcache import cli
from diffcache.eval.workshop.small import sticker_wan as wan
from diffcache.kv.life.save import SavedCacheError
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.session_film import policies
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import FewSteps, Flush, Recache
from tests.internals import cut_off
from tests.video.test_checkpoint import published

NAMES = policies()

CUTS = ([2, 2, 2], [1, 2, 3], [1] * 6)


def autoencoder(**settings: Any) -> Any:
    """Return a tiny causal autoencoder that makes four pictures of a latent frame."""
    torch.manual_seed(0)
    sizes = dict(base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True])
    scales = dict(latents_mean=[0.1, -0.7, 0.0, 1.5], latents_std=[2.8, 1.4, 0.3, 1.0])
    return AutoencoderKLWan(**sizes | scales | settings).eval()


def at_once(vae: Any, latents: Tensor) -> Tensor:
    """Return what an autoencoder makes of all latents at once, as WanPipeline gives them to it."""
    mean, std = (torch.tensor(x)[:, None, None, None] for x in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        made: Tensor = vae.decode(latents / (1 / std) + mean).sample
    return made.clamp(-1, 1)


def latents(seed: int = 0, frames: int = 6) -> Tensor:
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
    assert whole[0].shape[:3] == (2, 3, 21)
    streams = [WanDecoder(vae) for _ in CUTS]
    pictures: list[list[Tensor]] = [[] for _ in CUTS]
    pieces = [list(film.split(cut, 2)) for film, cut in zip(films, CUTS, strict=True)]
    while any(pieces):  # a piece of each film in turn
        for number, stream in enumerate(streams):
            if pieces[number]:
                pictures[number].append(stream.decode(pieces[number].pop(0)))
    for made, wanted, stream in zip(pictures, whole, streams, strict=True):
        assert torch.equal(torch.cat(made, 2), wanted)
        assert stream.frames == 6


def test_what_is_held_does_not_grow_and_a_failed_frame_can_be_given_again() -> None:
    vae, film = autoencoder(), latents()
    stream, other = WanDecoder(vae), WanDecoder(vae)
    assert stream.nbytes == 0
    stream.decode(film[:, :, :4])
    other.decode(film[:, :, :4])
    held = stream.nbytes
    with cut_off([vae.decoder.conv_out], error=ZeroDivisionError()):
        stream.decode(film[:, :, 4:])
    assert torch.equal(stream.decode(film[:, :, 4:]), other.decode(film[:, :, 4:]))
    assert stream.nbytes == held > 0
    stream.reset()
    assert torch.equal(stream.decode(film), at_once(vae, film))


def tiny_wan(folder: Path) -> tuple[Path, Path]:
    """Save a tiny WanPipeline of 16 channels with Wan's statistics, and causal weights for it."""
    torch.manual_seed(0)
    pipe = WanPipeline.from_pretrained(wan.DIRECTORY)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    text = UMT5EncoderModel(UMT5Config(vocab_size=len(pipe.tokenizer), **sizes))
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    transformer = WanTransformer3DModel(num_attention_heads=1, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=1)
    torch.nn.init.normal_(transformer.proj_out.weight)
    parts = {**pipe.components, "text_encoder": text, "vae": vae, "transformer": transformer}
    WanPipeline(**parts).save_pretrained(folder / "wan")
    size = {"call": {"height": 32, "width": 48}}
    (folder / "wan" / "diffcache.json").write_text(json.dumps(size))
    torch.save({"generator_ema": published(transformer)}, folder / "causal.pt")
    return folder / "wan", folder / "causal.pt"


def test_the_documented_lines_make_the_pictures_of_the_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "causal_video.md").read_text(encoding="utf-8")
    (lines,) = (x for x in re.findall(r"```python\n(.*?)```", docs, re.S) if "checkpoint=" in x)
    folder, weights = tiny_wan(tmp_path)
    for name, here in {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": str(folder),
        "self_forcing_dmd.pt": str(weights),
        '"cuda"': '"cpu", dtype=torch.bfloat16',
        "print(frames.shape)": "film.append(frames)",
        "chunks=7": "chunks=2",
    }.items():
        assert lines.count(name) == 1
        lines = lines.replace(name, here)
    made: dict[str, Any] = {"torch": torch, "film": []}
    exec(lines, made)
    video, film = made["video"], np.concatenate(made["film"])
    assert film.shape == (21, 32, 48, 3) and film.dtype == np.uint8
    assert "float32" not in capsys.readouterr().err  # which diffusers warns of
    dtypes = {n: x.dtype for n, x in video.transformer.named_parameters() if x.dim() == 3}
    assert dtypes == dict.fromkeys(dtypes, torch.float32) and dtypes  # the modulation
    text = video.embed(made["prompt"])
    assert text.shape[:2] == (1, 512)
    session = video.session(text, size=(4, 6), policy="infinity-rope", seed=0)
    latents = torch.cat([session.next() for _ in range(2)], 2)
    pipe = video.pipe
    video.close()
    pipe.scheduler.step = lambda _, time, x, **rest: (x,)  # the latents are finished
    asked = dict(height=32, width=48, num_frames=21, num_inference_steps=1, guidance_scale=1.0, output_type="np")
    wanted = pipe(prompt_embeds=text, latents=latents, **asked).frames[0]
    assert np.array_equal(film, (255 * wanted).round().astype(np.uint8))


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo.from_pretrained("sticker-causal") as opened:
        opened.sampler = FewSteps((1000,), predicts="clean")
        yield opened


SHORT = {"size": (16, 16)}


@pytest.mark.parametrize("name", dict.fromkeys([*NAMES[::3], "full", "quantized", "layer-budgets", "deep-forcing"]))
def test_the_bytes_that_are_told_before_are_those_that_are_held(
    video: CausalVideo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WanDecoder, "decode", lambda self, x: torch.zeros(1, 3, 1, 1, 1))
    # Deep Forcing with rotated keys holds less after the last chunk than before it.
    for read_once in (False, True) if name in ("quantized", "deep-forcing") else (False,):
        stream = video.stream("a fox", policy=name, chunks=12, read_once=read_once, **SHORT)
        held = []
        for _ in stream:
            held.append(stream.session.store.nbytes)
        assert stream.expected_bytes >= max(held) and len(held) == 12
        if name not in ("semantic-bank", "layer-budgets"):  # which hold less, by what they see
            assert stream.expected_bytes == max(held)
    longer = video.expected_bytes(name, frames=48, read_once=read_once, **SHORT)
    assert (longer > stream.expected_bytes) == (name == "full")


def test_defaults_hold_no_more_than_the_released_code_sets_aside() -> None:
    """Self-Forcing, 832 x 480: 21 frames of 1,560 tokens, 30 layers, keys and values, bfloat16."""
    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=12, num_layers=30, ffn_dim=8)
    official = 21 * 1560 * 30 * 2 * 1536 * 2
    with CausalVideo(model.to(torch.bfloat16)) as video:
        full = video.expected_bytes("full", frames=21)
        assert official < full < 1.01 * official
        window = video.expected_bytes("window", frames=21)
        assert window < 0.6 * official
        kept = video.expected_bytes("window", frames=21, read_once=True)
        assert kept == pytest.approx(1.5 * window, rel=0.01)
    assert CausalVideo.session.__kwdefaults__["read_once"] is False


def test_a_stream_takes_orders_and_goes_on_where_it_was_saved(video: CausalVideo, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policy": "window:window=3", "seed": 5, "read_once": True, **SHORT}
    one, other = (video.stream("a fox", **settings) for _ in "ab")
    assert np.array_equal(next(one), next(other))
    with cut_off([video.pipe.vae.decoder], error=ZeroDivisionError()):
        next(one)
    one.save(tmp_path)  # with a chunk that was made and not decoded
    one.resume(tmp_path)
    assert np.array_equal(next(one), next(other))
    one.save(tmp_path)
    with pytest.raises(SavedCacheError, match="of another moment or size"):
        video.stream("a fox", size=(16, 32)).resume(tmp_path)
    later = video.stream("an owl", policy="full", **SHORT)
    later.resume(tmp_path)
    assert later.policy == "window:window=3"
    assert (later.prompt, later.made, later.session.frames) == ("a fox", 2, 6)
    assert later.expected_bytes == one.expected_bytes  # which keeps rotated keys
    for each in (one, later):
        each.switch("a crab", Flush())
        next(each)
        each.use("infinity-rope")
    assert np.array_equal(next(one), next(later)) and one.policy == "infinity-rope"
    assert not np.array_equal(next(one), next(other))
    one.switch("an owl")  # an order for the next chunk outlives the policy before it
    one.use("window:window=3")
    next(one)
    assert torch.equal(one.session.prompt, video.embed("an owl"))
    one.switch("a fox", Recache(12))  # more than the next policy can make anew
    with pytest.raises(ValueError, match="frames=12: StreamDiffusionV2.* can make at most"):
        one.use("stream-diffusion-v2")
    assert one.policy == "window:window=3"
    one.save(tmp_path)
    (tmp_path / "pictures.safetensors").write_bytes(b"cut")
    with pytest.raises(SavedCacheError):
        later.resume(tmp_path)


def test_pictures_that_wait_to_be_shown_are_saved(video: CausalVideo, tmp_path: Path) -> None:
    start = np.random.default_rng(0).integers(0, 255, (3, *SHORT["size"], 3), dtype=np.uint8)
    begun = video.stream("a fox", start=start, **SHORT)
    begun.save(tmp_path / "begun")
    later = video.stream("an owl", **SHORT)
    later.resume(tmp_path / "begun")
    assert later._begins == begun._begins > 0
    first = next(begun)
    assert np.array_equal(first, next(later))
    plain = video.stream("a fox", **SHORT)
    plain.save(tmp_path / "plain")
    other = video.stream("a fox", start=start, **SHORT)
    other.resume(tmp_path / "plain")  # whose own pictures are not of this film
    assert other._begins == 0
    shown = next(other)
    assert np.array_equal(shown, next(plain)) and len(shown) < len(first)


def test_what_would_hold_too_much_is_refused_with_the_way_out(video: CausalVideo) -> None:
    window = video.expected_bytes("window", **SHORT)
    said = (
        r"policy='full': would hold 360 KiB of keys and values, and there are .* for it; take "
        r"policy='window' \(.*\), .*a smaller size, or allow more by most_bytes"
    )
    with pytest.raises(ValueError, match=said):
        video.stream("a fox", policy="full", most_bytes=window, **SHORT)
    stream = video.stream("a fox", policy="window", most_bytes=window, **SHORT)
    next(stream)
    before = stream.session
    with pytest.raises(ValueError, match="policy='full': would hold"):
        stream.use("full")
    assert (stream.session, stream.policy, stream.expected_bytes) == (before, "window", window)


def test_the_command_writes_a_film(tmp_path: Path) -> None:
    file = tmp_path / "fox.gif"
    order = ["stream", "a fox", "--out", file, "--chunks", 2, "--height", 16, "--width", 16]
    done = CliRunner().invoke(cli.app, list(map(str, order)))
    assert done.exit_code == 0, done.output
    assert "at most" in done.output and "wrote" in done.output
    with Image.open(file) as film:
        assert film.size == (16, 16) and film.n_frames >= 2
    for more, said in (
        (["--policy", "windw"], "did you mean"),
        (["--out", "x.avi"], "--out"),
        (["--height", 16], "go together"),
    ):
        done = CliRunner().invoke(cli.app, list(map(str, [*order[:4], *more])))
        assert done.exit_code == 2 and said in done.output, done.output
