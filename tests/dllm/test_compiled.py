"""Compiled forwards of rows compute what the others do; the graph runs as it is, uncompiled."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.dllm import BlockCache, D2Cache, DLLMCache, ElasticCache, FastDLLM, Policy, Schedule
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.test_remote import made
from tests.dllm.toys import MASK, bidirectional, prompts


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `torch.compile` note the whole graphs that it makes, and run them as they are."""
    noted: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        noted.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note, fullgraph=True))
    return noted


@pytest.mark.parametrize(
    ("policy", "lengths", "block", "length"),
    [
        (FastDLLM(dual=True), (9,), None, 16),  # a run of rows
        (D2Cache(9), (9,), None, 8),  # attention is noted
        (BlockCache(), (9,), 8, 16),  # a text that grows
        (ElasticCache(0.6, "key", 2), (9, 5), None, 16),  # some steps widen, and padding
    ],
)
def test_compiled_rows_are_the_same(
    graphs: list[Any], policy: Policy, lengths: tuple[int, ...], block: int | None, length: int
) -> None:
    model = bidirectional(num_hidden_layers=2)
    before = dict(model.__dict__)
    schedule = Schedule(length, 8, length // 2, multiple=8)
    noted: dict[bool, list[Tensor]] = {}
    counts = []
    for compiled in (False, True):
        with diffcache.wrapped(model, policy):
            lm = DiffusionLM(model, mask_id=MASK, block=block, compiled=compiled)
            made_logits, call = noted.setdefault(compiled, []), lm.masked.logits

            def note(*args: Any, call: Any = call, made_logits: Any = made_logits) -> Tensor:
                made_logits.append(call(*args))
                return made_logits[-1]

            lm.masked.logits = note  # type: ignore[method-assign]
            report: Any = lm.generate(prompts(*lengths), schedule).report
            counts.append((report.computed, [call.flops for call in report.calls]))
        assert model.__dict__.keys() == before.keys()  # its forward is its own again
    assert counts[0] == counts[1]
    for plain, same in zip(noted[False], noted[True], strict=True):
        torch.testing.assert_close(same, plain, rtol=0, atol=1e-12)
    assert graphs  # it was compiled


def test_what_cannot_be_compiled_is_refused() -> None:
    model = bidirectional(num_hidden_layers=2)
    lm = DiffusionLM(model, mask_id=MASK, compiled=True)
    for policy in (None, DLLMCache()):
        with ExitStack() as stack:
            if policy is not None:
                stack.enter_context(diffcache.wrapped(model, policy))
            with pytest.raises(ValueError, match="compiled=True: serves a model that is wrapped"):
                lm.generate(prompts(9), Schedule(16, 8))
    with pytest.raises(ValueError, match="compiled='yes'"):
        DiffusionLM(model, mask_id=MASK, compiled="yes")  # type: ignore[arg-type]
    own = made("llada")
    lm = DiffusionLM(diffcache.wrap(own, FastDLLM()), mask_id=MASK, compiled=True)
    with pytest.raises(diffcache.AttachError, match="compiled=True serves policies whose"):
        lm.generate(prompts(9), Schedule(16, 8))
