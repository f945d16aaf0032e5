"""Sites and denoisers that decide apart."""

import pytest
import torch

import diffcache
from diffcache import Combine, Interval, Reuse, Table, TaylorSeer
from diffcache.features.each import Each
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes
from tests.zoo_runs import sample

STEPS = 6


class Held(torch.nn.Module):
    """A module that returns the last output of its listed steps: the independent loop."""

    def __init__(self, module, listed):
        super().__init__()
        self.module, self.listed, self.step, self.kept, self.runs = module, listed, -1, None, 0

    def forward(self, *args, **kwargs):
        self.step += 1
        if self.step in self.listed:
            self.kept, self.runs = self.module(*args, **kwargs), self.runs + 1
        return self.kept


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("DiTTransformer2DModel", {"transformer_blocks.0.attn1": [0, 3], "transformer_blocks.1.ff": [0, 1, 5]}),
        ("WanTransformer3DModel", {"blocks.0.attn1": [0, 2, 4], "blocks.0.attn2": [0], "blocks.1.ffn": [0, 5]}),
        ("FluxTransformer2DModel", {"transformer_blocks.0.attn": [0, 4]}),
    ],
)
def test_modules_at_their_own_steps_equal_an_independent_loop(name, tables):
    case = cases()[name]
    model, twin = case.build(), case.build()
    twin.load_state_dict(model.state_dict())
    for path, listed in tables.items():
        parent, _, child = path.rpartition(".")
        setattr(twin.get_submodule(parent), child, Held(twin.get_submodule(path), listed))
    expected = sample(case, twin, STEPS)
    with diffcache.wrapped(model, Combine(Table(tables, total=STEPS), Reuse(), "module")) as handle:
        found = sample(case, model, STEPS)
        calls = handle.last.calls
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    skipped = sum(STEPS - len(listed) for listed in tables.values())
    assert sum(out for call in calls for _, out in call.counts.values()) == skipped


def test_a_fused_block_follows_its_projection():
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    runs = []
    block = model.single_transformer_blocks[0]
    block.proj_mlp.register_forward_hook(lambda *_: runs.append("mlp"))
    block.attn.register_forward_hook(lambda *_: runs.append("attn"))
    table = Table({"single_transformer_blocks.0.proj_out": [0, 3]}, total=STEPS)
    with diffcache.wrapped(model, Combine(table, Reuse(), "module")):
        sample(case, model, STEPS)
    assert sorted(runs) == ["attn", "attn", "mlp", "mlp"]


@pytest.mark.parametrize("site", ["block", "run"])
def test_blocks_at_their_own_steps(site):
    case = cases()["WanTransformer3DModel"]
    model = case.build()
    depth = len(model.blocks)
    runs = [[] for _ in range(depth)]
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, n=number: runs[n].append(step[0]))
    names = [f"blocks.{n}" for n in range(depth)]
    tables = {names[0]: [0, 2], names[1]: [0, 3, 4]}
    blocks = tuple(tables) if site == "run" else ()
    method = Combine(Table(tables, total=STEPS), Reuse(), site, blocks=blocks)
    step = [0]
    with diffcache.wrapped(model, method), torch.no_grad():
        for step[0] in range(STEPS):
            out = model(**case.kwargs(model, 0, step=step[0], steps=STEPS), return_dict=False)[0]
            assert torch.isfinite(out).all()
    assert sorted(set(runs[0])) == [0, 2]
    assert sorted(set(runs[1])) == [0, 3, 4]
    assert all(sorted(set(r)) == list(range(STEPS)) for r in runs[2:])


pytestmark = pytest.mark.usefixtures("quiet")
NAMES = ("transformer", "transformer_2")
BOTH = {"transformer": "taylorseer:every=3,warmup=4", "transformer_2": Interval(every=2)}


def computed(handle, pipe, steps=14):
    """The steps that each denoiser computed, of both guidance passes."""
    pipes()["WanPipeline-two"].run(pipe, steps=steps)
    return [[c.index for c in handle.last.calls if c.denoiser == name and c.computed] for name in NAMES]


def test_each_denoiser_follows_its_own_method():
    """The second takes over at half of the timesteps, after 8 of 14 steps, with a count of its own."""
    pipe = pipes()["WanPipeline-two"].build(0)
    expected = [[step for step in own for _ in range(2)] for own in ([0, 1, 2, 3, 6], [0, 2, 4])]
    for hold in (None, "int8"):
        with diffcache.wrapped(pipe, BOTH, hold=hold) as handle:
            assert computed(handle, pipe) == expected
            assert handle.method.total is None
            assert repr(handle.method) in str(diffcache.report(pipe))
    with diffcache.wrapped(pipe, BOTH, components=NAMES) as handle:
        assert handle.method == Each(
            (("transformer", TaylorSeer(every=3, warmup=4)), ("transformer_2", Interval(every=2)))
        )
        assert (
            eval(repr(handle.method), {name: getattr(diffcache, name) for name in ("Each", "Interval", "TaylorSeer")})
            == handle.method
        )
        assert diffcache.cite(pipe) == TaylorSeer.bibtex + "\n" + Interval.bibtex


def test_a_file_of_settings_keeps_the_method_of_each(tmp_path):
    pipe, path = pipes()["WanPipeline-two"].build(0), tmp_path / "cache.yaml"
    with diffcache.wrapped(pipe, BOTH) as handle:
        method, expected = handle.method, computed(handle, pipe)
        diffcache.save(pipe, path)
    with diffcache.wrapped(pipe, path) as handle:
        assert handle.method == method
        assert computed(handle, pipe) == expected


def test_settings_of_a_request_are_for_each():
    pipe = pipes()["WanPipeline-two"].build(0)
    with diffcache.wrapped(pipe, dict.fromkeys(NAMES, "interval:every=2")) as handle:
        with diffcache.settings(pipe, every=3):
            assert computed(handle, pipe)[1] == [0, 0, 3, 3]
        assert computed(handle, pipe)[1] == [0, 0, 2, 2, 4, 4]


def test_bytes_are_those_of_each():
    pipe, size = pipes()["WanPipeline-two"].build(0), {"height": 64, "width": 64, "frames": 5}
    held = [diffcache.expected_bytes(pipe, f"taylorseer:order={order}", **size) for order in (1, 2)]
    both = dict(zip(NAMES, ("taylorseer", "taylorseer:order=2"), strict=True))
    expected = {name: held[number][name] for number, name in enumerate(NAMES)}
    assert diffcache.expected_bytes(pipe, both, **size) == expected != held[0]
