"""Position maps, rotations of one axis and of several, and those of models of transformers."""

import math
import sys

import pytest
import torch
import transformers
from diffusers.models.transformers import transformer_wan as wan

from diffcache.kv.hf.rotary import PairLayout, rotary_of
from diffcache.kv.rotary import Rotary
from diffcache.kv.rotary_nd import RotaryND

SHAPE = (2, 3, 7, 32)  # B, H, S, D
POS = torch.tensor([0, 1, 5, 17, 40, 63, 90])


def _x(dtype=torch.float64, shape=SHAPE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _matrix(rotation, pos, size):
    """The rotation as an explicit matrix of 2x2 blocks, one channel and position at a time."""
    out = torch.eye(size, dtype=torch.float64)
    pairs = rotation.inv_freq.shape[0]
    axes = getattr(rotation, "axes", (None,) * pairs)
    for i, (freq, axis) in enumerate(zip(rotation.inv_freq.double().tolist(), axes, strict=True)):
        a = rotation.start + (2 * i if rotation.interleaved else i)
        b = a + (1 if rotation.interleaved else pairs)
        angle = freq * float(pos if axis is None else pos[axis])
        cos, sin = math.cos(angle) * rotation.scale, math.sin(angle) * rotation.scale
        out[a, a], out[a, b], out[b, a], out[b, b] = cos, -sin, sin, cos
    return out


ONE = [
    Rotary.default(10000.0, 32),
    Rotary.default(500.0, 32, interleaved=True),
    Rotary.default(10000.0, 12),
    Rotary(Rotary.default(100.0, 8).inv_freq, 1.3, True, 24),
    Rotary(-Rotary.default(100.0, 16).inv_freq.double(), 0.7, start=5),
]
MANY = [
    RotaryND.sections((12, 10, 10)),
    RotaryND.sections((8, 8), theta=(10000.0, 100.0)),
    RotaryND.mrope(Rotary.default(10000.0, 32).inv_freq, (4, 6, 6)),
    RotaryND.mrope(Rotary.default(10000.0, 32).inv_freq, (6, 5, 5), scale=1.2, alternate=True),
]


def _pos(rotation, seed=1):
    if not isinstance(rotation, RotaryND):
        return POS
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (SHAPE[2], rotation.count), generator=random)


EACH = pytest.mark.parametrize("rotation", ONE + MANY)


@EACH
def test_each_pair_turns_by_its_own_block_and_back(rotation):
    x, pos = _x(), _pos(rotation)
    blocks = torch.stack([_matrix(rotation, p, SHAPE[-1]) for p in pos])
    want = torch.einsum("sij,bhsj->bhsi", blocks, x)
    found = rotation.rotate(x, pos)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.unrotate(found, pos), x, rtol=0, atol=1e-13)
    half = rotation.shift(rotation.rotate(x, pos - 0.5), torch.full_like(pos[:1], 1) * 0.5)
    torch.testing.assert_close(half, found, rtol=0, atol=1e-12)
    assert not torch.allclose(found, x)


@EACH
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_shift_moves_rotated_keys_and_passes_gradients(rotation, dtype, close):
    x, pos = _x(dtype).requires_grad_(), _pos(rotation)
    delta = _pos(rotation, seed=2) - 30
    moved = rotation.shift(rotation.rotate(x, pos), delta)
    want = rotation.rotate(x, pos + delta)
    assert moved.dtype is want.dtype is dtype
    assert (moved.double() - want.double()).norm() / want.double().norm() < close
    moved.float().sum().backward()
    assert torch.isfinite(x.grad).all()


@EACH
def test_positions_by_row_and_head_and_one_for_all(rotation):
    x, pos = _x(), _pos(rotation)
    rows = torch.stack((pos, pos.flip(0)))
    each = torch.stack([rotation.rotate(x, p)[b] for b, p in enumerate(rows)])
    assert torch.equal(rotation.rotate(x, rows[:, None]), each)
    assert torch.equal(rotation.rotate(x, rows[:, None].expand(2, 3, *pos.shape)), each)
    whole = rotation.rotate(x, pos[3].expand(SHAPE[2], *pos[3].shape))
    assert torch.equal(rotation.rotate(x, pos[3]), whole)
    assert torch.equal(rotation.rotate(x, pos[3].tolist()), whole)


def test_no_frequencies_is_no_rotation():
    x = _x(torch.bfloat16)
    none = Rotary.default(10000.0, 0)
    assert torch.equal(none.rotate(x, POS), x)
    assert torch.equal(none.shift(x, 4), x)


def _wans(x, frames, height, width):
    """Rotate by the function inside diffusers' attention processor, with its tables."""
    rope = wan.WanRotaryPosEmbed(x.shape[-1], (1, 1, 1), 1024)
    tables = rope(torch.empty(1, 1, frames, height, width))
    seen, heads, size = [], x.shape[1], x.shape[3]
    attention = wan.WanAttention(heads * size, heads, size, processor=wan.WanAttnProcessor())
    for layer in (attention.to_q, attention.to_k, attention.to_v):
        torch.nn.init.eye_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    attention.norm_q, attention.norm_k = torch.nn.Identity(), torch.nn.Identity()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(wan, "dispatch_attention_fn", lambda query, key, value, **_: seen.append(key) or value)
        attention(x.transpose(1, 2).flatten(2), rotary_emb=tables)
    return seen[0].transpose(1, 2)


@pytest.mark.parametrize(("size", "grid"), [(128, (5, 3, 4)), (32, (5, 3, 4)), (128, (900, 1, 1))])
def test_wans_rotation_is_diffusers(size, grid):
    axis = torch.cartesian_prod(*(torch.arange(n) for n in grid))[-64:]
    x = _x(torch.float32, (1, 2, math.prod(grid), size))
    side = 2 * (size // 6)
    ours = RotaryND.sections((size - 2 * side, side, side)).rotate(x[:, :, -len(axis) :], axis)
    torch.testing.assert_close(ours, _wans(x, *grid)[:, :, -len(axis) :], rtol=0, atol=2e-6)
    assert size != 128 or (size - 2 * side, side, side) == (44, 42, 42)


TINY = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.5 * i for i in range(8)]
SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": dict(factor=4.0, short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=32),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
}


def _model(kind, **changes):
    cls = type(transformers.AutoConfig.for_model(kind))
    config = cls(**{**TINY, **changes})
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


def _llama(kind):
    return _model("llama", rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **SCALED[kind]})


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


@pytest.mark.parametrize(
    ("kind", "changes", "channels", "layout"),
    [
        ("gpt_neox", {}, 4, PairLayout()),
        ("phi", {}, 8, PairLayout()),
        ("stablelm", {}, 4, PairLayout()),
        ("glm", {"head_dim": 16}, 8, PairLayout(interleaved=True)),
        ("glm4", {"head_dim": 16}, 8, PairLayout(interleaved=True)),
        ("cohere", {}, 16, PairLayout(interleaved=True)),
        ("nanochat", {}, 16, PairLayout(sign=-1)),
        ("qwen3", {"head_dim": 16}, 16, PairLayout()),
    ],
)
def test_layouts(kind, changes, channels, layout):
    reader, rotation = _equal(_model(kind, **changes), NEAR)
    assert reader.layout == layout
    assert rotation.channels == channels


def test_a_layer_without_positions_turns_nothing():
    model = _model("smollm3", no_rope_layers=[1, 0])
    assert rotary_of(*_parts(model, 0)).layout == PairLayout()
    reader = rotary_of(*_parts(model, 1))
    assert not reader.layout.turns
    keys = _keys(_parts(model)[0])
    assert torch.equal(reader.read().rotate(keys, NEAR), keys)


@pytest.mark.parametrize(("kind", "alternate"), [("qwen2_vl_text", False), ("qwen3_vl_text", True)])
def test_multimodal_rotary(kind, alternate):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    model = _model(kind, rope_parameters=rope, head_dim=16)
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
