"""Cache a model in ComfyUI's own sampler, and report the computed steps of its last run.

A patched model is a clone with four wrappers of ComfyUI. The wrapper around the sampler puts the cache into the
network and takes it out again, so that nothing stays in weights that other clones share. The others track the
evaluation and the conditions of each call of the network: ComfyUI runs several conditions in one call or in several,
depending on the memory that is free.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.tap import Tap
from diffcache.catalog import make_method
from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.presets.choose import choose, presets
from diffcache.registry import find, read_word, rows_of

KEY = "diffcache"
PRESET, AUTO, AS_COMPUTED = "preset", "auto", "as computed"
# Methods that need no calibration, or have published numbers.
METHODS = (
    PRESET,
    *(
        name
        for name, row in rows_of("method").items()
        if name != "tuned" and (row.load().publishes or not issubclass(row.load(), Calibrated))
    ),
)
# Networks of ComfyUI that have presets -> their class in diffusers, under which presets are looked up.
KNOWN = {"Flux": "FluxTransformer2DModel", "WanModel": "WanTransformer3DModel"}
# Samplers that evaluate the model once a step; for others the number of evaluations is not known.
ONCE_A_STEP = (
    "euler", "euler_ancestral", "euler_cfg_pp", "euler_ancestral_cfg_pp", "lms", "ddpm", "lcm",
    "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun",
    "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ipndm", "ipndm_v", "sa_solver",
    "deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral", "er_sde",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp",
)  # fmt: skip
OF_FLOWS = ("lazycache", "seacache")  # take ComfyUI's sigma for the noise's weight, which it is in flow matching only
SIDES = {0: "cond", 1: "uncond"}  # ComfyUI's numbers of conditions


class Cache:
    """The cache of one patched model, shared by its clones.

    Args:
        method: Method that is put into the network of every sampler run.
        why: Line for the report, the reason why this method was taken; empty where the user named it.

    Attributes:
        report: Report of the last run, as text.
    """

    def __init__(self, method: Method, why: str) -> None:
        self.method, self.why = method, why
        self.report = "no sampler has run on this model yet"
        self.evaluation = -1  # number of the sampler's evaluation, from 0; -1 outside of runs
        self.batch = -1  # number of the batch of conditions within the evaluation: guidance may ask for several
        self.names: dict[Any, str] = {}  # conditions of a call -> name of its branch

    def sample(self, executor: Any, guider: Any, sigmas: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a sampler with the network cached; leave the network as it was.

        Raises:
            AttachError: If something else in the workflow changes the same calls, or the method needs another model.
        """
        check_alone(guider.model_options)
        sampling = type(guider.inner_model.model_sampling)
        name = getattr(self.method, "method", self.method).name  # of what is held, too
        if name in OF_FLOWS and not any(cls.__name__ == "CONST" for cls in sampling.__mro__):
            raise AttachError(f"{name}: made for models of flow matching, and this one is not; use easycache")
        network = guider.inner_model.diffusion_model
        self.names = {}
        self.report = "the last sampler run did not come to its end"
        with diffcache.wrapped(network, self.method), called_blocks(network):
            try:
                with diffcache.run(network, steps=_steps(executor.class_obj, sigmas)):
                    out = executor(guider, sigmas, *args, **kwargs)
            finally:
                self.evaluation = self.batch = -1
            text = str(diffcache.report(network))
        self.report = f"{text}\n{self.why}" if self.why else text
        return out

    def evaluate(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Count an evaluation of the sampler."""
        self.evaluation += 1
        self.batch = -1
        return executor(*args, **kwargs)

    def ask(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a batch of conditions that is evaluated, such as the one of perturbed guidance."""
        self.batch += 1
        return executor(*args, **kwargs)

    def call(
        self,
        executor: Any,
        x: Any,
        t: Any,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the network as the branch of its conditions."""
        options = transformer_options or {}
        inner = (x, t, c_concat, c_crossattn, control, options)
        if self.evaluation < 0:  # a call from outside the sampler
            return executor(*inner, **kwargs)
        with diffcache.branch(self.name_of(options), self.evaluation):
            return executor(*inner, **kwargs)

    def name_of(self, options: Mapping[str, Any]) -> str:
        """Return the name of a call's branch: the kinds of its conditions, numbered if several batches have them."""
        kinds = tuple(options["cond_or_uncond"])
        key = self.batch, kinds, tuple(options["uuids"])
        if key not in self.names:
            name = "+".join(SIDES.get(kind, f"cond {kind}") for kind in kinds)
            same = sum(known.partition("#")[0] == name for known in self.names.values())
            self.names[key] = f"{name}#{same + 1}" if same else name
        return self.names[key]


@contextmanager
def called_blocks(network: nn.Module) -> Iterator[None]:
    """Let ComfyUI's UNet call its blocks, through whose layers its own function goes one by one.

    The function is the module's: samplers in other threads call it as well, whose blocks run as ever without a cache.
    """
    home: Any = sys.modules[type(network).__module__]
    through = getattr(home, "forward_timestep_embed", None)
    if through is None:
        yield
        return

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        # isinstance() would ask a tap for its class, and it names that of its block.
        return (block if issubclass(type(block), Tap) else partial(through, block))(*args, **kwargs)

    home.forward_timestep_embed = call
    try:
        yield
    finally:
        home.forward_timestep_embed = through


def _steps(sampler: Any, sigmas: Any) -> int | None:
    """Return the number of evaluations of a run; None where a sampler does not tell it."""
    function = getattr(getattr(sampler, "sampler_function", None), "__name__", "")
    is_known = function.removeprefix("sample_") in ONCE_A_STEP
    return len(sigmas) - 1 if is_known and len(sigmas) > 1 else None


def check_alone(options: Mapping[str, Any]) -> None:
    """Raise AttachError if a node beside this one skips, splits or compiles the model's calls.

    `options` are the `model_options` of the sampler's guider.
    """
    inner = options.get("transformer_options", {})
    wrappers = inner.get("wrappers", {})
    others = {
        "EasyCache or LazyCache": "easycache" in inner or "lazycache" in inner,
        "TorchCompileModel": "torch.compile" in wrappers.get("apply_model", {}),
        "a node of context windows": options.get("context_handler") is not None,
    }
    for node, is_there in others.items():
        if is_there:
            raise AttachError(f"diffcache beside {node}: bypass one of the two nodes")


def facts_about(network: nn.Module) -> dict[str, Any]:
    """Return facts about a network of ComfyUI in the words that presets are looked up by."""
    facts, model = facts_of(network, None), type(network).__name__
    if model not in KNOWN:
        return facts
    own: Any = network
    if model == "Flux":
        sizes = {
            "num_layers": own.params.depth,
            "num_single_layers": own.params.depth_single_blocks,
            "in_channels": own.in_channels,
            "guidance_embeds": own.params.guidance_embed,
        }
    else:
        sizes = {
            "num_layers": own.num_layers,
            "num_attention_heads": own.num_heads,
            "in_channels": own.in_dim,
            "image_dim": None if own.img_emb is None else 1280,
            "pos_embed_seq_len": None,
        }
    return {**facts, "model": KNOWN[model], "settings": sizes}


def method_for(network: nn.Module, method: str, settings: str, preset: str, hold: str) -> tuple[Method, str]:
    """Return the method that the widgets ask for; where they leave it to presets, the reason for the choice too.

    Published numbers hold for weights, and so for ComfyUI's class of the same model; that they belong to this model is
    checked here.

    Raises:
        AttachError: If the preset, or the published numbers, belong to another model.
        ValueError: If a setting is unknown or out of its range.
    """
    given = read_settings(method, settings, preset)
    facts, why = facts_about(network), ""
    if method == PRESET:
        choice = choose(facts, None if preset == AUTO else preset)
        method, why = choice.method, f"preset: {choice.why}"
        given = {**choice.settings, **given}
    made = make_method(method, lambda: facts, **given)
    made.check_model(facts)
    if getattr(made, "model", ""):
        made = dataclasses.replace(made, model="")  # type: ignore[type-var]
    if hold != AS_COMPUTED:
        made = diffcache.Held(made, hold)  # type: ignore[arg-type]
    return made, why


def read_settings(method: str, settings: str, preset: str) -> dict[str, Any]:
    """Return the settings in a text such as `every=4, warmup=2`.

    Raises:
        ValueError: If the text cannot be read or refers to a file, or a preset is asked for beside a method.
    """
    if method != PRESET and preset != AUTO:
        raise ValueError(f"preset={preset!r} and method={method!r}: choose one of them")
    text = ",".join(part.strip() for part in settings.replace("\n", ",").split(",") if part.strip())
    given = read_word(f"{method}:{text}")[1] if text else {}
    if "tables" in given:
        raise ValueError("tables: files are not read from workflows; use published settings")
    return given


class DiffcacheModel:
    """Node that returns a model whose sampler runs are cached."""

    DESCRIPTION = (
        "Skips what hardly changes between the steps of a sampler. Choose a preset of your model, "
        "or a method with its settings."
    )
    CATEGORY = "model_patches/diffcache"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (ComfyUI's name)
        """Return the widgets."""
        names = [AUTO, *(one.name for levels in presets().values() for one in levels.values())]
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "Model to cache; it is left as it is."}),
                "method": (
                    METHODS,
                    {"default": PRESET, "tooltip": "preset takes what was published for the model, else taylorseer."},
                ),
                "settings": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": "Such as every=4 (interval, taylorseer) or threshold=0.08 (gates); "
                        "empty for the defaults. `diffcache methods` lists them.",
                    },
                ),
                "preset": (
                    names,
                    {"default": AUTO, "tooltip": "Published settings of a model; auto recognizes it by its sizes."},
                ),
                "hold": (
                    (AS_COMPUTED, "bf16", "int8", "host"),
                    {
                        "default": AS_COMPUTED,
                        "tooltip": "Form of what is kept between steps: fewer bytes, or host memory.",
                    },
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, method: str, settings: str, preset: str) -> bool | str:  # noqa: N802
        """Check the widgets before anything runs; return the error as text, True if there is none."""
        try:
            given = read_settings(method, settings, preset)
            row = find(method, "method")
            if row is not None and not row.load().publishes:  # others ask for the model
                make_method(method, **given)
        except ValueError as error:
            return str(error)
        return True

    def patch(self, model: Any, method: str, settings: str, preset: str, hold: str) -> tuple[Any]:
        """Return a clone of a model with the cache.

        Raises:
            AttachError: If the model has such a node already, or cannot be cached with this method.
            ValueError: If a setting is unknown or out of its range.
        """
        if model.get_attachment(KEY) is not None:
            raise AttachError("this model comes from a diffcache node already; keep one of them")
        network = model.model.diffusion_model
        cache = Cache(*method_for(network, method, settings, preset, hold))
        with diffcache.wrapped(network, cache.method):
            pass  # so that a misfit is reported at this node, and not later at the sampler
        patched = model.clone()
        patched.set_attachments(KEY, cache)
        patched.add_wrapper_with_key("sampler_sample", KEY, cache.sample)
        patched.add_wrapper_with_key("predict_noise", KEY, cache.evaluate)
        patched.add_wrapper_with_key("calc_cond_batch", KEY, cache.ask)
        patched.add_wrapper_with_key("apply_model", KEY, cache.call)
        return (patched,)


class DiffcacheReport:
    """Node that reports the computed and skipped steps of a cached model's last sampler run."""

    DESCRIPTION = "Reports steps, seconds and bytes of the sampler run that made these samples."
    CATEGORY = "model_patches/diffcache"
    FUNCTION = "tell"
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("samples", "report")
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Return the inputs; the samples pass through, so that the report comes after them."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model that the sampler was given."}),
                "samples": ("LATENT", {"tooltip": "What the sampler returned."}),
            }
        }

    def tell(self, model: Any, samples: Any) -> dict[str, Any]:
        """Return the samples and the report; raise AttachError if the model has no cache."""
        cache = model.get_attachment(KEY)
        if cache is None:
            raise AttachError("this model has no cache; connect the output of the diffcache node")
        return {"ui": {"text": [cache.report]}, "result": (samples, cache.report)}


NODE_CLASS_MAPPINGS = {"DiffcacheModel": DiffcacheModel, "DiffcacheReport": DiffcacheReport}
NODE_DISPLAY_NAME_MAPPINGS = {
    "DiffcacheModel": "Cache Model (diffcache)",
    "DiffcacheReport": "Cache Report (diffcache)",
}
