"""LLaDA's and Dream's own code: served unchanged, and as a Llama of transformers with its weights."""

import copy
import json
import pickle
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import diffcache
from diffcache import dllm
from diffcache.dllm import ALL, D2Cache, DKVCache, DLLMCache, FastDLLM, Policy, Quota, RowPlan, Schedule, Uncached
from diffcache.errors import CacheWarning
from diffcache.pipelines.demo.describe import find
from diffcache.pipelines.diffusion_lm import DiffusionLM
from diffcache.pipelines.language_model import _earlier_transformers, load_language_model
from tests.dllm import remote_models
from tests.dllm.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM
from tests.dllm.toys import LAYERS, MASK, Compared, bidirectional, padded, prompts, trace

NAMES = ("llada", "dream")
LENGTHS = (9, 5)
SCHEDULE = Schedule(8, 4)
CODES = {
    "llada": (LLaDAModelLM, LLaDAConfig),
    "dream": (DreamModel, DreamConfig),
    "llada2": (remote_models.LLaDA2MoeModelLM, remote_models.LLaDA2MoeConfig),
    "sdar": (remote_models.SDARForCausalLM, remote_models.SDARConfig),
    "fast-dllm": (remote_models.FastDLLMForCausalLM, remote_models.FastDLLMConfig),
}
POLICIES: dict[str, Policy] = {
    "decode": DKVCache(every=3),
    "pd": DKVCache("pd", every=3),
    "dual": FastDLLM(dual=True),
    "free": dllm.FreeCache(commit=True),
    "elastic": dllm.ElasticCache(0.97, track=2),
    "d2": D2Cache(3, 2.0),
    "dllm": DLLMCache(5, 3),
    "dllm, none": DLLMCache(3, 4, 0),
}


def made(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a model whose tokens depend on each other strongly."""
    model_class, config_class = CODES[name]
    if name == "llada":  # else its rotary embedding computes in float32, whatever the model's dtype
        settings.setdefault("rope_full_precision", dtype != torch.float64)
    with _earlier_transformers(model_class):
        model = model_class(config_class(**settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.dim() == 2 else 1 + noise * 0.1)
    return model.to(dtype).eval()


@cache
def model(name: str) -> Any:
    return made(name)


def llama(name: str) -> Any:
    """Return a Llama of transformers with a model's weights."""
    own, is_dream = model(name), name == "dream"
    rms_norm_eps = 1e-6 if is_dream else 1e-5
    twin = bidirectional(num_key_value_heads=2 if is_dream else 4, rms_norm_eps=rms_norm_eps, attention_bias=is_dream)
    weights = {
        key.replace("transformer.wte", "embed_tokens")
        .replace("transformer.blocks", "layers")
        .replace("transformer.ln_f", "norm")
        .replace("model.transformer.ff_out", "lm_head")
        .replace("q_proj", "self_attn.q_proj" if not is_dream else "q_proj"): value
        for key, value in own.state_dict().items()
    }
    if not is_dream:
        parts = {"k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj"}
        parts |= {"ff_out": "mlp.down_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj"}
        parts |= {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
        for old, new in parts.items():
            weights = {key.replace(f".{old}", f".{new}"): value for key, value in weights.items()}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected and all(key.endswith("o_proj.bias") for key in missing)
    with torch.no_grad():
        for key in missing:
            twin.get_parameter(key).zero_()
    return twin


def alone(own: Any, ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the logits of a model by itself, given padding as it takes it."""
    if valid is None:
        return own(ids).logits if own.config.model_type == "Dream" else own(ids, use_cache=False)[0]
    if own.config.model_type == "Dream":
        at = (valid.long().cumsum(1) - 1).clamp_min(0)
        return own(ids, valid[:, None, None].expand(-1, 1, ids.shape[1], -1), at).logits
    return own(ids, attention_mask=valid.long(), use_cache=False).logits


@pytest.mark.parametrize("lengths", [(9,), LENGTHS], ids=["alone", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_rows_are_the_model_bit_for_bit(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    own = made(name, dtype)
    ids, valid = padded(prompts(*lengths))
    width = ids.shape[1]
    listed = torch.arange(width).expand(len(ids), -1)
    with torch.no_grad():
        wanted = alone(own, ids, valid)
        with diffcache.wrapped(own, Uncached()), diffcache.run(own):
            for plan in (ALL, RowPlan(range(width)), RowPlan(listed)):
                found = own(ids, attention_mask=valid, row_plan=plan, use_cache=False).logits
                assert torch.equal(found, wanted)
            some = RowPlan(torch.tensor([[6, 7, 8]] * len(ids)))
            found = own(ids, attention_mask=valid, row_plan=some, use_cache=False).logits
            bound = 1e-4 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(found, wanted[:, 6:9], rtol=0, atol=bound)
            assert torch.equal(alone(own, ids, valid), wanted)  # without a plan


def compared(name: str, policy: str) -> Compared:
    """Hold a model against a Llama with its weights; LLaDA counts padding as positions."""
    rows = prompts(*LENGTHS) if name == "dream" else prompts(9, 9)
    ours, notes = trace(model(name), POLICIES[policy], rows, SCHEDULE)
    theirs, others = trace(llama(name), POLICIES[policy], rows, SCHEDULE)
    found = Compared()
    found.goes_on(ours.ids, theirs.ids)
    for now, other in zip(notes, others, strict=True):
        assert torch.equal(now.rows, other.rows) and now.tokens == other.tokens
        found.step(now.tokens, now.logits, other.logits)
        torch.testing.assert_close(now.logits, other.logits, rtol=0, atol=1e-10)
        for (k, v), (k_, v_) in zip(now.kept, other.kept, strict=True):
            torch.testing.assert_close((k, v), (k_, v_), rtol=0, atol=1e-10)
        if "dllm" in policy:
            for one, two in zip(now.more, other.more, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    assert "dllm" in policy or any(now.plan.rows is not None for now in notes)
    return found


def test_padding_is_masked_where_the_code_ignores_it() -> None:
    """So did LLaDA's code until October 2025."""
    early, late = made("llada", honors_mask=False), model("llada")
    answers = []
    for own in (early, late):
        with pytest.raises(ValueError, match="wrap the model first, with diffcache.dllm.Uncached"):
            DiffusionLM(own).generate(prompts(*LENGTHS), SCHEDULE)
        with diffcache.wrapped(own, Uncached()):
            answers.append(DiffusionLM(own).generate(prompts(*LENGTHS), SCHEDULE).ids)
    assert torch.equal(*answers)


@torch.no_grad()
def dream_by_hand(own: Any, prompt: list[int], length: int, by: str) -> list[int]:
    """Decode as Dream does: the last logits are dropped, the first stand twice."""
    ids = torch.tensor([[*prompt, *[MASK] * length]])
    times = torch.linspace(1, 1e-3, length + 1, dtype=torch.float64).tolist()
    for step in range(length):
        masks = (ids[0] == MASK).nonzero()[:, 0]
        logits = own(ids).logits
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)[0, masks]
        share = functional.softmax(logits, dim=-1)
        logits[:, MASK] = -torch.inf
        best = share.sort(dim=-1, descending=True).values
        score = best[:, 0] - best[:, 1] if by == "margin" else (share * share.log()).sum(-1)
        count = len(masks)
        if step < length - 1:
            count = int(count * (1 - times[step + 1] / times[step]))
        for place in score.argsort(descending=True)[:count].tolist():
            ids[0, masks[place]] = logits[place].argmax()
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("by", ["entropy", "margin"])
def test_dreams_own_schedule_is_that_of_a_loop_by_hand(by: Any) -> None:
    own, (prompt,) = model("dream"), prompts(7)
    schedule, sampler = Schedule(12, block=None), dllm.Sampler(by=by, rule=Quota("time"))
    wanted = dream_by_hand(own, prompt, 12, by)
    assert DiffusionLM(own).generate(prompt, schedule, sampler).ids.tolist() == [wanted]
    with diffcache.wrapped(own, Uncached()):
        assert DiffusionLM(own).generate(prompt, schedule, sampler).ids.tolist() == [wanted]
    assert DiffusionLM(own, shift=True).shift and not DiffusionLM(model("llada")).shift
    unshifted = DiffusionLM(llama("dream")).generate(prompt, schedule, sampler)
    assert unshifted.ids.tolist() != [wanted]


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_the_original(name: str) -> None:
    own, ids = made(name), torch.tensor(prompts(7))
    with torch.no_grad():
        wanted = alone(own, ids)
        diffcache.wrap(own, DKVCache())
        for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            with pytest.warns(CacheWarning, match="is a copy of a wrapped one"):
                assert torch.equal(alone(other, ids), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_with_code_for_transformers_4_is_loaded(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))
    own, folder = made(name, torch.float32), tmp_path / f"tiny_{name}"
    folder.mkdir()
    shutil.copy(remote_models.__file__, folder / "modeling_tiny.py")
    model_class, config_class = CODES[name]
    codes = {"AutoConfig": config_class.__name__, "AutoModel": model_class.__name__}
    settings = {"model_type": own.config.model_type, "architectures": [model_class.__name__], "dtype": "float32"}
    settings["auto_map"] = {key: f"modeling_tiny.{value}" for key, value in codes.items()}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"steps": 7}')
    save_file(own.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_language_model(str(folder))
    loaded = load_language_model(str(folder), trust_remote_code=True)
    assert name == "llada" or loaded.generation_config.steps == 7
    ids = torch.tensor(prompts(6))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, alone(own, ids))
    with diffcache.wrapped(loaded, DKVCache(every=3)):
        answer = DiffusionLM(loaded).generate(ids, SCHEDULE)
    with diffcache.wrapped(own, DKVCache(every=3)):
        assert torch.equal(answer.ids, DiffusionLM(own).generate(ids, SCHEDULE).ids)
    assert diffcache.inspect(loaded).lists[0].depth == LAYERS
    with pytest.raises(ValueError, match="comes with code of its own, which is not run here"):
        find(str(folder))
