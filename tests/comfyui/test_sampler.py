"""The node in ComfyUI's own sampler, on tiny random FLUX and Wan models of ComfyUI."""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache.errors import AttachError
from tests.comfyui.node_folder import FOLDER, load

PLACE = os.environ.get("COMFYUI", "")


class Anything(ModuleType):
    """Stands for a package that tiny models never call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Absent(MetaPathFinder, Loader):
    """Finds what is not installed of the packages whose names ComfyUI imports."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the place of a module or of a part of one; None for other packages."""
        here = name.partition(".")[0] in ("torchvision", "torchaudio")
        return ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


def comfy() -> SimpleNamespace:
    """Return the modules of ComfyUI; skip where there is none."""
    if not PLACE:
        pytest.skip("COMFYUI names no checkout of ComfyUI", allow_module_level=True)
    import transformers.utils

    transformers.utils.is_torchvision_available()  # before a stand-in of it could be asked
    sys.path.insert(0, PLACE)
    try:
        importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError):
        sys.meta_path.insert(0, Absent())
    try:
        importlib.import_module("comfy.options").enable_args_parsing(False)
        importlib.import_module("comfy.cli_args").args.cpu = True
        names = "samplers sample model_patcher model_management supported_models controlnet lora patcher_extension"
        return SimpleNamespace(**{n: importlib.import_module(f"comfy.{n}") for n in names.split()})
    except ImportError as error:
        pytest.skip(f"ComfyUI in {PLACE} lacks a package: {error}", allow_module_level=True)


COMFY = comfy()
PARAMS = importlib.import_module("comfy.ldm.flux.model").FluxParams
FLUX = dict(
    image_model="flux", in_channels=4, out_channels=4, vec_in_dim=8, context_in_dim=8,
    hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=3, depth_single_blocks=4,
    axes_dim=[4, 6, 6], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True,
    **({"txt_ids_dims": []} if "txt_ids_dims" in PARAMS.__annotations__ else {}),  # newer ones
)  # fmt: skip
SIZES = dict(patch_size=(1, 2, 2), text_len=8, in_dim=16, dim=48, ffn_dim=64, freq_dim=16, text_dim=8, out_dim=16)
WAN = dict(SIZES, image_model="wan2.1", model_type="t2v", num_heads=4, num_layers=4)


UNET = dict(
    image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[1, 1], channel_mult=(1, 2),
    transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1], transformer_depth_middle=1, context_dim=8,
    use_spatial_transformer=True, legacy=False,
)  # fmt: skip


class Model:
    """A tiny random model in ComfyUI's `ModelPatcher`, with a count of the blocks that ran."""

    def __init__(self, name: str) -> None:
        kinds = {"flux": ("Flux", FLUX, (1, 4, 8, 8)), "wan": ("WAN21_T2V", WAN, (1, 16, 2, 8, 8))}
        kinds["unet"] = ("SD15", UNET, (1, 4, 8, 8))
        kind, sizes, self.shape = kinds[name]
        config = getattr(COMFY.supported_models, kind)({**sizes, "dtype": torch.float32})
        config.set_inference_dtype(torch.float32, None)
        torch.manual_seed(0)
        model = config.get_model({})
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.12)
        cpu = torch.device("cpu")
        self.patcher = COMFY.model_patcher.ModelPatcher(model, cpu, cpu)
        self.network: Any = model.diffusion_model
        self.ran = 0
        lists = ("double_blocks", "single_blocks", "blocks", "input_blocks", "output_blocks")
        self.blocks = [b for name in lists for b in getattr(self.network, name, [])]
        for block in self.blocks:
            (block[0] if isinstance(block, nn.Sequential) else block).register_forward_hook(self._count)

    def _count(self, *given: Any) -> None:
        self.ran += 1


def condition(seed: int, tokens: int = 5, **more: Any) -> list[Any]:
    """Return a conditioning as text encoders of ComfyUI make it."""
    rng = torch.Generator().manual_seed(seed)
    pooled = torch.randn(1, 8, generator=rng)
    return [[torch.randn(1, tokens, 8, generator=rng), {"pooled_output": pooled, **more}]]


def sample(
    model: Model,
    patcher: Any = None,
    *,
    sampler: str = "euler",
    steps: int = 10,
    seed: int = 7,
    apart: bool = False,
    more: dict[str, Any] | None = None,
    callback: Callable[..., None] | None = None,
) -> torch.Tensor:
    """Run ComfyUI's sampler with guidance, in inference mode as its graphs are.

    The sampler is given a patcher, by default that of the uncached model; prompts that are `apart`
    differ in length, so that they cannot go into one call; `more` are entries of both conditionings.
    """
    noise = torch.randn(model.shape, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        made: torch.Tensor = COMFY.sample.sample(
            model.patcher if patcher is None else patcher,
            noise,
            steps,
            3.0,
            sampler,
            "simple",
            condition(1, **(more or {})),
            condition(2, 7 if apart else 5, **(more or {})),
            torch.zeros(model.shape),
            seed=seed,
            disable_pbar=True,
            callback=callback,
        )
    return made


NODE, REPORT = load().NODE_CLASS_MAPPINGS.values()
CODE = load().nodes
pytestmark = pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")


def cached(patcher: Any, method: str = "interval", settings: str = "every=3", **other: str) -> Any:
    widgets = {"preset": "auto", "hold": "as computed", **other}
    assert NODE.VALIDATE_INPUTS(method, settings, widgets["preset"]) is True
    return NODE().patch(patcher, method, settings, **widgets)[0]


def by_hand(model: Model, method: str, **given: Any) -> tuple[torch.Tensor, str]:
    """Return samples and report of our own `wrap`, whose branches ComfyUI's old hook names."""

    def named(apply: Any, call: dict[str, Any]) -> torch.Tensor:
        with diffcache.branch("+".join(map(str, call["cond_or_uncond"]))):
            made: torch.Tensor = apply(call["input"], call["timestep"], **call["c"])
            return made

    patcher = model.patcher.clone()
    patcher.set_model_unet_function_wrapper(named)
    with diffcache.wrapped(model.network, method, every=3), CODE.called_blocks(model.network):
        with diffcache.run(model.network, steps=10):
            made = sample(model, patcher, **given)
        return made, str(diffcache.report(model.network))


def told(patcher: Any) -> str:
    text: str = REPORT().tell(patcher, {})["result"][1]
    return text


@pytest.fixture(params=["flux", "wan", "unet"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture
def flux() -> Model:
    return Model("flux")


def test_the_wrappers_are_comfyui_s() -> None:
    wrappers = COMFY.patcher_extension.WrappersMP
    kinds = {"SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL"}
    text = (FOLDER / "nodes.py").read_text()
    assert all(f'"{getattr(wrappers, kind)}", KEY' in text for kind in kinds)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m_sde", "uni_pc"])
def test_interval_one_is_exact(model: Model, sampler: str, apart: bool) -> None:
    plain = sample(model, sampler=sampler, apart=apart)
    assert torch.equal(sample(model, cached(model.patcher, settings="every=1"), sampler=sampler, apart=apart), plain)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("method", ["interval", "taylorseer"])
def test_skipping_equals_our_own_wrap(model: Model, method: str, apart: bool) -> None:
    plain = sample(model, apart=apart)
    all_blocks, model.ran = model.ran, 0
    patched = cached(model.patcher, method)
    made = sample(model, patched, apart=apart)
    assert model.ran < 0.65 * all_blocks
    assert not torch.equal(made, plain)
    own, report = by_hand(model, method, apart=apart)
    assert torch.equal(made, own)
    assert next(line for line in report.splitlines() if line.startswith("steps")) in told(patched)
    sides = ("cond ", "uncond ") if apart else ("uncond+cond ",)
    assert all(f"  {side}" in told(patched) for side in sides)


def test_a_solver_that_evaluates_twice_counts_evaluations(model: Model) -> None:
    plain = sample(model, sampler="heun")
    patched = cached(model.patcher)
    made = sample(model, patched, sampler="heun")
    assert "19: 7 computed, 12 skipped" in told(patched)
    assert torch.isfinite(made).all()
    assert not torch.equal(made, plain)


def test_the_samplers_that_are_said_to_evaluate_once_do(flux: Model) -> None:
    patched = cached(flux.patcher, settings="every=2")
    found = {}
    for name in CODE.ONCE_A_STEP:
        sample(flux, patched, sampler=name, steps=4)
        found[name] = told(patched).partition("steps ")[2].splitlines()[0].split()
    assert {name for name, words in found.items() if words[0] != "4:"} == set()


def test_nothing_stays_after_a_run(model: Model) -> None:
    plain = sample(model)
    before = {name: dict(vars(m)) for name, m in model.network.named_modules()}
    classes = {name: type(m) for name, m in model.network.named_modules()}
    patched = cached(model.patcher)
    first, other = sample(model, patched), sample(model, patched, seed=8)
    assert torch.equal(sample(model, patched), first)  # nothing of the run before
    assert not torch.equal(first, other)
    assert torch.equal(sample(model), plain)  # of another clone of the same weights
    assert {name: type(m) for name, m in model.network.named_modules()} == classes
    for name, module in model.network.named_modules():
        assert vars(module).keys() == before[name].keys()


def test_an_interrupt_leaves_nothing(flux: Model) -> None:
    def stop(step: int, *given: Any) -> None:
        if step == 5:
            raise COMFY.model_management.InterruptProcessingException

    plain, patched = sample(flux), cached(flux.patcher)
    with pytest.raises(COMFY.model_management.InterruptProcessingException):
        sample(flux, patched, callback=stop)
    assert "did not come to its end" in told(patched)
    assert torch.equal(sample(flux), plain)
    assert torch.equal(sample(flux, cached(flux.patcher)), sample(flux, patched))


def test_memory_that_runs_short_midway_mixes_no_features(flux: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 4 on the two prompts go in two calls: their branches have no features yet."""
    free: list[float] = []

    def get_free_memory(device: Any = None, both: bool = False) -> Any:
        if both:  # attention asks
            return 1e12, 1e12
        free.append(1e12 if len(free) < 4 else 0)
        return free[-1]

    plain = sample(flux)
    monkeypatch.setattr(COMFY.model_management, "get_free_memory", get_free_memory)
    monkeypatch.setattr(COMFY.model_management, "load_models_gpu", lambda *a, **k: None)
    exact = sample(flux, cached(flux.patcher, settings="every=1"))
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4)  # batches of one round apart
    free.clear()
    patched = cached(flux.patcher)
    sample(flux, patched)
    rows = [line.split()[:2] for line in told(patched).splitlines()]
    marks = {row[0]: row[1] for row in rows if row and row[0] in ("uncond+cond", "cond", "uncond")}
    assert set(marks) == {"uncond+cond", "cond", "uncond"}
    assert marks["uncond+cond"].startswith("█··█")
    assert marks["cond"].lstrip("·- ").startswith("█")


def test_guidance_that_asks_twice_in_a_step_has_branches_of_its_own(flux: Model) -> None:
    """As perturbed attention does: the same condition once more in an evaluation."""

    def again(args: Any) -> torch.Tensor:
        model, options = args["model"], args["model_options"]
        (out,) = COMFY.samplers.calc_cond_batch(model, [args["cond"]], args["input"], args["sigma"], options)
        moved: torch.Tensor = args["denoised"] + 0.1 * (args["cond_denoised"] - 2 * out)
        return moved

    clone = flux.patcher.clone()
    clone.set_model_sampler_post_cfg_function(again)
    plain = sample(flux, clone)
    assert torch.equal(sample(flux, cached(clone, settings="every=1")), plain)
    patched = cached(clone)
    sample(flux, patched)
    assert "10: 4 computed, 6 skipped" in told(patched)
    assert "  cond " in told(patched)


class Residuals(COMFY.controlnet.ControlBase):
    """A ControlNet whose residuals move with the sample."""

    def get_control(self, x: torch.Tensor, t: Any, cond: Any, *given: Any) -> dict[str, Any]:
        """Return residuals of two double blocks and one single block."""
        each = x.mean(dim=(1, 2, 3), keepdim=False)[:, None, None].expand(len(x), 16, 32)
        return self.control_merge({"input": [each * 1.0, each * 2.0], "output": [each * 0.5]}, None, x.dtype)


@pytest.mark.parametrize("apart", [False, True])
def test_controlnet(flux: Model, apart: bool) -> None:
    more = {"control": Residuals(), "control_apply_to_uncond": True}
    without = sample(flux, apart=apart)
    plain = sample(flux, apart=apart, more=more)
    assert not torch.equal(plain, without)
    patched = cached(flux.patcher, settings="every=1")
    assert torch.equal(sample(flux, patched, apart=apart, more=more), plain)
    patched = cached(flux.patcher)
    made = sample(flux, patched, apart=apart, more=more)
    assert "4 computed, 6 skipped" in told(patched)
    assert torch.equal(made, by_hand(flux, "interval", apart=apart, more=more)[0])


@pytest.mark.parametrize("first", ["lora", "node"])
def test_lora(flux: Model, first: str) -> None:
    rng = torch.Generator().manual_seed(3)
    key = "diffusion_model.single_blocks.1.linear1"
    weight = flux.network.single_blocks[1].linear1.weight
    file = {
        f"{key}.lora_up.weight": torch.randn(weight.shape[0], 4, generator=rng),
        f"{key}.lora_down.weight": torch.randn(4, weight.shape[1], generator=rng),
    }
    keys = COMFY.lora.model_lora_keys_unet(flux.patcher.model, {})

    def with_lora(patcher: Any) -> Any:
        clone = patcher.clone()
        assert clone.add_patches(COMFY.lora.load_lora(file, keys), 0.3)
        return clone

    without, plain = sample(flux), sample(flux, with_lora(flux.patcher))
    assert not torch.equal(plain, without)
    for every, is_exact in ((1, True), (3, False)):
        if first == "lora":
            patched = cached(with_lora(flux.patcher), settings=f"every={every}")
        else:
            patched = with_lora(cached(flux.patcher, settings=f"every={every}"))
        assert torch.equal(sample(flux, patched), plain) is is_exact
    assert torch.equal(sample(flux), without)  # ComfyUI takes the weights back


def test_gates_and_forms_of_what_is_held(model: Model) -> None:
    plain = sample(model)
    patched = cached(model.patcher, "first-block", "threshold=1e9", hold="int8")
    made = sample(model, patched)
    assert "10: 1 computed, 9 skipped" in told(patched)
    assert torch.isfinite(made).all()
    exact = sample(model, cached(model.patcher, "dbcache", "threshold=0"))
    assert torch.equal(exact, plain)


def test_seacache_hears_the_noise_level_of_comfyui() -> None:
    wan = Model("wan")
    patched = cached(wan.patcher, "seacache", "threshold=1e9")
    sample(wan, patched)
    assert "skipped" in told(patched)
    assert torch.equal(sample(wan, cached(wan.patcher, "seacache", "threshold=0")), sample(wan))


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("teacache", "coefficients=(1,0)", "calls none of the attentions"),  # FLUX of ComfyUI
        ("seacache", "", "calls none of the attentions"),
        ("magcache", "", "no tables"),
        ("preset", "nonsense=1", "nonsense"),
    ],
)
def test_what_the_model_cannot_do_is_refused(flux: Model, method: str, settings: str, words: str) -> None:
    with pytest.raises((AttachError, ValueError), match=words):
        sample(flux, cached(flux.patcher, method, settings))
    assert diffcache.inspect(flux.network)  # and is not left wrapped
    diffcache.unwrap(diffcache.wrap(flux.network, "interval"))


@pytest.mark.parametrize("hold", ["as computed", "int8"])
def test_noise_levels_of_other_models_are_not_those_of_flows(hold: str) -> None:
    unet = Model("unet")
    with pytest.raises(AttachError, match="lazycache: made for models of flow matching"):
        sample(unet, cached(unet.patcher, "lazycache", "", hold=hold))


@pytest.mark.parametrize("beside", ["easycache", "compile", "windows"])
def test_nodes_that_change_the_same_calls_are_refused(flux: Model, beside: str) -> None:
    patched = cached(flux.patcher)
    if beside == "easycache":
        patched.model_options["transformer_options"]["easycache"] = object()
    elif beside == "windows":
        patched.model_options["context_handler"] = object()
    else:
        helpers = importlib.import_module("comfy_api.torch_helpers")
        helpers.set_torch_compile_wrapper(patched, backend="eager")
    with pytest.raises(AttachError, match="bypass one of the two nodes"):
        sample(flux, patched)
    with pytest.raises(AttachError, match="keep one of them"):
        cached(patched)


def test_comfyui_s_own_loader_finds_the_nodes_and_those_of_the_example() -> None:
    nodes = importlib.import_module("nodes")
    assert asyncio.run(nodes.load_custom_node(str(FOLDER)))
    assert {"DiffcacheModel", "DiffcacheReport"} <= nodes.NODE_CLASS_MAPPINGS.keys()
    example = json.loads((FOLDER / "example_workflows" / "flux_cached.json").read_text())
    for file in ("nodes_flux", "nodes_sd3", "nodes_preview_any"):
        path = Path(nodes.__file__).parent / "comfy_extras" / f"{file}.py"
        assert asyncio.run(nodes.load_custom_node(str(path)))
    assert {node["type"] for node in example["nodes"]} <= nodes.NODE_CLASS_MAPPINGS.keys()


def test_the_report_waits_for_the_sampler(flux: Model) -> None:
    patched = cached(flux.patcher, "preset", "", preset="auto")
    assert "no sampler has run" in told(patched)
    samples = {"samples": sample(flux, patched)}
    result = REPORT().tell(patched, samples)
    assert result["result"][0] is samples
    assert result["ui"]["text"] == [result["result"][1]]
    assert "fell back to taylorseer" in result["ui"]["text"][0]
