"""A film that is decoded in pieces is the film that is decoded at once, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.pipelines.streaming_vae import StreamingDecoder

CUTS = ([3, 3, 3], [1, 2, 6], [1] * 9)


def autoencoder(**settings: Any) -> Any:
    """Return a tiny causal autoencoder that makes four pictures of a latent frame."""
    torch.manual_seed(0)
    settings = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1,
                "temperal_downsample": [True, True], "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4, **settings}  # fmt: skip
    return AutoencoderKLWan(**settings).eval()


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
    with torch.no_grad():
        whole = [vae.decode(film).sample for film in films]
    assert whole[0].shape[:3] == (2, 3, 33)
    streams = [StreamingDecoder(vae) for _ in CUTS]
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
    stream, other = StreamingDecoder(vae), StreamingDecoder(vae)
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
    with torch.no_grad():
        assert torch.equal(stream.decode(film), vae.decode(film).sample)


def test_what_does_not_fit_is_refused() -> None:
    stream = StreamingDecoder(autoencoder())
    with pytest.raises(ValueError, match=r"latents=\[2, 3, 9, 4, 6\]: must be .* C=4"):
        stream.decode(latents()[:, :3])
    stream.decode(latents())
    with pytest.raises(ValueError, match="this film is of B=2, H=4, W=6; reset"):
        stream.decode(latents()[:1])
    with pytest.raises(AttachError, match="AutoencoderKL: films are decoded in pieces by"):
        StreamingDecoder(AutoencoderKL())
