from __future__ import annotations

import sys

import pytest
import torch

from diffcache.errors import AttachError
from diffcache.kv.hf.rotary import Layout, rotary_of
from diffcache.kv.rotary import Rotary
from diffcache.kv.rotary_nd import RotaryND

transformers = pytest.importorskip("transformers")

TINY = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SCALED = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def _model(kind, **changes):
    cls = type(transformers.AutoConfig.for_model(kind))
    config = cls(**{**TINY, **changes})
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


def _llama(kind):
    return _model("llama", rope_parameters={"rope_theta": 10000.0, **SCALED[kind]})


def _parts(model, layer=0):
    block = model.layers[layer]
    attention = block.attention if hasattr(block, "attention") else block.self_attn
    return attention, model.rotary_emb


def _keys(attention, size=9, seed=0):
    """Random keys as they are before rotation."""
    random = torch.Generator().manual_seed(seed)
    head = getattr(attention, "head_dim", None) or attention.head_size
    return torch.randn(2, 3, size, head, generator=random)


def _apply(attention, keys, cos, sin):
    """Rotate keys by the model's own function."""
    function = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    part = cos.shape[-1] if type(attention).__name__.startswith(("Phi", "StableLm")) else None
    turned = function(keys[..., :part], keys[..., :part], cos, sin)[1]
    return turned if part is None else torch.cat((turned, keys[..., part:]), dim=-1)


def _laws(rotation, x, pos):
    """The inverse and the shift, in float64."""
    x = x.double()
    back = rotation.unrotate(rotation.rotate(x, pos), pos)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-12)
    moved = rotation.shift(rotation.rotate(x, pos), 13)
    torch.testing.assert_close(moved, rotation.rotate(x, pos + 13), rtol=0, atol=1e-12)


def _equal(model, pos, layer=0, layer_type=None):
    attention, embedding = _parts(model, layer)
    reader = rotary_of(attention, embedding, layer_type)
    keys = _keys(attention, len(pos))
    named = (layer_type,) if reader.prefix else ()
    cos, sin = embedding(keys, pos[None], *named)
    rotation = reader.read()
    theirs = _apply(attention, keys, cos, sin)
    torch.testing.assert_close(rotation.rotate(keys, pos), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.unrotate(theirs, pos), keys, rtol=0, atol=1e-6)
    _laws(rotation, keys, pos)
    return reader, rotation


NEAR = torch.tensor([0, 1, 2, 3, 7, 11, 12, 13, 31])
FAR = NEAR + 200


@pytest.mark.parametrize("pos", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("kind", SCALED)
def test_llama_of_every_kind(kind, pos):
    reader, rotation = _equal(_llama(kind), pos)
    assert isinstance(rotation, Rotary)
    assert reader.varies == rotation.varies == (kind in ("dynamic", "longrope"))
    assert (rotation.scale == 1.0) == (kind not in ("yarn", "longrope"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_vary_are_those_of_the_last_forward(kind):
    attention, embedding = _parts(_llama(kind))
    reader = rotary_of(attention, embedding)
    x = torch.zeros(1, 1, 64)
    embedding(x, NEAR[None])
    near = reader.read()
    kept = near.inv_freq.clone()
    embedding(x, FAR[None])
    far = reader.read()
    assert not torch.allclose(near.inv_freq, far.inv_freq)
    assert torch.equal(near.inv_freq, kept)


@pytest.mark.parametrize("kind", SCALED)
def test_finding_out_leaves_the_embedding_as_it_was(kind):
    attention, embedding = _parts(_llama(kind))
    embedding(torch.zeros(1, 1, 64), FAR[None])
    before = {name: value.clone() for name, value in embedding.named_buffers()}
    length = embedding.max_seq_len_cached
    rotary_of(attention, embedding)
    after = dict(embedding.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert embedding.max_seq_len_cached == length


def test_gemma3_has_a_base_for_each_kind_of_layer():
    model = _model("gemma3_text", head_dim=16, layer_types=["sliding_attention", "full_attention"])
    local = _equal(model, NEAR, 0, "sliding_attention")[1]
    whole = _equal(model, NEAR, 1, "full_attention")[1]
    assert local.inv_freq[1] > whole.inv_freq[1]
    with pytest.raises(AttachError, match=r"layer_type is None, give one of \['full_attention'"):
        rotary_of(*_parts(model))


@pytest.mark.parametrize(
    ("kind", "changes", "channels", "layout"),
    [
        ("gpt_neox", {}, 4, Layout()),
        ("phi", {}, 8, Layout()),
        ("stablelm", {}, 4, Layout()),
        ("glm", {"head_dim": 16}, 8, Layout(interleaved=True)),
        ("glm4", {"head_dim": 16}, 8, Layout(interleaved=True)),
        ("cohere", {}, 16, Layout(interleaved=True)),
        ("nanochat", {}, 16, Layout(sign=-1)),
        ("qwen3", {"head_dim": 16}, 16, Layout()),
    ],
)
def test_layouts(kind, changes, channels, layout):
    reader, rotation = _equal(_model(kind, **changes), NEAR)
    assert reader.layout == layout
    assert rotation.channels == channels


def test_a_layer_without_positions_turns_nothing():
    model = _model("smollm3", no_rope_layers=[1, 0])
    assert rotary_of(*_parts(model, 0)).layout == Layout()
    reader = rotary_of(*_parts(model, 1))
    assert not reader.layout.turns
    keys = _keys(_parts(model)[0])
    assert torch.equal(reader.read().rotate(keys, NEAR), keys)


def _qwen(kind, section):
    changes = dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": section},
        head_dim=16,
    )
    text = type(transformers.AutoConfig.for_model(kind))
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(text(**{**TINY, **changes})).eval()


@pytest.mark.parametrize(("kind", "alternate"), [("qwen2_vl_text", False), ("qwen3_vl_text", True)])
def test_multimodal_rotary(kind, alternate):
    model = _qwen(kind, [2, 3, 3])
    attention, embedding = _parts(model)
    reader = rotary_of(attention, embedding)
    rotation = reader.read()
    assert isinstance(rotation, RotaryND)
    want = RotaryND.mrope(embedding.inv_freq, (2, 3, 3), alternate=alternate)
    assert (rotation.axes, rotation.count) == (want.axes, 3)
    keys = _keys(attention)
    pos = torch.stack((NEAR, NEAR.flip(0), NEAR // 3))
    cos, sin = embedding(keys, pos[:, None])
    theirs = _apply(attention, keys, cos, sin)
    torch.testing.assert_close(rotation.rotate(keys, pos.T), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.unrotate(theirs, pos.T), keys, rtol=0, atol=1e-6)
    later = pos + torch.tensor([[5], [0], [0]])
    cos, sin = embedding(keys, later[:, None])
    moved = rotation.shift(theirs, (5, 0, 0))
    torch.testing.assert_close(moved, _apply(attention, keys, cos, sin), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layers_in_other_dtypes(dtype):
    for kind in ("llama", "cohere", "gpt_neox"):
        whole = rotary_of(*_parts(_model(kind)))
        other = rotary_of(*_parts(_model(kind).to(dtype)))
        assert other.layout == whole.layout


def test_keys_of_bfloat16_models_come_back_within_rounding():
    """The model rounds cos, sin and products; turning back in float32 adds nothing to that."""
    attention, embedding = _parts(_llama("default"))
    rotation = rotary_of(attention, embedding).read()
    keys = _keys(attention).bfloat16()
    cos, sin = embedding(keys, FAR[None])
    back = rotation.unrotate(_apply(attention, keys, cos, sin), FAR)
    assert (back.float() - keys.float()).norm() / keys.float().norm() < 4e-3


class TestRefusals:
    def test_latents(self):
        model = _model(
            "deepseek_v3",
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            moe_intermediate_size=16,
            first_k_dense_replace=2,
        )
        with pytest.raises(AttachError, match="values turn too, as where a cache holds latents"):
            rotary_of(*_parts(model))

    def test_an_unknown_layout(self):
        attention, embedding = _parts(_llama("default"))
        module = sys.modules[type(attention).__module__]

        def swapped(q, k, cos, sin, **kwargs):
            order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
            turned = original(q[..., order], k[..., order], cos, sin)
            return tuple(tensor[..., order.argsort()] for tensor in turned)

        original = module.apply_rotary_pos_emb
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "apply_rotary_pos_emb", swapped)
            with pytest.raises(AttachError, match="turn neither in halves nor in adjacent pairs"):
                rotary_of(attention, embedding)

    def test_other_frequencies_than_it_says(self):
        attention, embedding = _parts(_llama("default"))
        wrong = _parts(_model("llama", rope_parameters={"rope_theta": 100.0}))[1]
        wrong.forward = embedding.forward
        with pytest.raises(AttachError, match="LlamaAttention turns keys: its keys of 16 channels"):
            rotary_of(attention, wrong)

    def test_another_scale_than_it_says(self):
        attention, embedding = _parts(_llama("yarn"))
        forward = type(embedding).forward
        embedding.forward = lambda *a: tuple(2 * t for t in forward(embedding, *a))
        with pytest.raises(AttachError, match="cos at position 0 is"):
            rotary_of(attention, embedding)

    def test_halves_of_a_pair_along_different_axes(self):
        model = _qwen("hunyuan_vl_text", [2, 2, 2, 2])
        with pytest.raises(AttachError, match="do not each turn along one of 4 axes"):
            rotary_of(*_parts(model))

    def test_positions_that_end(self):
        attention, embedding = _parts(_llama("default"))
        forward = type(embedding).forward
        embedding.forward = lambda x, ids: forward(embedding, x, ids.clamp(max=127))
        with pytest.raises(AttachError, match="turn otherwise at positions above"):
            rotary_of(attention, embedding)

    def test_modules_of_another_form(self):
        attention, embedding = _parts(_llama("default"))
        with pytest.raises(AttachError, match="it has no inv_freq to read"):
            rotary_of(attention, torch.nn.Identity())
        with pytest.raises(AttachError, match="needs config.hidden_size and a forward"):
            rotary_of(torch.nn.Linear(2, 2), embedding)
        with pytest.raises(AttachError, match="meta device"):
            rotary_of(attention, _parts(_llama("default"))[1].to("meta"))
        other = _parts(_model("llama", hidden_size=32, head_dim=8))[0]
        with pytest.raises(AttachError, match="could not be run by itself"):
            rotary_of(other, embedding)
