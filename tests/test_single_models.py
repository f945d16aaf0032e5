"""Odd ways of single models, and gates that look at what changes with the sample."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Combine, ConfidenceGatedTaylor, DBCache, FirstBlock, Interval, Newton, Taylor
from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.handle import Handle
from diffcache.attach.reuse.setup import KINDS
from diffcache.features.collect import Observer
from diffcache.features.parts.accumulated import Accumulated
from diffcache.features.parts.when import Gate
from diffcache.targets import handle_of
from tests.bare.toys import Block, Toy
from tests.internals import marks, reuse_in
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

DIM, DEPTH = 64, 4


class Model(Toy):
    """A chain of blocks."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__(depth, DIM)


class EmptyCache(Model):
    """Returns a cache that nothing is in yet, as AnyFlow-FAR does."""

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden_states, timestep), hidden_states.new_zeros(0, 3)


class Leaving(Block):
    """A block that leaves something behind."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.seen: Tensor | None = torch.tanh(self.attn(hidden_states))
        return hidden_states + self.seen

    def take(self) -> Tensor | None:
        seen, self.seen = self.seen, None
        return seen


class Reader(Model):
    """Its loop reads what a block left behind, which a skipped block does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving(DIM) for _ in range(DEPTH))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
            hidden_states = hidden_states + 0.5 * block.take()
        return hidden_states


class Side(Model):
    """Projects captions side by side, before a single block, as HiDream and BriaFibo may."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.caption_projection = nn.ModuleList(Block(DIM) for _ in range(3))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        captions = [project(torch.ones(1, 1, DIM)) for project in self.caption_projection]
        for number, block in enumerate(self.blocks):
            hidden_states = block(hidden_states * 1.0 + captions[number % 3])
        return hidden_states


pytestmark = pytest.mark.usefixtures("quiet")


def sample(step: int, tokens: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(17)
    return torch.randn(1, tokens, DIM, generator=generator) + 0.1 * step


def call(model: nn.Module, step: int, tokens: int = 4) -> Any:
    return model(sample(step, tokens), torch.tensor([9.0 - step]))


@pytest.mark.parametrize("site", ["stack", "block", "model", "module"])
def test_an_output_without_elements_is_no_trouble(site: str):
    model = diffcache.wrap(EmptyCache(), Interval(every=2, site=site))
    for step in range(3):
        assert [tuple(leaf.shape) for leaf in call(model, step)] == [(1, 4, DIM), (0, 3)]
    assert marks(model) == "CsC"


@pytest.mark.parametrize(
    "method",
    [
        FirstBlock(float("inf")),
        DBCache(float("inf"), warmup=1, order=1),
        ConfidenceGatedTaylor(float("inf"), warmup=2, start=0),
        Combine(Gate(float("inf"), forecast=Newton(2)), Taylor(1), lead=2),
        Combine(Accumulated(float("inf"))),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_gate_computes_where_the_number_of_tokens_changes(method: Any):
    """FLUX.2-klein's KV pipeline drops its reference tokens after the first step."""
    model = Model()
    expected = [call(model, step, tokens) for step, tokens in enumerate([7, 7, 4, 4, 4, 7])]
    diffcache.wrap(model, method)
    for step, tokens in enumerate([7, 7, 4, 4, 4, 7]):
        out, computed = call(model, step, tokens), diffcache.report(model).calls[-1].computed
        assert out.shape == expected[step].shape
        assert not computed or torch.equal(out, expected[step])
    assert marks(model) in ("CsCssC", "CCCssC")  # a warm-up of one or two steps


@pytest.mark.parametrize("method", [Interval(every=3), FirstBlock(float("inf"))])
def test_nan_goes_through_and_is_learned_from_once_it_is_gone(method: Any):
    model = Model()
    good = model.blocks[0].attn.value.weight.clone()
    wanted = call(model, 2)
    model.blocks[0].attn.value.weight.fill_(float("nan"))
    diffcache.wrap(model, method)
    for step in range(2):
        assert call(model, step).isnan().all()
    reasons = [c.reason for c in diffcache.report(model).calls]
    assert reasons == ["first call", "output not finite"]
    model.blocks[0].attn.value.weight.copy_(good)
    assert torch.equal(call(model, 2), wanted)
    assert call(model, 3).isfinite().all() and marks(model) == "CCCs"


def test_a_list_whose_blocks_do_not_feed_each_other_is_no_stack():
    model, ran = Side(depth=DEPTH), []
    for part in (*model.blocks, *model.caption_projection):
        part.register_forward_hook(lambda module, *_: ran.append(module))
    diffcache.wrap(model, Interval(every=3))
    call(model, 0)
    ran.clear()
    for step in range(1, 6):
        call(model, step)
    report = diffcache.report(model)
    assert report.sites == {"model": {"blocks": (8, 16)}}
    assert [ran.count(block) for block in model.blocks] == [1] * DEPTH
    assert [ran.count(project) for project in model.caption_projection] == [5] * 3


@pytest.mark.parametrize("site", ["stack", "block", "model"])
def test_a_refusal_names_the_sites_that_serve(site: str):
    diffcache.wrap(model := Reader(), Interval(every=2, site=site))
    with pytest.raises(AttachError, match="fails with its blocks skipped") as refusal:
        call(model, 0)
    assert re.findall(r"site='(\w+)'", str(refusal.value).partition(";")[2]) == ["module"]
    diffcache.unwrap(model)
    expected = call(model, 0)
    diffcache.wrap(model, Interval(every=2, site="module"))
    for _ in range(2):
        assert torch.equal(call(model, 0), expected)


@pytest.mark.parametrize("site", ["stack", "module"])
def test_kinds_of_calls_are_forgotten_after_many_resolutions(site: str):
    model = diffcache.wrap(Model(), Interval(every=2, site=site))
    setup = reuse_in(handle_of(model)).setup
    for tokens in range(1, KINDS + 9):
        for step in range(2):
            call(model, step, tokens)
        diffcache.reset(model)
        if tokens % 9 == 0:  # in use again and again: never forgotten
            call(model, 0, 1)
            diffcache.reset(model)
    kept = setup.costs if site == "module" else setup.layouts
    assert len(kept) == KINDS
    shapes = {str(signature) for signature in kept}
    assert any("1, 1, 64" in shape for shape in shapes)
    assert not any("1, 2, 64" in shape for shape in shapes)
    for step in range(2):  # one that was forgotten is learned again
        call(model, step, 2)
    assert marks(model) == "Cs" and diffcache.report(model).flops_saved


def test_an_untapped_sibling_holds_nothing_after_its_run():
    """`from_pipe` shares the denoiser and the scheduler; nobody says when such a run ends."""
    case = pipes()["FluxPipeline"]
    pipe = diffcache.wrap(case.build(0), Interval(every=3))
    wanted = case.run(pipe, 0, 6)
    sibling = type(pipe)(**pipe.components)
    sibling.set_progress_bar_config(disable=True)
    held: list[int] = []

    def look(_: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        held.append(diffcache.report(pipe).held_bytes)
        return given

    out = sibling(**case.call(sibling, 0, 6), callback_on_step_end=look)[0]
    assert torch.equal(out, wanted) and marks(sibling) == "CssCss"
    assert min(held[:-1]) > 0 == held[-1] == diffcache.report(pipe).held_bytes


def run(case, model, steps=8):
    with torch.no_grad():
        return [model(**case.kwargs(model, 0, step, steps), return_dict=False) for step in range(steps)]


def test_lead_and_tail_are_counted_over_the_blocks_of_the_image():
    case = cases()["Lumina2Transformer2DModel"]
    model = case.build(0)
    counts, hooks = Counter(), []
    for key in ("context_refiner", "noise_refiner", "layers"):
        for block in getattr(model, key):
            hook = block.register_forward_hook(lambda *_, key=key: counts.update([key]))
            hooks.append(hook)
    depth = {key: len(getattr(model, key)) for key in ("context_refiner", "noise_refiner", "layers")}
    method = diffcache.DBCache(float("inf"), lead=2, tail=1, warmup=1)
    with diffcache.wrapped(model, method) as handle:
        run(case, model)
        counts.clear()
        run(case, model)
        assert [call.computed for call in handle.last.calls] == [True] + [False] * 7
    assert counts == {
        "context_refiner": 8 * depth["context_refiner"],
        "noise_refiner": 8 * depth["noise_refiner"],
        "layers": depth["layers"] + 7 * 3,
    }


def test_teacache_on_lumina2_looks_at_the_joint_sequence_before_the_main_layers():
    """The official script compares `layers[0].norm1(joint, temb)[0]`; refiners always run."""
    case = cases()["Lumina2Transformer2DModel"]
    model, expected, probes = case.build(0), [], []
    norm = model.layers[0].norm1.register_forward_hook(lambda *call: expected.append(call[2][0]))
    run(case, model, 3)
    norm.remove()
    observer = Observer()
    observer.probe = lambda step, value: probes.append(value)
    method = diffcache.TeaCache(float("inf"), (1.0, 0.0), last=False)
    with Handle(model, {"model": model}, method, observer=observer) as handle:
        run(case, model, 3)
        assert [call.counts for call in handle.last.calls] == [
            {"layers": (len(model.layers), 0)},
            *[{"layers": (0, len(model.layers))}] * 2,
        ]
    joint = case.kwargs(model, 0)["encoder_hidden_states"].shape[1] + 16  # of the image
    assert [len(value[0]) for value in probes] == [joint] * 3
    for mine, official in zip(probes, expected, strict=True):
        torch.testing.assert_close(mine, official)


def test_the_stream_of_the_sample_is_looked_at_where_the_text_comes_first():
    """The first argument of its blocks is the text, which no step changes."""
    case = cases()["Cosmos3OmniTransformer"]
    model = case.build(0)
    assert anatomy_of(model).sample == "vision_tokens"
    for method in (diffcache.FirstBlock(1e-9), diffcache.TeaCache(1e-9, (1.0, 0.0))):
        with diffcache.wrapped(model, method) as handle:
            run(case, model)
            assert all(call.computed for call in handle.last.calls)
            (layout,) = reuse_in(handle).setup.layouts.values()
        assert layout.streams == {"layers": [1]}


class Apart(nn.Module):
    """A denoiser whose blocks see the text alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plus(), Plus(), Plus()])

    def forward(self, hidden_states, timestep, text):
        for block in self.blocks:
            text = block(text)
        return hidden_states * timestep.view(-1, 1) + text


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, hidden_states):
        return hidden_states + self.weight


def test_a_gate_with_nothing_to_look_at_is_refused():
    model, text = Apart(), torch.ones(1, 3)
    with torch.no_grad():
        with (
            diffcache.wrapped(model, diffcache.FirstBlock(0.1)),
            pytest.raises(diffcache.AttachError, match="'hidden_states', so a gate has nothing to"),
        ):
            model(torch.zeros(1, 3), torch.ones(1), text)
        with diffcache.wrapped(model, diffcache.Interval(every=2)) as handle:
            with diffcache.run(model):
                for step in range(4):
                    sample, time = torch.full((1, 3), float(step)), torch.tensor([4.0 - step])
                    assert torch.equal(model(sample, time, text), sample * time + text + 3)
            assert [call.computed for call in handle.last.calls] == [True, False] * 2


def test_a_gate_asked_about_other_tokens_computes():
    """Guidance branches may differ in their number of tokens, and come in another order."""
    step = diffcache.Step(index=1, timestep=None, total=9, branch=0)
    for when in (Gate(float("inf"), forecast=Taylor(1)), Accumulated(float("inf"))):
        state = when.init()
        first = diffcache.Step(index=0, timestep=None, total=9, branch=0)
        when.computed(state, first, torch.ones(1, 4, 2))
        assert not when.should_compute(state, step, torch.ones(1, 4, 2))
        state = when.init()
        when.computed(state, first, torch.ones(1, 4, 2))
        assert when.should_compute(state, step, torch.ones(1, 7, 2))
