"""Presets: what the files hold, who takes which, and the computed steps against official code."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache.api import denoisers_of
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.errors import AttachError
from diffcache.features.magcache import MagCache
from diffcache.features.teacache import TeaCache
from diffcache.presets.choose import FALLBACK, LEVELS, Preset, choose, known_models, presets
from diffcache.presets.published import families, models
from tests.real_models import as_real
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

ALL = [preset for own in presets().values() for preset in own.values()]
NAMES = [preset.name for preset in ALL]

pytestmark = pytest.mark.usefixtures("quiet")


# what the files hold ----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ALL, ids=NAMES)
def test_a_preset_says_where_it_is_from_and_makes_its_method(preset: Preset) -> None:
    assert preset.model in models() and preset.level in LEVELS
    assert preset.source.startswith("github.com/") and preset.license
    method: Any = make_method(preset.method, **preset.settings)
    method.abilities()
    if method.publishes:
        known = models()[method.model.removesuffix("-ret")]
        assert (known.model, known.sizes) == (models()[preset.model].model, known.sizes)
    ratios = getattr(method, "ratios", None)
    if ratios:
        rows = ratios if isinstance(ratios[0], tuple) else [ratios]
        assert {len(row) for row in rows} == {preset.steps}, "its list is for its steps"


def test_every_table_of_every_file_is_read() -> None:
    kinds = {kind for family in families().values() for kind in family}
    assert kinds == {"models", "presets", "teacache", "magcache"}
    named = [name for family in families().values() for name in family.get("models", {})]
    assert len(named) == len(set(named)), "a model stands in one file"
    assert set(presets()) <= set(named)


# who takes which --------------------------------------------------------------------------------


def facts_of_real(name: str, pipeline: str | None = None) -> dict[str, Any]:
    """Facts about a model as it is loaded from a folder of its name."""
    with as_real(name) as model:
        folder = f"{models()[name].word or name}/transformer"
        return {**facts_of(model, None), "pipeline": pipeline, "folder": folder}


@pytest.mark.parametrize("name", known_models())
def test_a_model_takes_its_own_presets(name: str) -> None:
    facts = facts_of_real(name)
    choice = choose(facts)
    if name not in presets():
        without = models()[name].without
        assert choice.preset is None and choice.method == FALLBACK
        assert choice.why.endswith(f"{name} {without}")
        with pytest.raises(AttachError, match=f"nobody published one for {name}; it {without}"):
            choose(facts, "fast")
        return
    assert choice.preset is not None and choice.preset.model == name
    assert choice.why.startswith(f"{choice.preset.name} is {choice.method}")
    for level in LEVELS:
        if level in presets()[name]:
            assert choose(facts, level).preset == choose(facts, f"{name}/{level}").preset
            assert choose(facts, level).preset == presets()[name][level]
        else:
            with pytest.raises(AttachError, match=f"nobody published one for {name}; there is "):
                choose(facts, level)


def test_what_cannot_be_taken_is_refused() -> None:
    dev = facts_of_real("flux.1-dev", "FluxPipeline")
    with pytest.raises(ValueError, match="preset='medium': must be quality, balanced, fast, or su"):
        choose(dev, "medium")
    with pytest.raises(AttachError, match="preset='flux/fast': there are presets of .*flux.1-dev"):
        choose(dev, "flux/fast")
    with pytest.raises(AttachError, match="is another model: its pipeline is FluxPipeline"):
        choose(dev, "flux.1-kontext-dev/balanced")
    bare = {**dev, "pipeline": None, "folder": ""}
    assert "it may be flux.1-dev or flux.1-kontext-dev; say which" in choose(bare).why
    with pytest.raises(AttachError, match="say preset='flux.1-dev/fast' or preset='flux.1-kont"):
        choose(bare, "fast")
    assert choose(bare, "flux.1-dev/fast").method == "magcache"


@pytest.mark.parametrize("name", pipes())
def test_every_pipeline_names_its_preset_or_says_that_it_fell_back(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diffcache")
    pipe = pipes()[name].build(0)
    denoiser = next(iter(denoisers_of(pipe).values()))
    facts = facts_of(denoiser, None, pipe)
    with diffcache.wrapped(pipe) as handle:
        assert handle.method.name == FALLBACK
        why = f"preset: none; fell back to {FALLBACK} with its defaults: this {facts['model']} of"
        assert caplog.messages[-1].startswith(why)
        assert f"preset   none; fell back to {FALLBACK}" in "\n".join(
            diffcache.report(pipe).summary()
        )
    with pytest.raises(AttachError, match="preset='fast': this .* is none of the models that have"):
        diffcache.wrap(pipe, preset="fast")
    tiny: Mapping[str, Any] = dict(getattr(denoiser, "config", {}))
    for model in known_models():
        known = models()[model]
        if known.model != facts["model"] or not re.fullmatch(known.pipeline, facts["pipeline"]):
            continue
        with as_real(model) as real:
            denoiser.register_to_config(**dict(real.config), _name_or_path=f"{known.word}/unet")
        try:
            with diffcache.wrapped(pipe) as handle:
                assert handle.choice is not None
                assert model in caplog.messages[-1] and handle.choice.why in caplog.messages[-1]
                taken = handle.choice.preset
                assert taken is None if known.without else taken.model == model  # type: ignore[union-attr]
        finally:
            denoiser.register_to_config(**tiny)


def test_settings_go_over_those_of_the_preset() -> None:
    with as_real("flux.1-schnell", guidance_embeds=True) as model:
        with diffcache.wrapped(model, preset="flux.1-dev/quality", threshold=0.1) as handle:
            assert handle.method == TeaCache.published("flux.1-dev", threshold=0.1)
        with pytest.raises(
            ValueError, match="no setting 'every'.*preset flux.1-dev/fast was taken"
        ):
            diffcache.wrap(model, preset="flux.1-dev/fast", every=4)
        with pytest.raises(ValueError, match="preset='fast' and method='teacache': give one of th"):
            diffcache.wrap(model, "teacache", preset="fast")


# the computed steps against official code ---------------------------------------------------------


def official_teacache(rows: Sequence[Tensor], method: TeaCache) -> list[int]:
    """Computed steps of the scripts of TeaCache: a counter, a sum, and the row of the step before."""
    total, computed, summed = len(rows), [], 0.0
    first = method.warmup if method.warmup >= 1 else method.warmup * total
    beyond = total - 1 if method.last else total
    curve = np.poly1d(method.coefficients)
    for index, row in enumerate(rows):
        runs = index < first or index >= beyond
        if not runs:
            before = rows[index - 1]
            summed += curve(((row - before).abs().mean() / before.abs().mean()).item())
            runs = not summed < method.threshold
        if runs:
            summed = 0.0
            computed.append(index)
    return computed


def official_magcache(method: MagCache, steps: int, nearest: bool) -> list[list[int]]:
    """Computed steps of each branch by the counter of the scripts of MagCache.

    Args:
        method: The settings.
        steps: Steps of the run.
        nearest: Whether the retained part is rounded, as for images; cut off for videos.
    """
    lists: Any = method.ratios
    lists = lists if isinstance(lists[0], tuple) else (lists,)
    branches = len(lists)
    places = np.round(np.arange(steps) * (len(lists[0]) - 1) / (steps - 1)).astype(int)
    kept = int(method.retention * branches * steps + (0.5 if nearest else 0))
    product, error, skipped = [1.0] * branches, [0.0] * branches, [0] * branches
    computed: list[list[int]] = [[] for _ in lists]
    for count in range(branches * steps):
        index, branch = divmod(count, branches)
        if count >= kept:
            product[branch] *= lists[branch][places[index]]
            skipped[branch] += 1
            error[branch] += abs(1 - product[branch])
            within = error[branch] < method.threshold and skipped[branch] <= method.longest
            if within and places[index] not in method.always:
                continue
        product[branch], error[branch], skipped[branch] = 1.0, 0.0, 0
        computed[branch].append(index)
    return computed


def rows_of(model: nn.Module, method: TeaCache, run: Any) -> list[Tensor]:
    """What the scripts of TeaCache compare at every step of an uncached run."""
    rows: list[Tensor] = []
    if method.input in ("time", "time-projection"):
        wanted = {"time": TIME, "time-projection": ("time_proj",)}[method.input]
        module = next(m for n, m in model.named_modules() if n.rpartition(".")[2] in wanted)
        hook = module.register_forward_hook(lambda m, a, out: rows.append(out.clone()))
    else:
        blocks = next(m for m in model.children() if isinstance(m, nn.ModuleList))
        block = blocks._modules["0"]
        assert block is not None
        attention = next(m for n, m in block.named_children() if n.startswith("attn"))
        hook = attention.register_forward_pre_hook(
            lambda m, args, named: rows.append((named.get("hidden_states", *args[:1])).clone()),
            with_kwargs=True,
        )
    run()
    hook.remove()
    return rows


TIME = ("time_embedder", "time_embedding", "timestep_embedder")


@pytest.mark.parametrize("preset", [p for p in ALL if p.compared], ids=lambda p: p.name)
def test_the_computed_steps_are_those_of_the_official_code(preset: Preset) -> None:
    """On a tiny model of the class, for as many steps as the preset is for."""
    case = cases()[models()[preset.model].model]
    model, steps = case.build(), preset.steps
    method: Any = make_method(preset.method, **preset.settings)
    branches = len(method.ratios) if isinstance(getattr(method, "ratios", (0,))[0], tuple) else 1

    def run() -> None:
        with torch.no_grad():
            for index in range(steps):
                given = case.kwargs(model, 0, index, steps)
                for name in case.latents if isinstance(given[case.latents[0]], Tensor) else ():
                    noise = torch.randn(given[name].shape, generator=generator(index))
                    given[name] = given[name] + 0.4 * (index % 5) / 4 * noise
                for branch in range(branches):
                    with diffcache.branch(str(branch)):
                        model(**given)

    if isinstance(method, TeaCache):
        expected = [official_teacache(rows_of(model, method, run), method)]
    else:
        assert isinstance(method, MagCache)
        expected = official_magcache(
            method, steps, "x" in preset.size and "frames" not in preset.size
        )
    unbound = make_method(
        preset.method,
        **preset.settings,
    )
    method = type(unbound)(**{**vars(unbound), "model": ""})
    with diffcache.wrapped(model, method) as handle, diffcache.run(model, steps=steps):
        run()
        calls = handle.last.calls
    found = [[c.index for c in calls if c.computed and c.branch == str(b)] for b in range(branches)]
    assert found == expected
    assert all(1 < len(own) < steps for own in found)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
