"""Decisions of a model that is split over ranks: each sees a part of the tokens, all decide alike."""

from types import SimpleNamespace

import torch

import diffcache
from diffcache.features.parts.when import relative_l1
from diffcache.foreign import process_group_of
from tests.zoo.catalog import cases


class Group:
    """Two ranks in one process: what the other one would add to a reduction."""

    def __init__(self, guess, probe):
        self.sums = torch.stack(((guess - probe).abs().sum(), probe.abs().sum()))
        self.calls = 0


def test_relative_l1_is_that_of_the_whole(monkeypatch):
    guess, probe = torch.randn(2, 10, 4), torch.randn(2, 10, 4)
    other = Group(guess[:, 3:], probe[:, 3:])

    def all_reduce(values, group):
        group.calls += 1
        values += group.sums

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    whole = relative_l1(guess, probe)
    alone = relative_l1(guess[:, :3], probe[:, :3])
    shared = relative_l1(guess[:, :3], probe[:, :3], ranks=other)
    assert abs(shared - whole) < 1e-6 < abs(alone - whole)
    assert other.calls == 1


def test_gates_ask_the_ranks_of_their_model_only(monkeypatch):
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    asked = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: asked.append(group))
    with diffcache.wrapped(model, "first-block", threshold=0.1), torch.no_grad():
        for step in range(3):
            model(**case.kwargs(model, 0, step=step, steps=8))
        assert asked == []
        mesh = SimpleNamespace(get_group=lambda: "group")
        split = SimpleNamespace(_flattened_mesh=mesh)
        model._parallel_config = SimpleNamespace(context_parallel_config=split)
        assert process_group_of(model) == "group"
        diffcache.reset(model)
        for step in range(3):
            model(**case.kwargs(model, 0, step=step, steps=8))
        assert asked == ["group", "group"]
    model._parallel_config = None
    assert process_group_of(model) is None
