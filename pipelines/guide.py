"""An autoregressive model that scores the drafts of a diffusion language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffcache.foreign import device_of_model, with_cache


class ModelGuide:
    """A causal language model of transformers as a `Guide`.

    It keeps keys and values of tokens that are the same as in the call before, up to the first token that differs, and
    computes all after it again. So its cache is exact, whatever was committed.

    Attributes:
        rows: Rows that the model computed, of all sequences and forwards together.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import DynamicCache

        self.model, self.cache, self.rows = model, DynamicCache(), 0
        self.ids: Tensor | None = None  # tokens whose keys and values are held, `[B, t]`

    @torch.no_grad()
    def __call__(self, ids: Tensor, at: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
        """Return the logits of the tokens that are asked for; the host waits.

        Args:
            ids: Tokens with the draft in them, int64 `[B, T]`.
            at: Positions of the active blocks, int64 `[B, n]`.
            wanted: Mask of the positions that are asked for, bool `[B, n]`; at least one.
            valid: Positions that are no padding, bool `[B, T]`; None for all.
        """
        asked = at[wanted]
        stop = int(asked.max())  # a token is predicted by the one before
        start = self._crop(ids, int(asked.min()) - 1)
        given = ids[:, start:stop]
        whole, places = None, None
        if valid is not None:
            whole = valid[:, :stop]
            places = (whole.long().cumsum(1) - 1).clamp_min(0)[:, start:]
        logits: Tensor = self.model(
            input_ids=given, attention_mask=whole, position_ids=places, **with_cache(self.model, self.cache)
        ).logits
        self.ids, self.rows = ids[:, :stop], self.rows + given.numel()
        place = (at - 1 - start).clamp(0, stop - start - 1)
        return logits.gather(1, place[..., None].expand(-1, -1, logits.shape[-1]))

    def _crop(self, ids: Tensor, most: int) -> int:
        """Keep the positions that did not change, up to `most`, and return their number."""
        if self.ids is None:
            return 0
        held = self.ids.shape[1]
        same = (ids[:, :held] == self.ids).all(0).cumprod(0)
        kept = min(int(same.sum()), most)
        if kept < held:
            self.cache.crop(kept - held)
        return kept


def check_guide(guide: nn.Module, model: nn.Module) -> None:
    """Raise ValueError if one model cannot score the drafts of the other.

    It must have the same vocabulary, and later tokens must not change what it predicts.
    """
    sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (guide, model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"guide: has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}; give a "
            "guide with the same tokenizer, and where only the padding differs, call "
            f"guide.resize_token_embeddings({sizes[1]}) first"
        )
    if not _is_causal(guide):
        raise ValueError(
            f"guide: {type(guide).__name__} attends both ways (another end of a text changes what "
            "it predicts before), and a guide predicts each token from those before it; give an "
            "autoregressive model, in its eval() mode"
        )


@torch.no_grad()
def _is_causal(guide: nn.Module) -> bool:
    """Return whether two texts with one beginning are given the same logits there."""
    ids = torch.zeros(2, 8, dtype=torch.int64, device=device_of_model(guide))
    ids[1, 4:] = 1
    one, other = guide(input_ids=ids).logits[:, :4]
    bound = 8 * torch.finfo(one.dtype).eps * one.abs().max()  # a mixture of experts may round differently
    return not bool((one - other).abs().max() > bound)
