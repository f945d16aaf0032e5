"""What can be said of the node without ComfyUI: its widgets, its checks, what the registry reads."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache.errors import AttachError
from diffcache.presets.choose import presets
from tests.comfyui.node_folder import FOLDER, load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NODES = load().NODE_CLASS_MAPPINGS
NODE, REPORT = NODES["DiffcacheModel"], NODES["DiffcacheReport"]
CODE = sys.modules[NODE.__module__]
PLAIN = {"method": "interval", "settings": "", "preset": "auto", "hold": "as computed"}


def network(name: str, **sizes: Any) -> nn.Module:
    """Return a module that is called as a network of ComfyUI, with its sizes."""
    made = type(name, (nn.Module,), {})()
    for key, value in sizes.items():
        setattr(made, key, value)
    return made


def flux(depth: int = 19, guidance: bool = True) -> nn.Module:
    params = SimpleNamespace(depth=depth, depth_single_blocks=38, guidance_embed=guidance)
    return network("Flux", params=params, in_channels=64)


def wan(layers: int, heads: int, channels: int = 16, images: bool = False) -> nn.Module:
    img_emb = nn.Identity() if images else None
    return network("WanModel", num_layers=layers, num_heads=heads, in_dim=channels, img_emb=img_emb)


def test_widgets_offer_every_preset_and_have_defaults() -> None:
    widgets = NODE.INPUT_TYPES()["required"]
    names = {one.name for levels in presets().values() for one in levels.values()}
    assert set(widgets["preset"][0]) == names | {"auto"}
    for kind, options in list(widgets.values())[1:]:
        assert kind == "STRING" or options["default"] in kind
    assert {"preset", "taylorseer", "first-block", "magcache"} <= set(widgets["method"][0])
    assert {"ertacache", "tuned", "regione"}.isdisjoint(widgets["method"][0])
    assert NODE.RETURN_TYPES == ("MODEL",)
    assert REPORT.RETURN_TYPES == ("LATENT", "STRING")


@pytest.mark.parametrize(
    ("method", "settings", "preset", "words"),
    [
        ("interval", "every=3", "auto", ""),
        ("taylorseer", "every=3,\n warmup=2,", "auto", ""),
        ("preset", "", "flux.1-dev/fast", ""),
        ("preset", "threshold=0.2", "auto", ""),
        ("interval", "threshold=3", "auto", "threshold"),
        ("interval", "every=0", "auto", "every=0"),
        ("interval", "every", "auto", "every"),
        ("interval", "", "flux.1-dev/fast", "choose one of them"),
        ("magcache", "tables=/etc/passwd", "auto", "files are not read"),
    ],
)
def test_bad_widgets_are_named_before_anything_runs(method: str, settings: str, preset: str, words: str) -> None:
    said = NODE.VALIDATE_INPUTS(method, settings, preset)
    assert said is True if not words else words in said


def test_a_preset_is_chosen_by_the_sizes_of_comfyui_s_model() -> None:
    method, why = CODE.method_for(wan(30, 12), "preset", "", "auto", "as computed")
    assert why.startswith("preset: wan2.1-t2v-1.3b/")
    assert method.model == ""  # the check is done, and the class is not that of diffusers
    method, why = CODE.method_for(flux(), "preset", "threshold=0.1", "flux.1-dev/fast", "bf16")
    assert method.method.threshold == 0.1
    assert len(method.method.ratios) == 28
    assert "flux.1-dev/fast" in why


def test_what_is_not_told_falls_back_and_says_so() -> None:
    for model, words in [
        (flux(), "it may be flux.1-dev or flux.1-kontext-dev"),  # one class, one size
        (flux(depth=3), "none of the models"),
        (flux(guidance=False), "distilled to 4 steps"),
        (wan(40, 40), "it may be"),  # 2.1, or an expert of 2.2
        (network("QwenImageTransformer2DModel"), "none of the models"),
    ]:
        method, why = CODE.method_for(model, "preset", "", "auto", "as computed")
        assert type(method).__name__ == "TaylorSeer"
        assert words in why


class Layer(nn.Linear):
    pass


class UNetModel(nn.Module):
    """A network whose function goes through the layers of its blocks, as ComfyUI's does."""

    def __init__(self) -> None:
        super().__init__()
        made = [[Layer(2, 2)], [Layer(2, 2), nn.SiLU()], [Layer(2, 2)], [Layer(4, 2)], [Layer(4, 2)]]
        a, b, middle, c, d = (type("Block", (nn.Sequential,), {})(*layers) for layers in made)
        self.input_blocks, self.middle_block = nn.ModuleList([a, b]), middle
        self.output_blocks = nn.ModuleList([c, d])
        for block in (a, b, middle, c, d):
            block[0].register_forward_hook(lambda *given: RAN.append(given[0]))

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Go down, through the middle and up."""
        held, h = [], x
        for block in self.input_blocks:
            h = forward_timestep_embed(block, h)
            held.append(h)
        h = forward_timestep_embed(self.middle_block, h)
        for block in self.output_blocks:
            h = forward_timestep_embed(block, torch.cat([h, held.pop()], 1))
        return h


RAN: list[nn.Module] = []


def forward_timestep_embed(block: Any, h: torch.Tensor) -> torch.Tensor:
    for layer in block:
        h = layer(h)
    return h


@torch.no_grad()
@pytest.mark.parametrize(("site", "kept"), [("stack", 0), ("deep", 2)])
def test_the_blocks_of_comfyui_s_unet_are_skipped(site: str, kept: int) -> None:
    torch.manual_seed(0)
    unet, through = UNetModel(), forward_timestep_embed
    plain = unet(torch.ones(1, 2), torch.ones(1))
    out, ran = [], []
    with diffcache.wrapped(unet, diffcache.Interval(2, site=site)), CODE.called_blocks(unet), diffcache.run(unet):
        for step in range(4):
            RAN.clear()
            out.append(unet(torch.ones(1, 2), torch.ones(1) - step / 4))
            ran.append(len(RAN))
    assert ran[1:] == [kept, 5, kept]
    torch.testing.assert_close(torch.stack(out), plain.expand(4, 1, 2))
    assert forward_timestep_embed is through
    with diffcache.wrapped(unet, "interval"), pytest.raises(AttachError, match="goes through the layers of a Block"):
        unet(torch.ones(1, 2), torch.ones(1))


def test_the_registry_finds_what_it_needs() -> None:
    about = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    project, comfy = about["project"], about["tool"]["comfy"]
    assert "comfyui" not in project["name"].lower()  # the registry's own advice
    assert project["license"] == {"text": "Apache-2.0"}
    assert project["dependencies"] == (FOLDER / "requirements.txt").read_text().split("\n")[:-1]
    assert comfy["PublisherId"]
    assert comfy["DisplayName"]
    assert comfy["Icon"].endswith("/pipelines/comfyui/icon.png")
    assert (FOLDER / "icon.png").stat().st_size < 50_000


def test_the_example_connects_what_the_nodes_have() -> None:
    workflow = json.loads((FOLDER / "example_workflows" / "flux_cached.json").read_text())
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for number, source, out, target, into, kind in workflow["links"]:
        assert number in nodes[source]["outputs"][out]["links"]
        assert nodes[target]["inputs"][into]["link"] == number
        assert kind == nodes[source]["outputs"][out]["type"]
        assert nodes[target]["inputs"][into]["type"] in (kind, "*")
    own = [node for node in nodes.values() if node["type"] in NODES]
    assert len(own) == 2
    for node in own:
        required = NODES[node["type"]].INPUT_TYPES()["required"]
        linked = {given["name"] for given in node["inputs"] if given["link"] is not None}
        widgets = [name for name in required if name not in linked]
        values = dict(zip(widgets, node.get("widgets_values", []), strict=True))
        for name, value in values.items():
            assert required[name][0] == "STRING" or value in required[name][0]
        if values:
            assert NODE.VALIDATE_INPUTS(*(values[k] for k in ("method", "settings", "preset"))) is True
