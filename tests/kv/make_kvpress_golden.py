"""Write tests/kv/golden/kvpress.safetensors, scores of kvpress for a tiny Llama's keys and values.

Run `pip install --no-deps kvpress==0.5.5`, then `python -m tests.kv.make_kvpress_golden`.
The numbers are results of kvpress (NVIDIA, Apache-2.0); no code of it is kept.

Tensors (f32; L layers, B rows, H kv heads, G query heads of each, S slots, D head size)
    q [L,B,H*G,S,D], k, v [L,B,H,S,D]   queries, keys rotated (half-split RoPE, positions 0..S-1)
    wo [L,hidden,H*G*D]       weight of the output projection, as nn.Linear holds it
    hidden_norm [L,B,S]       L2 norm of the input of the attention layer (KVzip+)
    inv_freq [D/2]            of RoPE; pre-RoPE queries and keys are q, k turned back
    qfilter [L,H,D], sketch [H,D,12], budgets [2,L,H]    what Q-Filters, leverage, LU-KV read
    score.NAME [L,B,H,S]      at ratio 0.5 (KVzip: [L,B,H,60])
    kept.NAME.R               bool [L,B,H,S], R = 50 or 75 percent removed
    channels.think.R          bool [L,B,H,D], key channels kept
    values.merged_snapkv.75, keys.rerotated_knorm.75    [L,B,H,n,D], in order of position
Every press was called one layer and one row at a time: statistics "of the row" below run over the
heads and slots of one row. Kept sets that rounding could turn (a tie at the border, or a set that
changes when the inputs change by 1e-6) are left out and listed in the header under "tied" (none
with these sizes). The header is one JSON object, `about`, with the settings of every press.

Kept: n = max(1, int(S * (1 - ratio))) slots of highest score in each head, unless said.
a = softmax(q k / sqrt(D)) causal over all S keys; W window; "top" = max over the row, plus 1.

knorm              -||k||
keydiff            -cos(k, mean over slots of k/||k||)
streaming_llm      1, and 0 for the S - int(S(1-ratio)) slots from n_sink on
snapkv             mean over the last W queries of a[:, :S-W] -> average pool 5 (zero padding,
                   always / 5) -> mean over the G query heads; the last W slots get top
tova               mean over all query heads of the last query's a[:S-1]; the last slot gets top
observed_attention sum over queries of a / number of queries that see the slot; mean over G
finch              snapkv without pooling, each query's weights times S-W+i for i = 0..W-1
critical_snapkv    s = snapkv; the int((1-ratio)*S*0.5) best by s get the largest float; the others
                   (s + 1e-4) * mean over G of ||W_o,head v||_1
expected_attention mu, C = mean, covariance (1/N) of pre-RoPE queries from slot n_sink on, turned by
                   R = mean rotation of positions S..S+511 (R mu, R C R'); over slots from n_sink on
                   softmax(mu k/sqrt(D) + k'Ck/(2D)), mean over G, (x + epsilon) * ||v||; the sinks
                   get top. "_mean": no covariance, no ||v||
lagkv              slots n_sink..end in P partitions of lag; x = (p - min)/(max - min) with min, max
                   of the next partition for every channel; softmax over the partition of the (N-1)
                   standard deviation over channels; mean of the one of keys and the one of values;
                   rank in the partition / lag. Sinks, last partition and remainder get 1
leverage           X = (pre-RoPE keys - mean over slots) sketch; diag(X (X'X + 0.01)^-1 X'); z-score
                   with (N-1) standard deviation over the row
non_causal         chunks of 32 queries and keys, softmax(q k) without scale and mask, sum over
                   queries; in a partial last chunk absent queries and keys have logit 0 (-1e-9);
                   mean over G, times ||v||, average pool 3 (/ 3), z-score over the row
compactor          on slots 8..S-4: ratio * leverage + non_causal; protected slots get the maximum
cur                ||k||^2 / sum over its window of 16, times the same of v; / sum over slots; the
                   first 4 slots get 1
cap                A = I + sum w v v', w = exp(5 cos(k, mean pre-RoPE query turned by R) - largest);
                   w v' A^-1 v from slot n_sink on, w + 1e-6 inside A; mean over G; sinks get top
qfilter            -(filter . k)
kvzip              slots 60.. repeat slots 0..59: largest a of the repeating queries on a context
                   slot, over queries and G; softmax over context and repetition.
                   "plus": a * ||W_o,head v||_2 / ||layer input of the query||
pyramidkv          snapkv; n falls linearly over layers: c = S(1-ratio), least c/beta, most
                   2c - least (at most S-W; then least = 2c - most), n = round(most - layer*step);
                   if not S >= most >= least >= W: round(S(1-ratio)) in all layers
adakv              int(n * 0.2) best of each head are safe; then the n*H best of all heads together
critical_adakv     the head budgets of adakv; in each head the safe slots and half the budget by s,
                   the others by the product
chunkkv            score summed over heads, mean in chunks of 8 (a partial chunk counts as one);
                   max(1, int(chunks*(1-ratio))) chunks, whole, the same in all heads
entropy_chunkkv    chunks of 10 by mean summed score, best first; one with score >= median and
                   entropy < median gives its 4 best tokens; the rest of n goes to the best others
chunk              the press on every chunk of 18 alone: max(1, int(length*(1-ratio))) of each
block              keep 0..n-1; for every 16 further slots: score kept + new ones, keep n
rerotated          keys turned to positions 0..n-1, in order of position
merged             each evicted value goes to the kept key of highest cosine c: weight
                   max(c,0)*|v_e|/(|v_e|+|v_t|+1e-6); v_t := (v_t + sum w v_e)/(1 + sum w)
duo                streaming heads keep the first 4 and the last 16; the others keep all
lukv               sinks 4 and last 1 get top; head h keeps floor((1 - budget)S), and the rounded
                   total is filled up by largest fraction; ratio 50 reads row 0 of budgets, 75 row 1
think              mean over the last 8 queries of q^2 (mean over G) times mean over slots of k^2:
                   the int(D*ratio) lowest channels go"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diffcache.eval.kv.peer import Seen, capture, installed
from tests.kv import kvpress_oracle as oracle
from tests.kv.kvpress_oracle import ALL, DUO_RECENT, DUO_SINK, DUO_STREAMING, SCORERS
from tests.kv.kvpress_presses import GOLDEN, GROUPS, HEADS, HIDDEN, LAYERS, ROWS, SIZE, TOKENS

VOCABULARY = 256


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Make a random two-layer GQA Llama whose attention is peaked (weights of q, k, v x12)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS * GROUPS,
            num_key_value_heads=HEADS,
            head_dim=SIZE,
            max_position_embeddings=2048,
            attn_implementation="eager",
        )
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
            layer.self_attn.k_proj.weight.mul_(12)
            layer.self_attn.v_proj.weight.mul_(12)
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress' own hook does
    return model


def tiny_ids(seed: int = 1) -> Tensor:
    """Draw token ids [B, S], none twice in a row: equal tokens have equal values and tie."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(VOCABULARY, generator=generator)[:TOKENS] for _ in range(ROWS)]
    return torch.stack(rows)


RATIOS = {50: 0.5, 75: 0.75}
NUDGE, MARGIN = 1e-6, 1e-5


def inputs(layers: list[Seen]) -> dict[str, Tensor]:
    """Return what our own scores read."""
    table = oracle.budgets(LAYERS, HEADS)
    modules = [seen.module for seen in layers]
    return {
        "q": torch.stack([seen.q for seen in layers]),
        "k": torch.stack([seen.k for seen in layers]),
        "v": torch.stack([seen.v for seen in layers]),
        "wo": torch.stack([module.o_proj.weight.detach() for module in modules]),
        "hidden_norm": torch.stack([seen.hidden.norm(dim=-1) for seen in layers]),
        "inv_freq": modules[0].rotary_emb.inv_freq,
        "qfilter": oracle.qfilters(LAYERS, HEADS, SIZE),
        "sketch": oracle.sketch("leverage", HEADS, SIZE),
        "budgets": torch.stack([table[percent - 1] for percent in RATIOS]),
    }


def golden_scores(layers: list[Seen]) -> dict[str, Tensor]:
    """Return the scores of every scorer at ratio 0.5."""
    found = {name: torch.stack([oracle.scores(name, seen) for seen in layers]) for name in SCORERS}
    found["finch"] = torch.stack([oracle.finch_scores(seen) for seen in layers])
    for name, plus in (("kvzip", False), ("kvzip_plus", True)):
        found[name] = torch.stack([oracle.kvzip_scores(seen, plus=plus) for seen in layers])
    return {f"score.{name}": value for name, value in found.items()}


def nudged(seen: Seen) -> Seen:
    """Return the same layer with inputs that differ by rounding."""
    generator = torch.Generator().manual_seed(5)

    def move(x: Tensor) -> Tensor:
        return x * (1 + NUDGE * torch.randn(x.shape, generator=generator))

    k, v, hidden, attentions = (move(x) for x in (seen.k, seen.v, seen.hidden, seen.attentions))
    return Seen(seen.module, hidden, seen.q, k, v, attentions, seen.cos, seen.sin)


def at_border(name: str, seen: Seen, ratio: float) -> bool:
    """Say whether the last kept and the first dropped score of a head are alike."""
    if name not in SCORERS or name == "streaming_llm":
        return False
    ranked = oracle.scores(name, seen, ratio).sort(-1, descending=True).values
    n = max(1, int(ranked.shape[-1] * (1 - ratio)))
    gap = ranked[..., n - 1] - ranked[..., n]
    return bool((gap <= MARGIN * ranked[..., n].abs()).any())


def golden_kept(layers: list[Seen]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the kept sets, and the names of those that rounding could turn."""
    found, tied = {}, []
    for name in ALL:
        for percent, ratio in RATIOS.items():
            key = f"kept.{name}.{percent}"
            sure = [
                not at_border(name, seen, ratio)
                and torch.equal(oracle.kept(name, seen, ratio), oracle.kept(name, nudged(seen), ratio))
                for seen in layers
            ]
            if all(sure):
                found[key] = torch.stack([oracle.kept(name, seen, ratio) for seen in layers])
            else:
                tied.append(key)
    for percent, ratio in RATIOS.items():
        channels = [oracle.think_channels(seen, ratio) for seen in layers]
        found[f"channels.think.{percent}"] = torch.stack(channels)
    return found, tied


def changed(layers: list[Seen]) -> dict[str, Tensor]:
    """Return the values that merging changed and the keys that were turned to new positions."""

    def part(name: str, place: int) -> Tensor:
        found = [oracle.compressed(name, seen, 0.75) for seen in layers]
        return torch.stack([torch.cat([row[place] for row in rows]) for rows in found])

    return {"values.merged_snapkv.75": part("merged_snapkv", 1), "keys.rerotated_knorm.75": part("rerotated_knorm", 0)}


def header(tied: list[str]) -> dict[str, str]:
    """Return where the numbers come from and the settings of every press."""
    duo = {"streaming": DUO_STREAMING, "sink": DUO_SINK, "recent": DUO_RECENT}
    settings = {
        name: {"class": spec.cls, "settings": dict(spec.settings), "base": spec.base} for name, spec in ALL.items()
    }
    settings["duo"]["settings"] = duo
    notes = {
        "attribution": "Numbers computed with kvpress, Copyright NVIDIA CORPORATION & AFFILIATES, "
        "https://github.com/NVIDIA/kvpress, licensed under Apache-2.0.",
        "licence": "Apache-2.0",
        "kvpress": installed(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "presses": settings,
        "tied": tied,
    }
    return {"about": json.dumps(notes, sort_keys=True)}  # one entry: the order of several varies


def make() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Ask kvpress for everything and return the tensors and the header."""
    layers = capture(tiny_llama(), tiny_ids())
    masks, tied = golden_kept(layers)
    tensors = {**inputs(layers), **golden_scores(layers), **masks, **changed(layers)}
    return {name: value.contiguous().clone() for name, value in tensors.items()}, header(tied)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the numbers of kvpress that tests read.")
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    tensors, notes = make()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    save_file(tensors, part, metadata=notes)
    part.replace(out)
    print(f"{out}: {out.stat().st_size} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
