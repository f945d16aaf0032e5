"""The diffusion policy: published names, its pipeline, the simulated task, the shipped model."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import diffcache
from diffcache import FirstBlock, Interval, TaylorSeer
from diffcache.errors import AttachError
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Every, Table
from diffcache.pipelines.policy import DiffusionPolicyPipeline, load_policy, rollout, scheduler
from diffcache.pipelines.policy_transformer import TransformerForDiffusion
from diffcache.pipelines.small import demonstrations, reach

SIZES = dict(input_dim=3, output_dim=3, horizon=5, n_obs_steps=2, cond_dim=4, n_layer=2, n_head=2, n_emb=16)


class Published(nn.Module):
    """The published architecture, put together from torch's own layers."""

    def __init__(self, causal: bool, cond_layers: int) -> None:
        super().__init__()
        options = dict(d_model=16, nhead=2, dim_feedforward=64, activation="gelu", batch_first=True, norm_first=True)
        self._dummy_variable = nn.Parameter()
        self.input_emb = nn.Linear(3, 16)
        self.pos_emb = nn.Parameter(torch.randn(1, 5, 16))
        self.cond_obs_emb = nn.Linear(4, 16)
        self.cond_pos_emb = nn.Parameter(torch.randn(1, 3, 16))
        self.encoder = (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), cond_layers)
            if cond_layers
            else nn.Sequential(nn.Linear(16, 64), nn.Mish(), nn.Linear(64, 16))
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2)
        self.ln_f = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        if causal:
            self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
            # the timestep, then one observation more with every action
            self.register_buffer("memory_mask", torch.full((5, 3), -math.inf).triu(2))
        for parameter in self.parameters():
            if parameter.numel():
                nn.init.normal_(parameter, std=0.3)

    def forward(self, sample, timestep, cond):
        angles = timestep[:, None] * torch.exp(-math.log(10_000) * torch.arange(8) / 7)
        time = torch.cat((angles.sin(), angles.cos()), 1)[:, None]
        memory = self.encoder(torch.cat((time, self.cond_obs_emb(cond)), 1) + self.cond_pos_emb)
        tokens = self.input_emb(sample) + self.pos_emb
        masks = getattr(self, "mask", None), getattr(self, "memory_mask", None)
        return self.head(self.ln_f(self.decoder(tokens, memory, *masks)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cond_layers", [0, 2])
def test_published_weights_load_by_name(causal, cond_layers):

    published = Published(causal, cond_layers).eval()
    model = TransformerForDiffusion(**SIZES, causal_attn=causal, n_cond_layers=cond_layers).eval()
    model.load_state_dict(published.state_dict(), strict=True)
    assert set(model.state_dict()) == set(published.state_dict()) - {"_dummy_variable"}
    sample, cond = torch.randn(6, 5, 3), torch.randn(6, 2, 4)
    times = torch.tensor([0, 1, 17, 50, 98, 99])
    with torch.no_grad():
        expected = published(sample, times, cond)
        torch.testing.assert_close(model(sample, times, cond), expected, atol=2e-5, rtol=1e-4)
        one = model(sample[3:4], torch.tensor(50), cond[3:4])
        torch.testing.assert_close(one, expected[3:4], atol=2e-5, rtol=1e-4)


def denoise(model, steps=12):
    """A chunk from a loop of one's own, `[6, 5, 3]`."""
    noise = torch.Generator().manual_seed(0)
    sample = torch.randn(6, 5, 3, generator=noise)
    cond = torch.randn(6, 2, 4, generator=noise)
    with torch.no_grad():
        for step in range(steps - 1, -1, -1):
            times = torch.full((6,), 8 * step)
            sample = sample - 0.05 * model(sample, timestep=times, cond=cond)
    return sample


TABLE = Table({"decoder.layers.0.self_attn": [0, 4, 8], "decoder.layers.1.linear2": [0, 6]})
CACHED = [
    (Interval(every=4, site="stack"), 0),
    (Interval(every=4, site="stack"), 2),
    (TaylorSeer(every=4, warmup=1, site="block"), 2),
    (TaylorSeer(every=4, warmup=1, site="module"), 0),
    (TaylorSeer(every=4, warmup=1, site="attention"), 0),
    (Combine(TABLE, site="module"), 0),
    (FirstBlock(1.0), 0),
]


@pytest.mark.parametrize(("method", "cond_layers"), CACHED, ids=str)
def test_the_published_architecture_is_cached_as_it_is(method, cond_layers):
    """Torch's own layers, against the same weights in layers that were written to be cached."""
    torch.manual_seed(0)
    published = Published(True, cond_layers).eval()
    model = TransformerForDiffusion(**SIZES, causal_attn=True, n_cond_layers=cond_layers).eval()
    model.load_state_dict(published.state_dict(), strict=True)
    plain, counts, made = denoise(published), [], []
    for wrapped in (published, model):
        with diffcache.wrapped(wrapped, method) as handle:
            made.append(denoise(wrapped))
            counts.append((handle.last.computed, handle.last.skipped))
    assert counts[0] == counts[1] and counts[0][1] > 0
    torch.testing.assert_close(made[0], made[1], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(made[0], plain, atol=1e-4)
    assert torch.equal(denoise(published), plain)


class Encoded(nn.Module):
    """A denoiser of torch's encoder layers, which run fused where no gradients are wanted."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)

    def forward(self, sample, timestep, padding=None):
        return self.encoder(sample + timestep / 1000, src_key_padding_mask=padding)


def test_encoder_layers_are_cached_whole_and_show_no_modules():
    model = Encoded(nested=True).eval()
    tokens, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True

    def draw(**more):
        with torch.no_grad():
            return torch.stack([model(tokens, torch.tensor(t), **more) for t in range(8, 0, -1)])

    plain = draw()
    with diffcache.wrapped(model, Interval(every=1)):
        assert torch.equal(draw(), plain)
    with diffcache.wrapped(model, Interval(every=4)) as handle:
        cached = draw()
        assert (handle.last.computed, handle.last.skipped) == (6, 18)
    assert torch.equal(cached[[0, 4]], plain[[0, 4]])
    with pytest.raises(AttachError, match="layers of nn.TransformerEncoder run as one fused"):
        diffcache.wrap(model, Interval(every=4, site="module"))
    with diffcache.wrapped(model, Interval(every=4)), pytest.raises(AttachError, match="nested"):
        draw(padding=padding)
    model.encoder.use_nested_tensor = False
    with diffcache.wrapped(model, Interval(every=4)):
        cached = draw(padding=padding)
    assert torch.equal(cached[[0, 4]], draw(padding=padding)[[0, 4]])


def test_a_whole_published_policy_loads():
    """Sizes are read off the weights; observations and actions are scaled as it was trained."""
    torch.manual_seed(0)
    published = Published(True, 2)
    state = {f"model.{name}": value for name, value in published.state_dict().items()}
    norms = {"obs": (4, 0.5, 0.1), "action": (3, 4.0, -0.2)}
    for field, (size, scale, offset) in norms.items():
        state[f"normalizer.params_dict.{field}.scale"] = torch.full((size,), scale)
        state[f"normalizer.params_dict.{field}.offset"] = torch.full((size,), offset)
    state["_dummy_variable"] = torch.empty(0)
    pipe = load_policy(state, n_head=2, n_action_steps=3)
    pipe.set_progress_bar_config(disable=True)
    config = pipe.transformer.config
    assert {name: config[name] for name in SIZES} == SIZES
    assert config.causal_attn and config.n_cond_layers == 2
    seen = torch.randn(2, 2, 4)
    made = pipe(seen, 4, torch.Generator().manual_seed(0))
    pipe.register_to_config(observation=[[1.0], [0.0]], action=[[1.0], [0.0]])
    plain = pipe(seen * 0.5 + 0.1, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(made.chunk, (plain.chunk + 0.2) / 4)
    assert torch.equal(made.actions, made.chunk[:, 1:4])


def small_policy():
    torch.manual_seed(0)
    model = TransformerForDiffusion(**SIZES, causal_attn=True).eval()
    pipe = DiffusionPolicyPipeline(model, scheduler(), 2, action=[[2.0], [0.5]])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_saved_and_loaded_it_is_the_same(tmp_path):

    pipe, seen = small_policy(), torch.randn(3, 2, 4)
    pipe.save_pretrained(tmp_path)
    again = DiffusionPolicyPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert dict(again.config)["action"] == [[2.0], [0.5]] and again.config.n_action_steps == 2
    one, other = (p(seen, 5, torch.Generator().manual_seed(0)) for p in (pipe, again))
    assert torch.equal(one.chunk, other.chunk)
    assert one.chunk.shape == (3, 5, 3) and one.actions.shape == (3, 2, 3)
    listed = pipe(seen, 5, torch.Generator().manual_seed(0), return_dict=False)
    assert torch.equal(listed[0], one.actions) and torch.equal(listed[1], one.chunk)


def test_noise_of_its_own_for_each_sample():

    pipe, seen = small_policy(), torch.randn(3, 2, 4)

    def noises(chosen):
        return [torch.Generator().manual_seed(n) for n in chosen]

    whole = pipe(seen, 4, noises([0, 1, 2])).chunk
    part = pipe(seen[1:], 4, noises([1, 2])).chunk
    torch.testing.assert_close(whole[1:], part)
    alone = pipe(seen[2], 4, noises([2])).chunk
    torch.testing.assert_close(whole[2:], alone)


@pytest.mark.parametrize("site", ["module", "attention", "feed-forward", "block", "stack"])
def test_every_site_can_be_cached(site):

    pipe, seen = small_policy(), torch.randn(3, 2, 4)
    plain = pipe(seen, 6, torch.Generator().manual_seed(0)).chunk
    ran = {}
    for name, module in pipe.transformer.named_modules():
        if name.startswith("decoder.layers.1.") and name.count(".") == 3:
            module.register_forward_hook(lambda *_, name=name[17:]: ran.__setitem__(name, ran.get(name, 0) + 1))
    with diffcache.wrapped(pipe, Combine(Every(3), site=site)):
        cached = pipe(seen, 6, torch.Generator().manual_seed(0)).chunk
    assert not torch.equal(cached, plain)
    attention, linears = {"self_attn", "multihead_attn"}, {"linear1", "linear2"}
    skipped = {"attention": attention, "feed-forward": linears}.get(site, attention | linears)
    assert {n: ran[n] for n in attention | linears} == {n: 2 if n in skipped else 6 for n in attention | linears}
    with diffcache.wrapped(pipe, Combine(Every(1), site=site)), pytest.warns(match="skipped"):
        assert torch.equal(pipe(seen, 6, torch.Generator().manual_seed(0)).chunk, plain)
    assert torch.equal(pipe(seen, 6, torch.Generator().manual_seed(0)).chunk, plain)


def test_shipped_policy_reaches_goals():
    """A few held-out episodes with a fifth of the steps; measured far above this threshold."""
    pipe = reach.load()
    episode = reach.Reach(reach.draw_scenes(24, reach.HELD_OUT + 77))
    rollout(pipe, episode, num_inference_steps=20)
    assert episode.succeeded.float().mean() > 0.5


def test_shipped_files():
    files = [path for path in reach.DIRECTORY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6e6
    weights = load_file(next(reach.DIRECTORY.glob("transformer/*.safetensors")))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert set(weights) == set(reach.build().transformer.state_dict())
    assert all(torch.isfinite(t).all() for name, t in weights.items() if "mask" not in name)


def scene(start, goal, center=(9.0, 9.0), radius=0.2):
    centers = torch.tensor([[center, (9.0, -9.0), (-9.0, 9.0)]])
    radii = torch.tensor([[radius, 0.1, 0.1]])
    return reach.Scenes(torch.tensor([start]), torch.tensor([goal]), centers, radii)


def test_an_episode_by_hand():
    """Straight ahead reaches a free goal; long moves are shortened; a touch ends the episode."""
    free = reach.Reach(scene((0.0, 0.0), (0.4, 0.0)))
    free.act(torch.tensor([[[5.0, 0.0], [0.1, 0.0], [0.1, 0.0]]]))
    assert free.position[0].tolist() == pytest.approx([0.3, 0.0]) and free.running.all()
    free.act(torch.tensor([[[0.06, 0.0], [0.1, 0.1]]]))
    assert free.succeeded.all() and not free.running.any()
    assert free.position[0].tolist() == pytest.approx([0.36, 0.0])  # nothing moves afterwards

    hit = reach.Reach(scene((0.0, 0.0), (0.0, 1.0), (0.0, 0.25), 0.2))
    hit.act(torch.tensor([[[0.1, 0.0]] * 10]))
    assert hit.touched.all() and not hit.succeeded.any()
    late = reach.Reach(scene((0.0, 0.0), (1.0, 0.0)))
    late.act(torch.full((1, reach.TIME, 2), math.nan))  # what is no move is none
    assert not late.running.any() and not late.succeeded.any() and not late.touched.any()
    assert late.position.tolist() == [[0, 0]]


def test_demonstrations_succeed_on_both_sides():
    """The script reaches every goal; where the way is blocked in the middle it goes both ways."""
    scenes = reach.draw_scenes(200, 1)
    demonstrator = demonstrations.Demonstrator(torch.Generator().manual_seed(0))
    episode = reach.Reach(scenes)
    while episode.running.any():
        episode.act(demonstrator.steer(scenes, episode.position)[:, None])
    assert episode.succeeded.float().mean() > 0.98

    middle = scene((0.0, -0.9), (0.0, 0.9), (0.0, 0.0), 0.25)
    many = reach.Scenes(
        *(getattr(middle, f).expand(400, *getattr(middle, f).shape[1:]) for f in ("start", "goal", "centers", "radii"))
    )
    demonstrator = demonstrations.Demonstrator(torch.Generator().manual_seed(0))
    left = (demonstrator.steer(many, many.start)[:, 1] > 0).float().mean()
    assert 0.4 < left < 0.6
    assert (demonstrator.sides.abs() == 1).all()
