"""KV caches for causal video: which frames are held, and under which positions they are read.

No modules: `diffcache.pipelines.causal_video` rolls a transformer out with them, and
`diffcache.pipelines.ca2_vdm` one in which attention over space and over time take turns.
"""

from typing import Any

from diffcache.registry import exported
from diffcache.video.ca2_vdm import Ca2VDM as Ca2VDM
from diffcache.video.deep_forcing import DeepForcing as DeepForcing
from diffcache.video.ema_sink import EMASink as EMASink
from diffcache.video.few_bits import Quantized as Quantized
from diffcache.video.few_steps import FewSteps as FewSteps
from diffcache.video.flow_cache import FlowCache as FlowCache
from diffcache.video.history_retrieval import HistoryRetrieval as HistoryRetrieval
from diffcache.video.infinity_rope import InfinityRoPE as InfinityRoPE
from diffcache.video.layer_budgets import LayerBudgets as LayerBudgets
from diffcache.video.motion_noise import MotionNoise as MotionNoise
from diffcache.video.policy import FullHistory as FullHistory
from diffcache.video.policy import VideoPolicy as VideoPolicy
from diffcache.video.policy import make_policy as make_policy
from diffcache.video.rolling_sink import RollingSink as RollingSink
from diffcache.video.semantic_bank import SemanticBank as SemanticBank
from diffcache.video.stream_diffusion_v2 import StreamDiffusionV2 as StreamDiffusionV2
from diffcache.video.switch import Cut as Cut
from diffcache.video.switch import Flush as Flush
from diffcache.video.switch import Keep as Keep
from diffcache.video.switch import Recache as Recache
from diffcache.video.switch import Switch as Switch
from diffcache.video.window import Window as Window


def __getattr__(name: str) -> Any:
    return exported(__name__, name, "video")
