"""Temporal tables: where they look up, what they keep, exact over runs, dropped with their weights."""

import types
from functools import partial

import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.extensions.lookup import COUNTED
from diffcache.attach.extensions.lookup_entries import alike
from diffcache.attach.extensions.lookup_layers import rounded_copy
from diffcache.attach.extensions.lookup_sites import time_sites
from diffcache.features.taylorseer import TaylorSeer
from diffcache.features.temporal_table import TemporalTable, disturbance, keeps_table, rounded, step_of
from diffcache.weights import Weights, checksum
from tests.internals import state_of
from tests.zoo.catalog import cases
from tests.zoo_runs import in_threads, sample


class Block(nn.Module):
    def __init__(self, size, kind=""):
        super().__init__()
        self.kind = kind
        self.mod = nn.Linear(size, size)
        self.squeeze = nn.Linear(size, size)
        self.drop = nn.Dropout(0.5)
        self.act = nn.Sequential(nn.SiLU(inplace=kind == "writes"), nn.Linear(size, size))
        self.scaling = 1.0
        self.secret = torch.ones(size)

    def forward(self, hidden_states, temb):
        given = temb
        if self.kind == "random":
            given = self.drop(temb)
        elif self.kind == "reads":  # what is computed depends on the sample
            given = temb if hidden_states.sum().item() > 0 else -temb
        elif self.kind == "attribute":  # a tensor that nobody knows of
            given = temb + self.secret
        elif self.kind == "masks":  # its shape depends on the sample
            given = temb + hidden_states[hidden_states > 0].shape[0]
        scale = self.mod(given) * self.scaling
        if self.kind == "twice":
            scale = scale + self.mod(2 * given)
        squeezed = self.squeeze(hidden_states.mean(1))
        return hidden_states + scale[:, None] * torch.tanh(squeezed)[:, None] + self.act(temb)[:, None]


class Toy(nn.Module):
    def __init__(self, kind="", size=6):
        super().__init__()
        self.first = nn.Linear(1, size)
        self.blocks = nn.ModuleList([Block(size, kind), Block(size)])

    def forward(self, hidden_states, timestep, label=None, scale=1.0):
        temb = torch.cos(self.first(timestep.reshape(-1, 1)))
        if label is not None:
            temb = temb + label * scale
        for block in self.blocks:
            hidden_states = block(hidden_states, temb)
        return hidden_states


def toy(kind=""):
    torch.manual_seed(0)
    return Toy(kind).eval().requires_grad_(False)


def toy_run(model, steps=3, batch=2, **more):
    x = torch.randn(batch, 6, 6, generator=torch.Generator().manual_seed(1))
    outs = []
    for s in range(steps):
        t = torch.full((batch,), 1.0 - s / 8)
        outs.append(model(hidden_states=x + s, timestep=t, **more))
    return torch.stack(outs)


ALL = ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act", "first"]


def table_of(handle):
    return handle.denoisers[0].extensions[-1]


def counts(handle):
    return [call.counts.get(COUNTED) for call in handle.last.calls]


STEPS = 3
MODELS = {  # denoiser -> modules to look up
    "FluxTransformer2DModel": 14,
    "WanTransformer3DModel": 2,
    "DiTTransformer2DModel": 8,
    "UNet2DConditionModel": 15,
}
LIGHT = ["FluxTransformer2DModel", "DiTTransformer2DModel"]


@pytest.fixture(scope="module", params=MODELS)
def made(request):
    case = cases()[request.param]
    return case, case.build().requires_grad_(False)


class Calls:
    """Counts how often modules really run."""

    def __init__(self, model, paths):
        self.count = 0
        self.hooks = [model.get_submodule(path).register_forward_hook(self._count) for path in paths]

    def _count(self, *_):
        self.count += 1

    def of(self, run, *args, **kwargs):
        self.count = 0
        return run(*args, **kwargs), self.count


def sites_of(case, model):
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, 1)
        return list(table_of(handle).taps)


def test_a_second_run_is_looked_up_bit_for_bit(made):
    case, model = made
    paths = sites_of(case, model)
    assert len(paths) == MODELS[case.name]
    plain, other = sample(case, model, STEPS), sample(case, model, STEPS, seed=1)
    assert plain.std() > 1e-3
    calls = Calls(model, paths)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, 1)  # learns what to tap, with a forward of its own
        first, ran = calls.of(sample, case, model, STEPS)
        assert torch.equal(first, plain)
        second, again = calls.of(sample, case, model, STEPS)
        assert torch.equal(second, plain)
        assert (again, ran > 0) == (0, True)
        assert counts(handle) == [(0, len(paths))] * STEPS
        assert torch.equal(sample(case, model, STEPS, order=range(STEPS - 1, -1, -1)), plain.flip(0))
        assert counts(handle)[0] == (0, len(paths))
        assert torch.equal(sample(case, model, STEPS, seed=1), other)  # the latent, at least, differs
    for hook in calls.hooks:
        hook.remove()


def test_a_prompt_is_part_of_the_key_where_it_matters(made):
    case, model = made
    plain = sample(case, model, STEPS, seed=1)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, STEPS)
        assert torch.equal(sample(case, model, STEPS, seed=1), plain)
        looked_up = sum(hit for _, hit in counts(handle))
        timestep_only = case.name in ("WanTransformer3DModel", "UNet2DConditionModel")
        assert looked_up == (STEPS * MODELS[case.name] if timestep_only else 0)
        sample(case, model, STEPS)
        assert sum(ran for ran, _ in counts(handle)) == 0  # the first prompt is still known


@pytest.mark.parametrize("made", LIGHT, indirect=True)
@pytest.mark.parametrize(
    "inner",
    [None, TaylorSeer(every=2, warmup=1), TaylorSeer(2, warmup=1, site="stack")],
    ids=["alone", "taylorseer", "stack"],
)
def test_it_goes_with_another_method_and_leaves_no_trace(made, inner):
    case, model = made
    before, plain = state_of(model), sample(case, model, STEPS)
    expected = plain
    if inner is not None:
        with diffcache.wrapped(model, inner):
            expected = sample(case, model, STEPS)
    with diffcache.wrapped(model, TemporalTable(inner)) as handle:
        assert torch.equal(sample(case, model, STEPS), expected)
        assert torch.equal(sample(case, model, STEPS), expected)
        assert all(ran == 0 and hit > 0 for ran, hit in counts(handle))  # at skipped steps as well
    assert state_of(model) == before
    assert torch.equal(sample(case, model, STEPS), plain)


@pytest.mark.parametrize("made", LIGHT, indirect=True)
def test_off_an_exception_the_next_run_is_exact(made):
    case, model = made
    plain = sample(case, model, STEPS)
    last = list(model.children())[-1]
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sample(case, model, STEPS, order=[0, 1])
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sample(case, model, STEPS, order=[2])
        hook.remove()
        handle.reset()
        assert torch.equal(sample(case, model, STEPS), plain)
        assert torch.equal(sample(case, model, STEPS), plain)


@pytest.mark.parametrize("made", LIGHT, indirect=True)
def test_threads_share_a_table(made):
    case, model = made
    plains = [sample(case, model, STEPS, seed=seed) for seed in (0, 1)]

    def work(number):
        return [sample(case, model, STEPS, seed=number % 2) for _ in range(2)]

    with diffcache.wrapped(model, TemporalTable()) as handle:
        found = in_threads(*(partial(work, number) for number in range(4)))
        for number, outs in enumerate(found):
            assert all(torch.equal(out, plains[number % 2]) for out in outs)
        assert torch.equal(sample(case, model, STEPS), plains[0])
        assert counts(handle) == [(0, MODELS[case.name])] * STEPS


def test_autocast_has_entries_of_its_own():
    case = cases()["DiTTransformer2DModel"]
    model = case.build()
    plain = sample(case, model, STEPS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sample(case, model, STEPS)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        for _ in range(2):
            assert torch.equal(sample(case, model, STEPS), plain)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(sample(case, model, STEPS), cast)
        assert counts(handle) == [(0, 8)] * STEPS


def test_rows_that_are_alike_are_kept_once():
    one, two = torch.randn(4), torch.randn(4)
    two[0], other = 0.0, two.clone()
    other[0] = -0.0
    rows, places = alike(torch.stack([one, two, one, other, two]))
    assert torch.equal(rows.view(torch.int32), torch.stack([one, two, other]).view(torch.int32))
    assert places.tolist() == [0, 1, 0, 2, 1]
    assert alike(torch.randn(3, 4))[1] is None and alike(torch.randn(3))[1] is None
    model = toy()
    with diffcache.wrapped(model, TemporalTable()) as handle:
        sizes = []
        for batch in (1, 8):
            toy_run(model, batch=batch)
            sizes.append(table_of(handle).table.nbytes)
            table_of(handle).clear()
    assert sizes[0] == 3 * 5 * 6 * 4 and sizes[1] < 4 * sizes[0]  # up to rounding by place


def test_more_conditions_than_entries():
    model = toy()
    plain, label = toy_run(model, steps=5), torch.randn(6)
    with diffcache.wrapped(model, TemporalTable(entries=4)) as handle:
        table = table_of(handle).table
        for _ in range(3):  # a run that is too long keeps its first four steps
            assert torch.equal(toy_run(model, steps=5), plain)
            assert len(table.conditions) == 4
        hits = [call[1] if call else 0 for call in counts(handle)]
        assert hits == [5, 5, 5, 5, 0]
        for _ in range(2):  # another prompt: two steps, of the timestep alone and with the label
            toy_run(model, steps=2, label=label)
        assert counts(handle)[-1] == (0, 5) and len(table.conditions) == 4


def test_selection_takes_the_smaller_disturbance_element_by_element():
    layer, table = torch.rand(9), torch.rand(9)
    table[3] = layer[3]
    chosen = keeps_table(layer, table, "step")
    assert torch.equal(torch.where(chosen, table, layer), torch.minimum(layer, table))
    assert chosen[3]
    assert keeps_table(layer, layer + 1, "site").tolist() == [False] * 9
    assert keeps_table(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), "site").all()
    one = torch.randn(5)
    assert disturbance([one], [one.clone()]) == 0.0
    assert disturbance([one], [-one]) == pytest.approx(2.0)
    assert disturbance([one[:2], one[2:]], [2 * one[:2], 2 * one[2:]]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("scale", ["entry", "site"])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_rounded_table_is_half_a_step_off(bits, scale):
    model = toy()
    plain = toy_run(model)
    method = TemporalTable(bits=bits, scale=scale)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        toy_run(model)
        exact = [dict(page) for page in table_of(handle).table.conditions.values()]
    with diffcache.wrapped(model, method) as handle:
        assert torch.equal(toy_run(model), plain)  # what it computes it uses
        second = toy_run(model)
        third = toy_run(model)
        assert counts(handle) == [(0, 5)] * 3
        found = list(table_of(handle).table.conditions.values())
    assert torch.equal(second, third) and not torch.equal(second, plain)
    steps = {}
    for pages in zip(exact, found, strict=True):
        for name in pages[0]:
            one, two = pages[0][name], pages[1][name]
            step = two.rows[0].step
            steps.setdefault(name, set()).add(float(step))
            assert (one.value() - two.value()).abs().max() <= 0.5001 * step
    assert {len(found) for found in steps.values()} == ({1} if scale == "site" else {3})


def expected_harm(model, bits):
    """Return {site: [(by layer, by table)]} from the modules themselves."""
    harms = {}
    for s in range(3):
        temb = torch.cos(model.first(torch.full((2, 1), 1.0 - s / 8)))
        given = {"first": torch.full((2, 1), 1.0 - s / 8)}
        given.update({p: temb for p in ALL if p != "first"})
        for path in ALL:
            module = model.get_submodule(path)
            exact = module(given[path])
            by_layer = disturbance([exact], [rounded_copy(module, bits)(given[path])])
            table = rounded(exact, bits, step_of([exact], bits)).value()
            harms.setdefault(path, []).append((by_layer, disturbance([exact], [table])))
    return harms


@pytest.mark.parametrize("by", ["step", "site"])
def test_the_closer_maintenance_is_kept(by):
    model = toy()
    # a large weight for a condition that is always 0 spoils the rounding of the others in its row
    model.first.weight[0], model.first.bias[0] = 0.0, torch.pi / 2
    model.blocks[0].mod.weight[:, 0] = 1000.0
    expected = expected_harm(model, 8)
    with diffcache.wrapped(model, TemporalTable(bits=8, keep="closer", by=by)) as handle:
        toy_run(model)
        second = toy_run(model)
        pages = list(table_of(handle).table.conditions.values())
        ran = [count[0] for count in counts(handle)]
        assert torch.equal(toy_run(model), second)
    layers = 0
    for path, harms in expected.items():
        by_layer, by_table = torch.tensor(harms, dtype=torch.float64).T
        tables = keeps_table(by_layer, by_table, by)
        for page, harm, stays in zip(pages, harms, tables.tolist(), strict=True):
            assert page[path].harm == pytest.approx(harm, abs=1e-12)
            assert page[path].layer is not stays
            layers += not stays
    assert sum(ran) == layers and 0 < layers < 15


def test_the_layer_alone_is_the_rounded_layer():
    model = toy()
    with diffcache.wrapped(model, TemporalTable(bits=8, keep="layer")) as handle:
        toy_run(model)
        second = toy_run(model)
        assert counts(handle) == [(5, 0)] * 3
        assert table_of(handle).table.nbytes > 0
    twin = toy()
    for path in ALL:
        parent, _, child = path.rpartition(".")
        setattr(twin.get_submodule(parent), child, rounded_copy(twin.get_submodule(path), 8))
    assert torch.equal(second, toy_run(twin))
    rows = rounded_copy(model.first, 8)
    assert (rows.codes * rows.step - model.first.weight).abs().max() <= 0.5001 * rows.step.max()


def test_reconstruction_rounds_for_the_features_of_the_steps():
    """With 4 bits: closer than to the nearest at every site; only for the run it was made for."""
    harms = {}
    for settings in ({}, {"reconstruct": True}, {"reconstruct": True, "activations": 8}):
        model = toy()
        before = [weight.clone() for weight in model.parameters()]
        method = TemporalTable(bits=4, keep="layer", **settings)
        with diffcache.wrapped(model, method) as handle:
            plain, second = toy_run(model), toy_run(model)
            assert torch.equal(toy_run(model), second) and not torch.equal(second, plain)
            entries = list(table_of(handle).table.conditions.values())
        harms[len(harms)] = {path: sum(e[path].harm[0] for e in entries) for path in ALL}
        assert all(map(torch.equal, before, model.parameters()))
    nearest, fitted, both = harms.values()
    assert all(fitted[path] <= nearest[path] for path in ALL)  # `first` has one column
    assert sum(fitted.values()) < 0.45 * sum(nearest.values())
    assert both != fitted and sum(both.values()) < 0.5 * sum(nearest.values())


@pytest.mark.parametrize("first", ["inference", "cast"])
def test_a_run_closes_as_it_was_made_and_not_with_other_weights(first):
    contexts = {"inference": torch.inference_mode, "cast": partial(torch.autocast, "cpu")}
    made = {}
    for second in (contexts[first], torch.no_grad):
        model = toy()
        method = TemporalTable(bits=4, keep="closer", reconstruct=True)
        with diffcache.wrapped(model, method) as handle:
            with contexts[first]():
                toy_run(model)
            with second():
                toy_run(model)
            made[second] = [
                entry.harm
                for page in table_of(handle).table.conditions.values()
                for entry in page.values()
                if entry.harm is not None
            ]
    inside, outside = made.values()
    assert inside == outside and inside
    model, twin = toy(), toy()
    twin.blocks[0].mod = nn.Linear(6, twin.blocks[0].mod.out_features).requires_grad_(False)
    with diffcache.wrapped(model, TemporalTable(bits=8, keep="layer", reconstruct=True)):
        toy_run(model)
        model.blocks[0].mod = twin.blocks[0].mod
        assert torch.equal(toy_run(model), toy_run(twin))


def test_columns_take_up_what_rounding_missed():
    layer = nn.Linear(6, 5).double()
    made = rounded_copy(layer, 4)
    nearest = made.codes.clone()
    # Inputs without correlation leave nothing to take up.
    made.fit(layer.weight, torch.eye(6, dtype=torch.float64))
    assert torch.equal(made.codes, nearest)
    # Two equal columns of inputs: only their sum counts, which is kept to half a step.
    given = torch.randn(9, 5, dtype=torch.float64)
    given = torch.cat([given[:, :1], given], dim=1)
    made.fit(layer.weight, given)
    missed = layer.weight / made.step - made.codes
    assert (missed[:, 0] + missed[:, 1]).abs().max() <= 0.51
    assert (made(given) - layer(given)).norm() < (given @ ((nearest * made.step) - layer.weight).T).norm()
    # With 16 bits nothing is left to see.
    fine = rounded_copy(layer, 16, activations=16)
    fine.fit(layer.weight, given)
    torch.testing.assert_close(fine(given), layer(given), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("", []),
        ("random", ["blocks.0.mod"]),
        ("reads", ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act"]),
        ("masks", ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act"]),
        ("attribute", ["blocks.0.mod"]),
        ("twice", ["blocks.0.mod"]),
        ("writes", ["blocks.0.act"]),
    ],
)
def test_only_what_the_sample_cannot_reach_is_tapped(kind, missing):
    model = toy(kind)
    model.blocks[0].drop.train(kind == "random")
    before = state_of(model)
    x, t = torch.randn(2, 5, 6), torch.rand(2)
    found = time_sites(model, lambda: model(x, t), {"timestep": t}, [x])
    assert sorted(site.path for site in found) == sorted(set(ALL) - set(missing))
    assert all(site.arguments == {"timestep"} for site in found)
    weights = {s.path: [name for _, name in s.weights] for s in found}
    assert weights["first"] == ["weight", "bias"]
    if "blocks.1.mod" not in missing:
        assert weights["blocks.1.mod"] == ["weight", "bias"] * 2  # its own and those of `first`
    assert state_of(model) == before
    if kind in ("reads", "masks", "attribute", "twice", "writes"):
        plain = toy_run(model)
        with diffcache.wrapped(model, TemporalTable()):
            assert torch.equal(toy_run(model), plain)
            assert torch.equal(toy_run(model), plain)


def test_what_is_inside_compiled_blocks_stays_there():
    model = toy()
    plain = toy_run(model)
    for block in model.blocks:
        block.compile(backend="eager")
    with diffcache.wrapped(model, TemporalTable()) as handle:
        for _ in range(2):
            assert torch.equal(toy_run(model), plain)
        assert list(table_of(handle).taps) == ["first"]
        assert counts(handle) == [(0, 1)] * 3
    torch._dynamo.reset()


def test_a_sample_that_shares_memory_with_a_condition_is_no_condition():
    model, both = toy(), torch.randn(2, 6, 6)
    x, t = both[:, :5], both[:, 5, 0]
    found = time_sites(model, lambda: model(x, t), {"timestep": t}, [x])
    assert found == []


class Mixed(nn.Module):
    """Nothing in it sees the timestep alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, hidden_states, timestep):
        mixed = timestep[:, None] + hidden_states.mean(1)
        for block in self.blocks:
            hidden_states = block(hidden_states, mixed)
        return hidden_states


class Attends(Toy):
    """Attends with flex attention, as far as its processor says."""

    def __init__(self):
        super().__init__()
        self.processor = types.SimpleNamespace(_attention_backend="flex")


class Fails(Toy):
    """Does not run where operations are followed."""

    def forward(self, hidden_states, timestep):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if any(type(mode).__name__ == "_Origins" for mode in modes):
            raise NotImplementedError("no rule for this operation")
        return super().forward(hidden_states, timestep)


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Mixed, "no module was seen"),
        (Attends, "cannot be followed .it attends with flex attention"),
        (Fails, "cannot be followed .no rule for this operation"),
    ],
)
def test_where_nothing_can_be_looked_up_it_says_so_and_computes(cls, match):
    model = cls().eval().requires_grad_(False)
    plain = toy_run(model)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        with pytest.warns(diffcache.CacheWarning, match=match):
            found = toy_run(model)
        assert torch.equal(found, plain) and torch.equal(toy_run(model), plain)
        assert counts(handle) == [None] * 3


def test_plain_arguments_and_dtypes_and_batches_are_part_of_the_key():
    model = toy()
    label = torch.randn(6)
    settings = [{}, {"label": label}, {"label": label, "scale": 2.0}, {"label": label + 1}]
    plains = [toy_run(model, **more) for more in settings]
    alone = toy_run(model, batch=1)
    with diffcache.wrapped(model, TemporalTable()):
        for _ in range(2):
            for more, plain in zip(settings, plains, strict=True):
                assert torch.equal(toy_run(model, **more), plain)
            assert torch.equal(toy_run(model, batch=1), alone)
        label.mul_(-1)  # the same tensor, written to
        found = toy_run(model, label=label)
    assert torch.equal(found, toy_run(model, label=label))


class Adapter(nn.Module):
    """Wraps a linear layer as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora = nn.ModuleDict({"one": nn.Linear(base.in_features, base.out_features)})
        self.scaling = {"one": 0.5}
        self.requires_grad_(False)

    def forward(self, value):
        return self.base_layer(value) + self.scaling["one"] * self.lora["one"](value)


CHANGES = {
    "in place": lambda model: model.blocks[0].mod.weight.mul_(2),
    "data": lambda model: model.blocks[0].mod.weight.data.add_(1),
    "upstream": lambda model: model.first.bias.data.add_(1),
    "columns": lambda model: model.blocks[1].mod.weight.data.copy_(model.blocks[1].mod.weight.data.flip(1).clone()),
    "adapter": lambda model: setattr(model.blocks[0], "mod", Adapter(model.blocks[0].mod)),
    "adapter upstream": lambda model: setattr(model, "first", Adapter(model.first)),
    "parameter": lambda model: setattr(model.blocks[1].mod, "bias", nn.Parameter(torch.ones(6), requires_grad=False)),
    "load": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_drops_the_table(change):
    model, twin = toy(), toy()
    state = torch.random.get_rng_state()  # adapters draw the same weights twice
    with torch.no_grad():
        CHANGES[change](twin)
    plain, after = toy_run(model), toy_run(twin)
    assert not torch.equal(plain, after)
    with diffcache.wrapped(model, TemporalTable()) as handle, torch.no_grad():
        assert torch.equal(toy_run(model), plain)
        torch.random.set_rng_state(state)
        CHANGES[change](model)
        for _ in range(2):
            assert torch.equal(toy_run(model), after)
        assert all(ran == 0 for ran, _ in counts(handle)) or "adapter" in change
    assert torch.equal(toy_run(model), after)


def test_the_scale_of_an_adapter_drops_the_table():
    model = toy()
    CHANGES["adapter"](model)
    CHANGES["adapter upstream"](model)
    with diffcache.wrapped(model, TemporalTable()), torch.no_grad():
        for path in ("first", "blocks.0.mod"):
            toy_run(model)
            model.get_submodule(path).scaling["one"] += 0.25
            found = toy_run(model)
            assert torch.equal(found, toy_run(model))
            assert not torch.equal(found, toy_run(toy()))
            kept = found
        model.first.scaling["one"] = model.first.scaling["one"]
        assert torch.equal(toy_run(model), kept)
    assert torch.equal(toy_run(model), kept)


def test_weights_that_only_move_keep_the_table():
    model = toy()
    plain = toy_run(model)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        toy_run(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(toy_run(model), plain)
        assert all(ran == 0 for ran, _ in counts(handle))


def test_a_change_within_a_run_is_seen():
    model = toy()
    x, times = torch.randn(1, 5, 6), [torch.tensor([t]) for t in (1.0, 0.5)]
    with diffcache.wrapped(model, TemporalTable()), torch.no_grad():
        for t in times:
            model(x, timestep=t)
        model(x, timestep=times[0])  # a second run starts
        model.blocks[0].mod.weight.mul_(3)
        found = model(x, timestep=times[1])
    assert torch.equal(found, model(x, times[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_checksums_tell_contents_apart(dtype):
    assert checksum(torch.ones(1).expand(1)) == checksum(torch.ones(1))
    for shape in [(), (1,), (3, 5), (64, 17), (8, 640)]:
        one = (torch.randn(shape) * 50).to(dtype)
        assert checksum(one) == checksum(one.clone())
        changed = one.clone().reshape(-1)
        changed[-1] = 0 if changed[-1] else 1
        assert checksum(changed.reshape(shape)) != checksum(one)
    assert checksum(torch.arange(9.0)) != checksum(torch.arange(9.0).flip(0))
    assert checksum(torch.arange(9.0)[1:4]) == checksum(torch.tensor([1.0, 2.0, 3.0]))


def test_weights_without_contents_never_count_as_unchanged():
    layer = nn.Linear(3, 3, device="meta")
    weights = Weights(nn.ModuleList([layer]), [(layer, "weight")])
    assert weights.changed(starts=True) and not weights.changed(starts=False)
