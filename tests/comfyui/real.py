"""ComfyUI's own code, and tiny random models in it.

It is not ours to ship (GPL): `COMFYUI` names a checkout, whose packages are importable. Without one
the tests that need it are skipped.
"""

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

PLACE = os.environ.get("COMFYUI", "")


class Anything(ModuleType):
    """Stands for a package that tiny models never call."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


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
        for name in ("torchvision", "torchvision.transforms"):
            sys.modules[name] = module = Anything(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
    try:
        importlib.import_module("comfy.options").enable_args_parsing(False)
        importlib.import_module("comfy.cli_args").args.cpu = True
        names = (
            "samplers",
            "sample",
            "model_patcher",
            "model_management",
            "supported_models",
            "controlnet",
            "lora",
            "patcher_extension",
        )
        return SimpleNamespace(**{n: importlib.import_module(f"comfy.{n}") for n in names})
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
WAN = dict(
    image_model="wan2.1",
    model_type="t2v",
    patch_size=(1, 2, 2),
    text_len=8,
    in_dim=16,
    dim=48,
    ffn_dim=64,
    freq_dim=16,
    text_dim=8,
    out_dim=16,
    num_heads=4,
    num_layers=4,
)


class Model:
    """A tiny random model in ComfyUI's `ModelPatcher`, with a count of the blocks that ran."""

    def __init__(self, name: str) -> None:
        kind, sizes, self.shape = {"flux": ("Flux", FLUX, (1, 4, 8, 8)), "wan": ("WAN21_T2V", WAN, (1, 16, 2, 8, 8))}[
            name
        ]
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
        lists = ("double_blocks", "single_blocks", "blocks")
        self.blocks = [b for name in lists for b in getattr(self.network, name, [])]
        for block in self.blocks:
            block.register_forward_hook(self._count)

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

    Args:
        model: The model.
        patcher: What the sampler is given; the uncached model by default.
        sampler: Name of the sampler.
        steps: Its steps.
        seed: Seed of the noise.
        apart: Whether the two prompts differ in length, so that they cannot go into one call.
        more: Entries of both conditionings.
        callback: Callback of the sampler.
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
