"""Published polynomials of TeaCache, with the settings they were tried with, and their models.

The numbers are those of the official scripts, github.com/ali-vilab/TeaCache at 7c10efc, Apache-2.0;
the file and line of each entry stand beside it. Thresholds are the defaults of the scripts, or for
Wan2.1 the largest of their page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diffcache.errors import AttachError


@dataclass(frozen=True)
class Published:
    """A model that numbers were published for.

    Attributes:
        model: Class name of its denoiser.
        sizes: Entries of its configuration: depth, width, channels.
        pipeline: Pattern of its pipelines' class names, which tells models of one size apart.
        word: Word in the folders it is loaded from, in lower case, where nothing else tells it.
    """

    model: str
    sizes: Mapping[str, Any]
    pipeline: str = ".*"
    word: str = ""

    def differs(self, facts: Mapping[str, Any]) -> list[str]:
        """Return in words how a model differs; a bare one has no pipeline to compare."""
        if facts["model"] != self.model:
            return [f"it is no {self.model}"]
        own = facts["settings"]
        found = [
            f"{name}={own.get(name)!r} instead of {value!r}"
            for name, value in self.sizes.items()
            if own.get(name) != value
        ]
        pipeline = facts["pipeline"]
        if pipeline is not None and not re.fullmatch(self.pipeline, pipeline):
            found.append(f"its pipeline is {pipeline}")
        return found


def fitting(names: Iterable[str], facts: Mapping[str, Any]) -> list[str]:
    """Return the published models that a model may be, by its configuration and folder.

    Args:
        names: Names in `MODELS`; `-ret` after one is another set of numbers for the same model.
        facts: Facts about the model, as in `Method.check_model`.
    """
    found = {name: MODELS[name.removesuffix("-ret")] for name in names}
    fit = [name for name, model in found.items() if not model.differs(facts)]
    folder = str(facts["folder"]).lower()
    return [name for name in fit if found[name].word and found[name].word in folder] or fit


def check_published(field: str, model: str, names: Iterable[str], facts: Mapping[str, Any]) -> None:
    """Raise AttachError unless numbers were published for a model.

    Args:
        field: The setting that holds them.
        model: Name in `MODELS` of the model that they are for; empty for any.
        names: Names of all models that such numbers were published for.
        facts: Facts about the model that they are put on, as in `Method.check_model`.
    """
    right = fitting(names, facts) if model else []
    if not model or model in right:
        return
    known = MODELS.get(model.removesuffix("-ret"))
    if known is None:
        raise AttachError(f"model={model!r}: published are {', '.join(names)}")
    why = "; ".join(known.differs(facts)) or f"it was loaded from {facts['folder']}"
    take = " or ".join(f"model={name!r}" for name in right)
    raise AttachError(
        f"{field} for {model}, and this {facts['model']} is another: {why}; "
        + (f"take those of {take}, or " if right else "")
        + "calibrate on this pipeline"
    )


def _wan(depth: int, heads: int, channels: int, word: str = "") -> Published:
    sizes = {"num_layers": depth, "num_attention_heads": heads, "in_channels": channels}
    image = {"image_dim": 1280, "pos_embed_seq_len": None} if channels == 36 else {}
    # Pipelines of Wan2.2, whose transformers are of these sizes, have a second one.
    return Published("WanTransformer3DModel", sizes | image, r"Wan\w*", word)


def _cogvideox(depth: int, heads: int, channels: int, patch: int | None) -> Published:
    sizes = {"num_layers": depth, "num_attention_heads": heads, "in_channels": channels}
    return Published("CogVideoXTransformer3DModel", {**sizes, "patch_size_t": patch})


def _hunyuan(word: str = "") -> Published:
    sizes = {"num_layers": 20, "num_single_layers": 40, "in_channels": 16}
    return Published(
        "HunyuanVideoTransformer3DModel", {**sizes, "image_condition_type": None}, word=word
    )


_FLUX = {"num_layers": 19, "num_single_layers": 38, "in_channels": 64, "guidance_embeds": True}
_QWEN = {"num_layers": 60, "num_attention_heads": 24, "in_channels": 64}
# Name -> the model. Sizes of Wan, CogVideoX 2B and 5B and HunyuanVideo are those of the scripts of
# diffusers that convert their checkpoints, most others the defaults of its classes;
# `guidance_embeds` of FLUX, and ConsisID and CogVideoX 1.5, were not looked up.
MODELS: dict[str, Published] = {
    "flux.1-dev": Published(
        "FluxTransformer2DModel", _FLUX, "Flux(?!Kontext).*", word="flux.1-dev"
    ),
    "flux.1-kontext-dev": Published(
        "FluxTransformer2DModel", _FLUX, "FluxKontext.*", word="kontext"
    ),
    "hunyuanvideo": _hunyuan(),
    "hunyuanvideo-720p": _hunyuan("720p"),
    "hunyuanvideo-540p": _hunyuan("540p"),
    "ltx-video": Published(
        "LTXVideoTransformer3DModel",
        {"num_layers": 28, "num_attention_heads": 32, "in_channels": 128},
    ),
    "mochi-1": Published(
        "MochiTransformer3DModel",
        {"num_layers": 48, "num_attention_heads": 24, "in_channels": 12},
    ),
    "hidream-i1-full": Published(
        "HiDreamImageTransformer2DModel",
        {"num_layers": 16, "num_single_layers": 32, "num_attention_heads": 20},
    ),
    "lumina2": Published(
        "Lumina2Transformer2DModel", {"num_layers": 26, "hidden_size": 2304, "in_channels": 16}
    ),
    "consisid": Published(
        "ConsisIDTransformer3DModel", {"num_layers": 42, "num_attention_heads": 48}
    ),
    "cogvideox-2b": _cogvideox(30, 30, 16, None),
    "cogvideox-5b": _cogvideox(42, 48, 16, None),
    "cogvideox-5b-i2v": _cogvideox(42, 48, 32, None),
    "cogvideox1.5-5b": _cogvideox(42, 48, 16, 2),
    "cogvideox1.5-5b-i2v": _cogvideox(42, 48, 32, 2),
    "qwen-image": Published("QwenImageTransformer2DModel", _QWEN, "QwenImage(?!Edit|Layered).*"),
    "qwen-image-edit": Published(
        "QwenImageTransformer2DModel", _QWEN, "QwenImageEdit.*", word="edit"
    ),
    "wan2.1-14b": _wan(40, 40, 16),
    "wan2.1-t2v-1.3b": _wan(30, 12, 16),
    "wan2.1-t2v-14b": _wan(40, 40, 16),
    "wan2.1-i2v-14b-480p": _wan(40, 40, 36, "480p"),
    "wan2.1-i2v-14b-720p": _wan(40, 40, 36, "720p"),
}

# fmt: off
# Model -> fields of `TeaCache`
TEACACHE: dict[str, dict[str, Any]] = {
    "flux.1-dev": {  # TeaCache4FLUX/teacache_flux.py:113
        "coefficients": (
            498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861,
        ),
        "threshold": 0.6,
    },
    "hunyuanvideo": {  # TeaCache4HunyuanVideo/teacache_sample_video.py:102
        "coefficients": (
            733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896,
        ),
        "threshold": 0.15,
    },
    "ltx-video": {  # TeaCache4LTX-Video/teacache_ltx.py:72
        "coefficients": (
            21.4700694, -12.8016453, 2.31279151, 0.792487521, 0.00969274326,
        ),
        "threshold": 0.05,
    },
    "mochi-1": {  # TeaCache4Mochi/teacache_mochi.py:70
        "coefficients": (
            -3512.41319, 811.675948, -60.9400215, 2.42429681, 0.00305291719,
        ),
        "threshold": 0.09,
    },
    "lumina2": {  # TeaCache4Lumina2/teacache_lumina2.py:72
        "coefficients": (
            393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344,
        ),
        "threshold": 0.3,
        "by_branch": True,
    },
    "hidream-i1-full": {  # TeaCache4HiDream-I1/teacache_hidream_i1.py:298
        "coefficients": (
            -31360.5009, -712.425503, 49.1363285, 8.2651549, 0.108053901,
        ),
        "threshold": 0.3,
        "input": "time",
        "warmup": 0.1,
        "last": False,
    },
    "consisid": {  # TeaCache4ConsisID/teacache_sample_video.py:82
        "coefficients": (
            -1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339,
        ),
        "threshold": 0.1,
        "input": "time",
    },
    "cogvideox-2b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:10
        "coefficients": (
            -31.0658903, 25.4732368, -5.92380459, 1.75769064, -0.00361568434,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox-5b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:11
        "coefficients": (
            -1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox-5b-i2v": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:12
        "coefficients": (
            -1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox1.5-5b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:13
        "coefficients": (
            250.210439, -165.061612, 35.7804877, -0.781551492, 0.0358559703,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox1.5-5b-i2v": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:14
        "coefficients": (
            122.842302, -104.088754, 26.2981677, -0.306009921, 0.037121322,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "wan2.1-t2v-1.3b": {  # TeaCache4Wan2.1/teacache_generate.py:890
        "coefficients": (
            2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774,
        ),
        "threshold": 0.08,
        "input": "time",
    },
    "wan2.1-t2v-1.3b-ret": {  # TeaCache4Wan2.1/teacache_generate.py:883
        "coefficients": (
            -52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664,
        ),
        "threshold": 0.1,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-t2v-14b": {  # TeaCache4Wan2.1/teacache_generate.py:892
        "coefficients": (
            -5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "wan2.1-t2v-14b-ret": {  # TeaCache4Wan2.1/teacache_generate.py:885
        "coefficients": (
            -303318.725, 49053.7029, -2655.30556, 58.7365115, -0.315583525,
        ),
        "threshold": 0.2,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-i2v-14b-480p": {  # TeaCache4Wan2.1/teacache_generate.py:974
        "coefficients": (
            -302.33167, 223.948934, -52.546397, 5.8734844, -0.201973289,
        ),
        "threshold": 0.26,
        "input": "time",
    },
    "wan2.1-i2v-14b-480p-ret": {  # TeaCache4Wan2.1/teacache_generate.py:967
        "coefficients": (
            257151.496, -35422.9917, 1402.86849, -13.5890334, 0.132517977,
        ),
        "threshold": 0.3,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-i2v-14b-720p": {  # TeaCache4Wan2.1/teacache_generate.py:976
        "coefficients": (
            -114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683,
        ),
        "threshold": 0.3,
        "input": "time",
    },
    "wan2.1-i2v-14b-720p-ret": {  # TeaCache4Wan2.1/teacache_generate.py:969
        "coefficients": (
            8107.0546, 2133.93892, -372.934672, 16.6203073, -0.0417769401,
        ),
        "threshold": 0.3,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
}
# fmt: on
