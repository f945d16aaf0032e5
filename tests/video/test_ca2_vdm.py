"""Ca2-VDM: rollouts over its cache against one masked pass, written out here from the weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.pipelines import ca2_vdm
from diffcache.pipelines.ca2_vdm import FactorizedSession, FactorizedTransformer, FactorizedVideo
from diffcache.video import Ca2VDM, FewSteps, Keep
from diffcache.video.ca2_vdm import OnePass
from tests.internals import cut_off

CHANNELS, SIZE, HEADS, WIDTH, TEXT = 3, (4, 6), 2, 16, 8
CHUNK, POLICY = 2, Ca2VDM(queue=6, prefix=3, length=8)
STEPS = FewSteps((1000, 500))
LENGTHS = [1, 2, 2, 1, 2, 2, 2, 2, 2]  # frames of the chunk that is given, and of the others


def made(official: bool = False, dtype: torch.dtype = torch.float32) -> FactorizedTransformer:
    """Return a transformer whose tokens depend on each other strongly."""
    torch.manual_seed(0)
    model = FactorizedTransformer(CHANNELS, (1, 2, 2), HEADS, WIDTH // HEADS, 2, TEXT, official)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frames(count: int, batch: int = 1, seed: int = 1) -> Tensor:
    return drawn(batch, CHANNELS, count, *SIZE, seed=seed)


def text(batch: int = 1, seed: int = 2) -> Tensor:
    return drawn(batch, 5, TEXT, seed=seed)


def opened(
    model: FactorizedTransformer | None = None, sampler: FewSteps = STEPS, **settings: Any
) -> FactorizedSession:
    """Return a session that holds one clean frame."""
    video = FactorizedVideo(model or made(), chunk=CHUNK, sampler=sampler)
    prompt = settings.pop("prompt", text())
    given = settings.pop("given", frames(1, len(prompt)))
    session = video.session(prompt, **{"size": SIZE, "policy": POLICY, **settings})
    session.take(given)
    return session


@dataclass
class ByHand:
    """One pass over all frames there ever were, with masks, from the weights alone."""

    weights: dict[str, Tensor]
    policy: Ca2VDM
    official: bool

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return attention of `[..., n, C]` to `[..., m, C]`, head by head."""
        size = WIDTH // HEADS
        outs = []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            logits = q[..., part] @ k[..., part].transpose(-1, -2) / size**0.5
            if seen is not None:
                logits = logits.masked_fill(~seen, -torch.inf)
            outs.append(logits.softmax(-1) @ v[..., part])
        return torch.cat(outs, -1)

    def qkv(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(f"{name}.qkv", x).split(WIDTH, -1)

    def space(self, name: str, x: Tensor, clean: int, beside: bool) -> Tensor:
        q, k, v = self.qkv(name, x)
        outs = []
        for frame in range(x.shape[1]):
            if frame < clean:
                seen = [frame]
            else:
                seen = [max(clean - back, 0) for back in range(self.policy.prefix, 0, -1)]
                seen += [frame] * beside
            keys, values = (torch.cat([y[:, f] for f in seen], 1) for y in (k, v))
            outs.append(self.attend(q[:, frame], keys, values))
        return self.linear(f"{name}.out", torch.stack(outs, 1))

    def waves(self, at: Tensor, width: int) -> Tensor:
        rate = torch.exp(-torch.arange(0, width, 2).double() / width * torch.tensor(1e4).double().log())
        return torch.cat([f(at.double()[..., None] * rate) for f in (torch.sin, torch.cos)], -1)

    def seen(self, lengths: list[int]) -> Tensor:
        """Return which frames each frame sees in time: the queue of its chunk, and its own chunk."""
        mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
        start = 0
        for count in lengths:
            for frame in range(start, start + count):
                mask[frame, max(start - self.policy.queue, 0) : frame + 1] = True
            start += count
        return mask

    def __call__(self, x: Tensor, time: float, prompt: Tensor, lengths: list[int]) -> Tensor:
        """Return the prediction of the last chunk; all frames before are clean."""
        batch, count = len(x), x.shape[2]
        clean = count - lengths[-1]
        tall, wide = (side // 2 for side in SIZE)
        patches = x.reshape(batch, CHANNELS, count, tall, 2, wide, 2).permute(0, 2, 3, 5, 1, 4, 6)
        h = patches.flatten(4).flatten(2, 3) @ self.weights["patch.weight"].flatten(1).T
        cell = torch.arange(tall * wide)
        spots = [self.waves(at, WIDTH // 2) for at in (cell % wide, cell // wide)]
        h = h + self.weights["patch.bias"] + torch.cat(spots, -1).to(h)
        times = torch.tensor([0.0] * clean + [time] * (count - clean))
        level = self.linear("timestep.0", self.waves(times, 256).to(h))
        level = self.linear("timestep.2", functional.silu(level))
        noise = self.linear("modulation.1", functional.silu(level)).reshape(count, 6, WIDTH)
        told = functional.gelu(self.linear("text.0", prompt.to(h)), approximate="tanh")
        told = self.linear("text.2", told)
        for number in range(2):
            block = f"blocks.{number}"
            parts = (self.weights[f"{block}.table"] + noise)[:, :, None].unbind(1)  # [F, 1, C]
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
            within = functional.layer_norm(h, [WIDTH], eps=1e-6) * (1 + scale) + shift
            if self.official:
                h = h + gate * self.space(f"{block}.space", within, count, False)
                h = h + gate * self.space(f"{block}.prefix", h, clean, False)
            else:
                h = h + gate * self.space(f"{block}.space", within, clean, True)
            sites = h.transpose(1, 2)
            if number == 0:
                rows = torch.arange(count) % self.policy.length
                sites = sites + self.waves(rows, WIDTH).to(h)
            over = self.attend(*self.qkv(f"{block}.time", sites), self.seen(lengths))
            h = h + gate * self.linear(f"{block}.time.out", over).transpose(1, 2)
            k, v = self.linear(f"{block}.text.kv", told)[:, None].split(WIDTH, -1)
            read = self.attend(self.linear(f"{block}.text.q", h), k, v)
            h = h + self.linear(f"{block}.text.out", read)
            inner = functional.layer_norm(h, [WIDTH], eps=1e-6) * (1 + scale_mlp) + shift_mlp
            inner = functional.gelu(self.linear(f"{block}.mlp.0", inner), approximate="tanh")
            h = h + gate_mlp * self.linear(f"{block}.mlp.2", inner)
        shift, scale = (self.weights["table"] + level[:, None])[:, :, None].unbind(1)
        h = functional.layer_norm(h, [WIDTH], eps=1e-6) * (1 + scale) + shift
        h = self.linear("out", h).reshape(batch, count, tall, wide, 2, 2, CHANNELS)
        out = h.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, CHANNELS, count, *SIZE)
        return out[:, :, clean:]


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_rollout_is_the_masked_recompute(
    official: bool, dtype: torch.dtype, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt, counts = made(official, dtype), text(2), []

    def counting(own: Any, before: list[Tensor], beside: bool, real: Any = ca2_vdm.enhanced) -> Any:
        counts.extend(x.shape[1] for x in before)
        return real(own, before, beside)

    monkeypatch.setattr(ca2_vdm, "enhanced", counting)
    session = opened(model, prompt=prompt)
    by_hand = ByHand(dict(model.state_dict()), POLICY, official)
    calls: list[Any] = []
    model.register_forward_hook(lambda _, args, out: calls.append((*args[:2], out)))
    film = frames(1, 2).to(dtype)
    for chunk in range(1, len(LENGTHS)):
        new = session.next(LENGTHS[chunk])
        lengths = LENGTHS[: chunk + 1]
        for noisy, time, out in calls[:-1]:  # the last one is the clean pass
            wanted = by_hand(torch.cat([film, noisy], 2), float(time[0]), prompt, lengths)
            torch.testing.assert_close(out, wanted, atol=close, rtol=close)
        calls.clear()
        film = torch.cat([film, new], 2)
        over_time, over_space = (layer.meta()["pos"][0, 0] for layer in session.store.layers[:2])
        before = sum(lengths[:-1])
        assert over_time.tolist() == list(range(max(before - POLICY.queue, 0), sum(lengths)))
        assert over_space.tolist() == list(range(max(before - POLICY.prefix, 0), sum(lengths)))
    assert set(counts) == {POLICY.prefix}  # from the first chunk on, after a single frame
    assert session.frames == sum(LENGTHS) > POLICY.length + POLICY.queue


@torch.no_grad()
def test_one_pass_is_a_rollout_until_the_queue_is_full_and_not_after() -> None:
    model, film = made(), frames(8)
    times = torch.tensor([300.0])
    for before, equal in ((6, True), (10, False)):
        session = opened(model)
        session.take(frames(before - 1, seed=5))
        held = torch.cat([frames(1), frames(before - 1, seed=5)], 2)[:, :, -POLICY.queue :]
        with session.chunk(CHUNK):
            cached = session._velocity(film[:, :, :CHUNK], 300.0)
        once = OnePass(POLICY, POLICY.queue, before - POLICY.queue)
        whole = model(torch.cat([held, film[:, :, :CHUNK]], 2), times, text(), once)[:, :, -CHUNK:]
        far = float((cached - whole).abs().max())
        assert far < 1e-5 if equal else far > 1e-3  # frames that left live on in those they were seen by


class Told(FewSteps):
    """A sampler that makes the same chunks whatever is predicted."""

    def clean(self, x: Tensor, predicted: Tensor, step: int) -> Tensor:
        return frames(CHUNK, seed=9).expand_as(x)


def kept(session: FactorizedSession) -> list[Tensor]:
    slots = [layer.read() for layer in session.store.layers]
    return [x for each in slots for x in (each.k, each.v)]


def test_bytes_stay_and_a_chunk_that_is_cut_off_leaves_nothing() -> None:
    model, sizes = made(), []
    one, other = opened(model), opened(model)
    for chunk in range(9):
        if chunk in (0, 3, 6):
            with cut_off(model.blocks[1:2], 3):  # in the clean pass, after the first block
                one.next()
        assert torch.equal(one.next(), other.next())  # they take turns, too
        sizes.append((one.store.nbytes, [layer.held for layer in one.store.layers]))
    assert sizes[4:] == sizes[4:5] * 5
    sites = SIZE[0] * SIZE[1] // 4
    assert sizes[-1][1] == [POLICY.queue + CHUNK, POLICY.prefix + CHUNK] * 2
    assert sum(x.numel() for x in kept(one)) == 2 * 2 * sites * WIDTH * (6 + 3 + 2 * CHUNK)


def test_a_batch_is_its_rows_and_guidance_its_branches() -> None:
    model, prompts, against, given = made(), text(2), text(2, 4), frames(1, 2)
    guidance = {"guidance": 3.0, "negative": against}
    whole = opened(model, prompt=prompts, **guidance)
    rows = [
        opened(model, prompt=p[None], guidance=3.0, negative=n[None], given=g[None])
        for p, n, g in zip(prompts, against, given, strict=True)
    ]
    for noise in (frames(CHUNK, 2, seed) for seed in range(4)):
        for each, own in ((whole, noise), *zip(rows, noise.split(1), strict=True)):
            each.noise = lambda _, own=own: own  # type: ignore[method-assign]
        together = whole.next()
        torch.testing.assert_close(together, torch.cat([row.next() for row in rows]), atol=1e-4, rtol=1e-4)
    one, other = (opened(model, Told((1000,)), prompt=each) for each in (prompts, against))
    both = opened(model, Told((1000,)), prompt=prompts, **guidance)
    for session in (one, other, both):
        session.next()
    for parts in zip(kept(one), kept(other), kept(both), strict=True):
        torch.testing.assert_close(torch.cat(parts[:2]), parts[2])  # the guided branch comes first


def test_a_saved_stream_goes_on_to_the_bit_under_its_prompt(tmp_path: Path) -> None:
    model, session = made(), opened()
    [session.next() for _ in range(4)]
    session.save(tmp_path)
    again = FactorizedVideo(model, chunk=CHUNK, sampler=STEPS).restore(tmp_path, POLICY)
    for _ in range(3):
        assert torch.equal(session.next(), again.next())
    session.switch(text(seed=7), Keep())
    assert not torch.allclose(session.next(), again.next())
    half = opened(made(dtype=torch.bfloat16))
    with half.chunk(CHUNK), opened().chunk(CHUNK):
        assert half._velocity(frames(CHUNK), 500.0).isfinite().all()
    assert {x.dtype for x in kept(half)} == {torch.bfloat16}


def passed(count: int, **change: Any) -> Tensor:
    given = {"sample": frames(count), "timestep": torch.ones(1), "history": OnePass(POLICY, 2)}
    return made()(text=text(), **{**given, **change})
