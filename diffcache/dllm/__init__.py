"""Caches for diffusion language models: which tokens every forward computes, and what it commits.

No modules: `diffcache.attach.extensions.rows` carries a row plan out on a model, and
`diffcache.pipelines.diffusion_lm` decodes with it.
"""

from typing import Any

from diffcache.dllm.block_cache import BlockCache as BlockCache
from diffcache.dllm.block_cache import FinishedBlocks as FinishedBlocks
from diffcache.dllm.credit import Credit as Credit
from diffcache.dllm.d2_cache import D2Cache as D2Cache
from diffcache.dllm.decode import Decoding as Decoding
from diffcache.dllm.decode import Schedule as Schedule
from diffcache.dllm.dkv_cache import DKVCache as DKVCache
from diffcache.dllm.dllm_cache import DLLMCache as DLLMCache
from diffcache.dllm.dpad import DPad as DPad
from diffcache.dllm.elastic_cache import ElasticCache as ElasticCache
from diffcache.dllm.entropy_cache import EntropyCache as EntropyCache
from diffcache.dllm.fast_dllm import FastDLLM as FastDLLM
from diffcache.dllm.free_cache import FreeCache as FreeCache
from diffcache.dllm.guided import Guide as Guide
from diffcache.dllm.guided import Guided as Guided
from diffcache.dllm.policy import FedRows as FedRows
from diffcache.dllm.policy import Policy as Policy
from diffcache.dllm.policy import Uncached as Uncached
from diffcache.dllm.rows import ALL as ALL
from diffcache.dllm.rows import RowPlan as RowPlan
from diffcache.dllm.rules import Dynamic as Dynamic
from diffcache.dllm.rules import Factor as Factor
from diffcache.dllm.rules import Hierarchical as Hierarchical
from diffcache.dllm.rules import Quota as Quota
from diffcache.dllm.rules import Threshold as Threshold
from diffcache.dllm.sampler import Sampler as Sampler
from diffcache.dllm.slow_fast import SlowFast as SlowFast
from diffcache.dllm.sparse_dllm import SparseDLLM as SparseDLLM
from diffcache.dllm.state import RowState as RowState
from diffcache.dllm.state import State as State
from diffcache.dllm.state import check_coverage as check_coverage
from diffcache.dllm.vicinity import Vicinity as Vicinity
from diffcache.dllm.window_diffusion import WindowDiffusion as WindowDiffusion
from diffcache.registry import exported


def __getattr__(name: str) -> Any:
    return exported(__name__, name, "dllm")
