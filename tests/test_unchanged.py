"""Settings that skip nothing change nothing: every method on every class of the zoo."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError
from diffcache.attach.anatomy import Anatomy, anatomy_of
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method, method_class
from diffcache.features.base import Method
from diffcache.features.ertacache import READINGS
from diffcache.features.interval import Interval
from diffcache.features.serialize import to_plain
from diffcache.features.tables import Tables
from diffcache.registry import rows_of
from diffcache.step import Site
from tests.internals import reuse_in
from tests.near_zero import SETTINGS, near_zero
from tests.zoo.case import Case, output_tensors
from tests.zoo.catalog import cases
from tests.zoo_runs import inputs, steps

TABLE_STEPS = 2  # the first learns the wiring, from the second on a step may be skipped
ALWAYS = 20.0  # a router's logit: the sigmoid is 1 in float32


def off_method(name: str, model: nn.Module, anatomy: Anatomy) -> Method:
    """Return a method that computes everything, with tables that say so where it needs them."""
    if name == "profilingdit":  # all blocks are background, so that every list is tapped
        blocks = tuple(f"{entry.key}.0-{entry.depth - 1}" for entry in anatomy.lists)
        return method_class(name)(background=blocks, every=1, warmup=0)
    tables = _tables(name, anatomy)
    if tables is None:
        return make_method(name, **rows_of("method")[name].off)
    more, tensors, settings = tables
    header = {"method": name, "steps": TABLE_STEPS, **facts_of(model, None), **more}
    return method_class(name)(tables=Tables(header, tensors), **settings)


def _tables(name: str, anatomy: Anatomy) -> tuple[dict[str, Any], ...] | None:
    """Return header, tensors and settings of a method whose tables compute everything."""
    sites = [f"{m.parent}.{m.child}" for m in anatomy.modules_at(Site.MODULE) if m.kind != "empty"] or [
        "nowhere"
    ]  # a model without any has to be refused
    ones, square = torch.ones(TABLE_STEPS), torch.eye(TABLE_STEPS)
    if name == "bac":
        pairs = {f"{table}.{site}": square for table in ("pairs", "shift") for site in sites}
        settings = {"count": TABLE_STEPS, "union": min(2, len(sites))}
        return {"sites": sites, "metric": "cosine"}, pairs, settings
    if name == "harmonica":
        return {"sites": sites}, {"logits": torch.full((TABLE_STEPS, len(sites)), ALWAYS)}, {}
    if name == "fitted-forecast":
        return {"site": "stack"}, {"products": square, "moves": ones}, {"computed": TABLE_STEPS}
    if name == "dpcache":
        errors = torch.zeros((TABLE_STEPS,) * 3)
        return {"site": "stack"}, {"errors": errors}, {"computed": TABLE_STEPS, "warmup": TABLE_STEPS}
    if name == "ertacache":
        maps = {"scale": ones[:, None], "shift": 0 * ones[:, None], "errors": 0 * ones}
        none = torch.zeros(0, dtype=torch.int64)
        factors = dict.fromkeys(READINGS.values(), ones)
        return {"threshold": 0.3}, {"reuse": none, **maps, **factors}, {"time": False}
    if name == "regione":
        settings = {"threshold": 2.0, "decay": -1.0, "warmup": 1, "post": 0, "refresh": ()}
        return {}, {"gamma": ones[1:]}, settings
    if name == "tuned":
        return {"choice": to_plain(Interval(every=1), {}), "front": []}, {}, {}
    return None


Made = tuple[Case, nn.Module, list[list[Tensor]]]

CASES = cases()
STEPS = 3
# Gates are near zero, but for the one that needs the noise levels of a scheduler.
# A mask of steps is for four steps or more, and what it runs else is DBCache.
OFF = sorted(set(rows_of("method")) - set(SETTINGS) - {"step-mask"} | {"seacache"})
# Those of a row tap the same modules and compute the same steps: each model meets one of them in
# its turn, a third of all others, and those that it refuses; all with `python -m tests.test_unchanged`.
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
            methods.assert_computed()
            assert [call.computed for call in handle.last.calls] == [True] * STEPS
            setup = reuse_in(handle).setup
            (layout,) = setup.layouts.values()
            text = {entry.key for entry in setup.anatomy.lists} - set(layout.streams)
            assert text == TEXT.get(case.name, set())


def test_every_method_that_is_off_changes_nothing(made: Made):
    """Bit for bit, with all of it computed; or the model is refused, with the reason."""
    name = made[0].name
    turn = sorted(CASES).index(name)
    alone = sorted(set(OFF).difference(*ALIKE))[turn % 3 :: 3]
    refuse = [method for method, cases in REFUSED.items() if name in cases]
    check_all(sorted({*(row[turn % len(row)] for row in ALIKE), *alone, *refuse}), made)


def check_all(names: list[str], made: Made) -> None:
    case, model, expected = made
    anatomy = anatomy_of(model)
    for name in names:
        refused = REFUSED.get(name, USUAL)
        reason = refused.get("") or refused.get(case.name)
        with pytest.raises(AttachError, match=reason) if reason else nullcontext():
            check_off(off_method(name, model, anatomy), made)
    assert all(map(torch.equal, output_tensors(model(**inputs(case, model, step=0))), expected[0]))


def check_off(method: Method, made: Made) -> None:
    case, model, expected = made
    name = method.name
    tabled = name == "temporal-table"
    with diffcache.wrapped(model, method) as handle, diffcache.branch("the only one"):
        for _ in range(2 if tabled else 1):  # the first run fills tables, the next reads them
            for step in steps(handle, TABLE_STEPS):
                with diffcache.branch("one"):
                    out = output_tensors(model(**inputs(case, model, step=step)))
                assert len(out) == len(expected[step]), name
                assert all(map(torch.equal, out, expected[step])), f"{name}, step {step}"
        calls = handle.last.calls
        assert [call.computed for call in calls] == [True] * TABLE_STEPS, name
        assert tabled or not any(left for c in calls for _, left in c.counts.values()), name


def main() -> None:
    """Check every method on every class, without turns (two minutes)."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name in sorted(CASES):
            check_all(OFF, make(name))
            print(f"{name}: {len(OFF)} methods change nothing, or are refused as listed")


if __name__ == "__main__":
    main()
