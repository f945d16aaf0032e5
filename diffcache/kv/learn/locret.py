"""Train the retaining heads of Locret on how much later queries attend to each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from diffcache.kv.score.learned import RetainingHeads


@dataclass(frozen=True, eq=False)
class RetainCase:
    """Tokens of one layer, those of a prompt first.

    Attributes:
        layer: Number of the layer, from 0.
        q: [B, Hq, T, D], rotated.
        k: [B, H, T, D], rotated.
        v: [B, H, T, Dv].
        prompt: Tokens of the prompt; those that follow are the answer.
        scale: Factor of the logits.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    scale: float


def targets(sample: RetainCase) -> Tensor:
    """Return the largest logit that any query of the answer gives each token of the prompt.

    Over all query heads of a key-value head, [B, H, prompt] float32.

    Reference: Locret, arXiv 2410.01805, section 3.3.

    Args:
        sample: Tokens of a layer, with at least one in prompt and answer.

    Raises:
        ValueError: If prompt or answer are empty.
    """
    length = sample.k.shape[2]
    if not 0 < sample.prompt < length:
        raise ValueError(f"prompt={sample.prompt}: must be between 1 and {length - 1} tokens")
    batch, heads = sample.k.shape[:2]
    asked = sample.q[:, :, sample.prompt :].float()
    asked = asked.reshape(batch, heads, -1, *asked.shape[2:])
    k = sample.k[:, :, : sample.prompt].float()
    found = torch.einsum("bhgnd,bhsd->bhgns", asked, k) * sample.scale
    return found.amax((2, 3))


def fresh(layers: int, channels: int, heads: int, width: int = 1024, seed: int = 0) -> RetainingHeads:
    """Return networks to start from.

    Args:
        layers: Number of layers, L.
        channels: Channels of query, key and value of a token, Hq * D + H * D + H * Dv.
        heads: Number of key-value heads, H.
        width: Width of the hidden layer.
        seed: Seed of the weights that are drawn.
    """
    drawn = torch.Generator().manual_seed(seed)
    first = torch.randn(layers, channels, width, generator=drawn) * channels**-0.5
    second = torch.randn(layers, width, heads, generator=drawn) * width**-0.5
    return RetainingHeads(first, second)


def loss(heads: RetainingHeads, sample: RetainCase, smooth: float = 0.0025) -> Tensor:
    """Return how far the scores are from the targets.

    Reference: Locret, arXiv 2410.01805, section 3.3, equation 3.

    Args:
        heads: The networks.
        sample: Tokens of a layer.
        smooth: Weight of how much the scores of neighbors differ.
    """
    stop = sample.prompt
    found = heads(sample.q[:, :, :stop], sample.k[:, :, :stop], sample.v[:, :, :stop], sample.layer)
    rough = found.diff(dim=-1).square().mean() if stop > 1 else found.sum() * 0
    return smooth_l1_loss(found, targets(sample)) + smooth * rough


@torch.enable_grad()
def train(
    heads: RetainingHeads,
    samples: Sequence[RetainCase],
    *,
    steps: int = 3000,
    rate: float = 5e-4,
    smooth: float = 0.0025,
    watch: Callable[[int, float], None] | None = None,
) -> RetainingHeads:
    """Return networks trained by AdamW, one sample a step in turn; the model stays as it is.

    Reference: Locret, arXiv 2410.01805, section 3.3.

    Args:
        heads: Networks to start from; left as they are.
        samples: Tokens of layers, of any number.
        steps: Number of training steps.
        rate: Learning rate.
        smooth: Weight of how much the scores of neighbors differ.
        watch: Function that is called with each step and its loss.

    Raises:
        ValueError: If there are no samples or no steps.
    """
    if not samples or steps < 1:
        raise ValueError(f"{len(samples)} samples, steps={steps}: must be at least 1 each")
    parts = [each.detach().clone().requires_grad_() for each in (heads.first, heads.second)]
    optimizer = torch.optim.AdamW(parts, lr=rate)
    trained = RetainingHeads(*parts)
    for step in range(steps):
        found = loss(trained, samples[step % len(samples)], smooth)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        if watch is not None:
            watch(step, float(found.detach()))
    return RetainingHeads(*(each.detach() for each in parts))
