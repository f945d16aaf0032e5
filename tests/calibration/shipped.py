"""Settings and a run of the shipped model, for tests of calibration and tuning."""

import torch

from tests.shipped import CALL as LARGE

STEPS = 5
CALL = {**LARGE, "height": 32, "width": 32}
PROMPTS = ["a fox left of an owl on grass"] * 3
SETTINGS = {"steps": STEPS, "batch_size": 2, **CALL}


def draw(pipe):
    generator = torch.Generator().manual_seed(7)
    return pipe(PROMPTS[:1], generator=generator, num_inference_steps=STEPS, output_type="pt", **CALL).images
