"""dLLM-Cache against a dense float64 decoding with stale outputs put in by hand, and its limits."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import diffcache
from diffcache.dllm import Decoding, DLLMCache
from diffcache.dllm.dllm_cache import BranchPlan
from diffcache.errors import AttachError
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm import toys
from tests.dllm.cases import ANSWER, CONFIDENT, LENGTHS, LONGEST, SCHEDULE, VALID, WIDTH, model
from tests.dllm.toys import LAYERS, MASK, SIZES, Compared, Noted, after, bidirectional, following, prompts, trace

SETTINGS = [DLLMCache(5, 3), DLLMCache(3, 8, 0.5), DLLMCache(2, None, 0), DLLMCache(4, 3, 0.05)]


def name(method: DLLMCache) -> str:
    return f"{method.prompt_every}, {method.answer_every}, {method.ratio}"


@cache
def traced(method: DLLMCache) -> tuple[Decoding, list[Noted]]:
    return trace(model(), method, prompts(*LENGTHS), SCHEDULE)


def attended(attn: Any, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return attention of one sequence, `[n, C]`: `q` [n, C] of rows, which `turn` rotates as it does all of 0 to T-1."""
    queries, keys, values = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
    queries, keys = (toys.rotated(x, angles[:, None]) for x, angles in zip((queries, keys), turn, strict=True))
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values))
    weights = torch.einsum("nhd,thd->hnt", queries, keys).div(attn.head_dim**0.5).softmax(-1)
    return attn.o_proj(torch.einsum("hnt,thd->nhd", weights, values).flatten(1))


class Sequence:
    """One sequence without padding, decoded as the paper says, from what was kept before."""

    def __init__(self, method: DLLMCache, prompt: int) -> None:
        self.method, self.prompt, self.step = method, prompt, 0
        self.kept: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
        self.rows: list[set[int]] = []  # of each layer at the last step

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of all rows."""
        core, method = model().model, self.method
        x = core.embed_tokens(ids)
        at = torch.arange(len(ids))
        angles = toys.turns(core, x[None], at[None])[0]
        due = [self.step == 0 or (n and self.step % n == 0) for n in (method.prompt_every, method.answer_every)]
        self.rows = []
        for number, (layer, kept) in enumerate(zip(core.layers, self.kept, strict=True)):
            attn, inner = layer.self_attn, layer.input_layernorm(x)
            rows = set(range(self.prompt)) if due[0] or not number else set()
            if due[1] or not number:
                rows |= set(range(self.prompt, len(ids)))
            elif method.ratio:
                new, old = attn.v_proj(inner)[self.prompt :], kept["v"][self.prompt :]
                alike = (new * old).sum(-1) / new.norm(dim=-1) / old.norm(dim=-1)
                count = int(method.ratio * len(new))
                rows |= {self.prompt + i for i in alike.sort().indices[:count].tolist()}
                kept["v"] = torch.cat([kept["v"][: self.prompt], new])
            some = torch.tensor(sorted(rows), dtype=torch.int64)
            if not kept:
                kept |= {n: torch.zeros_like(x) for n in ("attention", "mlp")}
                kept |= {n: torch.zeros_like(attn.k_proj(inner)) for n in ("k", "v")}
            for name, project in (("k", attn.k_proj), ("v", attn.v_proj)):
                kept[name] = kept[name].index_copy(0, some, project(inner[some]))
            fresh = attended(attn, attn.q_proj(inner[some]), kept["k"], kept["v"], (angles[some], angles))
            kept["attention"] = kept["attention"].index_copy(0, some, fresh)
            x = x + kept["attention"]
            fresh = layer.mlp(layer.post_attention_layernorm(x[some]))
            kept["mlp"] = kept["mlp"].index_copy(0, some, fresh)
            x = x + kept["mlp"]
            self.rows.append(rows)
        self.step += 1
        return model().lm_head(core.norm(x))


def compared(method: DLLMCache) -> Compared:
    """Hold logits, rows and what is held against those of the oracle."""
    oracles = [Sequence(method, length) for length in LENGTHS]
    before, found, (decoding, notes) = None, Compared(), traced(method)
    for step, now in enumerate(notes):
        by_hand = now.logits.new_zeros(now.logits.shape)
        for row, (oracle, length) in enumerate(zip(oracles, LENGTHS, strict=True)):
            first = LONGEST - length
            logits = oracle.forward(now.ids[row, first:])
            torch.testing.assert_close(now.logits[row, first:], logits, rtol=0, atol=1e-9)
            by_hand[row, first:] = logits
            for layer in range(LAYERS):
                kept, outputs = oracle.kept[layer], now.more[2 * layer :][:2]
                values = now.kept[layer][1][row].transpose(0, 1).flatten(1)
                for name, ours in (("v", values), ("attention", outputs[0][row]), ("mlp", outputs[1][row])):
                    torch.testing.assert_close(ours[first:], kept[name], rtol=0, atol=1e-9)
                if before is not None:  # of all others the very bytes are held
                    for ours, old in zip(outputs, before[2 * layer :], strict=False):
                        changed = (ours[row, first:] != old[row, first:]).any(-1).nonzero()[:, 0]
                        assert set(changed.tolist()) == oracle.rows[layer]
        before = now.more
        found.step(now.tokens, now.logits[VALID], by_hand[VALID])
        found.goes_on(following(decoding, notes, step), after(now, by_hand, SCHEDULE, CONFIDENT))
    return found


# Biases; norms of queries and keys; norms after each branch; branches side by side; one complex
# rotary table, and layers without.
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo2", "Cohere", "Llama4"])
def test_other_layers_are_served(kind: str) -> None:
    """All rows computed one by one are the uncached model; with few of them work is saved."""
    layered = dict(no_rope_layers=[1, 0, 1], layer_types=["full_attention"] * LAYERS)
    llama4 = dict(head_dim=8, intermediate_size_mlp=48, moe_layers=[], **layered)
    size: dict[str, dict[str, Any]] = {"Qwen3": {"head_dim": 8}, "Llama4": llama4}
    bound = 1e-5 if kind == "Llama4" else 1e-9  # it rotates in float32
    own = dict(num_hidden_layers=LAYERS, num_key_value_heads=2, is_causal=False, mask_token_id=MASK)
    own |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = getattr(hf, "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config")
    network = getattr(hf, f"{kind}ForCausalLM")
    other = bidirectional(config=config(**SIZES | own | size.get(kind, {})), network=network)
    rows = prompts(*LENGTHS)
    plain = trace(other, None, rows, SCHEDULE)[1]
    chosen = trace(other, DLLMCache(1, None, 1.0), rows, SCHEDULE)[1]
    for one, two in zip(plain, chosen, strict=True):
        for row, length in enumerate(LENGTHS):
            first = LONGEST - length
            torch.testing.assert_close(one.logits[row, first:], two.logits[row, first:], rtol=0, atol=bound)
    few = trace(other, DLLMCache(5, 3), rows, SCHEDULE)[1]
    assert not torch.equal(few[-1].logits, plain[-1].logits)


@pytest.mark.parametrize("method", SETTINGS, ids=name)
def test_operations_are_the_closed_forms(method: DLLMCache) -> None:
    with diffcache.wrapped(model(), method):
        report = DiffusionLM(model()).generate(prompts(*LENGTHS), SCHEDULE, check=True).report
    assert report is not None
    computed, values = 0, 0
    for step in range(ANSWER):
        prompt, answer = (step == 0 or (n and step % n == 0) for n in (method.prompt_every, method.answer_every))
        few = ANSWER if answer else int(method.ratio * ANSWER)
        computed += WIDTH + (LAYERS - 1) * (LONGEST * prompt + few)
        values += (LAYERS - 1) * ANSWER * (not answer and method.ratio > 0)
    whole = ANSWER * WIDTH * LAYERS
    size, inner, kv = 32, 48, 16
    row = size * (2 * size + 2 * kv + 3 * inner) + 2 * WIDTH * size
    flops = 2 * 2 * (computed * row + values * size * kv)
    assert report.flops_computed == flops
    assert report.flops_saved == 2 * 2 * whole * row - flops


class Mixing(nn.Sequential):
    """A feed-forward that lets tokens see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


def test_a_run_that_failed_holds_nothing() -> None:
    ids, network, plan = torch.tensor(prompts(5)), bidirectional(), BranchPlan(None, 3)
    with torch.no_grad(), diffcache.wrapped(network, DLLMCache()), diffcache.run(network):
        network(ids, row_plan=plan)
        network.set_attn_implementation("sdpa")
        with pytest.raises(AttachError, match=r"layers\.0\.self_attn did not attend as wrapped"):
            network(ids, row_plan=plan)
        with pytest.raises(AttachError, match="nothing is held"):
            network(ids, row_plan=BranchPlan(None, 3, False, False))


def causal() -> Any:
    """Return a causal model of code of its own; another is refused when it is wrapped."""
    network = bidirectional(is_causal=True)
    network.__class__ = type("Own", (type(network),), {"__module__": "own"})
    return network
