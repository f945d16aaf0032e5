"""One training step of the small WanPipeline: the model sees what the pipeline will show it.

Wan attends to text padded with zeros, without a mask, so the number of zeros changes what it sees.
All zeros are alike: one of them whose score is raised by the logarithm of their number is worth
them all, which makes any `max_sequence_length` cheap to train with.
"""

from __future__ import annotations

import math

import torch
from diffusers import WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from torch.nn import functional

from diffcache.pipelines.small.wan import SHIFT, TEXT_TOKENS

REAL_TOKENS = 18
_EARLY_SHIFT = 6.0


def draw_sigmas(count: int, generator: torch.Generator, progress: float = 1.0) -> Tensor:
    """Draw noise levels in (0, 1), float32 [B]: those of the sampler, and higher ones early on.

    All the channels of five latent frames tell much about one object, so that its place is decided
    while almost everything is noise. The shift of the evenly drawn levels falls from 6 to the
    sampler's over the first half of the training.

    Args:
        count: Number of noise levels.
        generator: Source of randomness.
        progress: Share of the training that is done.
    """
    even = torch.rand(count, generator=generator).clamp(1e-3, 1 - 1e-3)
    shift = SHIFT + (_EARLY_SHIFT - SHIFT) * max(0.0, 1 - 2 * progress)
    return shift * even / (1 + (shift - 1) * even)


class PlainWanAttention:
    """A processor for both attentions of `WanTransformer3DModel`, in two matrix products.

    Its backward pass is faster on a CPU than the fused kernel's; the weights are the model's.

    Attributes:
        raised: Number that is added to the scores of the text tokens, float32 [19].
    """

    def __init__(self) -> None:
        self.raised = torch.zeros(REAL_TOKENS + 1)

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run attention as `WanAttnProcessor` does."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = _scaled(attn.norm_q, attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = _scaled(attn.norm_k, attn.to_k(source)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        query = (query * query.shape[-1] ** -0.5).transpose(1, 2)
        scores = torch.matmul(query, key.permute(0, 2, 3, 1)).float()
        if encoder_hidden_states is not None:
            scores = scores + self.raised
        weights = torch.softmax(scores, dim=-1).to(value.dtype)
        states = torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2).flatten(2, 3)
        made: Tensor = attn.to_out[1](attn.to_out[0](states))
        return made


def _scaled(norm: nn.RMSNorm, states: Tensor) -> Tensor:
    # A weight of another type than the states keeps the norm off its fused kernel.
    weight = norm.weight.to(states.dtype)
    return functional.rms_norm(states, norm.normalized_shape, weight, norm.eps)


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    even, odd = states.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[..., 0::2].to(states.dtype), sine[..., 1::2].to(states.dtype)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


class Step(nn.Module):
    """One training step's loss; holds the two trained modules under the pipeline's names.

    Args:
        pipe: Pipeline whose attention is replaced by `PlainWanAttention`.
        compiled: Compile the denoiser's block, once for all of them.
    """

    def __init__(self, pipe: WanPipeline, *, compiled: bool = False) -> None:
        super().__init__()
        self.transformer = pipe.transformer
        self.text_encoder = pipe.text_encoder
        self.tokenizer = pipe.tokenizer
        self.attention = PlainWanAttention()
        pipe.transformer.set_attn_processor(self.attention)
        if compiled:
            pipe.transformer.compile_repeated_blocks()

    def encode(self, texts: list[str]) -> Tensor:
        """Return text states [B, 19, D]: each prompt's own tokens, then zeros."""
        pad = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, max_length=REAL_TOKENS, **pad)
        states = self.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return functional.pad(states * tokens.attention_mask[..., None], (0, 0, 0, 1))

    def velocity(
        self, noised: Tensor, sigmas: Tensor, texts: list[str], text_tokens: int = TEXT_TOKENS
    ) -> Tensor:
        """Return what the denoiser answers when the pipeline pads to that many text tokens.

        Args:
            noised: Latents [B, Z, F, H, W].
            sigmas: Noise levels in (0, 1), [B].
            texts: Prompt of each sample.
            text_tokens: The pipeline's `max_sequence_length`, more than 18.
        """
        self.attention.raised[-1] = math.log(text_tokens - REAL_TOKENS)
        made: Tensor = self.transformer(
            hidden_states=noised,
            timestep=1000 * sigmas,
            encoder_hidden_states=self.encode(texts),
            return_dict=False,
        )[0]
        return made

    def forward(
        self,
        latents: Tensor,
        noise: Tensor,
        sigmas: Tensor,
        texts: list[str],
        text_tokens: int = TEXT_TOKENS,
    ) -> Tensor:
        """Return the mean square error of the velocity, for latents [B, Z, F, H, W]."""
        level = sigmas[:, None, None, None, None]
        noised = (1 - level) * latents + level * noise
        velocity = self.velocity(noised, sigmas, texts, text_tokens)
        return functional.mse_loss(velocity.float(), noise - latents)
