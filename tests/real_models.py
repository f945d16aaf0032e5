"""Configurations of real models, which tiny ones of the zoo are given for a while."""

import inspect
from contextlib import contextmanager

from diffcache.presets.published import models
from tests.zoo.catalog import cases

MODELS: dict = {}


def model_of(name):
    """A tiny model of a class, built once."""
    if name not in MODELS:
        MODELS[name] = cases()[name].build()
    return MODELS[name]


# Denoiser and what differs from its class's defaults, as the configurations on the hub have it
WAN_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
LARGE = {"num_layers": 42, "num_attention_heads": 48}
REAL: dict = {
    "flux.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "flux.1-kontext-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "hunyuanvideo": ("HunyuanVideoTransformer3DModel", {}),
    "hunyuanvideo-720p": ("HunyuanVideoTransformer3DModel", {}),
    "hunyuanvideo-540p": ("HunyuanVideoTransformer3DModel", {}),
    "ltx-video": ("LTXVideoTransformer3DModel", {}),
    "mochi-1": ("MochiTransformer3DModel", {}),
    "lumina2": ("Lumina2Transformer2DModel", {}),
    "hidream-i1-full": ("HiDreamImageTransformer2DModel", {"in_channels": 16}),
    "consisid": ("ConsisIDTransformer3DModel", {"in_channels": 32, **LARGE}),
    "cogvideox-2b": ("CogVideoXTransformer3DModel", {}),
    "cogvideox-5b": ("CogVideoXTransformer3DModel", LARGE),
    "cogvideox-5b-i2v": ("CogVideoXTransformer3DModel", {"in_channels": 32, **LARGE}),
    "cogvideox1.5-5b": ("CogVideoXTransformer3DModel", {"patch_size_t": 2, **LARGE}),
    "cogvideox1.5-5b-i2v": ("CogVideoXTransformer3DModel", {"in_channels": 32, "patch_size_t": 2, **LARGE}),
    "qwen-image": ("QwenImageTransformer2DModel", {}),
    "qwen-image-edit": ("QwenImageTransformer2DModel", {}),
    "wan2.1-14b": ("WanTransformer3DModel", {}),
    "wan2.1-t2v-14b": ("WanTransformer3DModel", {}),
    "wan2.1-t2v-1.3b": ("WanTransformer3DModel", {"num_layers": 30, "num_attention_heads": 12}),
    "wan2.1-i2v-14b-480p": ("WanTransformer3DModel", WAN_I2V),
    "wan2.1-i2v-14b-720p": ("WanTransformer3DModel", WAN_I2V),
}


@contextmanager
def as_real(name, **changes):
    """Let a tiny model have the configuration of a published one.

    Of a model that is not in the table, that is what its family's file recognizes it by.
    """
    name = name.removesuffix("-ret")
    known = models()[name]
    cls, own = REAL.get(name) or (known.model, known.sizes)
    model = model_of(cls)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(type(model).__init__).parameters.items()
        if parameter.default is not parameter.empty
    }
    tiny = dict(model.config)
    model.register_to_config(**{**defaults, **own, **changes})
    try:
        yield model
    finally:
        model.register_to_config(**tiny)
