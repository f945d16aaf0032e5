"""Scores, kept slots and changed values of all presses of kvpress on the tiny Llama.

Besides the presses that `diffcache kv` asks there are some that need tables, which are drawn here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.kv.peer import (
    FUTURE,
    PRESSES,
    SKETCH_SEED,
    WINDOW,
    Seen,
    Spec,
    build,
    calling,
    compress,
    press_class,
)
from diffcache.eval.kv.peer import kept as kept_by

CONTEXT = 60  # KVzip: the first tokens are the context, the others repeat it
_SCORERS = (
    "knorm", "keydiff", "streaming_llm", "snapkv", "tova", "observed_attention",
    "expected_attention", "lagkv", "leverage", "non_causal", "compactor", "cur", "cap",
)  # fmt: skip
SCORERS = {
    **{name: PRESSES[name] for name in _SCORERS},
    "critical_snapkv": PRESSES["criticalkv"],
    "expected_attention_mean": Spec(
        "expected_attention_press", "ExpectedAttentionPress", {**FUTURE, "use_covariance": False, "use_vnorm": False}
    ),
    "qfilter": Spec("qfilter_press", "QFilterPress"),
}
WRAPPERS = {
    "pyramidkv_beta2": replace(PRESSES["pyramidkv"], settings={**WINDOW, "beta": 2}),
    "pyramidkv_beta20": PRESSES["pyramidkv"],
    "adakv_snapkv": PRESSES["adakv"],
    "critical_adakv_snapkv": PRESSES["critical_adakv"],
    "chunkkv_snapkv": PRESSES["chunkkv"],
    "entropy_chunkkv_snapkv": Spec(
        "entropy_gated_chunkkv_press",
        "EntropyGatedChunkKVPress",
        {"chunk_length": 10, "low_entropy_chunk_length": 4},
        base="snapkv",
    ),
    "chunk_keydiff": PRESSES["chunk_keydiff"],
    "block_keydiff": PRESSES["block_keydiff"],
    "rerotated_knorm": Spec("key_rerotation_press", "KeyRerotationPress", base="knorm"),
    "merged_snapkv": Spec("merging_press", "MergingPress", base="snapkv"),
    "duo": Spec("duo_attention_press", "DuoAttentionPress"),
    "lukv": Spec("lukv_press", "LUKVPress", {"sink": 4, "window": 1}, base="expected_attention"),
}
ALL = {**SCORERS, **WRAPPERS}
DUO_STREAMING = [[False, True], [True, False]]  # [L, H]: the heads that keep sinks and recent slots
DUO_SINK, DUO_RECENT = 4, 16


def budgets(layers: int, heads: int, seed: int = 3) -> Tensor:
    """Draw the table that LU-KV reads: pruned fractions [99, L, H] for 1 % to 99 % pruned."""
    spread = torch.rand(99, layers, heads, generator=torch.Generator().manual_seed(seed)) - 0.5
    wanted = torch.arange(1, 100)[:, None, None] / 100
    return (wanted + 0.3 * (spread - spread.mean((1, 2), keepdim=True))).clamp(0.02, 0.98)


def qfilters(layers: int, heads: int, size: int, seed: int = 4) -> Tensor:
    """Draw the filters that Q-Filters reads [L, H, D]."""
    return torch.randn(layers, heads, size, generator=torch.Generator().manual_seed(seed))


def sketch(name: str, heads: int, size: int) -> Tensor:
    """Return the Gaussian sketch [H, D, k] that a row of leverage or Compactor draws."""
    k = SCORERS[name].settings["sketch_dimension"]
    with torch.random.fork_rng():
        torch.manual_seed(SKETCH_SEED)
        drawn: Tensor = torch.randn(1, heads, size, k)[0]
    return drawn.div(k**0.5)


def press(name: str, ratio: float, config: Any) -> Any:
    """Build a press that removes a fraction, with its tables for a model's configuration."""
    spec, layers, heads = ALL[name], config.num_hidden_layers, config.num_key_value_heads
    if name == "duo":
        made = press_class(spec.file, spec.cls)(head_compression_ratio=0.5)
        made.sink_size, made.recent_size = DUO_SINK, DUO_RECENT
        made.streaming_mask = torch.tensor(DUO_STREAMING)
        return made
    if name == "lukv":
        base = build(PRESSES["expected_attention"], ratio)
        made = press_class(spec.file, spec.cls)(press=base, compression_ratio=ratio)
        made.sink, made.window = spec.settings["sink"], spec.settings["window"]
        made._budget_curves = budgets(layers, heads).numpy()
        return made
    made = build(spec, ratio)
    if name == "qfilter":
        made.q_filters = qfilters(layers, heads, config.head_dim)
    return made


def scores(name: str, seen: Seen, ratio: float = 0.5) -> Tensor:
    """Return the scores [B, H, S] of a press of SCORERS."""
    found = []
    for row in rows(seen):
        attentions = row.attentions if SCORERS[name].attentions else None
        with calling(row):
            made = press(name, ratio, row.module.config)
            got = made.score(row.module, row.hidden, row.k, row.v, attentions, row.rotation)
        found.append(got.expand(1, row.k.shape[1], -1))
    return torch.cat(found)


def rows(seen: Seen) -> list[Seen]:
    return [seen.row(b) for b in range(len(seen.k))]


@torch.no_grad()
def finch_scores(seen: Seen) -> Tensor:
    """Return FINCH's scores [B, H, S] with a window of 8."""
    made = press_class("finch_press", "FinchPress")(normalize_scores=True)
    made.window_size = WINDOW["window_size"]
    return torch.cat([made.score(r.module, r.hidden, r.k, r.v, None, r.rotation) for r in rows(seen)])


@torch.no_grad()
def kvzip_scores(seen: Seen, *, plus: bool) -> Tensor:
    """Return KVzip's scores [B, H, CONTEXT]: the first slots, which the others repeat."""
    made = press_class("kvzip_press", "KVzipPress")(kvzip_plus_normalization=plus, n_sink=4)
    found = []
    for row in rows(seen):
        made.context_length, made.end_idx = CONTEXT, CONTEXT
        layers, heads = row.module.config.num_hidden_layers, row.k.shape[1]
        made.score_val = torch.zeros(layers, 1, heads, CONTEXT)
        turn = {"position_embeddings": (row.cos[:, CONTEXT:], row.sin[:, CONTEXT:])}
        made.score_kvzip(row.module, row.hidden[:, CONTEXT:], row.k, row.v, None, turn)
        found.append(made.score_val[row.module.layer_idx])
    return torch.cat(found)


def kept(name: str, seen: Seen, ratio: float) -> Tensor:
    """Return the kept slots of a press of ALL as a mask [B, H, S]."""
    if name == "rerotated_knorm":
        return torch.cat([each[2] for each in compressed(name, seen, ratio)])
    config = seen.module.config
    return kept_by(seen, lambda: press(name, ratio, config), ALL[name].attentions)


def compressed(name: str, seen: Seen, ratio: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return keys and values [1, H, n, D] of each row after a press, and its kept slots."""
    turns, config = name == "rerotated_knorm", seen.module.config
    return [compress(row, press(name, ratio, config), by_values=turns) for row in rows(seen)]


@torch.no_grad()
def think_channels(seen: Seen, ratio: float, window: int = 8) -> Tensor:
    """Return the key channels that ThinK keeps as a mask [B, H, D]."""
    made = press_class("think_press", "ThinKPress")(ratio, window)
    found = []
    for row in rows(seen):
        k, _ = made.compress(row.module, row.hidden, row.k, row.v, None, row.rotation)
        found.append((k != 0).any(2))
    return torch.cat(found)
