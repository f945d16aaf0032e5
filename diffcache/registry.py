"""The registry: a row for each method, recipe, policy, metric and kernel, and names in one word.

Everything that lists them reads it: `wrap`, `cite`, command lines, pages, benches, contract tests.
Rows name classes as text, so that nothing is imported before it is asked for. A row is a line of
one of the tables below: cells stand between `|` under the names of the first line, a line that
begins with `#` opens a family, and settings are written as on a command line, `defaults` for none.

| cell | says |
|---|---|
| `place` | module, below the folder of its kind, and name of the class or function |
| `paper` | paper or project that it is from |
| `skips` | settings with which it skips or drops something in runs as short as those of tests |
| `off` | settings with which it changes nothing, for `skips` as well as for real runs |
| `tried` | methods: models that tests run it on, see `TRIED` |
| `computed` | methods: steps of 8 that it computes with `skips`, where no pipeline is needed |
| `holds` | methods: tensors kept of each feature, and of the probe |
| `aliases` | names that others give, with settings where they are not the default |
| `used` | kernels: callers |

"-" and "_" mean the same in a name, in Python and on command lines.
"""

# ruff: noqa: E501  (rows are lines)

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from diffcache.errors import UnknownMethodError

Kind = Literal["method", "recipe", "dllm", "video", "reuse", "metric", "kernel"]

# Kind -> folder of its places.
_FOLDERS: Mapping[Kind, str] = {
    "method": "diffcache.features",
    "recipe": "diffcache.kv.recipes",
    "dllm": "diffcache.dllm",
    "video": "diffcache.video",
    "reuse": "diffcache.kv",
    "metric": "diffcache.eval.metrics",
    "kernel": "diffcache.kernels",
}

# `tried` of a method -> what tests run it on: pipelines of diffusers, and others by what they are.
TRIED: Mapping[str, tuple[str, ...]] = {
    "every": ("FluxPipeline", "StableDiffusion3Pipeline", "DiTPipeline", "WanPipeline", "StableDiffusionPipeline"),
    "flow": ("FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "HunyuanVideoPipeline"),
    "tokens": ("FluxPipeline", "StableDiffusion3Pipeline", "DiTPipeline", "PixArtAlphaPipeline", "WanPipeline"),
    "attention": ("FluxPipeline", "HunyuanVideoPipeline", "WanPipeline", "DiTPipeline"),
    "guided": ("WanPipeline", "CogView4Pipeline", "Lumina2Pipeline"),
    "policies": ("diffusion policy",),
    "editing": ("image editing (FLUX Kontext)", "image editing (Qwen-Image-Edit)"),
    "chosen": ("FluxPipeline",),
}
# Pipeline -> what it is on pages.
MODELS: Mapping[str, str] = {
    "FluxPipeline": "image, double and single blocks (FLUX)",
    "StableDiffusion3Pipeline": "image, joint blocks (SD 3)",
    "DiTPipeline": "image, class-conditional (DiT)",
    "PixArtAlphaPipeline": "image, cross-attention (PixArt)",
    "WanPipeline": "video, guidance in two calls (Wan)",
    "HunyuanVideoPipeline": "video, double and single blocks (HunyuanVideo)",
    "StableDiffusionPipeline": "image, UNet (Stable Diffusion)",
    "CogView4Pipeline": "image, guidance in two calls (CogView 4)",
    "Lumina2Pipeline": "image, guidance in two calls (Lumina 2)",
}

_TABLES: Mapping[Kind, str] = {
    "method": """
name | place | paper | tried | skips | off | computed | holds | aliases
# A fixed schedule
interval | interval:Interval | FORA: Fast-Forward Caching in Diffusion Transformer Acceleration, arXiv 2407.01425 | every, policies | every=3 | every=1 | 0 3 6 | 1 0 | fora, deepcache:site=deep
taylorseer | taylorseer:TaylorSeer | From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers, arXiv 2503.06923 | every | every=3,warmup=2 | every=1 | 0 1 4 7 | 2 0 | taylor-seer
spectrum | spectrum:Spectrum | Adaptive Spectral Feature Forecasting for Diffusion Sampling Acceleration (Spectrum), arXiv 2603.01623 | every | warmup=2 | window=1.0,growth=0.0 | 0 1 3 5 | 6 0 | chebyshev
hicache | hicache:HiCache | HiCache: Training-free Acceleration of Diffusion Models via Hermite Polynomial-based Feature Caching, arXiv 2508.16984 | every | every=3,warmup=2 | every=1 | 0 1 4 7 | 3 0 | hi-cache
foca | foca:FoCa | Forecast then Calibrate: Feature Caching as ODE for Efficient Diffusion Transformers (FoCa), arXiv 2508.16211 | every | every=3,warmup=2 | every=1 | 0 1 4 7 | 3 0 | fo-ca
freqca | freqca:FreqCa | FreqCa: Accelerating Diffusion Models via Frequency-Aware Caching, arXiv 2510.08669 | every | every=3,warmup=2 | every=1 | 0 1 4 7 | 3 0 | freq-ca
dmd | dmd:DMD | Dynamic mode decomposition, doi 10.1017/S0022112010001217; DMD calibrator (cache-dit) | every | every=3,warmup=2 | every=1 | 0 1 4 7 | 4 0 | prony
pab | pab:PAB | Real-Time Video Generation with Pyramid Attention Broadcast, arXiv 2408.12588 | attention | cross_every=3,start=0.0,end=1.0 | self_every=1,temporal_every=1,cross_every=1 | | | pyramid-attention-broadcast
fastercache | fastercache:FasterCache | FasterCache: Training-Free Video Diffusion Model Acceleration with High Quality, arXiv 2410.19355 | guided | every=3,start=0.0 | every=1 | | | faster-cache
# A gate on what changes in the sample
first-block | first_block:FirstBlock | First Block Cache (ParaAttention) | every | threshold=1e9 | threshold=0.0 | 0 | 1 1 | fbcache, first-block-cache
confidence-gated-taylor | confidence_gated:ConfidenceGatedTaylor | Forecasting When to Forecast: Confidence-Gated Taylor, arXiv 2508.02240 | every | threshold=1e9,warmup=3 | threshold=0.0 | 0 1 2 | 2 2 |
teacache | teacache:TeaCache | Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model (TeaCache), arXiv 2411.19108 | tokens | threshold=1e9 | threshold=0.0 | 0 | 1 1 | tea-cache
magcache | magcache:MagCache | MagCache: Fast Video Generation with Magnitude-Aware Cache, arXiv 2506.09045 | every | threshold=1e9,retention=0.0 | threshold=0.0 | 0 4 | 1 0 | mag-cache
dbcache | dbcache:DBCache | DBCache: Dual Block Cache (cache-dit) | every | threshold=1e9,warmup=2,longest=2 | threshold=0.0 | 0 1 4 7 | 1 1 | db-cache, cache-dit
dbprune | dbprune:DBPrune | DBPrune: Dynamic Block Prune (cache-dit) | every | threshold=1e9,warmup=2 | threshold=0.0 | | | db-prune
easycache | easycache:EasyCache | Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching (EasyCache), arXiv 2507.02860 | every | threshold=1e9,warmup=1 | threshold=0.0 | 0 1 | 2 2 | easy-cache
lazycache | lazycache:LazyCache | LazyCache (ComfyUI) | flow | threshold=1e9,warmup=1 | threshold=0.0 | | | lazy-cache
step-reuse | step_reuse:StepReuse | Step reuse (SGLang Diffusion) | every | threshold=1e9,longest=2 | threshold=0.0 | 0 1 4 7 | 2 0 | step-skip
speca | speca:SpeCa | SpeCa: Accelerating Diffusion Transformers with Speculative Feature Caching, arXiv 2509.11628 | tokens | threshold=1e9,longest=2,warmup=1 | threshold=0.0 | | | spe-ca
step-mask | step_mask:StepMask | Step computation masks (cache-dit) | every | level='ultra',threshold=1e9 | threshold=0.0 | | | scm, step-computation-mask
seacache | seacache:SeaCache | SeaCache: Spectral-Evolution-Aware Cache for Accelerating Diffusion Models, arXiv 2602.18993 | every | threshold=1e9 | threshold=0.0 | | | sea-cache
# Tables measured on the model
ertacache | ertacache:ERTACache | ERTACache: Error Rectification and Timesteps Adjustment for Efficient Diffusion, arXiv 2508.21091 | flow | threshold=1e9 | threshold=0.0 | | |
fitted-forecast | fitted:FittedForecast | diffcache | every | computed=4 | computed=8 | | |
dpcache | dpcache:DPCache | DPCache: Denoising as Path Planning for Training-Free Diffusion Acceleration, arXiv 2602.22654 | every | computed=4 | computed=8 | | | dp-cache
bac | bac:BAC | Block-wise Adaptive Caching for Accelerating Diffusion Policy, arXiv 2506.13456 | every, policies | count=3,union=2 | count=8 | | |
cachequant | cachequant:CacheQuant | CacheQuant: Comprehensively Accelerated Diffusion Models, arXiv 2503.01323 | every | every=3 | every=1 | | |
harmonica | harmonica:HarmoniCa | HarmoniCa: Harmonizing Training and Inference for Better Feature Caching in Diffusion Transformer Acceleration, arXiv 2410.01723 | tokens | threshold=0.5,epochs=2,refresh=14,rate=1.0,beta=0.01 | threshold=0,epochs=2,refresh=14,rate=1.0,beta=0.01 | | |
profilingdit | profilingdit:ProfilingDiT | Model Reveals What to Cache: Profiling-Based Feature Reuse for Video Diffusion Models, arXiv 2504.03140 | attention | every=3,warmup=1,share=0.5 | background=() | | |
# Parts of an edit, and what depends on the timestep alone
regione | regione:RegionE | RegionE: Adaptive Region-Aware Generation for Efficient Image Editing, arXiv 2510.25590 | editing | | | | |
temporal-table | temporal_table:TemporalTable | TFMQ-DM: Temporal Feature Maintenance Quantization for Diffusion Models, arXiv 2311.16503; Temporal Feature Matters: A Framework for Diffusion Model Quantization, arXiv 2407.19547 | every | defaults | defaults | | |
# A search over all of them
tuned | tuned:Tuned | diffcache | chosen | | | | |
""",
    "dllm": """
name | place | paper | skips | off
# Row plans of a masked language model
d2cache | d2_cache:D2Cache | d2Cache, arXiv 2509.23094 | current_k=3,sigma=2.0,rollout_p=0.3,inflate_w=3 |
dkv-cache | dkv_cache:DKVCache | dKV-Cache, arXiv 2505.15781 | every=4 | every=1
dllm-cache | dllm_cache:DLLMCache | dLLM-Cache, arXiv 2506.06295 | prompt_every=5,answer_every=3 | prompt_every=1,answer_every=1
dpad | dpad:DPad | DPad, arXiv 2508.14148 | window=3,sigma=0.0,scale=3.0,cache='dual' | window=999,sigma=0.0,scale=3.0
elastic | elastic_cache:ElasticCache | Elastic-Cache, arXiv 2510.14973 | gamma=0.8 | force_full=True
entropy-cache | entropy_cache:EntropyCache | EntropyCache, arXiv 2603.18489 | threshold=3.2,recent=3 | threshold=0
fast-dllm | fast_dllm:FastDLLM | Fast-dLLM, arXiv 2505.22618 | defaults |
free-cache | free_cache:FreeCache | FlashDLM (FreeCache), arXiv 2505.21467 | defaults |
sparse-dllm | sparse_dllm:SparseDLLM | Sparse-dLLM, arXiv 2508.02558 | keep=0.4 |
vicinity | vicinity:Vicinity | dInfer, arXiv 2510.08666 | before=2,after=3,warmup=1 | before=999,after=999
window-diffusion | window_diffusion:WindowDiffusion | Window-Diffusion, arXiv 2601.20332 | window=16,every=5 | window=7,every=1
uncached | policy:Uncached | | | defaults
# Finished blocks, of models that are causal over blocks
block-cache | block_cache:BlockCache | this project, after Block Diffusion, arXiv 2503.09573 | |
""",
    "video": """
name | place | paper | skips | off
# Frames
full | policy:FullHistory | Self-Forcing, arXiv 2506.08009 | | defaults
window | window:Window | MotionStream, arXiv 2511.01266; Self-Forcing, arXiv 2506.08009 | window=3,sinks=3 |
infinity-rope | infinity_rope:InfinityRoPE | Infinity-RoPE, arXiv 2511.20649 | window=3,sinks=1 |
deep-forcing | deep_forcing:DeepForcing | Deep Forcing, arXiv 2512.05081 | window=9,sinks=3,budget=8,recent=4,max_reuse=2 |
ema-sink | ema_sink:EMASink | Reward Forcing, arXiv 2512.04678 | window=3,sinks=3,alpha=0.5 |
rolling-sink | rolling_sink:RollingSink | Rolling Sink, arXiv 2602.07775 | sinks=6,recent=3 |
stream-diffusion-v2 | stream_diffusion_v2:StreamDiffusionV2 | StreamDiffusionV2, arXiv 2511.07399 | |
history-retrieval | history_retrieval:HistoryRetrieval | after MagicWorld, arXiv 2511.18886 | window=3,pool=4,count=2 |
semantic-bank | semantic_bank:SemanticBank | after BlockVid, arXiv 2511.22973 | window=3,pool=4,count=2 |
flow-cache | flow_cache:FlowCache | FlowCache, arXiv 2602.10825 | window=4,recent=4 |
layer-budgets | layer_budgets:LayerBudgets | after ScaleKV, arXiv 2505.19602 | window=6,recent=2 |
quantized | few_bits:Quantized | KIVI, arXiv 2402.02750 | |
# A transformer of another build
ca2-vdm | ca2_vdm:Ca2VDM | Ca2-VDM, arXiv 2411.16375 | |
""",
    "recipe": """
name | place | paper | skips | off
# First and latest tokens
streaming_llm | streaming:streaming_llm | StreamingLLM, arXiv 2309.17453 | budget=12 | budget=1.0,sinks=2
duo_attention | streaming:duo_attention | DuoAttention, arXiv 2410.10819 | budget=12 | heads=((True,True),(True,True),(True,True),(True,True)),budget=1.0
razor_attention | streaming:razor_attention | RazorAttention, arXiv 2407.15891 | budget=0.3,least=8 | budget=1.0,least=6
# Eviction by a score
random | eviction:random |  | budget=12 | budget=1.0
knorm | eviction:knorm | A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430 | budget=12 | budget=1.0
value_norm | eviction:value_norm |  | budget=12 | budget=1.0,recent=2
keydiff | eviction:keydiff | KeyDiff, arXiv 2504.15364 | budget=0.4 | budget=1.0
lagkv | eviction:lagkv | LagKV, arXiv 2504.04704 | budget=16,lag=8 | budget=1.0,lag=6
expected_attention | eviction:expected_attention | Expected Attention, arXiv 2510.00636 | budget=14,future=32 | budget=1.0,future=64
h2o | eviction:h2o | H2O, arXiv 2306.14048 | budget=0.3 | budget=1.0
tova | eviction:tova | TOVA, Transformers are Multi-State RNNs, arXiv 2401.06104 | budget=12 | budget=1.0
snapkv | eviction:snapkv | SnapKV, arXiv 2404.14469 | budget=12,window=4 | budget=1.0,window=4
pyramidkv | eviction:pyramidkv | PyramidKV, arXiv 2406.02069 | budget=14,window=4 | budget=1.0,window=4,beta=4
cake | eviction:cake | CAKE, arXiv 2503.12491 | budget=14,window=4 | budget=1.0,window=4
adakv | eviction:adakv | Ada-KV, arXiv 2407.11550 | base='snapkv:budget=12,window=4' | base='snapkv:budget=1.0,window=4'
criticalkv | eviction:criticalkv | CriticalKV, arXiv 2502.03805 | base='snapkv:budget=12,window=4' | base="adakv:base='snapkv:budget=1.0'"
# Eviction by statistics, windows and probes
scissorhands | eviction:scissorhands | Scissorhands, arXiv 2305.17118 | budget=12,history=16,recent=4 | budget=1.0,history=16,recent=4
keyformer | eviction:keyformer | Keyformer, arXiv 2403.09054 | budget=12 | budget=1.0
lazy_eviction | eviction:lazy_eviction | LazyEviction, arXiv 2506.15969 | budget=12,lag=3,threshold=0.02 | budget=1.0,lag=3
windowkv | eviction:windowkv | WindowKV, arXiv 2503.17922 | budget=16,window=4,size=4,group=2 | budget=1.0,window=4,size=4,group=2
epicache | eviction:epicache | EpiCache, arXiv 2509.17396 |  |
kvzip | eviction:kvzip | KVzip, arXiv 2505.23416 |  |
curdkv | eviction:curdkv | CurDKV, arXiv 2509.15038 | budget=12,window=5,sinks=2 | budget=1.0,window=5,sinks=2
compactor | eviction:compactor | Compactor, arXiv 2507.08143 | budget=20,chunk=8 | budget=1.0,chunk=8
# Eviction by tables found beforehand
prefixkv | eviction:prefixkv | PrefixKV, arXiv 2412.03409 | budget=14,sinks=2 | budget=1.0,sinks=2,shares=(0.5,0.1,0.3,0.1)
compresskv | eviction:compresskv | CompressKV, arXiv 2508.02401 | budget=16,window=4,kernel=3,least=6 | budget=1.0,window=4,weights=()
scalekv | eviction:scalekv | ScaleKV, arXiv 2505.19602 |  |
# Merging and diversity
d2o | merging:d2o | D2O, arXiv 2406.13035 | budget=12 | budget=1.0
ems | merging:ems | EMS, arXiv 2412.08521 | budget=16,window=4,threshold=0.0 | budget=1.0
elastic_cache | merging:elastic_cache | Elastic Cache, arXiv 2407.18121 | budget=12,distance=5 | budget=1.0
look_m | merging:look_m | LOOK-M, arXiv 2406.18139 | budget=12 | budget=1.0
kvmerger | merging:kvmerger | KVMerger, arXiv 2407.08454 | budget=12,threshold=0.0,recent=4 | budget=1.0
chelsea | merging:chelsea | Chelsea, arXiv 2506.11418 | budget=12,chunk=8,recent=4,every=4 | budget=1.0
lococo | merging:lococo | LoCoCo, arXiv 2406.05317 | budget=12,recent=4,chunk=4 | budget=64
kvcrush | merging:kvcrush | KVCrush, arXiv 2503.00022 | budget=12,recent=4 | budget=1.0
locret | merging:locret | Locret, arXiv 2410.01805 | budget=12,stabilizers=4,chunk=4 | budget=64
# Quantization and sparsity
kivi | quantized:kivi | KIVI, arXiv 2402.02750 | bits=4,group=8,residual=16 |
gear | quantized:gear | GEAR, arXiv 2403.05527 | bits=4,group=8,buffer=16 |
zipcache | quantized:zipcache | ZipCache, arXiv 2405.14256 | every=16 |
mikv | quantized:mikv | MiKV, arXiv 2402.18096 | budget=16,every=4,queries=8,group=8,bits=4 |
rotatekv | quantized:rotatekv | RotateKV, arXiv 2501.16383 | bits=4,group=8,heads=2,recent=8 |
vidkv | quantized:vidkv | VidKV, arXiv 2503.16257 | group=8,residual=16 |
xquant | quantized:xquant | XQuant, arXiv 2510.11236 | group=8,residual=16 |
staircase | quantized:staircase |  | steps=(8,16,32),group=8 |
mustafar | quantized:mustafar | Mustafar, arXiv 2505.22913 | recent=8 |
# Low rank and layers in terms of one another
xkv | low_rank:xkv | xKV, arXiv 2503.18893 | block=16 |
minicache | low_rank:minicache | MiniCache, arXiv 2405.14366 | block=16,bits=4,skip=2 |
cskv | low_rank:cskv | CSKV, arXiv 2409.10593 | recent=8,bits=8 |
kv_heads | low_rank:kv_heads | Effectively Compress KV Heads for LLM, arXiv 2406.07056 | bits=8 |
rematerialised | low_rank:rematerialised | XQuant, arXiv 2508.10395 |  |
xquant_latent | low_rank:xquant_latent | XQuant, arXiv 2508.10395 |  |
# Retrieval: nothing is dropped
quest | retrieval:quest | Quest, arXiv 2406.10774 | budget=24,page=4,skip=1 | budget=1.0,page=4,skip=1
mpcache_select | retrieval:mpcache_select | MPCache, arXiv 2501.06807 | budget=24,large=8,small=4 | budget=1.0,large=8,small=4
double_sparsity | retrieval:double_sparsity | Double Sparsity, arXiv 2408.07092 | budget=24,recent=4,bits=4,skip=0 | budget=1.0,recent=4,bits=4,skip=0
tidal_decode | retrieval:tidal_decode | TidalDecode, arXiv 2410.05076 | budget=24,select=(1,3),recent=4 | budget=1.0,select=(1,3),recent=4
sentence_kv | retrieval:sentence_kv | SentenceKV, arXiv 2504.00970 | budget=24,sinks=2,recent=4,block=4 | budget=1.0,sinks=2,recent=4,block=4
rekv | retrieval:rekv | ReKV, arXiv 2503.00540 | budget=24,recent=4,sinks=2,block=4 | budget=1.0,recent=4,sinks=2,block=4
probe_query | retrieval:probe_query |  | budget=24,density=1.0,block=4,recent=4 | budget=1.0,density=1.0,block=4,recent=4
a2ats | retrieval:a2ats | A2ATS, arXiv 2502.12665 | budget=24,codes=16,far=4,recent=4 | budget=1.0,codes=16,far=4,recent=4
shadowkv | retrieval:shadowkv | ShadowKV, arXiv 2410.21465 | budget=44,rank=32,outliers=1,block=8 | budget=1.0,rank=32,outliers=1,block=8
""",
    "reuse": """
name | place | paper
# Keys and values in other contexts
cacheblend | reuse.recompute:cacheblend | CacheBlend, arXiv 2405.16444
cachecraft | reuse.cachecraft:cachecraft | Cache-Craft, arXiv 2502.15734
kvshare | reuse.recompute:kvshare | KVShare, arXiv 2503.16525
pie | reuse.recompute:pie | Let the Code LLM Edit Itself When You Edit the Code, arXiv 2407.03157
ape | reuse.ape:ape | APE, arXiv 2502.05431
hydragen | reuse.hydragen:hydragen | Hydragen, arXiv 2402.05099
pack | life.prepacking:pack | Prepacking, arXiv 2404.09529
""",
    "kernel": """
name | place | used
# attention
lse_merge | merge:MERGE | attention to parts: shared prefixes, contexts encoded side by side
attn_forward | attention:FORWARD | codes, windows, chosen slots, keys rotated when they are read, shared prefixes, prompts that are scored, masks of row plans
attn_mass | attention:MASS | scores by attention: H2O, Scissorhands and others
sdpa_cudnn | dense:NAME | attention of many queries without a mask, where torch's own choice is plain
attn_int8 | int8:INT8 | `with Int8Attention():` around a pipeline's call
# codes
int8_codes | codes:CODES | inputs of the quantized layers of CacheQuant
# distance
l1_sums | distance:SUMS | gates: FirstBlock, TeaCache and all that compare a probe
# forecast
weighted_sum | forecast:SUM | forecasts of TaylorSeer, confidence-gated Taylor and Newton
finite_differences | forecast:DIFFERENCES | their computed steps
# linear
linear_of_codes | linear:LINEAR | quantized linear layers of CacheQuant
# move
kv_scatter | move:SCATTER | row plans of diffusion language models, edited regions, refreshed tokens
kv_gather | move:GATHER | what is kept when slots are dropped or settled
# quantize
quant_groups | quantize:QUANT | KIVI and other codecs of groups, when slots settle
dequant_groups | quantize:DEQUANT | the same codecs, when slots are read
attn_decode_kivi | coded:ATTEND | a generated token over keys and values of KIVI in native mode
# rotary
rotate | rotary:ROTATE | keys that are rotated when they are read, turned back, or moved
# rows
pack_rows | rows:PACK | `hold="int8"`, on computed steps
weighted_sum_int8 | rows:SUM | `hold="int8"`: forecasts, and unpacking on computed steps
""",
    "metric": """
name | title | unit | direction | definition | paper | call | weights | packages | stand_in
# Fidelity: closeness to the uncached sample of the same prompt and seed
psnr_db | PSNR | dB | up | mean over pairs of 10 log10(255² / MSE) with one MSE per image, at most 100 dB (MSE below 1e-10 of 255²); videos: mean over frames first | definition; the cap as in VBench-style comparisons | `pixels.psnr`, as torchmetrics `PeakSignalNoiseRatio(data_range=1, reduction="none", dim=(1, 2, 3))` | | |
psnr_pooled_db | Pooled PSNR | dB | up | 10 log10(255² / MSE) with one MSE over all images; poor images weigh more than in the mean | definition | `pixels.pooled_psnr`, as torchmetrics `PeakSignalNoiseRatio(data_range=1)` | | |
ssim | SSIM | | up | mean of (2 μ₁μ₂ + c₁)(2 σ₁₂ + c₂) / ((μ₁² + μ₂² + c₁)(σ₁² + σ₂² + c₂)) over windows, Gaussian, 11 by 11 pixels with standard deviation 1.5, for each channel, borders reflected | Wang et al. 2004, doi 10.1109/TIP.2003.819861 | `pixels.ssim`, as torchmetrics `StructuralSimilarityIndexMeasure(data_range=1)` | | |
ms_ssim | MS-SSIM | | up | product over 5 halved scales of the contrast-structure term, and SSIM at the last, to the powers .0448, .2856, .3001, .2363, .1333; fewer scales with rescaled powers where a side is below 176 pixels | Wang et al. 2003, doi 10.1109/ACSSC.2003.1292216 | `pixels.ms_ssim`, as torchmetrics `MultiScaleStructuralSimilarityIndexMeasure(data_range=1)` from 176 pixels | | |
lpips | LPIPS | | down | sum over 5 AlexNet layers of the learned weighting of squared differences between unit-normalized feature maps, averaged over positions | Zhang et al. 2018, arXiv 1801.03924 (v0.1 heads) | `lpips.LPIPS`, as torchmetrics `LearnedPerceptualImagePatchSimilarity("alex")` without torchvision | alexnet | torchmetrics | lpips_lite
lpips_lite | LPIPS-lite | | down | mean over the levels of the shipped extractor of squared differences between unit-normalized feature maps | this project, after arXiv 1801.03924 | `lite.lpips_lite` | | sticker-features |
latent_error | Latent error | | down | ‖cached - uncached‖₂ / ‖uncached‖₂ of the latents after every step, mean over the first 16 samples | definition | `eval.runs` | | |
temporal_error | Temporal error | | down | mean absolute difference of frame-to-frame changes, mean abs((a[t+1] - a[t]) - (b[t+1] - b[t])) / 255 | definition | `pixels.temporal_error` | | |
# Quality of images
fid | FID | | down | ‖μ₁ - μ₂‖² + tr(Σ₁ + Σ₂ - 2 (Σ₁Σ₂)^½) of 2048-d Inception pool features, covariance over N - 1, float64 | Heusel et al. 2017, arXiv 1706.08500 | `inception.load` (torch-fidelity `FeatureExtractorInceptionV3`) and `distances.frechet`; clean-fid resize with `mode="clean"` (arXiv 2104.11222) | inception | torch_fidelity, torchvision | fid_lite
fid_lite | FID-lite | | down | the same distance on 64-d features of the shipped extractor | this project, after arXiv 1706.08500 | `lite.embed`, `distances.frechet` | | sticker-features |
fid_to_uncached | FID to uncached | | down | FID between the cached and the uncached samples of the same prompts and seeds; 0 for identical ones | after arXiv 1706.08500 | as FID | inception | torch_fidelity, torchvision | fid_lite_to_uncached
fid_lite_to_uncached | FID-lite to uncached | | down | FID-lite between the cached and the uncached samples of the same prompts and seeds | this project | as FID-lite | | sticker-features |
kid | KID | | down | unbiased squared maximum mean discrepancy with the kernel (x·y / d + 1)³, mean over subsets | Bińkowski et al. 2018, arXiv 1801.01401 | `distances.kid`, as torchmetrics `KernelInceptionDistance` | inception | torch_fidelity, torchvision | kid_lite
kid_lite | KID-lite | | down | the same on features of the shipped extractor | this project, after arXiv 1801.01401 | `distances.kid` on `lite.embed` | | sticker-features |
is | Inception score | | up | exp(mean KL(p(y given x), p(y))) over splits, p from the logits without bias | Salimans et al. 2016, arXiv 1606.03498 | `inception.load`, `distances.inception_score`, as torchmetrics `InceptionScore` | inception | torch_fidelity, torchvision | is_lite
is_lite | IS-lite | | up | the same with the class head of the shipped extractor; at most its number of classes | this project, after arXiv 1606.03498 | `distances.inception_score` on `lite.embed_and_classify` | | sticker-features |
precision | Precision | | up | share of generated features inside a ball around a real one that reaches to its 3rd neighbor | Kynkäänniemi et al. 2019, arXiv 1904.06991 | `distances.precision_recall` | inception | torch_fidelity, torchvision | precision_lite
recall | Recall | | up | share of real features inside a ball around a generated one that reaches to its 3rd neighbor | arXiv 1904.06991 | `distances.precision_recall` | inception | torch_fidelity, torchvision | recall_lite
density | Density | | up | mean number of real 5th-neighbor balls around a generated feature, over 5; can exceed 1 | Naeem et al. 2020, arXiv 2002.09797 | `distances.density_coverage` | inception | torch_fidelity, torchvision | density_lite
coverage | Coverage | | up | share of real 5th-neighbor balls with a generated feature inside | arXiv 2002.09797 | `distances.density_coverage` | inception | torch_fidelity, torchvision | coverage_lite
precision_lite | Precision-lite | | up | precision on features of the shipped extractor | this project, after arXiv 1904.06991 | `distances.precision_recall` on `lite.embed` | | sticker-features |
recall_lite | Recall-lite | | up | recall on features of the shipped extractor | this project, after arXiv 1904.06991 | `distances.precision_recall` on `lite.embed` | | sticker-features |
density_lite | Density-lite | | up | density on features of the shipped extractor | this project, after arXiv 2002.09797 | `distances.density_coverage` on `lite.embed` | | sticker-features |
coverage_lite | Coverage-lite | | up | coverage on features of the shipped extractor | this project, after arXiv 2002.09797 | `distances.density_coverage` on `lite.embed` | | sticker-features |
clip_score | CLIP score | | up | 100 max(0, cos(image features, text features)), mean over samples; prompts are cut at the text model's length (77 tokens) | Hessel et al. 2021, arXiv 2104.08718 (factor 100 as in torchmetrics) | `clip.ClipScore` (transformers `CLIPModel`) | clip | transformers |
pick_score | PickScore | | up | exp(logit scale) cos(image features, text features) of a CLIP ViT-H/14 trained on preferences of people | Kirstain et al. 2023, arXiv 2305.01569 | `reward.PickScore` (transformers `CLIPModel`) | pickscore | transformers |
# Quality of videos
fvd | FVD | | down | Fréchet distance of 400-d I3D logits of clips of equal length, usually 16 frames | Unterthiner et al. 2018, arXiv 1812.01717; detector and call as StyleGAN-V, arXiv 2112.14683 | `i3d.I3D`, `distances.frechet` | i3d | | fvd_lite
fvd_lite | FVD-lite | | down | Fréchet distance of statistics over time of the shipped extractor's frame features | this project, after arXiv 1812.01717 | `lite.clip_features`, `distances.frechet` | | sticker-features |
fvd_to_uncached | FVD to uncached | | down | FVD between the cached and the uncached videos of the same prompts and seeds | after arXiv 1812.01717 | as FVD | i3d | | fvd_lite_to_uncached
fvd_lite_to_uncached | FVD-lite to uncached | | down | FVD-lite between the cached and the uncached videos of the same prompts and seeds | this project | as FVD-lite | | sticker-features |
kvd | KVD | | down | KID's estimator on the I3D logits of clips | arXiv 1812.01717 | `i3d.I3D`, `distances.kid` | i3d | | kvd_lite
kvd_lite | KVD-lite | | down | KID's estimator on the clip features of FVD-lite | this project, after arXiv 1812.01717 | `lite.clip_features`, `distances.kid` | | sticker-features |
# Videos, by VBench's formula without its choice of videos
temporal_flickering | Temporal flickering (formula) | | up | (255 - mean abs(F[t] - F[t+1])) / 255, VBench's formula on all videos instead of static ones only | arXiv 2311.17982 | `suite.temporal_flickering` | | |
# VBench, through the official package in its own interpreter (arXiv 2311.17982)
vbench_subject_consistency | VBench subject consistency | | up | mean over frames of ½(cos to the previous + cos to the first) of DINO ViT-B/16 features | arXiv 2311.17982 | `VBench.evaluate` | vbench-dino | |
vbench_background_consistency | VBench background consistency | | up | the same on CLIP ViT-B/32 features | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-b32 | |
vbench_temporal_flickering | VBench temporal flickering | | up | (255 - mean abs(F[t] - F[t+1])) / 255 on videos filtered for being static | arXiv 2311.17982 | `VBench.evaluate` | | |
vbench_motion_smoothness | VBench motion smoothness | | up | (255 - mean abs(odd frame - AMT-S interpolation from the even ones)) / 255 | arXiv 2311.17982 | `VBench.evaluate` | vbench-amt | |
vbench_dynamic_degree | VBench dynamic degree | | up | share of videos in which enough frame pairs have top 5 % RAFT flow above 6 · side / 256 pixels | arXiv 2311.17982 | `VBench.evaluate` | vbench-raft | |
vbench_aesthetic_quality | VBench aesthetic quality | | up | LAION linear head on CLIP ViT-L/14 over 10, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-l14, vbench-aesthetic | |
vbench_imaging_quality | VBench imaging quality | | up | MUSIQ-SPAQ over 100, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-musiq | |
vbench_object_class | VBench object class | | up | share of 16 frames in which GRiT detects the object | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_multiple_objects | VBench multiple objects | | up | share of 16 frames in which GRiT detects both objects | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_human_action | VBench human action | | up | share of videos whose action is in UMT's top 5 at 0.85 or more | arXiv 2311.17982 | `VBench.evaluate` | vbench-umt | |
vbench_color | VBench color | | up | share of frames with the object whose GRiT caption names the color | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_spatial_relationship | VBench spatial relationship | | up | mean over frames of the agreement of GRiT boxes with the relation asked for | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_scene | VBench scene | | up | share of frames whose Tag2Text caption contains every word of the scene | arXiv 2311.17982 | `VBench.evaluate` | vbench-tag2text | |
vbench_appearance_style | VBench appearance style | | up | CLIP ViT-B/32 similarity of frames and style phrase, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-b32 | |
vbench_temporal_style | VBench temporal style | | up | ViCLIP similarity of 8 frames and prompt | arXiv 2311.17982 | `VBench.evaluate` | vbench-viclip, vbench-viclip-vocabulary | |
vbench_overall_consistency | VBench overall consistency | | up | ViCLIP similarity of 8 frames and prompt, on its own prompts | arXiv 2311.17982 | `VBench.evaluate` | vbench-viclip, vbench-viclip-vocabulary | |
# Language
exact_match | Exact match | | up | share of answers that equal the expected one after the task's normalization | task | `lm_eval.simple_evaluate` | | lm_eval |
perplexity | Perplexity | | down | exp(-mean log p of a token given those before it) | definition | `transformers` | | |
# Cost
seconds | Seconds | s | down | median wall time of timed runs after warm-up runs, synchronized, uncached and cached interleaved | definition | `eval.cost` | | |
ratio | Speed ratio | | up | uncached seconds over cached seconds of each interleaved pair, median | definition | `eval.cost` | | |
cpu_ratio | CPU ratio | | up | CPU seconds of the uncached call over those of the cached one, of each interleaved pair, median; other work on the machine hardly changes it | definition | `eval.cost` | | |
denoiser_ratio | Denoiser ratio | | up | the speed ratio within the denoiser's calls, without text encoders and decoder | definition | `eval.cost` | | |
throughput | Throughput | samples/s | up | samples of a batch over its seconds, median | definition | `eval.cost` | | |
flops | FLOPs | FLOP | down | two per multiply-accumulate of the matrix products, convolutions and attention that ran; by formula where a model is too big to run | definition | `eval.cost.flops` (`torch.utils.flop_counter` with a rule for attention on CPUs) | | |
flops_ratio | FLOPs ratio | | up | FLOPs of the uncached run over those of the row | definition | as FLOPs | | |
evaluations | Evaluations | | down | denoiser calls of a full run that cost the same FLOPs | definition | as FLOPs | | |
computed_steps | Computed steps | | down | steps of a run in which anything that the cache may skip was computed, mean over runs | definition | `diffcache.report` | | |
peak_bytes | Peak memory | bytes | down | most memory in use during a run: allocated on CUDA, resident of a fresh process on CPU | definition | `torch.cuda.max_memory_allocated`, `psutil` | | |
held_bytes | Held memory | bytes | down | bytes of the features that a cache keeps, elements times element size | definition | `diffcache.report` | | |
""",
}


@dataclass(frozen=True)
class Row:
    """One row of the registry."""

    kind: Kind
    name: str  # name, as users write it
    family: str  # heading that it stands under
    cells: Mapping[str, str]  # its other cells, by the names of their columns

    @property
    def place(self) -> str:
        """Dotted module and name of the class or function, with a colon between them."""
        return f"{_FOLDERS[self.kind]}.{self.cells['place']}"

    @property
    def paper(self) -> str:
        """Paper or project that it is from, empty for none."""
        return self.cells["paper"]

    @property
    def skips(self) -> dict[str, Any] | None:
        """Settings with which it skips or drops something in a short run; None where none do."""
        return _settings_of_cell(self.cells["skips"])

    @property
    def off(self) -> dict[str, Any] | None:
        """Settings with which it changes nothing; None where none do."""
        return _settings_of_cell(self.cells["off"])

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names that others give."""
        return tuple(filter(None, self.cells.get("aliases", "").split(", ")))

    @property
    def tried(self) -> tuple[str, ...]:
        """Return the models and pipelines that tests run a method on, by the words of `TRIED`."""
        return tuple(each for word in self.cells["tried"].split(", ") for each in TRIED[word])

    def numbers(self, column: str) -> tuple[int, ...]:
        """Return the whole numbers of a cell."""
        return tuple(map(int, self.cells[column].split()))

    @property
    def sentence(self) -> str:
        """First line of its docstring."""
        return (inspect.getdoc(self.load()) or "").split("\n")[0]

    def load(self) -> Any:
        """Import the class or function, and return it."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)


@cache
def rows_of(kind: Kind) -> Mapping[str, Row]:
    """Return the rows of a kind by their names, in the order of the registry."""
    first, *lines = filter(None, _TABLES[kind].splitlines())
    columns = [column.strip() for column in first.split("|")]
    found: dict[str, Row] = {}
    family = ""
    for line in lines:
        if line.startswith("#"):
            family = line.removeprefix("#").strip()
            continue
        cells = dict(zip(columns, (cell.strip() for cell in line.split("|")), strict=True))
        name = cells.pop("name")
        found[name] = Row(kind, name, family, cells)
    return found


def places(kind: Kind) -> dict[str, str]:
    """Return the classes and functions of a kind: name in Python -> dotted module."""
    parts = (row.place.partition(":") for row in rows_of(kind).values())
    return {name: module for module, _, name in parts}


@cache
def name_of(cls: type) -> str:
    """Return the name of a class, or of the nearest one that it is made from; "unnamed" for none."""
    rows = (row for kind in ("method", "dllm", "video") for row in rows_of(kind).values())
    names = {row.place: row.name for row in rows}
    bases = (f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__)
    return next((names[base] for base in bases if base in names), "unnamed")


def exported(package: str, name: str, kind: Kind) -> Any:
    """Return a class of a kind as an attribute of its package, or raise AttributeError."""
    module = places(kind).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def find(name: str, *kinds: Kind) -> Row | None:
    """Return the row of a name among kinds; None if there is none."""
    wanted = _key(name)
    return next((r for kind in kinds for r in rows_of(kind).values() if _key(r.name) == wanted), None)


def unknown(name: str, *kinds: Kind) -> UnknownMethodError:
    """Return the error for a name that no row of some kinds has, with the nearest names, and where others belong."""
    noun, key = WORDS[kinds[0]].noun, _key(name).lower()
    joined = key.replace("-", "")
    for row in rows_of("method").values():
        for alias in row.aliases:
            theirs, colon, own = alias.partition(":")
            if joined == theirs.replace("-", "") and key != row.name:
                ours = f"{row.name}{colon}{own}"
                return UnknownMethodError(f"unknown {noun} {name!r}; it is called {ours!r} here")
    rows = [row for kind in WORDS for row in rows_of(kind).values()]
    classes = {row.place.partition(":")[2].lower(): row for row in rows}
    named = {**classes, **{_key(row.name): row for row in rows}}
    close = difflib.get_close_matches(key, named, n=1)
    if not close:
        if len(kinds) > 2:
            return UnknownMethodError(f"unknown name {name!r}; `diffcache methods` lists all")
        known = ", ".join(each for kind in kinds for each in rows_of(kind))
        return UnknownMethodError(f"unknown {noun} {name!r}; known: {known}")
    row = named[close[0]]
    is_meant = close[0] == _key(name)
    hint = f"{'this is' if is_meant else 'did you mean'} {row.name!r}{'.' if is_meant else '?'}"
    place = "" if row.kind in kinds else f" It is a {WORDS[row.kind].story}"
    return UnknownMethodError(f"unknown {noun} {name!r}; {hint}{place}")


@dataclass(frozen=True)
class Words:
    """Words of messages about one kind of cache that can be wrapped: a noun, where it goes, what it is put on."""

    noun: str
    story: str
    takes: str


WORDS: Mapping[Kind, Words] = {
    "method": Words(
        "method",
        "method: pass it to diffcache.wrap or `diffcache run --method`",
        "a pipeline of diffusers, or a denoiser: a torch module with lists of blocks",
    ),
    "dllm": Words(
        "policy",
        "policy for diffusion language models: pass it to diffcache.wrap or `diffcache run --method`",
        "a masked diffusion language model, or a DiffusionLM",
    ),
    "recipe": Words(
        "recipe",
        "recipe for key-value caches: pass it to diffcache.wrap with a language model, to "
        "diffcache.kv.cache_for or `diffcache kv --recipe`",
        "a language model of transformers",
    ),
    "video": Words(
        "video policy",
        "policy for causal video: pass it to diffcache.wrap with a CausalVideo, or to its session",
        "a CausalVideo",
    ),
}  # what `wrap` takes


def _key(name: str) -> str:
    return name.replace("_", "-")


def check_settings(cls: Any, settings: Iterable[str]) -> None:
    """Raise ValueError unless a dataclass has all settings."""
    known = [field.name for field in fields(cls)]
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ValueError(f"{cls.__name__} has no setting {wrong[0]!r}; it has {', '.join(known)}")


# names with settings ---------------------------------------------------------------------------

_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""


def _settings_of_cell(cell: str) -> dict[str, Any] | None:
    if cell in ("", "defaults"):
        return {} if cell else None
    return read_word(f"row:{cell}")[1]


def read_word(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings that one word of a command line gives, `name:key=value,key=value`.

    Raises:
        ValueError: If the name is missing, or a setting cannot be read or is given twice.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon and "=" in name:
        raise ValueError(f"method {text!r}: settings follow a colon, such as taylorseer:every=4")
    if not name:
        raise ValueError(f"method {text!r}: a name is missing; `diffcache methods` lists them")
    if colon and not rest:
        raise ValueError(f"method {text!r}: settings are missing behind the colon")
    settings: dict[str, Any] = {}
    for pair in split(text, rest):
        key, value = _setting(text, pair)
        if key in settings:
            raise ValueError(f"method {text!r}: {key} is given twice")
        settings[key] = value
    return name, settings


def _setting(text: str, pair: str) -> tuple[str, Any]:
    key, sign, value = (part.strip() for part in pair.partition("="))
    if not sign or not key.isidentifier() or not value:
        raise ValueError(f"method {text!r}: {pair.strip()!r} must be a setting and its value, such as every=4")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, {"true": True, "false": False}.get(value, value)


def split(text: str, rest: str, at: str = ",") -> list[str]:
    """Split at the commas, or another sign, that stand outside of brackets and quotes.

    Raises:
        ValueError: If a bracket or quote is open; `text` is the whole word, for the error.
    """
    parts, depth, quote = [""], 0, ""
    for sign in rest:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES:
            quote = sign
        else:
            depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == at and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if quote or depth:
        raise ValueError(f"method {text!r}: {rest!r} has an open quote or bracket")
    return [part for part in parts if part or len(parts) > 1]
