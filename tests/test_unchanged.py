"""Settings that skip nothing change nothing: every method on every class of the zoo."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError
from diffcache.registry import rows_of
from tests import off
from tests.internals import reuse_in
from tests.near_zero import SETTINGS, near_zero
from tests.zoo.case import Case, output_tensors
from tests.zoo.catalog import cases
from tests.zoo_runs import inputs, steps

Made = tuple[Case, nn.Module, list[list[Tensor]]]

CASES = cases()
STEPS = 3
# Gates are near zero, but for the one that needs the noise levels of a scheduler.
# A mask of steps is for four steps or more, and what it runs else is DBCache.
OFF = sorted(set(rows_of("method")) - set(SETTINGS) - {"step-mask"} | {"seacache"})
# Those of a row tap the same modules and compute the same steps: each model meets one of them in
# its turn, all of them with `python -m tests.test_unchanged`.
ALIKE = [
    ("dmd", "dpcache", "fitted-forecast", "foca", "freqca", "hicache", "interval", "seacache",
     "spectrum", "taylorseer", "tuned"),
    ("easycache", "ertacache", "fastercache", "lazycache", "step-reuse"),
    ("bac", "harmonica"),
]  # fmt: skip
# Models that a gate cannot look into, by what it looks at.
BLIND = {
    ("UniDiffuserModel", ""): "skipping its blocks on inputs they just saw changes the output",
    ("StableCascadeUNet", "modulated"): "calls none of the attentions that were found",
} | {
    (name, "modulated"): "down_blocks.0 has no attention module.*with lead=1, as FirstBlock"
    for name in ("Kandinsky3UNet", "UNet1DModel", "UNet2DConditionModel-sdxl", "UNet2DModel", "UNet2DModel-skip")
}
# Lists of the text alone, and refiners before text and image are joined: they always run.
TEXT = {
    "BriaFibo2Transformer2DModel": {"perceiver.layers", "noise_refiner"},
    "Flux3Transformer2DModel": {"txt_mode_blocks", "mode_blocks.image_cond"},
    "Kandinsky5Transformer3DModel": {"text_transformer_blocks"},
    "Kandinsky6Transformer3DModel": {"video_text_transformer_blocks", "audio_text_transformer_blocks"},
    "Krea2Transformer2DModel": {"text_fusion.layerwise_blocks", "text_fusion.refiner_blocks"},
    "Lumina2Transformer2DModel": {"context_refiner", "noise_refiner"},
    "MiniMaxH3Transformer3DModel": {"token_refiner.refiner_blocks"},
    "ZImageTransformer2DModel": {"context_refiner", "noise_refiner"},
}
UNSEEN = "skipping its blocks on inputs they just saw changes the output"
# Method -> name of the case, or "" for all -> why it cannot be had there; other methods: USUAL.
USUAL = {"UniDiffuserModel": UNSEEN}
REFUSED: dict[str, dict[str, str]] = {
    "bac": {"UNet1DModel": "nothing at site 'module' inside its blocks"},
    "cachequant": {
        "Kandinsky3UNet": "no layers called `resnets`, so site 'deep' cannot split it",
        "UNet2DModel-skip": UNSEEN,
        "UniDiffuserModel": UNSEEN,
        "WanAnimateTransformer3DModel": UNSEEN,
    },
    "ertacache": dict.fromkeys(
        ("Cosmos3OmniTransformer", "UVit2DModel", "WanAnimate2Transformer3DModel",
         "ZImageTransformer2DModel"),
        "cannot be taken against its sample; use another method",
    ),
    "easycache": dict.fromkeys(
        ("Cosmos3OmniTransformer", "UVit2DModel", "WanAnimate2Transformer3DModel",
         "ZImageTransformer2DModel"),
        "cannot be taken against its sample; use another method",
    ),
    "dbprune": {},
    "fastercache": {},
    "lazycache": {},
    "pab": {"UNet1DModel": "nothing at site 'attention' inside its blocks"},
    "step-reuse": {},
    "harmonica": {"UNet1DModel": "nothing at site 'module' inside its blocks"},
    # Its last block always runs, and there reads outputs of blocks that are skipped.
    "speca": dict.fromkeys(
        ("AudioLDM2UNet2DConditionModel", "DreamLiteUNetModel", "HunyuanDiT2DModel", "I2VGenXLUNet",
         "Kandinsky3UNet", "RFD4ProteinaTransformer", "UNet1DModel", "UNet2DConditionModel",
         "UNet2DConditionModel-class", "UNet2DConditionModel-sdxl", "UNet2DModel",
         "UNet2DModel-skip", "UNet3DConditionModel", "UNetControlNetXSModel", "UNetMotionModel",
         "UNetSpatioTemporalConditionModel", "UniDiffuserModel", "WanAnimateTransformer3DModel"),
        UNSEEN,
    ),
    "regione": {"": "serves FluxKontextPipeline, .*, not a bare model"},
    "temporal-table": {},
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("eager")


def make(name: str) -> Made:
    """Build a case, with what it returns at every step."""
    case = CASES[name]
    model = case.build(0)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = [output_tensors(model(**inputs(case, model, step=step))) for step in range(STEPS)]
    return case, model, expected


@pytest.fixture(scope="module", params=sorted(CASES))
def made(request) -> Made:
    """Build a model once for the tests of this file."""
    return make(request.param)


def test_a_threshold_near_zero_computes_every_step(made: Made):
    """Bit for bit: gates look at what changes; or the model is refused, with the reason."""
    case, model, expected = made
    for probe, methods in near_zero("seacache").items():
        reason = BLIND.get((case.name, probe)) or BLIND.get((case.name, ""))
        with (
            pytest.raises(AttachError, match=reason) if reason else nullcontext(),
            diffcache.wrapped(model, methods) as handle,
            diffcache.branch("the only one"),  # some have a second sample among the conditions
        ):
            for step in steps(handle, STEPS):
                with diffcache.branch("one"):  # whose conditions may change with the step
                    out = output_tensors(model(**inputs(case, model, step=step)))
                assert all(map(torch.equal, out, expected[step]))
            methods.check()
            assert [call.computed for call in handle.last.calls] == [True] * STEPS
            setup = reuse_in(handle).setup
            (layout,) = setup.layouts.values()
            text = {entry.key for entry in setup.anatomy.lists} - set(layout.streams)
            assert text == TEXT.get(case.name, set())


def test_every_method_that_is_off_changes_nothing(made: Made):
    """Bit for bit, with all of it computed; or the model is refused, with the reason."""
    turn = sorted(CASES).index(made[0].name)
    alone = set(OFF).difference(*ALIKE)
    check_all([*(row[turn % len(row)] for row in ALIKE), *sorted(alone)], made)


def check_all(names: list[str], made: Made) -> None:
    case, model, expected = made
    for name in names:
        refused = REFUSED.get(name, USUAL)
        reason = refused.get("") or refused.get(case.name)
        with pytest.raises(AttachError, match=reason) if reason else nullcontext():
            check_off(name, made)
    assert all(map(torch.equal, output_tensors(model(**inputs(case, model, step=0))), expected[0]))


def check_off(name: str, made: Made) -> None:
    case, model, expected = made
    tabled = name == "temporal-table"
    with diffcache.wrapped(model, off.off_method(name, model)) as handle, diffcache.branch("the only one"):
        for _ in range(2 if tabled else 1):  # the first run fills tables, the next reads them
            for step in steps(handle, off.STEPS):
                with diffcache.branch("one"):
                    out = output_tensors(model(**inputs(case, model, step=step)))
                assert len(out) == len(expected[step]), name
                assert all(map(torch.equal, out, expected[step])), f"{name}, step {step}"
        calls = handle.last.calls
        assert [call.computed for call in calls] == [True] * off.STEPS, name
        assert tabled or not any(left for c in calls for _, left in c.counts.values()), name


def main() -> None:
    """Check every method on every class, without turns (two minutes)."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name in sorted(CASES):
            check_all(OFF, make(name))
            print(f"{name}: {len(OFF)} methods change nothing, or are refused as listed")


if __name__ == "__main__":
    main()
