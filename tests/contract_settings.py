"""Settings under which the contract runs the methods that need no pipeline."""

from tests.zoo.families import FAMILIES
from tests.zoo.families import STEPS as STEPS

MODELS = [
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "SD3Transformer2DModel",
    "DiTTransformer2DModel",
    "UNet2DConditionModel",
]
COMPUTED = {name: list(one.computed) for name, one in FAMILIES.items() if one.computed is not None}
OFF = {name: FAMILIES[name].off for name in COMPUTED}
ON = {name: FAMILIES[name].settings | FAMILIES[name].alone for name in COMPUTED}
TENSORS = {name: FAMILIES[name].tensors for name in COMPUTED}
