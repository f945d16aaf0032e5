"""Published polynomials of TeaCache, with the settings they were tried with.

The numbers are those of the official scripts, github.com/ali-vilab/TeaCache at 7c10efc, Apache-2.0;
the file and line of each entry stand beside it. Thresholds are the defaults of the scripts, or for
Wan2.1 the largest of their page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffcache.errors import AttachError


def settings_of(table: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Return the published settings of a model.

    Raises:
        ValueError: If there are none.
    """
    if model not in table:
        raise ValueError(f"model={model!r}: published are {', '.join(table)}")
    return dict(table[model])


def check_models(field: str, models: tuple[str, ...], facts: Mapping[str, Any]) -> None:
    """Raise AttachError unless numbers are for the class of a model, or for any.

    Args:
        field: The setting that holds them.
        models: Class names of the models that they are for, none for any.
        facts: Facts about the model; `model` is its class name.
    """
    if models and facts["model"] not in models:
        raise AttachError(
            f"{field} for {', '.join(models)}, and this is {facts['model']}; calibrate on this "
            "pipeline, or take those of its family"
        )


# fmt: off
# Model -> fields of `TeaCache`
TEACACHE: dict[str, dict[str, Any]] = {
    "flux.1-dev": {  # TeaCache4FLUX/teacache_flux.py:113
        "models": ("FluxTransformer2DModel",),
        "coefficients": (
            498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861,
        ),
        "threshold": 0.6,
    },
    "hunyuanvideo": {  # TeaCache4HunyuanVideo/teacache_sample_video.py:102
        "models": ("HunyuanVideoTransformer3DModel",),
        "coefficients": (
            733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896,
        ),
        "threshold": 0.15,
    },
    "ltx-video": {  # TeaCache4LTX-Video/teacache_ltx.py:72
        "models": ("LTXVideoTransformer3DModel",),
        "coefficients": (
            21.4700694, -12.8016453, 2.31279151, 0.792487521, 0.00969274326,
        ),
        "threshold": 0.05,
    },
    "mochi-1": {  # TeaCache4Mochi/teacache_mochi.py:70
        "models": ("MochiTransformer3DModel",),
        "coefficients": (
            -3512.41319, 811.675948, -60.9400215, 2.42429681, 0.00305291719,
        ),
        "threshold": 0.09,
    },
    "hidream-i1-full": {  # TeaCache4HiDream-I1/teacache_hidream_i1.py:298
        "models": ("HiDreamImageTransformer2DModel",),
        "coefficients": (
            -31360.5009, -712.425503, 49.1363285, 8.2651549, 0.108053901,
        ),
        "threshold": 0.3,
        "input": "time",
        "warmup": 5,
        "last": False,
    },
    "consisid": {  # TeaCache4ConsisID/teacache_sample_video.py:82
        "models": ("ConsisIDTransformer3DModel",),
        "coefficients": (
            -1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339,
        ),
        "threshold": 0.1,
        "input": "time",
    },
    "cogvideox-2b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:10
        "models": ("CogVideoXTransformer3DModel",),
        "coefficients": (
            -31.0658903, 25.4732368, -5.92380459, 1.75769064, -0.00361568434,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox-5b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:11
        "models": ("CogVideoXTransformer3DModel",),
        "coefficients": (
            -1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox1.5-5b": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:13
        "models": ("CogVideoXTransformer3DModel",),
        "coefficients": (
            250.210439, -165.061612, 35.7804877, -0.781551492, 0.0358559703,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "cogvideox1.5-5b-i2v": {  # TeaCache4CogVideoX1.5/teacache_sample_video.py:14
        "models": ("CogVideoXTransformer3DModel",),
        "coefficients": (
            122.842302, -104.088754, 26.2981677, -0.306009921, 0.037121322,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "wan2.1-t2v-1.3b": {  # TeaCache4Wan2.1/teacache_generate.py:890
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774,
        ),
        "threshold": 0.08,
        "input": "time",
    },
    "wan2.1-t2v-1.3b-ret": {  # TeaCache4Wan2.1/teacache_generate.py:883
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            -52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664,
        ),
        "threshold": 0.1,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-t2v-14b": {  # TeaCache4Wan2.1/teacache_generate.py:892
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            -5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404,
        ),
        "threshold": 0.2,
        "input": "time",
    },
    "wan2.1-t2v-14b-ret": {  # TeaCache4Wan2.1/teacache_generate.py:885
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            -303318.725, 49053.7029, -2655.30556, 58.7365115, -0.315583525,
        ),
        "threshold": 0.2,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-i2v-14b-480p": {  # TeaCache4Wan2.1/teacache_generate.py:974
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            -302.33167, 223.948934, -52.546397, 5.8734844, -0.201973289,
        ),
        "threshold": 0.26,
        "input": "time",
    },
    "wan2.1-i2v-14b-480p-ret": {  # TeaCache4Wan2.1/teacache_generate.py:967
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            257151.496, -35422.9917, 1402.86849, -13.5890334, 0.132517977,
        ),
        "threshold": 0.3,
        "input": "time-projection",
        "warmup": 5,
        "last": False,
    },
    "wan2.1-i2v-14b-720p": {  # TeaCache4Wan2.1/teacache_generate.py:976
        "models": ("WanTransformer3DModel",),
        "coefficients": (
            -114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683,
        ),
        "threshold": 0.3,
        "input": "time",
    },
    "wan2.1-i2v-14b-720p-ret": {  # TeaCache4Wan2.1/teacache_generate.py:969
        "models": ("WanTransformer3DModel",),
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
