"""An ability that is no feature reuse: a recorder of keys and values at the door to attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Ability, AttachError, Call, Extension, Method, TaylorSeer
from diffcache.attach.attention import Door, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import current_call
from tests.internals import state_of
from tests.zoo.catalog import cases
from tests.zoo.pipe import PipeCase
from tests.zoo.pipes import pipes

STEPS = 6
SEER = TaylorSeer(every=3, warmup=2, site="stack")
PIPES = ["FluxPipeline", "WanPipeline", "StableDiffusionPipeline"]
MODELS = ["FluxTransformer2DModel", "WanTransformer3DModel", "UNet2DConditionModel"]


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

    extension = "tests.test_abilities:install"
    seen: list[Seen] = field(default_factory=list, repr=False)
    opened: list[int] = field(default_factory=list, repr=False)  # steps of the calls


class Recorder(Extension):
    """A strategy that leaves the attention to the model."""

    def __init__(self, model: nn.Module, ability: Record) -> None:
        self.ability = ability
        self.door = Door(model, self)

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        around = current_call()
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


def install(denoiser: Any, ability: Any) -> Recorder:
    return Recorder(denoiser.model, ability)


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


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module", params=PIPES)
def made(request: Any) -> tuple[PipeCase, Any]:
    case = pipes()[request.param]
    pipe = case.build(0)
    pipe.set_progress_bar_config(disable=True)
    return case, pipe


def network(pipe: Any) -> nn.Module:
    model: nn.Module = getattr(pipe, "transformer", None) or pipe.unet
    return model


@pytest.mark.filterwarnings("error::diffcache.CacheWarning")  # it is no cache that skips nothing
def test_a_recorder_sees_every_attention_of_every_call_and_changes_nothing(made: Any) -> None:
    case, pipe = made
    model = network(pipe)
    plain, before = case.run(pipe, 0, STEPS), state_of(model)
    sites = [(site.path, site.part) for site in attention_sites(model)]
    method = Watched()
    diffcache.wrap(pipe, method)
    seen = method.record.seen
    assert torch.equal(case.run(pipe, 0, STEPS), plain)
    assert method.record.opened == [i for i in range(STEPS) for _ in range(case.branches)]
    assert len(seen) == len(sites) * case.branches * STEPS
    counts = Counter((one.place, one.path, one.part) for one in seen)
    assert set(counts.values()) == {1}
    for step in range(STEPS):  # every call has every site once
        for branch in range(case.branches):
            assert {(p, part) for place, p, part in counts if place == (step, branch)} == {*sites}
    assert all(one.k.shape[:3] == one.v.shape[:3] for one in seen)
    report = diffcache.report(pipe)
    assert (report.steps_computed, report.steps_skipped, report.skipped) == (STEPS, 0, 0)
    assert "Nothing was skipped" not in str(report) and "compiled" not in str(report)
    diffcache.unwrap(pipe)
    assert state_of(model) == before
    assert torch.equal(case.run(pipe, 0, STEPS), plain)
    assert len(seen) == len(sites) * case.branches * STEPS


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


def test_two_doors_are_an_error() -> None:
    model = cases()["FluxTransformer2DModel"].build(0)
    before = state_of(model)
    with pytest.raises(AttachError, match="has a door already"):
        diffcache.wrap(model, Watched(Watched()))
    assert state_of(model) == before
