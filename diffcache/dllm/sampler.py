"""The sampler: which token each mask would become, how sure that is, and which are committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from diffcache.dllm.rules import Quota, Rule
from diffcache.method import check_int
from diffcache.ranges import Range, Settings, Such, Whole

By = Literal["confidence", "random", "margin", "entropy"]
Precision = Literal["float64", "float32", "model"]
_MOST = 1000  # of numbers that are of the order of 1, beyond which nothing of the logits is left


@dataclass(frozen=True)
class Sampler(Settings):
    """Choose tokens for masks and decide which of them are committed. Independent of any cache.

    The mask's own token is never chosen. Its probability counts in the softmax all the same, so
    that the confidence of others is that of the published samplers.

    Args:
        by: Measure that ranks candidates: the probability of the token (`confidence`), an
            order drawn beforehand (`random`), the probability of the token less that of the second
            best (`margin`), or the negative entropy (`entropy`).
        rule: Rule for the number of candidates that a step commits.
        temperature: Factor of the Gumbel noise that tokens are chosen with, in float64; 0 for the
            most probable token. Confidence is that without noise.
        softmax: Precision of the softmax. LLaDA's first code and all caches use float64; in lower
            precision ties are decided otherwise.
        banned: Tokens that are never chosen, besides the mask, and have no probability: LLaDA's
            `logits_eos_inf` with the token that ends an answer.
        late: Tokens whose probability counts as zero once they are chosen, so that they are
            committed last: LLaDA's `confidence_eos_eot_inf` with those that end an answer and a
            turn.
        cfg_scale: Guidance without a prompt, LLaDA's `cfg_scale`: logits are moved away from those
            of the same answer behind a prompt of masks, by this many times their difference. Every
            forward then computes both, as a batch of twice as many sequences; 0 for none.
        seed: Seed of the noise and of random orders.

    Raises:
        ValueError: If `late` or a rule that looks at confidence goes with another measure.

    Departure: with noise, LLaDA's code keeps the confidence of the first of its late tokens, by a
    slip of assignment.

    Reference: LLaDA, arXiv 2502.09992, section 2.4 (`confidence`, `random`), appendix B.4
    (`banned`, `late`), and its released code (`cfg_scale`); Dream, arXiv 2508.15487 (`margin`,
    `entropy`).
    """

    by: By = "confidence"
    rule: Annotated[Rule, Such("Quota(), Threshold(0.9) or Factor(1)")] = field(default_factory=Quota)
    temperature: Annotated[float, Range(0, _MOST)] = 0.0
    softmax: Precision = "float64"
    banned: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    cfg_scale: Annotated[float, Range(0, _MOST)] = 0.0
    seed: Whole = 0

    def check(self) -> None:
        """Raise ValueError unless tokens are such, and nothing looks at confidence that is not there."""
        for name in ("banned", "late"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a tuple of tokens")
            for token in getattr(self, name):
                check_int(name, token, 0)
        if self.by != "confidence" and (self.late or not self.rule.is_fixed):
            what, way = (f"late={self.late!r}", "late=()") if self.late else (repr(self.rule), "rule=Quota()")
            raise ValueError(f"by={self.by!r}: {what} looks at confidence; use by='confidence', or {way}")

    def candidates(self, logits: Tensor, mask_id: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the token that each position would take, and how good it is.

        Args:
            logits: Logits, `[B, n, V]`.
            mask_id: Token of the mask.
            generator: Source of the noise, where there is any.

        Returns:
            Tokens int64 `[B, n]` and scores `[B, n]`; scores are zero where the order is random,
            and NaN where the logit of the token is not finite.

        Raises:
            ValueError: If a banned or late token is none of the `V`, or none is left to choose.
        """
        self._check_tokens(logits.shape[-1], mask_id)
        if self.banned:
            banned = torch.tensor(self.banned, device=logits.device)
            logits = logits.index_fill(-1, banned, float("-inf"))
        dtype = logits.dtype if self.softmax == "model" else getattr(torch, self.softmax)
        tokens = self._tokens(logits, mask_id, generator)
        if self.by == "random":  # 0, but NaN where the logit is NaN or infinite
            return tokens, logits.gather(-1, tokens[..., None])[..., 0].double() * 0
        if self.late:
            late = torch.tensor(self.late, device=logits.device)
            logits = logits.index_fill(-1, late, float("-inf"))
        logs = logits.to(dtype).log_softmax(-1) if self.by == "entropy" else None
        if logs is not None:
            return tokens, (logs.exp() * logs).masked_fill(logs == float("-inf"), 0).sum(-1).double()
        probabilities = logits.to(dtype).softmax(-1)
        if self.by == "margin":
            best = probabilities.topk(2, dim=-1).values
            return tokens, (best[..., 0] - best[..., 1]).double()
        return tokens, probabilities.gather(-1, tokens[..., None])[..., 0].double()

    def _check_tokens(self, size: int, mask_id: int) -> None:
        """Raise unless the tokens that are named are in the vocabulary, and leave one to choose."""
        for name in ("banned", "late"):
            most = max(getattr(self, name), default=0)
            if most >= size:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: names a token outside of the vocabulary, "
                    f"which has {size}; leave {most} out"
                )
        if len({mask_id, *self.banned}) >= size:
            raise ValueError(
                f"banned={self.banned!r}: leaves none of the vocabulary's {size} tokens to choose, "
                f"since the mask, token {mask_id}, never is; ban fewer"
            )

    def _tokens(self, logits: Tensor, mask_id: int, generator: torch.Generator | None) -> Tensor:
        if self.temperature:
            noise = torch.rand(logits.shape, dtype=torch.float64, device=logits.device, generator=generator)
            logits = logits.double() - self.temperature * (-noise.log()).log()
        logits = logits.clone()
        logits[..., mask_id] = float("-inf")
        return logits.argmax(-1)
