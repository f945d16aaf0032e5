"""Fast-dLLM: keys and values are computed anew at the start of every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.method import check_bool


@dataclass(frozen=True)
class FastDLLM(Policy):
    """Keep what lies before the block, and with `dual` what lies after it, from its first step.

    The paper's parallel decoding is a rule of the sampler: `Threshold` or `Factor`.

    Departure: sequences of a batch have blocks of their own; the published code is for one.

    Args:
        dual: Whether steps after the first of a block compute the block alone (DualCache), instead
            of the block and all masks after it (PrefixCache).

    Reference: Fast-dLLM, arXiv 2505.22618, section 3.2.
    """

    name: ClassVar[str] = "fast-dllm"
    bibtex: ClassVar[str] = """@article{wu2025fastdllm,
  title={Fast-{dLLM}: Training-free Acceleration of Diffusion {LLM} by Enabling {KV} Cache and Parallel Decoding},
  author={Wu, Chengyue and Zhang, Hao and Xue, Shuchen and Liu, Zhijian and Diao, Shizhe and Zhu, Ligeng and Luo, Ping and Han, Song and Xie, Enze},
  journal={arXiv preprint arXiv:2505.22618},
  year={2025}
}"""  # noqa: E501

    dual: bool = False

    def __post_init__(self) -> None:
        check_bool("dual", self.dual)

    def plan(self, state: State) -> RowPlan:
        """Return all rows at the start of a block, then the block or the block and what follows."""

        def run_of(row: RowState) -> range:
            if row.step == 0:
                return range(state.width)
            return range(row.start, row.stop if self.dual else state.width)

        return state.runs(run_of)
