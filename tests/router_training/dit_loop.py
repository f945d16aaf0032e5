"""A denoising loop of DiTPipeline written out, for tests of the training of HarmoniCa's router."""

import torch
from torch.nn import functional

STEPS, BLOCKS = 4, 4
SITES = [f"transformer_blocks.{n}.{child}" for n in range(BLOCKS) for child in ("attn1", "ff")]
CALL = {"guidance_scale": 4.0, "num_inference_steps": STEPS}


class Loop:
    """DiTPipeline with mixed features, written out: one batch of labels, step by step."""

    def __init__(self, pipe, labels, seed, threshold=0.1, steps=STEPS):
        self.model, self.solver, self.threshold = pipe.transformer, pipe.scheduler, threshold
        generator, count = torch.Generator().manual_seed(seed), len(labels)
        noise = torch.randn(count, 4, 8, 8, generator=generator)
        self.labels = torch.tensor([*labels, *([1000] * count)])
        self.start = torch.cat([noise, noise])
        self.solver.set_timesteps(steps)
        self.restart()

    def restart(self):
        self.x, self.kept = self.start, {}

    def predict(self, step, weights=None):
        """Return the guided output with its variance; weights [sites] mix, None does not."""
        times, model = self.solver.timesteps[step].expand(len(self.labels)), self.model
        hidden = model.pos_embed(self.x)
        for number, block in enumerate(model.transformer_blocks):
            normed, gate, shift, scale, gate_ff = block.norm1(hidden, times, self.labels, hidden_dtype=hidden.dtype)
            out = self.mix(2 * number, block.attn1(normed), weights)
            hidden = gate.unsqueeze(1) * out + hidden
            normed = block.norm3(hidden) * (1 + scale[:, None]) + shift[:, None]
            out = self.mix(2 * number + 1, block.ff(normed), weights)
            hidden = gate_ff.unsqueeze(1) * out + hidden
        embedded = model.transformer_blocks[0].norm1.emb(times, self.labels, hidden_dtype=hidden.dtype)
        shift, scale = model.proj_out_1(functional.silu(embedded)).chunk(2, dim=1)
        hidden = model.norm_out(hidden) * (1 + scale[:, None]) + shift[:, None]
        hidden = model.proj_out_2(hidden).reshape(-1, 4, 4, 2, 2, 8)
        out = torch.einsum("nhwpqc->nchpwq", hidden).reshape(-1, 8, 8, 8)
        start, end = out[:, :4].chunk(2)
        guided = end + 4.0 * (start - end)
        return torch.cat([torch.cat([guided, guided]), out[:, 4:]], 1)

    def mix(self, site, fresh, weights):
        if weights is None:
            return fresh
        if site not in self.kept:
            self.kept[site] = fresh.detach()
            return fresh
        mixed = weights[site] * fresh + (1 - weights[site]) * self.kept[site]
        if weights[site] > self.threshold:
            self.kept[site] = mixed.detach()
        return mixed

    def advance(self, step, out):
        time = self.solver.timesteps[step]
        self.x = self.solver.step(out[:, :4].detach(), time, self.x).prev_sample

    @torch.no_grad()
    def run(self, scores):
        """Return the end of a run with the scores of each step."""
        self.restart()
        for step, weights in enumerate(scores):
            self.advance(step, self.predict(step, weights))
        return self.x.double()


@torch.no_grad()
def causes_of(loop, scores, proxy):
    """Return the squared error of the output at each step, where only it or all before it mix."""
    found = [0.0]
    for last in range(1, len(scores)):
        loop.restart()
        loop.advance(0, loop.predict(0, torch.ones(len(SITES))))
        for step in range(1, last + 1):
            mixes = proxy == "official" or step == last
            teacher = loop.predict(step)
            out = loop.predict(step, scores[step] if mixes else torch.ones(len(SITES)))
            loop.advance(step, out)
        found.append(float((teacher - out).square().mean()))
    return found
