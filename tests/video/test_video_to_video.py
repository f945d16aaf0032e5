"""Films that begin with pictures, and films that are made from other ones as those come in."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from diffcache import cli
from diffcache.kv.life.save import SavedCacheError
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.source_pictures import begin_with, film_of, to_tensor
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.pipelines.streaming_vae import WanDecoder, WanEncoder
from diffcache.pipelines.video_stream import to_pictures
from diffcache.pipelines.video_to_video import VideoToVideo, below
from diffcache.video import FewSteps, MotionNoise
from tests.internals import cut_off
from tests.video.test_streaming_vae import autoencoder

SIZE = (16, 32)
SHORT = {"size": SIZE, "policy": "window:window=3,sinks=0"}


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo.from_pretrained("sticker-causal") as opened:
        opened.sampler = FewSteps((1000, 500, 250), shift=2.0, predicts="clean")
        yield opened


def pictures(number: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return pictures of a square that moves, faster and faster."""
    film = np.random.default_rng(seed).integers(0, 60, (number, *SIZE, 3), dtype=np.uint8)
    for at in range(number):
        film[at, 4:10, at * at // 24 % 20 : at * at // 24 % 20 + 8] = 200
    return film


def encoded(vae: Any, film: Tensor) -> Tensor:
    """Return normalized latents of a whole film, as diffusers makes them."""
    config = vae.config
    mean, std = (torch.tensor(x)[:, None, None, None] for x in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        found: Tensor = (vae.encode(film).latent_dist.mode() - mean) / std
    return found


@pytest.mark.parametrize(
    "settings",
    [{}, {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True, "decoder_base_dim": 8}],
    ids=["wan 2.1", "wan 2.2"],
)
def test_any_cut_encodes_to_the_same_latents(settings: dict[str, Any]) -> None:
    vae = autoencoder(**settings)
    films = [torch.rand(2, 3, 17, 32, 48) * 2 - 1 for _ in range(3)]
    cuts = ([17], [1, 4, 12], [5, 8, 4])
    streams = [WanEncoder(vae) for _ in cuts]
    parts: list[list[Tensor]] = [[], [], []]
    for turn in range(3):  # a piece of each film in turn
        for number, cut in enumerate(cuts):
            if turn < len(cut):
                piece = films[number].split(cut, 2)[turn]
                parts[number].append(streams[number].encode(piece))
    for film, part, stream in zip(films, parts, streams, strict=True):
        torch.testing.assert_close(torch.cat(part, 2), encoded(vae, film), rtol=1e-5, atol=1e-6)
        assert stream.frames == 5 and stream.nbytes > 0


@pytest.mark.parametrize("number", [1, 10])  # an image, and a film whose first picture is left out
def test_a_film_begins_with_pictures(video: CausalVideo, number: int) -> None:
    start = pictures(number)
    used = start[(number - 1) % 2 :]
    stream = video.stream("a fox", start=list(start), seed=3, chunks=2, **SHORT)
    first, second = stream
    assert (len(first), len(second)) == (len(used) + 6, 6)
    assert stream.session.frames == 1 + len(used) // 2 + 6

    vae = video.pipe.vae
    session = video.session(video.embed("a fox"), size=video.latent_size(SIZE), policy=SHORT["policy"], seed=3)
    latents = encoded(vae, to_tensor(used, torch.device("cpu")))
    session.take(latents)
    whole = torch.cat([latents, session.next(), session.next()], 2)
    wanted = to_pictures(WanDecoder(vae).decode(whole))
    apart = np.abs(np.concatenate([first, second]).astype(int) - wanted).max()
    assert apart <= 1  # latents are rounded otherwise
    other = next(video.stream("a fox", start=255 - start, seed=3, **SHORT))
    assert np.abs(first[-6:].astype(int) - other[-6:]).max() > 8  # the start is seen


def by_hand(video: CausalVideo, film: Any, noise: MotionNoise) -> tuple[Any, list[float]]:
    """Return what StreamDiffusionV2 makes of a film, a level of every chunk after the other."""
    whole = to_tensor(film, torch.device("cpu"))
    latents = encoded(video.pipe.vae, whole)
    settings = dict(size=video.latent_size(SIZE), policy=SHORT["policy"], sampler=below(video.sampler, noise.low))
    batch = StreamBatch(video, video.embed("a crab"), rows=1, seed=1, **settings)
    made, levels, level, seen = [], [], None, 0
    for part in latents.split(3, 2):
        until = 1 + 2 * (2 + 3 * len(made))
        moved = whole[:, :, max(seen - 1, 0) : until].diff(dim=2).square().mean((0, 1, 3, 4)).sqrt()
        wished = noise.high - (noise.high - noise.low) * min(float(moved.max()) / noise.scale, 1.0)
        level = wished if level is None else noise.rate * wished + (1 - noise.rate) * level
        made.append(batch.next(part, level))
        levels.append(level)
        seen = until
    return to_pictures(WanDecoder(video.pipe.vae).decode(torch.cat(made, 2))), levels


def test_a_video_is_made_anew_as_stream_diffusion_v2_does(video: CausalVideo) -> None:
    film, noise = pictures(5 + 2 * 6 + 3), MotionNoise(scale=0.5)  # 3 pictures make no chunk
    wanted, levels = by_hand(video, film[:-3], noise)
    assert max(levels) - min(levels) > 0.01  # motion is seen
    told = []
    for rows in (None, 1):
        live = VideoToVideo(video, "a crab", seed=1, noise=noise, rows=rows, **SHORT)
        chunks = list(live.of(iter(film)))
        assert [len(chunk) for chunk in chunks] == [5, 6, 6]
        apart = np.abs(np.concatenate(chunks).astype(int) - wanted)
        assert apart.max() <= 1, rows
        assert live.level == pytest.approx(levels[-1], abs=1e-5)
        told.append(live.nbytes)
    assert len(live.batch.levels) == 3 and told[0] == told[1] <= live.expected_bytes
    still = VideoToVideo(video, "a crab", seed=1, noise=MotionNoise(0.7, 0.7), **SHORT)
    assert np.abs(np.concatenate(list(still.of(film[:11]))).astype(int) - wanted[:11]).max() > 8


def test_chunks_on_their_way_come_later_take_orders_and_are_saved(video: CausalVideo, tmp_path: Path) -> None:
    live, plain = (VideoToVideo(video, "a crab", seed=2, **SHORT) for _ in "ab")
    endless = (pictures(1, seed)[0] for seed in count())
    taken = [np.stack([next(endless) for _ in range(wanted)]) for wanted in (5, 6, 6, 6)]
    assert [len(live.next(group)) for group in taken[:3]] == [0, 0, 5]
    assert live.wanted == 6
    live.switch("a fox")
    live.save(tmp_path)  # with two chunks on their way, and an order
    saved = VideoToVideo(video, "a dog", seed=5, size=SIZE, policy="window")
    saved.resume(tmp_path)
    assert (saved.prompt, saved.policy) == ("a fox", SHORT["policy"])
    goes_on = [saved.next(taken[3]), *saved.finish()]
    with pytest.raises(ValueError, match=r"pictures=uint8 \[5, 16, 32, 3\]: must be uint8 \[6, "):
        live.next(taken[0])
    held = live.encoder.frames
    with cut_off([video.transformer], error=ZeroDivisionError()):
        live.next(taken[3])
    assert live.encoder.frames == held
    with cut_off([video.pipe.vae.decoder], error=ZeroDivisionError()):
        live.next(taken[3])  # the chunk went in, and comes out with the next one
    with cut_off([video.pipe.vae.decoder], error=ZeroDivisionError()):
        list(live.finish())
    shown = list(live.finish())
    assert np.array_equal(np.concatenate(goes_on), np.concatenate(shown))
    with pytest.raises(SavedCacheError, match="of another size or number"):
        VideoToVideo(video, "a fox", size=SIZE[::-1], policy=SHORT["policy"]).resume(tmp_path)
    other = replace(video.sampler, shift=video.sampler.shift + 1)  # of as many levels
    with pytest.raises(SavedCacheError, match="a stream goes on with what it began with"):
        VideoToVideo(video, "a fox", size=SIZE, sampler=other).resume(tmp_path)
    fresh = VideoToVideo(video, "a fox", size=SIZE, policy=SHORT["policy"])
    refused = patch.object(fresh.decoder, "hold", side_effect=ValueError("of another"))
    with refused, pytest.raises(SavedCacheError):
        fresh.resume(tmp_path)
    assert fresh.encoder.frames == 0 and not any(isinstance(x, Tensor) for x in fresh.encoder.held())
    for group in taken:
        before = plain.next(group)
    others = [before, *plain.finish()]
    assert [len(each) for each in shown] == [6, 6, 6] == [len(each) for each in others]
    assert np.array_equal(shown[0], others[0]) and not np.array_equal(shown[2], others[2])


def turned_film(file: Path) -> None:
    """Write 13 pictures at 24 a second, on their side: red where the top is, ever greener."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.set_display_rotation(-90)  # clockwise: what is on the left comes to the top
        for number in range(13):
            picture = np.zeros((32, 64, 3), np.uint8)
            picture[:, :32, 0], picture[..., 1] = 220, 10 * number
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def test_sources_are_scaled_and_what_is_none_is_refused(video: CausalVideo, tmp_path: Path) -> None:
    wide = Image.fromarray(np.tile(np.arange(120, dtype=np.uint8)[None, :, None], (20, 1, 3)))
    wide.save(tmp_path / "wide.png")
    (picture,) = film_of(tmp_path / "wide.png", SIZE)
    assert picture.shape == (*SIZE, 3) and 38 < picture[:, 0].mean() < picture[:, -1].mean() < 82
    assert np.array_equal(picture, begin_with([wide, wide, wide], SIZE, 2)[2])
    clear = Image.new("RGBA", SIZE[::-1], (0, 0, 0, 0))
    assert all((each == 255).all() for each in film_of([clear, clear.convert("LA")], SIZE))
    turned_film(tmp_path / "turned.mp4")
    frames = list(film_of(tmp_path / "turned.mp4", (32, 16), video.way.fps))
    assert len(frames) == 7  # of half a second and a bit at 12 pictures a second
    reds = [[int(part.mean()) for part in (each[:8, :, 0], each[-8:, :, 0])] for each in frames]
    assert all(top > 150 > 60 > bottom for top, bottom in reds)  # of a film on its side
    greens = np.array([each[..., 1].mean() for each in frames])
    assert np.all(np.abs(np.diff(greens) - 20) < 8)  # every second picture of it
    assert len(list(film_of(tmp_path / "turned.mp4", (32, 16)))) == 13
    with pytest.raises(ValueError, match="policy='full': would hold .* and there are 4 KiB"):
        VideoToVideo(video, "a fox", size=SIZE, policy="full", most_bytes=4096)
    long, most = pictures(140), video.expected_bytes("full", size=SIZE)
    assert np.array_equal(begin_with(iter(long), SIZE, 2), long[-119:])  # 60 latent frames
    with pytest.raises(ValueError, match="policy='full': would hold"):
        video.stream("a fox", start=long, size=SIZE, policy="full", most_bytes=most)
    with pytest.raises(ValueError, match="queries of finished frames"):
        VideoToVideo(video, "a fox", size=SIZE, policy="deep-forcing")


def test_the_command_begins_with_pictures_and_makes_a_video_anew(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    assert av.codecs_available
    order = ["stream", "a fox", "--height", "16", "--width", "32", "--out"]
    runs = [
        (["a.mp4", "--chunks", "2"], "11 pictures"),
        (["b.mp4", "--chunks", "1", "--start", "a.mp4"], "17 pictures"),
        (["c.gif", "--restyle", "b.mp4", "--policy", "window"], "17 pictures"),
    ]
    for arguments, said in runs:
        given = [str(tmp_path / a) if "." in a else a for a in arguments]
        done = CliRunner().invoke(cli.app, [*order, *given])
        assert done.exit_code == 0 and said in done.output, done.output
    for arguments, said in (
        (["d.gif", "--restyle", "a.mp4", "--start", "a.mp4"], "leave out --start"),
        (["d.gif", "--restyle", "none.mp4"], "no file"),
    ):
        given = [str(tmp_path / a) if "." in a else a for a in arguments]
        done = CliRunner().invoke(cli.app, [*order, *given])
        assert done.exit_code == 2 and said in done.output, done.output
