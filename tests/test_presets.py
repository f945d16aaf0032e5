"""Presets and published numbers: what the files hold, who takes which, the steps of official code."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import diffcache
from diffcache import cli
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.errors import AttachError, UncalibratedError
from diffcache.eval.workshop import preset_page
from diffcache.features.dbcache import DBCache
from diffcache.features.each import Each
from diffcache.features.first_block import FirstBlock
from diffcache.features.magcache import MagCache
from diffcache.features.profilingdit import ProfilingDiT
from diffcache.features.teacache import BY_TIME, TeaCache
from diffcache.presets.choose import FALLBACK, LEVELS, Preset, choose, known_models, presets
from diffcache.presets.published import families, models, published_settings
from diffcache.targets import denoisers_of
from tests.internals import computed_steps
from tests.real_models import REAL, as_real, model_of
from tests.zoo.case import Case
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

ALL = [preset for own in presets().values() for preset in own.values()]
NAMES = [preset.name for preset in ALL]

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("preset", ALL, ids=NAMES)
def test_a_preset_says_where_it_is_from_and_makes_its_method(preset: Preset) -> None:
    assert preset.model in models() and preset.level in LEVELS
    assert preset.source.startswith("github.com/") and preset.license
    for expert in ({}, *preset.experts.values()):
        make_method(preset.method, **preset.settings, **expert).abilities()
    method: Any = make_method(preset.method, **preset.settings)
    if method.publishes:
        known = models()[method.model.removesuffix("-ret")]
        assert (known.model, known.sizes) == (models()[preset.model].model, known.sizes)
    ratios = getattr(method, "ratios", None)
    if ratios:
        rows = ratios if isinstance(ratios[0], tuple) else [ratios]
        assert {len(row) for row in rows} == {preset.steps}, "its list is for its steps"


def test_every_table_of_every_file_is_read() -> None:
    kinds = {kind for family in families().values() for kind in family}
    assert kinds == {"models", "presets", "teacache", "magcache", "regione"}
    named = [name for family in families().values() for name in family.get("models", {})]
    assert len(named) == len(set(named)), "a model stands in one file"
    assert set(presets()) <= set(named)


def facts_of_real(name: str, pipeline: str | None = None) -> dict[str, Any]:
    """Facts about a model as it is loaded from a folder of its name, in a pipeline of its own."""
    pipeline = pipeline or pipeline_of(models()[name].pipeline)
    return facts_in(name, pipeline, f"{models()[name].word or name}/transformer")


def pipeline_of(pattern: str) -> str:
    """Return the name of a pipeline that a model is recognized by."""
    names = [name for name in dir(diffusers) if name.endswith("Pipeline")]
    told = [*names, *(f"{name} with transformer_2" for name in names)]
    return next(name for name in told if re.fullmatch(pattern, name))


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


def test_the_cache_of_the_hub_names_a_model() -> None:
    """Its folders are hashes; the name stands further up."""
    with as_real("wan2.1-i2v-14b-480p") as shared:
        model = copy.deepcopy(shared)
        for size, taken in (("480P", True), ("720P", True), ("", False)):
            folder = f"/hub/models--Wan-AI--Wan2.1-I2V-14B-{size}/snapshots/0a1b/transformer"
            model.register_to_config(_name_or_path=folder)
            choice = choose(facts_of(model, None))
            assert (choice.preset is not None) == taken
            assert f"14b-{size.lower()}" in choice.why
        assert "it may be wan2.1-i2v-14b-480p or wan2.1-i2v-14b-720p; say which" in choice.why


def test_of_a_bare_model_of_two_names_one_is_to_be_said() -> None:
    bare = {**facts_of_real("flux.1-dev", "FluxPipeline"), "pipeline": None, "folder": ""}
    assert "it may be flux.1-dev or flux.1-kontext-dev; say which" in choose(bare).why
    assert choose(bare, "flux.1-dev/fast").method == "magcache"


@pytest.mark.parametrize("name", [name for name in pipes() if "-" not in name or name == "WanPipeline-two"])
def test_every_pipeline_names_its_preset_or_says_that_it_fell_back(name: str, logged: list[str]) -> None:
    pipe = pipes()[name].build(0)
    denoiser = next(iter(denoisers_of(pipe).values()))
    facts = facts_of(denoiser, None, pipe)
    with diffcache.wrapped(pipe) as handle:
        assert handle.method.name == FALLBACK
        why = f"preset: none; fell back to {FALLBACK} with its defaults: this {facts['model']} of"
        assert logged[-1].startswith(why)
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
                assert model in logged[-1] and handle.choice.why in logged[-1]
                taken = handle.choice.preset
                assert taken is None if known.without else taken.model == model  # type: ignore[union-attr]
        finally:
            denoiser.register_to_config(**tiny)


def test_two_experts_get_settings_of_their_own() -> None:
    pipe = pipes()["WanPipeline-two"].build(0)
    preset = presets()["wan2.2-t2v-a14b"]["balanced"]
    tiny = [dict(pipe.transformer.config), dict(pipe.transformer_2.config)]
    with as_real(preset.model) as real:
        pipe.transformer.register_to_config(**dict(real.config))
        pipe.transformer_2.register_to_config(**dict(real.config))
    with diffcache.wrapped(pipe, longest=2) as handle:
        assert handle.choice is not None and handle.choice.preset is preset
        for name, (warmup, skips) in {"transformer": (4, 8), "transformer_2": (2, 20)}.items():
            expected = DBCache(0.12, lead=1, longest=2, warmup=warmup, skips=skips)
            assert handle.method.for_denoiser(name) == expected
    with diffcache.wrapped(pipe, components="transformer_2", threshold=1e9, skips=3) as handle:
        assert handle.method == Each((("transformer_2", DBCache(1e9, 1, 0, 2, 3, 3)),))
    pipe.transformer.register_to_config(**tiny[0])
    pipe.transformer_2.register_to_config(**tiny[1])


def test_settings_go_over_those_of_the_preset() -> None:
    with as_real("flux.1-schnell", guidance_embeds=True) as model:
        with diffcache.wrapped(model, preset="flux.1-dev/quality", threshold=0.1) as handle:
            assert handle.method == TeaCache.published("flux.1-dev", threshold=0.1)
        with pytest.raises(ValueError, match="no setting 'every'.*preset flux.1-dev/fast was taken"):
            diffcache.wrap(model, preset="flux.1-dev/fast", every=4)
        with pytest.raises(ValueError, match="preset='fast' and method='teacache': give one of th"):
            diffcache.wrap(model, "teacache", preset="fast")


@pytest.fixture
def dev() -> Iterator[Any]:
    """A tiny FluxPipeline that said it was FLUX.1-dev when it was wrapped."""
    pipe = pipes()["FluxPipeline"].build(0)
    tiny = dict(pipe.transformer.config)
    with as_real("flux.1-dev") as model:
        pipe.transformer.register_to_config(**dict(model.config))
    diffcache.wrap(pipe, preset="fast")
    pipe.transformer.register_to_config(**tiny)
    yield pipe
    diffcache.unwrap(pipe)


def test_the_report_has_the_preset_and_what_it_does_not_hold_for(dev: Any) -> None:
    why = "preset   flux.1-dev/fast is magcache:threshold=0.24,longest=5,retention=0.1, published for"
    assert why in str(diffcache.report(dev))
    for steps in (28, 10):
        pipes()["FluxPipeline"].run(dev, steps=steps)
        report = diffcache.report(dev)
        assert why in str(report) and report.to_dict()["preset"].startswith("flux.1-dev/fast is ")
        other = f"preset   it holds for 28 steps, and this run had {steps}"
        assert (other in report.summary()) == (steps != 28)
    plain = pipes()["FluxPipeline"].build(0)
    with diffcache.wrapped(plain, "taylorseer"):
        report = diffcache.report(plain)
    assert report.to_dict()["preset"] is None and "preset" not in str(report)


def test_bytes_are_those_of_the_preset() -> None:
    pipe, size = pipes()["FluxPipeline"].build(0), {"height": 64, "width": 64}
    held = diffcache.expected_bytes(pipe, **size)
    assert held == diffcache.expected_bytes(pipe, FALLBACK, **size)
    assert held != diffcache.expected_bytes(pipe, FALLBACK, order=2, **size)
    assert diffcache.expected_bytes(pipe, order=2, **size) != held


def said(*words: str) -> str:
    """Return the exit code of a command, and what it prints, on one line."""
    result = CliRunner().invoke(cli.app, list(words))
    return f"{result.exit_code} {' '.join(result.output.split())}"


def test_the_command_line_lists_presets_and_says_which_a_pipeline_takes() -> None:
    every = said("presets")
    assert all(name in every.replace(" ", "") for name in known_models())
    one = said("presets", "flux.1-dev")
    assert "flux.1-dev/quality: github.com/ali-vilab/TeaCache 7c10efc TeaCache4FLUX/RE" in one
    assert "wan2.1" not in one
    none = f"0 preset: none; fell back to {FALLBACK} with its defaults: this FluxTransformer2DModel"
    assert said("presets", "sticker-flux").startswith(none)
    assert said("presets", "sticker-flax").startswith("2 error: no pipeline at 'sticker-flax'")


def test_run_takes_a_preset_or_a_method(tmp_path: Path) -> None:
    order = ("run", "sticker-flux", "a red ring", "--steps", "6", "--out", str(tmp_path / "a.png"))
    assert f"preset none; fell back to {FALLBACK} with its defaults" in said(*order)
    assert "2 error: preset='fast': this FluxTransformer2DModel" in said(*order, "--preset", "fast")
    both = said(*order, "--preset", "fast", "--method", "interval")
    assert both == "2 error: --preset fast and --method interval: give one of them"


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


def official_magcache(method: MagCache, total: int) -> list[list[int]]:
    """Computed steps of each branch by the counter over all calls of the scripts of MagCache.

    Those for images round the retained part, those for videos cut it off: of the presets it is a
    whole number, or one that both make the same.
    """
    lists: Any = method.ratios
    lists = lists if isinstance(lists[0], tuple) else (lists,)
    branches = len(lists)
    kept = int(method.retention * branches * total + 0.5 * (branches == 1))
    product, error, skipped = [1.0] * branches, [0.0] * branches, [0] * branches
    computed: list[list[int]] = [[] for _ in lists]
    for count in range(branches * total):
        index, branch = divmod(count, branches)
        if count >= kept:
            product[branch] *= lists[branch][index]
            skipped[branch] += 1
            error[branch] += abs(1 - product[branch])
            within = error[branch] < method.threshold and skipped[branch] <= method.longest
            if within and index not in method.always:
                continue
        product[branch], error[branch], skipped[branch] = 1.0, 0.0, 0
        computed[branch].append(index)
    return computed


def rows_of(model: nn.Module, method: Any, run: Callable[[], None]) -> list[Tensor]:
    """Return what official code compares at every step of an uncached run."""
    rows: list[Tensor] = []
    lists = {n: m for n, m in model.named_children() if isinstance(m, nn.ModuleList)}
    block = next(m for n, m in lists.items() if "refiner" not in n)[0]
    if isinstance(method, FirstBlock):
        hook = block.register_forward_hook(
            lambda m, args, named, out: rows.append(
                next(o for o in out if o.shape == named["hidden_states"].shape) - named["hidden_states"]
            ),
            with_kwargs=True,
        )
    elif method.input in TIMES:
        module = time_module(model, method.input)
        hook = module.register_forward_hook(lambda m, args, out: rows.append(out.clone()))
    else:
        attention = next(m for n, m in block.named_children() if n.startswith("attn"))
        hook = attention.register_forward_pre_hook(
            lambda m, args, named: rows.append(named.get("hidden_states", *args[:1]).clone()), with_kwargs=True
        )
    run()
    hook.remove()
    return rows


def time_module(model: nn.Module, of: str) -> nn.Module:
    """Return the module that gives the time embedding of a model, or its projection."""
    return next(m for n, m in model.named_modules() if n.endswith(TIMES[of]))


# Modules that give the time embedding, and its projection, by the ends of their names.
TIMES: Mapping[str, tuple[str, ...]] = {
    "time": ("time_embedder", "time_embedding", "timestep_embedder"),
    "time-projection": ("time_proj",),
}


def official_first_block(rows: Sequence[Tensor], method: FirstBlock) -> list[int]:
    """Computed steps of First Block Cache: a row against that of the last computed step."""
    computed = [0]
    for index, row in enumerate(rows):
        before = rows[computed[-1]]
        if index and not ((before - row).abs().mean() / before.abs().mean()).item() < method.threshold:
            computed.append(index)
    return computed


# How much a run changes from step to step, in turn: enough that gates open, little enough that the
# polynomials, which fall to minus infinity, are looked at where they rise.
MOVES = (1e-4, 1e-3, 3e-3, 1e-2)  # of the timesteps
WHOLE = (1e-3, 2e-3, 3e-3, 1e-2)  # of timesteps that are whole numbers
NOISES = (0.0, 0.02, 0.05, 0.1)


def sampled(model: nn.Module, case: Case, total: int, branches: int) -> None:
    """Call a model as a sampler does, with changes of many sizes, for each guidance branch."""
    at, time = 0.0, case.kwargs(model, 0)[case.timestep]
    moves = MOVES if time.is_floating_point() else WHOLE
    for index in range(total):
        at += moves[index % 4]
        for branch in range(branches):
            given = case.kwargs(model, branch, at, 1)  # type: ignore[arg-type]
            for name in case.latents:
                if isinstance(given[name], Tensor):
                    made = torch.Generator().manual_seed(index)
                    noise = torch.randn(given[name].shape, generator=made)
                    given[name] = given[name] + NOISES[index // 2 % 4] * noise
            with diffcache.branch(str(branch)):
                model(**given)


def expected_steps(model: nn.Module, case: Case, method: Any, total: int) -> list[list[int]]:
    """Computed steps of the official code, for each guidance branch."""
    branches = 1 + getattr(method, "by_branch", False)
    rows = rows_of(model, method, lambda: sampled(model, case, total, branches))
    if isinstance(method, FirstBlock):
        return [official_first_block(rows, method)]
    assert isinstance(method, TeaCache)
    return [official_teacache(rows[branch::branches], method) for branch in range(branches)]


@pytest.mark.parametrize("preset", [p for p in ALL if p.compared], ids=lambda p: p.name)
def test_the_computed_steps_are_those_of_the_official_code(preset: Preset) -> None:
    """Ratios by themselves, for the steps of the preset; gates on a tiny model of the class, for any number."""
    method: Any = make_method(preset.method, **preset.settings)
    if isinstance(method, MagCache):
        expected = official_magcache(method, total := preset.steps)
        assert [computed_steps(method, total, branch=number) for number in range(len(expected))] == expected
        assert all(1 < len(own) < total for own in expected)
        return
    case, total = cases()[models()[preset.model].model], 16
    model = case.build()
    if getattr(method, "input", None) in TIMES:  # random ones change more than trained ones
        layers = [m for m in time_module(model, method.input).modules() if isinstance(m, nn.Linear)]
        layers[-1].bias.data += 10 if np.polyval(method.coefficients, 0.03) > 0 else 1
    expected = expected_steps(model, case, method, total)
    free = dataclasses.replace(method, model="") if method.publishes else method
    with diffcache.wrapped(model, free) as handle, diffcache.run(model, steps=total):
        sampled(model, case, total, len(expected))
        calls = handle.last.calls
    branches = [str(number) for number in range(len(expected))]
    found = [[c.index for c in calls if c.computed and c.branch == name] for name in branches]
    assert found == expected
    assert all(1 < len(own) < total for own in found)


def test_the_page_is_up_to_date() -> None:
    command = "python -m diffcache.eval.workshop.preset_page --write"
    assert preset_page.main(["--check"]) == 0, command


def refused(model, method):
    with pytest.raises(AttachError) as error:
        diffcache.wrap(model, method)
    return str(error.value)


def fits(method):
    """Attach to the model that it is for, be refused on others, run one step."""
    case, wrapped = cases()[models()[method.model.removesuffix("-ret")].model], diffcache.wrapped
    with as_real(method.model) as model, torch.no_grad(), wrapped(model, method):
        arguments = case.kwargs(model, 0, step=0, steps=4)
    assert "num_layers=" in refused(model, method)  # tiny
    with wrapped(model, type(method).published(method.model, model="")), torch.no_grad():
        model(**arguments)
    with as_real(method.model, num_layers=7) as model:
        assert re.search(r"num_layers=7 instead of \d\d; .*calibrate", refused(model, method))
    other = "SD3Transformer2DModel"
    assert f"this {other} is another: it is no {case.name}" in refused(model_of(other), method)


def facts_in(name, pipeline=None, folder=""):
    with as_real(name) as model:
        return {**facts_of(model, None), "pipeline": pipeline, "folder": folder}


@pytest.mark.parametrize("name", sorted(REAL))
def test_every_model_fits_its_own_configuration_and_no_other_of_its_class(name):
    facts = facts_in(name)
    for other in REAL:
        same = REAL[other] == REAL[name]
        assert (not models()[other].differs(facts)) == same, other
    assert not models()[name].differs(facts)


def test_pipelines_and_folders_tell_models_of_one_size_apart():
    def found(method, name, pipeline=None, folder=""):
        return method.published_for(facts_in(name, pipeline, folder))

    assert found(MagCache, "flux.1-dev", "FluxImg2ImgPipeline") == "flux.1-dev"
    assert found(MagCache, "flux.1-dev", "FluxKontextPipeline") == "flux.1-kontext-dev"
    assert found(MagCache, "flux.1-dev", folder="FLUX.1-Kontext-dev/transformer").endswith("t-dev")
    assert found(MagCache, "qwen-image", "QwenImagePipeline") == "qwen-image"
    assert found(MagCache, "qwen-image", "QwenImageEditPlusPipeline") == "qwen-image-edit"
    assert found(MagCache, "qwen-image", "QwenImageLayeredPipeline") == ""
    assert found(TeaCache, "wan2.1-t2v-14b", "WanPipeline") == "wan2.1-t2v-14b"  # not -ret
    assert found(TeaCache, "wan2.1-t2v-14b", "WanPipeline with transformer_2") == ""  # Wan2.2
    i2v = (TeaCache, "wan2.1-i2v-14b-720p", "WanImageToVideoPipeline")
    assert found(*i2v, "Wan2.1-I2V-14B-480P-Diffusers/transformer") == "wan2.1-i2v-14b-480p"
    with pytest.raises(AttachError, match="say model='wan2.1-i2v-14b-480p' or model='wan2.1-i2v"):
        found(*i2v)
    with pytest.raises(AttachError, match="say model='hunyuanvideo-720p' or "):
        found(MagCache, "hunyuanvideo")
    assert found(TeaCache, "hunyuanvideo") == found(ProfilingDiT, "hunyuanvideo") == "hunyuanvideo"


def test_numbers_of_another_model_of_the_class_are_refused_with_the_right_one_named():
    large, small = TeaCache.published("wan2.1-t2v-14b"), TeaCache.published("wan2.1-t2v-1.3b-ret")
    with as_real("wan2.1-t2v-14b") as model:
        message = refused(model, small)
        assert "num_layers=40 instead of 30; num_attention_heads=40 instead of 12" in message
        assert "take those of model='wan2.1-t2v-14b' or model='wan2.1-t2v-14b-ret', or" in message
        assert "in_channels=16 instead of 36" in refused(model, MagCache.published("wan2.1-i2v-14b-480p"))
    with as_real("cogvideox-5b") as model:
        assert "take those of model='cogvideox-5b'" in refused(model, TeaCache.published("cogvideox-2b"))
    facts = facts_in("flux.1-dev", "FluxPipeline")
    with pytest.raises(AttachError, match="its pipeline is FluxPipeline; take .*'flux.1-dev'"):
        MagCache.published("flux.1-kontext-dev").check_model(facts)
    with pytest.raises(AttachError, match="model='wan3': published are consisid"):
        replace(large, model="wan3").check_model(facts)


def test_a_name_without_tables_takes_what_is_published_for_the_model():
    with as_real("wan2.1-t2v-1.3b") as model:
        for method, settings in (("teacache", {"threshold": 0.25}), ("magcache:longest=3", {})):
            with diffcache.wrapped(model, method, **settings) as handle:
                assert handle.method.model == "wan2.1-t2v-1.3b"
                assert handle.method.threshold == settings.get("threshold", 0.12)
        with diffcache.wrapped(model, "teacache", model="wan2.1-t2v-1.3b-ret") as handle:
            assert (handle.method.threshold, handle.method.warmup) == (0.1, 5)
        with diffcache.wrapped(model, "teacache", coefficients=(1, 0)) as handle:
            assert handle.method.threshold == 0.25 and handle.method.model == ""
        with pytest.raises(UncalibratedError, match=r"no tables.*published\(NAME\) is for consisid"):
            diffcache.wrap(model, TeaCache())
    with pytest.raises(UncalibratedError, match="no tables"):
        diffcache.wrap(model, "teacache")  # tiny
    assert make_method("profilingdit", model="wan2.1-14b") == ProfilingDiT.published("wan2.1-14b")


@pytest.mark.parametrize("name", published_settings("teacache"))
def test_published_polynomials_are_attached_to_their_models_alone(name):
    method = TeaCache.published(name)
    assert len(method.coefficients) in (5, 6) and all(map(math.isfinite, method.coefficients))
    assert 0 < method.threshold < 1
    timed = method.input in ("time", "time-projection")
    assert timed == (models()[name.removesuffix("-ret")].model in BY_TIME)
    assert name.endswith("-ret") == (method.input == "time-projection")
    if name.endswith("-ret"):
        assert (method.warmup, method.last) == (5, False)
    assert TeaCache.published(name, threshold=0.03).threshold == 0.03
    assert eval(repr(method)) == method
    fits(method)


@pytest.mark.parametrize("name", published_settings("magcache"))
def test_published_ratios_are_attached_to_their_models_alone(name):
    method = MagCache.published(name)
    lists = method.parts().when.ratios
    assert len(lists) == (2 if name.startswith(("wan", "qwen", "hunyuanvideo-1.5")) else 1)
    steps = {"flux": 28, "wan2.1-i2v": 40}
    total = next((n for start, n in steps.items() if name.startswith(start)), 50)
    assert {len(row) for row in lists} == {total}
    for row in lists:
        assert row[0] == 1 and all(0.5 < value < 1.7 for value in row)
    if len(lists) == 2:  # of two branches in turn, whose neighbors are alike
        assert max(abs(a - b) for a, b in zip(*lists, strict=True)) < 0.02
    assert eval(repr(method)) == method
    assert total / 5 < len(computed_steps(method, total)) < total * 0.8
    fits(method)


def test_the_flux_ratios_are_those_of_diffusers():
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    ratios = MagCache.published("flux.1-dev").ratios
    assert torch.allclose(torch.tensor(ratios), FLUX_MAG_RATIOS, atol=1e-6)
