"""Published polynomials of TeaCache and ratios of MagCache, with the settings they were tried with.

The numbers are those of the official scripts: TeaCache, github.com/ali-vilab/TeaCache at 7c10efc,
and MagCache, github.com/Zehong-Ma/MagCache at df81cb1, both Apache-2.0; the file and line of each
entry stand beside it. Thresholds are the defaults of the scripts, or of their pages for Wan2.1.
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
        facts: What is known of the model.
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

# Model -> fields of `MagCache`; without the ratio of the first step, which is 1
MAGCACHE: dict[str, dict[str, Any]] = {
    "flux.1-dev": {  # MagCache4FLUX/magcache_flux.py:459
        "models": ("FluxTransformer2DModel",),
        "branches": 1,
        "threshold": 0.24,
        "longest": 5,
        "retention": 0.1,
        "always": (11,),
        "ratios": (
            1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125, 1.02344,
            0.98047, 1.01562, 1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609, 0.99609,
            0.98047, 0.98828, 0.96484, 0.95703, 0.93359, 0.89062,
        ),
    },
    "flux.1-kontext-dev": {  # MagCache4FLUX_Kontext/magcache_flux_kontext.py:458
        "models": ("FluxTransformer2DModel",),
        "branches": 1,
        "threshold": 0.05,
        "longest": 4,
        "retention": 0.2,
        "always": (11,),
        "ratios": (
            1.19531, 1.07812, 1.02344, 1.03125, 1.00781, 1.02344, 1.01562, 1.01562, 1.0, 1.01562,
            1.0, 1.00781, 1.0, 1.00781, 1.0, 1.00781, 0.99609, 1.01562, 0.99219, 1.0, 0.99219,
            0.98438, 0.99609, 0.96484, 0.96094, 0.9375, 0.93359,
        ),
    },
    "hunyuanvideo-720p": {  # MagCache4HunyuanVideo/magcache_sample_video.py:316
        "models": ("HunyuanVideoTransformer3DModel",),
        "branches": 1,
        "threshold": 0.24,
        "longest": 6,
        "retention": 0.2,
        "ratios": (
            1.0754, 1.27807, 1.11596, 1.09504, 1.05188, 1.00844, 1.05779, 1.00657, 1.04142, 1.03101,
            1.00679, 1.02556, 1.00908, 1.06949, 1.05438, 1.02214, 1.02321, 1.03019, 1.00779,
            1.03381, 1.01886, 1.01161, 1.02968, 1.00544, 1.02822, 1.00689, 1.02119, 1.0105, 1.01044,
            1.01572, 1.02972, 1.0094, 1.02368, 1.0226, 0.98965, 1.01588, 1.02146, 1.0018, 1.01687,
            0.99436, 1.00283, 1.01139, 0.97122, 0.98251, 0.94513, 0.97656, 0.90943, 0.85703,
            0.75456,
        ),
    },
    "hunyuanvideo-540p": {  # MagCache4HunyuanVideo/magcache_sample_video.py:318
        "models": ("HunyuanVideoTransformer3DModel",),
        "branches": 1,
        "threshold": 0.24,
        "longest": 6,
        "retention": 0.2,
        "ratios": (
            1.06971, 1.29073, 1.11245, 1.09596, 1.05233, 1.01415, 1.05672, 1.00848, 1.03632,
            1.02974, 1.00984, 1.03028, 1.00681, 1.06614, 1.05022, 1.02592, 1.01776, 1.02985,
            1.00726, 1.03727, 1.01502, 1.00992, 1.03371, 0.9976, 1.02742, 1.0093, 1.01869, 1.00815,
            1.01461, 1.01152, 1.03082, 1.0061, 1.02162, 1.01999, 0.99063, 1.01186, 1.0217, 0.99947,
            1.01711, 0.9904, 1.00258, 1.00878, 0.97039, 0.97686, 0.94315, 0.97728, 0.91154, 0.86139,
            0.76592,
        ),
    },
    "qwen-image": {  # MagCache4QwenImage/magcache_generate.py:275
        "models": ("QwenImageTransformer2DModel",),
        "branches": 2,
        "threshold": 0.06,
        "longest": 2,
        "retention": 0.2,
        "ratios": (
            1.64062, 1.64062, 1.45312, 1.45312, 1.1875, 1.1875, 1.17188, 1.17188, 1.05469, 1.05469,
            1.21094, 1.21094, 1.10938, 1.10938, 1.11719, 1.11719, 1.13281, 1.13281, 1.11719,
            1.11719, 1.07812, 1.07812, 1.07031, 1.07031, 1.08594, 1.08594, 1.08594, 1.08594,
            1.07812, 1.07812, 1.03906, 1.03906, 1.04688, 1.04688, 1.07812, 1.07812, 1.07031,
            1.07031, 1.03125, 1.03125, 1.07812, 1.07812, 1.04688, 1.04688, 1.04688, 1.04688,
            1.04688, 1.04688, 1.03906, 1.03906, 1.01562, 1.01562, 1.03125, 1.03125, 1.02344,
            1.02344, 1.02344, 1.02344, 1.02344, 1.02344, 1.03906, 1.03906, 1.0, 1.0, 1.01562,
            1.01562, 1.0, 1.0, 0.99219, 0.99219, 1.00781, 1.00781, 0.98047, 0.98047, 0.95703,
            0.95703, 0.96875, 0.96875, 0.99219, 0.99219, 0.92578, 0.92578, 0.92578, 0.92578,
            0.90625, 0.90625, 0.85938, 0.85938, 0.80469, 0.80469, 0.87891, 0.87891, 0.75, 0.75,
            0.60938, 0.60938, 0.55078, 0.55078,
        ),
    },
    "qwen-image-edit": {  # MagCache4QwenImageEdit/magcache_generate.py:271
        "models": ("QwenImageTransformer2DModel",),
        "branches": 2,
        "threshold": 0.06,
        "longest": 2,
        "retention": 0.2,
        "ratios": (
            1.41406, 1.41406, 1.09375, 1.09375, 1.3125, 1.3125, 1.20312, 1.20312, 1.0625, 1.0625,
            1.125, 1.125, 1.14062, 1.14062, 1.17969, 1.17969, 1.09375, 1.09375, 1.10938, 1.10938,
            1.10938, 1.10938, 1.07031, 1.07031, 1.04688, 1.04688, 1.09375, 1.09375, 1.03906,
            1.03906, 1.0625, 1.0625, 1.04688, 1.04688, 1.0625, 1.0625, 1.04688, 1.04688, 1.07031,
            1.0625, 1.03125, 1.03125, 1.03906, 1.03906, 1.03906, 1.03906, 1.02344, 1.02344, 1.01562,
            1.01562, 1.03125, 1.03125, 1.00781, 1.00781, 1.01562, 1.01562, 1.00781, 1.00781,
            1.01562, 1.01562, 1.0, 1.0, 1.0, 1.0, 0.98828, 0.98828, 0.98047, 0.98047, 0.98047,
            0.98047, 0.97266, 0.97266, 0.92578, 0.92578, 0.94922, 0.94922, 0.98438, 0.98438,
            0.89844, 0.89844, 0.91797, 0.91797, 0.92188, 0.92188, 0.84375, 0.84375, 0.82812,
            0.82812, 0.78516, 0.78516, 0.87891, 0.87891, 0.71094, 0.71094, 0.56641, 0.56641,
            0.50781, 0.50781,
        ),
    },
    "wan2.1-t2v-1.3b": {  # MagCache4Wan2.1/magcache_generate.py:912
        "models": ("WanTransformer3DModel",),
        "branches": 2,
        "threshold": 0.12,
        "longest": 4,
        "retention": 0.2,
        "ratios": (
            1.0124, 1.02213, 1.00166, 1.0041, 0.99791, 1.00061, 0.99682, 0.99762, 0.99634, 0.99685,
            0.99567, 0.99586, 0.99416, 0.99422, 0.99578, 0.99575, 0.9957, 0.99563, 0.99511, 0.99506,
            0.99535, 0.99531, 0.99552, 0.99549, 0.99541, 0.99539, 0.9954, 0.99536, 0.99489, 0.99485,
            0.99518, 0.99514, 0.99484, 0.99478, 0.99481, 0.99479, 0.99415, 0.99413, 0.99419,
            0.99416, 0.99396, 0.99393, 0.99388, 0.99386, 0.99349, 0.99349, 0.99309, 0.99304, 0.9927,
            0.9927, 0.99228, 0.99226, 0.99171, 0.9917, 0.99137, 0.99135, 0.99068, 0.99063, 0.99005,
            0.99003, 0.98944, 0.98942, 0.98849, 0.98849, 0.98758, 0.98757, 0.98644, 0.98643,
            0.98504, 0.98503, 0.9836, 0.98359, 0.98202, 0.98201, 0.97977, 0.97978, 0.97717, 0.97718,
            0.9741, 0.97411, 0.97003, 0.97002, 0.96538, 0.96541, 0.9593, 0.95933, 0.95086, 0.95089,
            0.94013, 0.94019, 0.92402, 0.92414, 0.90241, 0.9026, 0.86821, 0.86868, 0.81838, 0.81939,
        ),
    },
    "wan2.1-t2v-14b": {  # MagCache4Wan2.1/magcache_generate.py:910
        "models": ("WanTransformer3DModel",),
        "branches": 2,
        "threshold": 0.24,
        "longest": 6,
        "retention": 0.2,
        "ratios": (
            1.02504, 1.03017, 1.00025, 1.00251, 0.9985, 0.99962, 0.99779, 0.99771, 0.9966, 0.99658,
            0.99482, 0.99476, 0.99467, 0.99451, 0.99664, 0.99656, 0.99434, 0.99431, 0.99533,
            0.99545, 0.99468, 0.99465, 0.99438, 0.99434, 0.99516, 0.99517, 0.99384, 0.9938, 0.99404,
            0.99401, 0.99517, 0.99516, 0.99409, 0.99408, 0.99428, 0.99426, 0.99347, 0.99343,
            0.99418, 0.99416, 0.99271, 0.99269, 0.99313, 0.99311, 0.99215, 0.99215, 0.99218,
            0.99215, 0.99216, 0.99217, 0.99163, 0.99161, 0.99138, 0.99135, 0.98982, 0.9898, 0.98996,
            0.98995, 0.9887, 0.98866, 0.98772, 0.9877, 0.98767, 0.98765, 0.98573, 0.9857, 0.98501,
            0.98498, 0.9838, 0.98376, 0.98177, 0.98173, 0.98037, 0.98035, 0.97678, 0.97677, 0.97546,
            0.97543, 0.97184, 0.97183, 0.96711, 0.96708, 0.96349, 0.96345, 0.95629, 0.95625,
            0.94926, 0.94929, 0.93964, 0.93961, 0.92511, 0.92504, 0.90693, 0.90678, 0.8796, 0.87945,
            0.86111, 0.86189,
        ),
    },
    "wan2.1-i2v-14b-480p": {  # MagCache4Wan2.1/magcache_generate.py:1002
        "models": ("WanTransformer3DModel",),
        "branches": 2,
        "threshold": 0.24,
        "longest": 6,
        "retention": 0.2,
        "ratios": (
            0.98783, 0.98993, 0.97559, 0.97593, 0.98311, 0.98319, 0.98202, 0.98225, 0.9888, 0.98878,
            0.98762, 0.98759, 0.98957, 0.98971, 0.99052, 0.99043, 0.99383, 0.99384, 0.98857, 0.9886,
            0.99065, 0.99068, 0.98845, 0.98847, 0.99057, 0.99057, 0.98957, 0.98961, 0.98601, 0.9861,
            0.98823, 0.98823, 0.98756, 0.98759, 0.98808, 0.98814, 0.98721, 0.98724, 0.98571,
            0.98572, 0.98543, 0.98544, 0.98157, 0.98165, 0.98411, 0.98413, 0.97952, 0.97953,
            0.98149, 0.9815, 0.9774, 0.97742, 0.97825, 0.97826, 0.97355, 0.97361, 0.97085, 0.97087,
            0.97056, 0.97055, 0.96588, 0.96587, 0.96113, 0.96124, 0.9567, 0.95681, 0.94961, 0.94969,
            0.93973, 0.93988, 0.93217, 0.93224, 0.91878, 0.91896, 0.90955, 0.90954, 0.92617,
            0.92616,
        ),
    },
    "wan2.1-i2v-14b-720p": {  # MagCache4Wan2.1/magcache_generate.py:1004
        "models": ("WanTransformer3DModel",),
        "branches": 2,
        "threshold": 0.24,
        "longest": 6,
        "retention": 0.2,
        "ratios": (
            0.99428, 0.99498, 0.98588, 0.98621, 0.98273, 0.98281, 0.99018, 0.99023, 0.98911,
            0.98917, 0.98646, 0.98652, 0.99454, 0.99456, 0.9891, 0.98909, 0.99124, 0.99127, 0.99102,
            0.99103, 0.99215, 0.99212, 0.99515, 0.99515, 0.99576, 0.99572, 0.99068, 0.99072,
            0.99097, 0.99097, 0.99166, 0.99169, 0.99041, 0.99042, 0.99201, 0.99198, 0.99101,
            0.99101, 0.98599, 0.98603, 0.98845, 0.98844, 0.98848, 0.98851, 0.98862, 0.98857,
            0.98718, 0.98719, 0.98497, 0.98497, 0.98264, 0.98263, 0.98389, 0.98393, 0.97938, 0.9794,
            0.97535, 0.97536, 0.97498, 0.97499, 0.973, 0.97301, 0.96827, 0.96828, 0.96261, 0.96263,
            0.95335, 0.9534, 0.94649, 0.94655, 0.93397, 0.93414, 0.91636, 0.9165, 0.89088, 0.89109,
            0.8679, 0.86768,
        ),
    },
}
# fmt: on
