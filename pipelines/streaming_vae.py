"""Decode a film as it is made: a causal autoencoder that remembers the frames before."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor, nn

from diffcache.errors import AttachError


class WanDecoder:
    """Decode one film as it is made; its pictures are those of `WanPipeline`, however it is cut.

    What the autoencoder's convolutions have to know of earlier frames is held here, so any number
    of films take turns on one autoencoder. Frames are decoded whole, without the tiles and slices
    that the autoencoder may be set to.

    Args:
        vae: `AutoencoderKLWan` of diffusers.

    Raises:
        AttachError: If it is of another class.
    """

    def __init__(self, vae: nn.Module) -> None:
        if type(vae).__name__ != "AutoencoderKLWan":
            raise AttachError(
                f"{type(vae).__name__}: films are decoded in pieces by AutoencoderKLWan of "
                "diffusers, whose convolutions look at earlier frames only"
            )
        self.vae: Any = vae
        self.frames = 0
        self._held: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Begin another film."""
        convolutions = [m for m in self.vae.decoder.modules() if isinstance(m, WanCausalConv3d)]
        self._held = [None] * len(convolutions)
        self.frames = 0

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures of the next frames, in -1..1, `[B, 3, F, H, W]`.

        The first latent frame of a film gives one picture, those after it give several each.

        Args:
            latents: Latents as the transformer makes them, `[B, C, F, H, W]`: of mean 0 and
                variance 1 in each channel, which is undone here by the statistics of the
                autoencoder's configuration.

        Raises:
            ValueError: If they are no latents of this autoencoder, or of another size than those
                before.
        """
        self._check(latents)
        config, held, pictures = self.vae.config, list(self._held), []
        latents = latents.to(self.vae.device, self.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (config.latents_mean, config.latents_std)
        )
        # The reciprocal is rounded as in WanPipeline, whose pictures are these to the bit.
        latents = latents / (1 / std) + mean
        for number, frame in enumerate(self.vae.post_quant_conv(latents).split(1, 2)):
            first = not self.frames and not number
            pictures.append(self.vae.decoder(frame, held, [0], first_chunk=first))
        film = torch.cat(pictures, 2)
        if config.patch_size is not None:
            film = unpatchify(film, config.patch_size)
        self._held = held  # only now, so that a frame that failed can be given again
        self.frames += latents.shape[2]
        return film.clamp(-1, 1)

    def held(self) -> list[Any]:
        """Return the features kept of earlier frames: tensors, None, or a word of diffusers."""
        return list(self._held)

    def hold(self, held: list[Any], frames: int) -> None:
        """Go on where another decoder of this autoencoder was.

        Args:
            held: Result of `held` of it.
            frames: Latent frames that it had decoded.

        Raises:
            ValueError: If they are of another autoencoder.
        """
        if len(held) != len(self._held):
            raise ValueError(f"held={len(held)} convolutions: this decoder has {len(self._held)}")
        self._held, self.frames = list(held), frames

    @property
    def nbytes(self) -> int:
        """Bytes that are held between two calls."""
        return sum(x.untyped_storage().nbytes() for x in self._held if isinstance(x, Tensor))

    def _check(self, latents: Tensor) -> None:
        channels = self.vae.config.z_dim
        if latents.dim() != 5 or latents.shape[1] != channels or not latents.numel():
            raise ValueError(
                f"latents={list(latents.shape)}: must be [B, C, F, H, W] with C={channels}"
            )
        before = next((x for x in self._held if isinstance(x, Tensor)), None)
        if before is None:
            return
        wanted = (before.shape[0], *before.shape[3:])
        if (latents.shape[0], *latents.shape[3:]) != wanted:
            raise ValueError(
                f"latents={list(latents.shape)}: this film is of B={wanted[0]}, H={wanted[1]}, "
                f"W={wanted[2]}; reset() begins another"
            )
