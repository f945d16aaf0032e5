"""The door to attention: same bits as without it, at every call, nothing left behind; abilities that use it."""

import copy
import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import diffcache
from diffcache import Ability, Call, Extension, Method, TaylorSeer
from diffcache.attach.attention import Door, DoorProcessor, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.attention_families import FAMILIES
from diffcache.errors import AttachError
from diffcache.step import CURRENT
from tests.internals import state_of
from tests.zoo.case import output_tensors
from tests.zoo.catalog import cases
from tests.zoo.pipe import PipeCase
from tests.zoo.pipes import pipes

CASES = cases()
SOME = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel-edit",
    "WanTransformer3DModel-i2v",
    "SD3Transformer2DModel-sd35",
    "LTXVideoTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "CogVideoXTransformer3DModel-15",
    "UNet2DConditionModel",
    "PixArtTransformer2DModel",
    "ChromaTransformer2DModel",
]

pytestmark = pytest.mark.usefixtures("no_gradients")


class Recorder:
    """Notes calls; with `way`, attends as the model does, by what it is given."""

    def __init__(self, way: str = "none") -> None:
        self.way = way
        self.calls: list[tuple[AttentionSite, AttentionCall]] = []

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        self.calls.append((site, call))
        q, k, turn = call.q, call.k, call.rotary
        if self.way == "none":
            return None
        if turn is not None and self.way == "rows":  # each row by its own angle, in pieces
            last = torch.arange(3, q.shape[1]).expand(len(q), -1)
            first = turn.apply(q[:, :3], torch.arange(3))
            q = torch.cat([first, turn.apply(q[:, 3:], last)], dim=1)
            k = turn.apply(k, torch.arange(k.shape[1]))
        else:
            q, k = (x if turn is None else turn.apply(x) for x in (q, k))
        return call.attend(q, k, call.v, call.mask)


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "PixArtTransformer2DModel"])
def test_a_removed_door_stays_shut_where_somebody_kept_it(name: str):
    """`unfuse_qkv_projections` of diffusers puts back the processors that it found."""
    model, seen = CASES[name].build(0), Recorder()
    expected = run(model, name, torch.float32)
    kept = Door(model, seen)
    processors = model.attn_processors
    kept.remove()
    model.set_attn_processor(processors)
    assert all(map(torch.equal, run(model, name, torch.float32), expected))
    assert seen.calls == []
    with Door(model, seen):  # and opens anew
        run(model, name, torch.float32)
    assert len(seen.calls) >= len(attention_sites(model))


def run(model: nn.Module, name: str, dtype: torch.dtype) -> list[Tensor]:
    given = CASES[name].kwargs(model, 0, 3)
    for key, value in given.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            given[key] = value.to(dtype)
    if name.endswith("-i2v"):  # the model takes the last 512 rows for text, the others for a picture
        text = given["encoder_hidden_states"]
        given["encoder_hidden_states"] = nn.functional.pad(text, (0, 0, 0, 512 - text.shape[1]))
    return output_tensors(model(**given))


def check(call: AttentionCall, site: AttentionSite) -> None:
    assert call.q.dim() == 4 and call.q.shape[2] == site.heads
    assert call.k.shape[1:3] == call.v.shape[1:3] and call.k.shape[3] == call.q.shape[3]
    assert call.scale == pytest.approx(call.q.shape[3] ** -0.5)
    if site.kind == "joint":
        assert call.k.shape[1] == call.q.shape[1]
        assert call.text is None or 0 <= call.text < call.q.shape[1]
    else:
        assert call.text == 0


def doors(model: nn.Module) -> list[Any]:
    return [m.processor for m in model.modules() if getattr(m, "processor", None) is not None]


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_class_of_the_zoo_is_the_same_through_the_door_or_refused(name: str) -> None:
    model = CASES[name].build(0)
    names = {type(processor).__name__ for processor in doors(model)}
    if not names or not names <= FAMILIES.keys():
        which = f"has ({'|'.join(sorted(names - FAMILIES.keys()))})," if names else "has no"
        with pytest.raises(AttachError, match=f"{type(model).__name__}.*{which}.*FluxAttnProc"):
            Door(model, Recorder())
        return
    plain, recorder, before = run(model, name, torch.float32), Recorder(), doors(model)
    sites = attention_sites(model)
    with Door(model, recorder) as door:
        assert door.sites == sites
        made = run(model, name, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(made, plain, strict=True))
    assert sorted(map(str, door.sites)) == sorted(str(site) for site, _ in recorder.calls)
    for site, call in recorder.calls:
        check(call, site)
    assert all(a is b for a, b in zip(doors(model), before, strict=True))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_attending_plainly_with_what_is_given_is_bit_identical(name: str, dtype: torch.dtype) -> None:
    model = CASES[name].build(0, dtype)
    plain = run(model, name, dtype)
    for way in ("whole", "rows"):
        recorder = Recorder(way)
        with Door(model, recorder) as door:
            made = run(model, name, dtype)
        assert all(torch.equal(a, b) for a, b in zip(made, plain, strict=True)), way
        assert [site for site, _ in recorder.calls] == door.sites


@pytest.mark.parametrize("name", [*SOME[:4], "CogVideoXTransformer3DModel"])
def test_fused_projections_are_the_same_through_the_door(name: str) -> None:
    model = CASES[name].build(0)
    model.fuse_qkv_projections()
    plain = run(model, name, torch.float32)
    with Door(model, Recorder("whole")):
        made = run(model, name, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(made, plain, strict=True))


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "PixArtTransformer2DModel"])
def test_masks_of_text_go_through_the_door(name: str) -> None:
    model = CASES[name].build(0)
    given = CASES[name].kwargs(model, 0, 3)
    mask = torch.ones(given["encoder_hidden_states"].shape[:2])
    mask[:, -2:] = 0
    given["encoder_attention_mask"] = mask
    plain, recorder = model(**given)[0], Recorder("whole")
    with Door(model, recorder):
        assert torch.equal(model(**given)[0], plain)
    assert any(call.mask is not None for _, call in recorder.calls)


def test_a_strategy_attends_in_the_models_place_at_chosen_sites() -> None:
    class Zeros:
        def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
            return torch.zeros_like(call.q) if site.part == "image" else None

    name = "WanTransformer3DModel-i2v"
    model = CASES[name].build(0)
    plain = run(model, name, torch.float32)[0]
    images = [site for site in attention_sites(model) if site.part == "image"]
    texts = [site for site in attention_sites(model) if site.kind == "cross" and not site.part]
    assert {site.path for site in images} == {site.path for site in texts}
    recorder = Recorder()
    with Door(model, recorder, texts):
        assert torch.equal(run(model, name, torch.float32)[0], plain)
    assert [site for site, _ in recorder.calls] == texts
    with Door(model, Zeros()):
        assert not torch.equal(run(model, name, torch.float32)[0], plain)


def test_copies_and_pickles_have_the_original_processors() -> None:
    model = CASES["FluxTransformer2DModel"].build(0)
    cls = type(doors(model)[0])
    door = Door(model, Recorder())
    assert all(isinstance(processor, DoorProcessor) for processor in doors(model))
    with pytest.raises(AttachError, match=r"transformer_blocks.0.attn has a door already"):
        Door(model, Recorder())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(processor) for processor in doors(twin)} == {cls}
    mine = cls()
    model.transformer_blocks[1].attn.set_processor(mine)
    model.set_attention_backend("native")
    door.remove()
    assert {type(processor) for processor in doors(model)} == {cls}
    assert model.transformer_blocks[1].attn.processor is mine
    assert {str(getattr(p._attention_backend, "value", "")) for p in doors(model)} == {"native"}


def test_compiled_blocks_go_through_the_door() -> None:
    torch._dynamo.reset()
    name = "WanTransformer3DModel"
    model = CASES[name].build(0)
    plain, recorder = run(model, name, torch.float32), Recorder()
    model.compile_repeated_blocks(backend="eager")
    with Door(model, recorder) as door:
        assert torch.equal(run(model, name, torch.float32)[0], plain[0])
    assert [site for site, _ in recorder.calls] == door.sites
    assert torch.equal(run(model, name, torch.float32)[0], plain[0])
    assert len(recorder.calls) == len(door.sites)
    torch._dynamo.reset()


def language_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    llama = LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    bert = BertConfig(**sizes, num_hidden_layers=2)
    both = LlamaForCausalLM(llama), BertModel(bert, add_pooling_layer=False)
    return {"llama": both[0].eval(), "bert": both[1].eval()}


@pytest.mark.parametrize(
    ("name", "way", "padded"), [("llama", "whole", False), ("llama", "none", True), ("bert", "whole", True)]
)
def test_models_of_transformers(name: str, way: str, padded: bool) -> None:
    model = language_models()[name]
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 1 - int(padded)
    given = {"input_ids": torch.arange(14).view(2, 7), "attention_mask": mask}
    plain, recorder = model(**given)[0], Recorder(way)
    with Door(model, recorder) as door:
        assert torch.equal(model(**given)[0], plain)
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [site for site, _ in recorder.calls] == door.sites
    assert [site.kind for site in door.sites] == ["self"] * len(door.sites)
    for site, call in recorder.calls:
        assert call.q.shape == (2, 7, 4, 8) and site.heads == 4 and call.rotary is None
        assert call.k.shape == (2, 7, 2 if name == "llama" else 4, 8)
        assert call.causal == (name == "llama" and call.mask is None)
        assert call.scale == pytest.approx(8**-0.5)
    count = len(recorder.calls)
    for each in (model, *twins):
        assert each.config._attn_implementation == "sdpa"
        assert torch.equal(each(**given)[0], plain)
    assert len(recorder.calls) == count


STEPS = 6
PIPES = ["FluxPipeline", "WanPipeline", "StableDiffusionPipeline"]


@dataclass(frozen=True)
class Seen:
    """Keys and values of one attention."""

    place: tuple[int, int | str]  # step, branch
    path: str
    part: str
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Record(Ability):
    """Note keys and values at every attention site."""

    extension = "tests.test_attention_door:install"
    seen: list[Seen] = field(default_factory=list, repr=False)
    opened: list[int] = field(default_factory=list, repr=False)  # steps of the calls


class Noting(Extension):
    """A strategy that leaves the attention to the model."""

    def __init__(self, model: nn.Module, ability: Record) -> None:
        self.ability = ability
        self.door = Door(model, self)

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        around = CURRENT.get()
        assert around is not None
        if not around.repeats:
            place = around.step.index, around.branch.number
            self.ability.seen.append(Seen(place, site.path, site.part, call.k, call.v))
        return None

    def open(self, call: Call) -> Call:
        self.ability.opened.append(call.step.index)
        return call

    def remove(self) -> None:
        self.door.remove()


def install(denoiser: Any, ability: Any) -> Noting:
    return Noting(denoiser.model, ability)


@dataclass(frozen=True)
class Watched(Method):
    """The abilities of another method, if any, and the recorder."""

    inner: Method | None = None
    record: Record = field(default_factory=Record)
    last: bool = True

    def abilities(self) -> tuple[Ability, ...]:
        inner = () if self.inner is None else self.inner.abilities()
        return (*inner, self.record) if self.last else (self.record, *inner)


@dataclass(frozen=True)
class Nobody(Ability):
    """An ability that no extension carries out."""


@dataclass(frozen=True)
class Asks(Method):
    def abilities(self) -> tuple[Ability, ...]:
        return (Record(), Nobody())


@pytest.fixture(scope="module", params=PIPES)
def made(request: Any) -> tuple[PipeCase, Any]:
    case = pipes()[request.param]
    pipe = case.build(0)
    return case, pipe


def network(pipe: Any) -> nn.Module:
    model: nn.Module = getattr(pipe, "transformer", None) or pipe.unet
    return model


@pytest.mark.parametrize(
    ("site", "last"), [("stack", True), ("module", False)], ids=["recorder last", "recorder first"]
)
def test_with_taylorseer_both_act(made: Any, site: str, last: bool) -> None:
    case, pipe = made
    model, inner = network(pipe), TaylorSeer(every=3, warmup=2, site=site)
    before = state_of(model)
    with diffcache.wrapped(pipe, inner) as handle:
        alone = case.run(pipe, 0, STEPS)
        said = [(c.index, c.branch, c.computed, c.counts, c.flops) for c in handle.last.calls]
    method = Watched(inner, last=last)
    with diffcache.wrapped(pipe, method) as handle:
        assert torch.equal(case.run(pipe, 0, STEPS), alone)
        calls = handle.last.calls
        assert [(c.index, c.branch, c.computed, c.counts, c.flops) for c in calls] == said
    assert {c.index for c in calls if c.computed} == {0, 1, 4}
    assert len(method.record.opened) == len(calls)
    computed = {c.index for c in calls if c.computed}
    assert {one.place[0] for one in method.record.seen} == computed
    sites = {(site.path, site.part) for site in attention_sites(model)}
    counts = Counter((one.place, one.path, one.part) for one in method.record.seen)
    for place in {one.place for one in method.record.seen}:
        assert {(path, part) for at, path, part in counts if at == place} == sites
    assert set(counts.values()) == {1}
    assert state_of(model) == before


def test_an_unknown_ability_is_an_error_that_names_it() -> None:
    model = cases()["FluxTransformer2DModel"].build(0)
    before = state_of(model)
    with pytest.raises(AttachError, match=r"Asks\(\) asks for Nobody, which nothing installs"):
        diffcache.wrap(model, Asks())
    assert state_of(model) == before  # what was installed before it is taken out again
    with pytest.raises(AttachError, match="is not wrapped"):
        diffcache.report(model)
