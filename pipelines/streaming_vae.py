"""Decode a film as it is made, and encode one as it comes in, frame after frame."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify
from torch import Tensor, nn

from diffcache.errors import AttachError

_MOST = 1.01  # largest value of pictures in -1..1, with room for scaling and rounding


class _Film:
    """One film that passes through half of an autoencoder, which keeps features of its earlier frames."""

    def __init__(self, vae: nn.Module, half: str) -> None:
        if type(vae).__name__ != "AutoencoderKLWan":
            raise AttachError(
                f"{type(vae).__name__}: films are {half}d in pieces by AutoencoderKLWan of "
                "diffusers, whose convolutions look at earlier frames only"
            )
        self.vae: Any = vae
        self._half: Any = getattr(vae, f"{half}r")
        self.frames = 0
        self._held: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Begin another film."""
        convolutions = [m for m in self._half.modules() if isinstance(m, WanCausalConv3d)]
        self._held = [None] * len(convolutions)
        self.frames = 0

    def held(self) -> list[Any]:
        """Return the features kept of earlier frames: tensors, None, or a word of diffusers."""
        return list(self._held)

    def hold(self, held: list[Any], frames: int) -> None:
        """Go on where another film of this autoencoder was.

        `held` is its result of `held`, `frames` the number of latent frames so far.

        Raises:
            ValueError: If the features belong to another autoencoder.
        """
        if len(held) != len(self._held):
            raise ValueError(f"held={len(held)} convolutions: this autoencoder has {len(self._held)}")
        self._held, self.frames = list(held), frames

    @property
    def nbytes(self) -> int:
        """Bytes that are held between two calls."""
        return sum(x.untyped_storage().nbytes() for x in self._held if isinstance(x, Tensor))

    def _statistics(self, like: Tensor) -> list[Tensor]:
        """Return mean and standard deviation of the channels of raw latents."""
        config = self.vae.config
        return [
            torch.tensor(values).view(1, -1, 1, 1, 1).to(like) for values in (config.latents_mean, config.latents_std)
        ]


class WanEncoder(_Film):
    """Encode one film as it comes in; latents are those of the whole film, however it is cut into calls.

    The first picture of a film makes a latent frame, and every `pictures` after it one more.

    Args:
        vae: `AutoencoderKLWan` of diffusers.

    Attributes:
        frames: Latent frames made so far.
        pictures: Pictures of a latent frame, after the first.

    Raises:
        AttachError: If `vae` is of another class.
    """

    def __init__(self, vae: nn.Module) -> None:
        super().__init__(vae, "encode")
        self.pictures = 2 ** sum(self.vae.config.temperal_downsample)

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Return the latents of the next pictures, as a transformer makes them, `[B, C, F, H, W]`.

        They are the means of the autoencoder's distribution, normalized to mean 0 and variance 1.

        Args:
            pictures: Pictures in -1..1, floating, `[B, 3, F, H, W]`; F is 1 and a multiple of `pictures` at the start
                of a film, later a multiple.

        Raises:
            ValueError: If they have another shape, size or range, or do not make whole latent frames.
        """
        shape, each = [*pictures.shape], self.pictures
        if len(shape) != 5 or shape[1] != 3 or 0 in (shape[0], *shape[3:]):
            raise ValueError(f"pictures={shape}: must be [B, 3, F, H, W]")
        first = 0 if self.frames else 1
        if shape[2] < max(first, 1) or (shape[2] - first) % each:
            wanted = f"{each} or a multiple of it" if self.frames else f"1, {1 + each}, {1 + 2 * each}"
            raise ValueError(f"pictures={shape}: {shape[2]} do not make whole latents; give {wanted}")
        self._check(pictures)
        config, held, found = self.vae.config, list(self._held), []
        film = pictures.to(self.vae.device, self.vae.dtype)
        if config.patch_size is not None:
            film = patchify(film, config.patch_size)
        cuts = [1] * first + [each] * ((shape[2] - first) // each)
        for part in film.split(cuts, 2):
            found.append(self._half(part, held, [0]))
        latents = self.vae.quant_conv(torch.cat(found, 2))[:, : config.z_dim]
        mean, std = self._statistics(latents)
        self._held = held  # only now, so that pictures that failed can be given again
        self.frames += len(cuts)
        normal: Tensor = (latents - mean) * (1 / std)
        return normal

    def _check(self, pictures: Tensor) -> None:
        """Raise unless pictures are in -1..1 and of the size of those before."""
        if not pictures.is_floating_point():
            raise ValueError(f"pictures={pictures.dtype}: must be floating, in -1..1; of uint8 x / 127.5 - 1")
        low, high = torch.stack(pictures.aminmax()).tolist()
        if not (low >= -_MOST and high <= _MOST):  # neither holds for numbers that are not finite
            raise ValueError(f"pictures={low:g}..{high:g}: must be finite and in -1..1")
        before = next((x for x in self._held if isinstance(x, Tensor)), None)
        if before is None:
            return
        side = self.vae.config.patch_size or 1  # the first convolution sees patches
        wanted = [before.shape[0], *(side * n for n in before.shape[3:])]
        if [pictures.shape[0], *pictures.shape[3:]] != wanted:
            raise ValueError(
                f"pictures={[*pictures.shape]}: this film is of B={wanted[0]}, H={wanted[1]}, "
                f"W={wanted[2]}; reset() begins another"
            )


class WanDecoder(_Film):
    """Decode one film as it is made; pictures are those of `WanPipeline`, however the film is cut into calls.

    The features of earlier frames that the autoencoder's convolutions need are kept here, so any number of films take
    turns on one autoencoder. Frames are decoded whole, without the tiles and slices that the autoencoder may be set
    to.

    Args:
        vae: `AutoencoderKLWan` of diffusers.

    Raises:
        AttachError: If `vae` is of another class.
    """

    def __init__(self, vae: nn.Module) -> None:
        super().__init__(vae, "decode")

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures of the next frames, in -1..1, `[B, 3, F, H, W]`.

        The first latent frame of a film gives one picture, each later one gives several.

        Args:
            latents: Latents as the transformer makes them, `[B, C, F, H, W]`, with mean 0 and variance 1 in each
                channel; the statistics in the autoencoder's configuration undo that here.

        Raises:
            ValueError: If they are not latents of this autoencoder, or have another size than those before.
        """
        self._check(latents)
        config, held, pictures = self.vae.config, list(self._held), []
        latents = latents.to(self.vae.device, self.vae.dtype)
        mean, std = self._statistics(latents)
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

    def _check(self, latents: Tensor) -> None:
        channels = self.vae.config.z_dim
        if latents.dim() != 5 or latents.shape[1] != channels or not latents.numel():
            raise ValueError(f"latents={list(latents.shape)}: must be [B, C, F, H, W] with C={channels}")
        before = next((x for x in self._held if isinstance(x, Tensor)), None)
        if before is None:
            return
        wanted = (before.shape[0], *before.shape[3:])
        if (latents.shape[0], *latents.shape[3:]) != wanted:
            raise ValueError(
                f"latents={list(latents.shape)}: this film is of B={wanted[0]}, H={wanted[1]}, "
                f"W={wanted[2]}; reset() begins another"
            )
