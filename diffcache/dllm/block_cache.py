"""Keys and values of finished blocks are kept, in pipelines whose text grows block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffcache.dllm.policy import FedRows
from diffcache.method import Ability, Method, check_int


@dataclass(frozen=True)
class FinishedBlocks(FedRows):
    """Compute the last block of a text that grows, and serve the keys and values before it.

    Attributes:
        block: Tokens of a block; None for those that the pipeline's scheduler steps with.
    """

    block: int | None = None


@dataclass(frozen=True)
class BlockCache(Method):
    """Keep the keys and values of finished blocks, for pipelines that own the decoding loop.

    diffusers' `LLaDA2Pipeline` calls its model at every step with all tokens up to the end of the
    active block. Here the model computes the active block, and what stands from the first change
    since the last call on. A block that just ended is thus computed once more, together with the
    next one, and then no more. Changes are found by comparing tokens, so that token editing and
    callbacks that write tokens are served; the host waits for that once a call.

    This is exact, up to rounding, where a token sees its own block and those before it, and
    approximate where tokens attend both ways: finished blocks then keep what they were when the
    text was shorter. The report says which, and approximate runs warn. It is read off the masks of
    a call of the model itself, the first one with finished blocks and again when the text has
    doubled; the cache computes the same call beside it, and has to agree.

    The loop is the pipeline's, so `diffcache run` and `DiffusionLM` do not take it: wrap a
    pipeline, or a bare model in a loop of yours.

    Logits before the first position that is computed are NaN; the pipeline reads the last block
    alone. Other outputs of the model are left out.

    Args:
        block: Tokens of a block, for a bare model in a loop of yours inside `diffcache.run`; None
            for those that the pipeline's scheduler steps with.

    Reference: Block Diffusion, arXiv 2503.09573, section 3, for a loop that is not ours.
    """

    name: ClassVar[str] = "block-cache"
    bibtex: ClassVar[str] = """@inproceedings{arriola2025block,
  title={Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models},
  author={Arriola, Marianne and Gokaslan, Aaron and Chiu, Justin T and Yang, Zhihan and Qi, Zhixuan and Han, Jiaqi and Sahoo, Subham Sekhar and Kuleshov, Volodymyr},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""  # noqa: E501
    counts_calls: ClassVar[bool] = True

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            check_int("block", self.block, 1)

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute the last blocks only."""
        return (FinishedBlocks(self.block),)
