"""Scores of kvpress for a tiny Llama's keys and values, which our scores are held to.

Run `pip install --no-deps kvpress==0.5.5`, then `python -m tests.kv.kvpress_golden` to write the file.
The numbers are results of kvpress (NVIDIA, Apache-2.0); no code of it is kept.

Tensors (f32; L layers, B rows, H kv heads, G query heads of each, S slots, D head size)
    q [L,B,H*G,S,D], k, v [L,B,H,S,D]   queries, keys rotated (half-split RoPE, positions 0..S-1)
    wo [L,hidden,H*G*D]       weight of the output projection, as nn.Linear holds it
    inv_freq [D/2]            of RoPE; pre-RoPE queries and keys are q, k turned back
    sketch [H,D,12]           what leverage reads
    score.NAME [L,B,H,S]      at ratio 0.5 (KVzip: [L,B,H,60])
    kept.NAME.R               bool [L,B,H,S], R = 50 or 75 percent removed
Every press was called one layer and one row at a time: statistics "of the row" below run over the
heads and slots of one row. No kept set has a tie at its border. The header is one JSON object,
`about`, with the settings of every press.

a = softmax(q k / sqrt(D)) causal over all S keys; W window; "top" = max over the row, plus 1.

knorm              -||k||
keydiff            -cos(k, mean over slots of k/||k||)
streaming_llm      1, and 0 for the S - int(S(1-ratio)) slots from n_sink on
snapkv             mean over the last W queries of a[:, :S-W] -> average pool 5 (zero padding,
                   always / 5) -> mean over the G query heads; the last W slots get top
tova               mean over all query heads of the last query's a[:S-1]; the last slot gets top
observed_attention sum over queries of a / number of queries that see the slot; mean over G
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
kvzip              slots 60.. repeat slots 0..59: largest a of the repeating queries on a context
                   slot, over queries and G; softmax over context and repetition
adakv              int(n * 0.2) best of each head are safe; then the n*H best of all heads together
critical_adakv     the head budgets of adakv; in each head the safe slots and half the budget by s,
                   the others by the product"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diffcache.eval.kv.peer import FUTURE, PRESSES, SKETCH_SEED, Seen, Spec, build, calling, capture, installed, kept
from diffcache.eval.kv.peer import press_class as class_of

GOLDEN = Path(__file__).parent / "golden" / "kvpress.safetensors"
LAYERS, ROWS, HEADS, GROUPS, SIZE, TOKENS, HIDDEN = 2, 2, 2, 2, 16, 79, 32
VOCABULARY, CONTEXT = 256, 60  # KVzip: the first tokens are the context, the others repeat it
_NAMES = (
    "knorm",
    "keydiff",
    "snapkv",
    "tova",
    "observed_attention",
    "expected_attention",
    "lagkv",
    "leverage",
    "non_causal",
    "compactor",
    "cur",
)
_MEAN = {**FUTURE, "use_covariance": False, "use_vnorm": False}
SCORED = {name: PRESSES[name] for name in _NAMES} | {
    "expected_attention_mean": Spec("expected_attention_press", "ExpectedAttentionPress", _MEAN)
}
KEPT = {"streaming_llm": PRESSES["streaming_llm"], "critical_snapkv": PRESSES["criticalkv"]}
KEPT |= {"adakv_snapkv": PRESSES["adakv"], "critical_adakv_snapkv": PRESSES["critical_adakv"]}
ABOUT = {
    name: {"class": spec.cls, "settings": dict(spec.settings), "base": spec.base}
    for name, spec in (SCORED | KEPT).items()
}


@functools.cache
def golden() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of the golden file."""
    with safe_open(GOLDEN, "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["about"])


def layers() -> list[Seen]:
    """Capture a random two-layer GQA Llama whose attention is peaked (weights of q, k, v x12).

    No token comes twice in a row: equal tokens have equal values and tie.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
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
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.weight.mul_(12)
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress' own hook does
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randperm(VOCABULARY, generator=generator)[:TOKENS] for _ in range(ROWS)]
    return capture(model, torch.stack(rows))


def scores(spec: Spec, seen: Seen) -> Tensor:
    """Return the scores [B, H, S] of a press, one row at a time."""
    found = []
    for row in map(seen.row, range(ROWS)):
        with calling(row):
            weights = row.attentions if spec.attentions else None
            got = build(spec, 0.5).score(row.module, row.hidden, row.k, row.v, weights, row.rotation)
        found.append(got.expand(1, HEADS, -1))
    return torch.cat(found)


@torch.no_grad()
def kvzip(seen: Seen) -> Tensor:
    """Return KVzip's scores [B, H, CONTEXT]: the first slots, which the others repeat."""
    made = class_of("kvzip_press", "KVzipPress")(kvzip_plus_normalization=False, n_sink=4)
    found = []
    for row in map(seen.row, range(ROWS)):
        made.context_length, made.end_idx = CONTEXT, CONTEXT
        made.score_val = torch.zeros(LAYERS, 1, HEADS, CONTEXT)
        turn = {"position_embeddings": (row.cos[:, CONTEXT:], row.sin[:, CONTEXT:])}
        made.score_kvzip(row.module, row.hidden[:, CONTEXT:], row.k, row.v, None, turn)
        found.append(made.score_val[row.module.layer_idx])
    return torch.cat(found)


def make() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Ask kvpress for everything and return the tensors and the header."""
    seen = layers()
    tensors = {name: torch.stack([getattr(each, name) for each in seen]) for name in "qkv"}
    tensors["wo"] = torch.stack([each.module.o_proj.weight.detach() for each in seen])
    tensors["inv_freq"] = seen[0].module.rotary_emb.inv_freq
    size = PRESSES["leverage"].settings["sketch_dimension"]
    with torch.random.fork_rng():
        torch.manual_seed(SKETCH_SEED)
        tensors["sketch"] = torch.randn(1, HEADS, SIZE, size)[0].div(size**0.5)
    for name, spec in SCORED.items():
        tensors[f"score.{name}"] = torch.stack([scores(spec, each) for each in seen])
    tensors["score.kvzip"] = torch.stack([kvzip(each) for each in seen])
    for name, spec in KEPT.items():
        for percent in (50, 75):
            masks = [kept(each, lambda s=spec, r=percent / 100: build(s, r), spec.attentions) for each in seen]
            tensors[f"kept.{name}.{percent}"] = torch.stack(masks)
    notes = {
        "attribution": "Numbers computed with kvpress, Copyright NVIDIA CORPORATION & AFFILIATES, "
        "https://github.com/NVIDIA/kvpress, licensed under Apache-2.0.",
        "licence": "Apache-2.0",
        "kvpress": installed(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "presses": ABOUT,
    }  # one entry: the order of several varies
    made = {name: value.contiguous().clone() for name, value in tensors.items()}
    return made, {"about": json.dumps(notes, sort_keys=True)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    made, notes = make()
    save_file(made, GOLDEN, metadata=notes)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {len(made)} tensors")
