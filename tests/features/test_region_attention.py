"""RegionE on pipelines, against a dense loop that recomputes everything with stale keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.api import wrapped
from diffcache.features.regione import RegionE
from tests.features.region_pipelines import (
    SIZE,
    STEPS,
    TOKENS,
    kontext,
    kontext_call,
    latents_of,
    method,
    qwen,
    qwen_call,
)

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def small_qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    # the pipeline brings every reference to a megapixel, which is a constant in its source
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as module

    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (SIZE, SIZE, None))


class Dense:
    """RegionE as it should be, on a pipeline that is not wrapped, with every row computed always.

    Attention of the model itself is watched where it is dispatched: on a full step its keys and
    values are noted, on a region step those of rows that are not edited are replaced by the noted
    ones. What rows that are not edited return is thrown away.
    """

    def __init__(self, pipe: Any, method: RegionE, branches: int, module: Any, patch: Any) -> None:
        self.pipe, self.plan, self.branches = pipe, method.plan(), branches
        self.index, self.branch, self.calls = -1, 0, 0
        self.notes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.full: dict[int, Tensor] = {}
        self.last: dict[int, Tensor] = {}
        self.mask: Tensor | None = None
        self.real = module.dispatch_attention_fn
        patch.setattr(module, "dispatch_attention_fn", self.attend)
        self.hooks = [
            pipe.transformer.register_forward_pre_hook(self.before, with_kwargs=True),
            pipe.transformer.register_forward_hook(self.after),
        ]
        step = pipe.scheduler.step
        patch.setattr(
            pipe.scheduler, "step", lambda *args, **kw: (self.stepping(*args), step(*args, **kw))[1]
        )

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        self.branch = self.calls % self.branches
        self.index += self.branch == 0
        self.calls += 1
        self.visit = 0
        self.seen = kwargs["hidden_states"]

    @property
    def skips(self) -> dict[int, float]:
        return self.plan.skips(self.pipe.scheduler.timesteps.tolist())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        place = (self.branch, self.visit)
        self.visit += 1
        phase = self.plan.phase(self.index)
        if phase == "store":
            self.notes[place] = key.clone(), value.clone()
        if phase == "region":
            text = key.shape[1] - 2 * TOKENS
            stale = torch.cat([~self.mask, torch.ones_like(self.mask)], dim=1)
            stale = torch.cat([torch.zeros(len(stale), text, dtype=torch.bool), stale], dim=1)
            old_key, old_value = self.notes[place]
            key = torch.where(stale[..., None, None], old_key, key)
            value = torch.where(stale[..., None, None], old_value, value)
        return self.real(query, key, value, **more)

    def after(self, module: Any, args: Any, out: tuple[Tensor]) -> tuple[Tensor]:
        fresh, phase = out[0][:, :TOKENS], self.plan.phase(self.index)
        if phase == "store":
            self.full[self.branch] = fresh
        if phase == "region":
            edited = self.mask[..., None]
            if self.index in self.skips:
                fresh = self.skips[self.index] * self.last[self.branch]
            fresh = torch.where(edited, fresh, self.full[self.branch])
        if self.index not in self.skips:
            self.last[self.branch] = fresh
        return (torch.cat([fresh, out[0][:, TOKENS:]], dim=1),)

    def stepping(self, velocity: Tensor, timestep: Tensor, sample: Tensor) -> None:
        if self.index != self.plan.split:
            return
        clean = sample - self.pipe.scheduler.sigmas[self.index] * velocity
        reference = self.seen[:, TOKENS:]
        cosine = (clean * reference).sum(-1) / (clean.norm(dim=-1) * reference.norm(dim=-1))
        mask = (cosine <= self.plan.threshold).unflatten(1, (8, 8))
        if self.plan.morphology:
            cross = torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]])[None, None]
            count = torch.conv2d(mask[:, None].float(), cross, padding=1)
            grown = torch.conv2d((count == 5).float(), torch.ones(1, 1, 5, 5), padding=2)
            mask = grown[:, 0] > 0
        self.mask = mask.flatten(1)


Case = tuple[Callable[[], Any], Callable[[], dict[str, Any]], int, str]
FLUX = "diffusers.models.transformers.transformer_flux"
QWEN = "diffusers.models.transformers.transformer_qwenimage"
CASES: dict[str, Case] = {
    "kontext": (kontext, kontext_call, 1, FLUX),
    "kontext, true CFG": (kontext, lambda: kontext_call(guided=True), 2, FLUX),
    "kontext, two samples": (kontext, lambda: kontext_call((0, 2)), 1, FLUX),
    "qwen": (qwen, qwen_call, 2, QWEN),
    "qwen, reference at time 0": (lambda: qwen(zero_cond_t=True), qwen_call, 2, QWEN),
}
METHODS: dict[str, dict[str, Any]] = {
    "published rule": {},
    "nothing skipped": {"threshold": 0.1, "decay": -1.0},
    "morphology": {
        "threshold": 0.2,
        "morphology": True,
        "official": False,
        "decay": 0.2,
        "refresh": (10, 20),
    },
    "all edited": {
        "threshold": 2.0,
        "morphology": True,
        "decay": -1.0,
        "warmup": 1,
        "refresh": (),
    },
}
FEW = ("kontext, two samples", "qwen")  # for the methods that say little more


@pytest.mark.usefixtures("small_qwen")
@pytest.mark.parametrize(
    ("case", "kind"),
    [(c, k) for k in METHODS for c in CASES if k.startswith(("pub", "all")) or c in FEW],
)
def test_runs_are_those_of_the_dense_loop(case: str, kind: str, monkeypatch: Any) -> None:
    build, call, branches, where = CASES[case]
    pipe = build()
    chosen = method(pipe, **METHODS[kind])
    with monkeypatch.context() as patch:
        dense = Dense(pipe, chosen, branches, importlib.import_module(where), patch)
        wanted = pipe(**call())[0]
    for hook in dense.hooks:
        hook.remove()
    assert dense.index == STEPS - 1
    assert dense.mask is not None
    if kind != "all edited":
        counts = dense.mask.sum(dim=1).tolist()
        assert all(0 < count < TOKENS for count in counts)
        assert len(set(counts)) == len(counts)
    with wrapped(pipe, chosen) as handle:
        made = pipe(**call())[0]
        again = pipe(**call())[0]
        calls = handle.last.calls
    torch.testing.assert_close(made, wanted, rtol=2e-4, atol=2e-5)
    assert torch.equal(made, again)
    assert {c.index for c in calls if not c.computed} == set(dense.skips)
    assert bool(dense.skips) == (chosen.plan().decay > 0)
    most, samples = int(dense.mask.sum(dim=1).max()), len(dense.mask)
    for c in calls:
        region = chosen.plan().phase(c.index) == "region"
        text = 6 if case.startswith("kontext") or c.branch in (0, "cond") else 5
        present = samples * (text + (most if region else 2 * TOKENS)) * c.computed
        assert c.counts["tokens"] == (present, samples * (text + 2 * TOKENS) - present)
        ran, saved = c.flops
        assert ran / (ran + saved) == pytest.approx(present / (samples * (text + 2 * TOKENS)))


def test_steps_before_the_first_region_step_are_the_uncached_ones() -> None:
    pipe = kontext()
    plain = latents_of(pipe, kontext_call(guided=True))
    with wrapped(pipe, method(pipe)):
        cached = latents_of(pipe, kontext_call(guided=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], cached[:3], strict=True))
    assert not torch.equal(plain[3], cached[3])


@pytest.mark.usefixtures("small_qwen")
@pytest.mark.parametrize("case", ["kontext, two samples", "qwen"])
def test_where_nothing_is_edited_no_block_runs_and_all_rows_jump(case: str) -> None:
    build, call, branches, _ = CASES[case]
    pipe = build()
    runs: list[int] = []
    blocks = pipe.transformer.transformer_blocks
    blocks[0].register_forward_hook(lambda *_: runs.append(1))
    with wrapped(pipe, method(pipe, threshold=-2.0)):
        seen = latents_of(pipe, call())
    sigmas = pipe.scheduler.sigmas
    assert len(runs) == branches * 5
    for first, last in ((2, 6), (6, 11)):
        velocity = (seen[first] - seen[first - 1]) / (sigmas[first + 1] - sigmas[first])
        jump = seen[first - 1] + (sigmas[last] - sigmas[first]) * velocity
        torch.testing.assert_close(seen[last - 1], jump, rtol=1e-3, atol=1e-4)


def test_samples_of_a_batch_are_those_drawn_alone_whatever_the_others_edit() -> None:
    pipe = kontext()
    with wrapped(pipe, method(pipe)):
        both = pipe(**kontext_call((0, 1)))[0]
        alone = torch.cat([pipe(**kontext_call((number,)))[0] for number in (0, 1)])
    torch.testing.assert_close(both, alone, rtol=2e-4, atol=2e-5)


def test_a_sample_without_edits_moves_straight_beside_one_with() -> None:
    pipe = kontext()
    call = kontext_call((0, 1))
    with wrapped(pipe, method(pipe, threshold=-2.0)):
        straight = latents_of(pipe, kontext_call((0,)))
    with wrapped(pipe, method(pipe, threshold=2.0)) as handle:
        extension = handle.denoisers[0].extensions[1]
        choose = extension.stepping

        def none_of_the_first(run: Any, *given: Any) -> None:
            from diffcache.features.parts.region_mask import rows_of

            choose(run, *given)
            progress = run.storage[extension]
            if progress.mask is not None and progress.mask[0].any():
                progress.mask[0] = False
                progress.rows = rows_of(progress.mask)

        extension.stepping = none_of_the_first
        mixed = latents_of(pipe, call)
    torch.testing.assert_close(mixed[10][:1], straight[10], rtol=1e-4, atol=1e-5)
