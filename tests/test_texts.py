"""Outputs of text encoders that are kept from call to call."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import diffcache
from diffcache.attach import text_encoders
from diffcache.attach.text_encoders import TextCache
from diffcache.errors import AttachError
from tests.internals import state_of
from tests.shipped import CALL, load
from tests.zoo.case import randomize
from tests.zoo_runs import PIPES, in_threads

pytestmark = pytest.mark.usefixtures("eager")
SIZES = dict(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
T5 = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
STATES = dict(output_hidden_states=True)
# Class of text encoder in pipelines of diffusers -> its configuration, and how they call it.
ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "CLIPTextModel": ("CLIPTextConfig", SIZES, STATES),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", SIZES | dict(projection_dim=24), STATES),
    "T5EncoderModel": ("T5Config", T5, {}),
    "UMT5EncoderModel": ("UMT5Config", T5, {}),
    "BertModel": ("BertConfig", SIZES, {}),
    "LlamaModel": ("LlamaConfig", SIZES, STATES),
    "LlamaForCausalLM": ("LlamaConfig", SIZES, STATES | dict(output_attentions=True)),
    "Gemma2Model": ("Gemma2Config", SIZES, STATES),
    "Qwen3ForCausalLM": ("Qwen3Config", SIZES, STATES | dict(use_cache=False)),
    "GlmModel": ("GlmConfig", SIZES, STATES),
    "SmolLM3ForCausalLM": ("SmolLM3Config", SIZES, STATES),
}


def encoder(name: str = "T5EncoderModel") -> nn.Module:
    config, sizes, _ = ENCODERS[name]
    made = getattr(transformers, config)(**sizes)
    made._attn_implementation = "eager"
    return randomize(getattr(transformers, name)(made), 0).eval()


def holder(**parts: nn.Module) -> Any:
    return SimpleNamespace(components=parts)


def ids(seed: int = 0, rows: int = 1, tokens: int = 8) -> dict[str, torch.Tensor]:
    drawn = torch.randint(3, 99, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(drawn)
    mask[:, 6:] = 0
    return dict(input_ids=drawn, attention_mask=mask)


def flat(out: Any) -> list[Any]:
    """Return everything in an output in order, key-value caches as their tensors."""
    if isinstance(out, dict):
        return [part for name in out for part in (name, *flat(out[name]))]
    if isinstance(out, (tuple, list)):
        return [type(out), *(part for one in out for part in flat(one))]
    if hasattr(out, "layers"):
        return [type(out), *(part for one in out.layers for part in (one.keys, one.values))]
    return [out]


def same(one: Any, other: Any) -> bool:
    left, right = flat(one), flat(other)
    return (
        type(one) is type(other)
        and len(left) == len(right)
        and all(
            torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
            if isinstance(a, torch.Tensor)
            else a == b
            for a, b in zip(left, right, strict=True)
        )
    )


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_every_class_of_encoder_returns_what_it_did(name: str) -> None:
    model, call = encoder(name), ENCODERS[name][2]
    first, second = model(**ids(), **call), model(**ids(1), **call)
    before = state_of(model)
    cache = TextCache(holder(text_encoder=model), 2**24)
    assert same(model(**ids(), **call), first)
    found = model(**ids(), **call)
    assert same(found, first) and cache.counts().looked_up == 1
    for part in flat(found):
        if isinstance(part, torch.Tensor):
            part.zero_()  # a caller's own
    assert same(model(**ids(), **call), first) and same(model(**ids(1), **call), second)
    masked = ids() | dict(attention_mask=torch.ones(1, 8, dtype=torch.long))
    model(**masked, **call)
    counts = cache.counts()
    assert (counts.looked_up, counts.computed, counts.passed_over) == (2, 3, "")
    assert counts.held_bytes > 0
    cache.detach()
    assert state_of(model) == before and type(model).__call__ is nn.Module.__call__
    assert cache.counts().held_bytes == 0


def add_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q"], init_lora_weights=False), model)
    model.eval()


CHANGES: dict[str, Any] = {
    "weight": lambda model: model.get_input_embeddings().weight.add_(1),
    # no version tells
    "data": lambda model: model.get_input_embeddings().weight.data[ids()["input_ids"][0, 0], 3].add_(1),
    "rows": lambda model: (q := model.encoder.block[0].layer[0].SelfAttention.q.weight.data).copy_(q.flip(0).clone()),
    "adapter": add_adapter,
    "scale": lambda model: [m.scale_layer(0.5) for m in model.modules() if hasattr(m, "scale_layer")],
    "dtype": lambda model: model.to(torch.float64),
    "setting": lambda model: setattr(model.config, "output_attentions", True),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_an_encoder_returned_before_it_changed_is_dropped(change: str) -> None:
    model = encoder()
    if change == "scale":
        add_adapter(model)
    cache = TextCache(holder(text_encoder=model), 2**24)
    before = model(**ids())
    assert same(model(**ids()), before)
    CHANGES[change](model)
    after = model(**ids())
    assert cache.counts().looked_up == 1 and not same(after, before)
    assert same(model(**ids()), after) and cache.counts().looked_up == 2
    cache.detach()
    assert same(model(**ids()), after)


@torch.no_grad()
def test_outputs_that_were_not_asked_for_longest_go_first() -> None:
    model = encoder()
    cache = TextCache(holder(text_encoder=model), 2 * 8 * 32 * 4)  # two of eight tokens
    for seed in (0, 1, 0, 2, 0):
        model(**ids(seed))
    assert cache.counts().looked_up == 2 and cache.counts().held_bytes == 2 * 8 * 32 * 4
    model(**ids(1))
    assert cache.counts().looked_up == 2
    model(**ids(rows=4))
    assert "4096 bytes, more than text_bytes=2048" in cache.counts().passed_over
    with torch.autocast("cpu", torch.bfloat16):
        model(**ids(1))
    assert cache.counts().looked_up == 2  # was computed in float32
    cache.detach()


def test_calls_that_a_lookup_could_change_are_computed() -> None:
    model = encoder("LlamaModel")
    cache = TextCache(holder(text_encoder=model), 2**24)
    with torch.enable_grad():
        model(**ids())
    assert cache.counts().passed_over == "gradients are on"
    with torch.no_grad():
        prefix = model(**ids(), use_cache=True).past_key_values
        for _ in range(2):
            model(ids(1)["input_ids"], past_key_values=copy.deepcopy(prefix))
        assert "neither a tensor" in cache.counts().passed_over
        seen: list[Any] = []
        hook = model.layers[0].register_forward_hook(lambda *given: seen.append(1))
        for _ in range(2):
            model(**ids())
        assert len(seen) == 2 and "hooks" in cache.counts().passed_over
        hook.remove()
        model.layers[0].train()
        model(**ids())
        assert "training" in cache.counts().passed_over
        model.requires_grad_(False).eval()
        states = model.get_input_embeddings()(ids()["input_ids"])
        model(inputs_embeds=states)
    states = states.clone().requires_grad_()
    with torch.enable_grad():  # the weights are frozen, the argument is not
        model(inputs_embeds=states).last_hidden_state.sum().backward()
    assert states.grad is not None
    assert cache.counts().looked_up == 0
    cache.detach()


@torch.no_grad()
def test_threads_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    alone = [model(**ids(seed)) for seed in range(4)]
    cache = TextCache(holder(text_encoder=model), 2**24)
    twin = copy.deepcopy(model)
    assert same(twin(**ids()), alone[0]) and cache.counts().computed == 0

    def work(first: int) -> list[Any]:
        return [model(**ids((first + place) % 4)) for place in range(12)]

    for first, found in enumerate(in_threads(*(lambda n=n: work(n) for n in range(4)))):
        assert all(same(out, alone[(first + place) % 4]) for place, out in enumerate(found))
    counts = cache.counts()
    assert counts.looked_up + counts.computed == 48 and counts.looked_up >= 32
    assert counts.held_bytes == 4 * 8 * 32 * 4

    # an encoder that changes while a call of it is on its way
    copied = text_encoders._copied
    monkeypatch.setattr(text_encoders, "_copied", lambda out: (CHANGES["weight"](model), copied(out))[1])
    stale = model(**ids(7))
    monkeypatch.undo()
    assert not same(model(**ids(7)), stale)
    cache.detach()
    with torch.inference_mode():
        cache = TextCache(holder(text_encoder=model), 2**24)
        model(**ids())
    assert not model(**ids())[0].is_inference()
    assert cache.counts().looked_up == 1
    cache.detach()


def test_a_pipeline_draws_the_same_pictures_and_counts_its_texts(tmp_path: Any) -> None:
    pipe = load()
    pipe.set_progress_bar_config(disable=True)
    call = {**CALL, "height": 32, "width": 32}

    def draw(prompt: Any) -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return pipe(prompt, num_inference_steps=3, generator=noise, output_type="latent", **call)[0]

    prompts = ["a fox on grass", "an owl", ["a fox on grass", "an owl"]]
    plain = [draw(prompt) for prompt in prompts]
    encoders = pipe.text_encoder, pipe.text_encoder_2
    before = [state_of(encoder) for encoder in encoders]
    diffcache.wrap(pipe, "interval:every=1", text_bytes=2**20)
    assert "no denoiser call" in str(diffcache.report(pipe)).lower()
    for _ in range(2):
        assert all(map(torch.equal, map(draw, prompts), plain))
    report = diffcache.report(pipe)
    assert (report.texts.looked_up, report.texts.computed) == (6, 6)
    assert "6 calls of text encoders looked up, 6 computed" in str(report)
    assert report.to_dict()["texts"]["limit_bytes"] == 2**20
    with pytest.raises(AttachError, match="text_encoder is held by another pipeline's texts"):
        TextCache(pipe, 1)
    diffcache.save(pipe, tmp_path / "cache.yaml")
    diffcache.reset(pipe)
    assert diffcache.report(pipe).texts.held_bytes == 0
    diffcache.unwrap(pipe)
    assert [state_of(encoder) for encoder in encoders] == before
    diffcache.wrap(pipe, tmp_path / "cache.yaml")
    assert diffcache.report(pipe).texts.limit_bytes == 2**20
    diffcache.unwrap(pipe)


def test_connectors_of_ltx_2_are_kept_too() -> None:
    case = PIPES["LTX2Pipeline"]
    pipe = case.build(0)
    plain = case.run(pipe)
    diffcache.wrap(pipe, "interval:every=1", text_bytes=2**24)
    assert torch.equal(case.run(pipe), plain) and torch.equal(case.run(pipe), plain)
    assert diffcache.report(pipe).texts.looked_up == 1
    diffcache.unwrap(pipe)
