"""Training of HarmoniCa's routers: the loss of a step, replays, and whole trainings."""

import json

import pytest
import torch
from torch.nn import functional

import diffcache
from diffcache.errors import AttachError, TablesError
from diffcache.features.harmonica import HarmoniCa
from diffcache.offline.calibrate import CollectPlan, calibrate
from diffcache.offline.harmonica.replay import Replay
from diffcache.offline.harmonica.training import COLUMNS, Mixer, _drawn, _generator, image_errors, step_loss, train
from tests.zoo.pipes import pipes

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


@pytest.fixture(scope="module")
def pipe():
    return pipes()["DiTPipeline"].build(0)


@pytest.fixture(scope="module")
def replay(pipe):
    replay = Replay(pipe, CALL, [3, 8])
    for parameter in pipe.transformer.parameters():
        parameter.requires_grad_(False)
    yield replay
    for parameter in pipe.transformer.parameters():
        parameter.requires_grad_(True)


@pytest.fixture
def mixer(replay):
    mixer = Mixer(replay.model, SITES, 0.1)
    yield mixer
    mixer.remove()


@pytest.fixture
def logits():
    return 2 * torch.randn(STEPS, len(SITES), generator=torch.Generator().manual_seed(3))


def curve_of(tables):
    """Return what a training noted of every epoch, by name."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in tables["curve"].tolist()]


def first_step(track, mixer):
    mixer.forget()
    with torch.no_grad(), mixer.mixing(torch.ones(len(SITES))):
        track.advance(track.predict(mixer))


def test_the_loss_and_its_gradient_agree_with_differences(pipe, replay, mixer, logits):
    track, loop = replay.begin([3, 8], seed=2), Loop(pipe, [3, 8], 2)
    first_step(track, mixer)
    with torch.no_grad():
        loop.advance(0, loop.predict(0, torch.ones(len(SITES))))
    kept = dict(loop.kept)
    row = logits[1].clone().requires_grad_(True)
    loss, student, parts = step_loss(track, mixer, row, weight=2.0, beta=0.01)
    (gradient,) = torch.autograd.grad(loss, row)

    @torch.no_grad()
    def independent(row):
        loop.kept = dict(kept)
        scores = torch.sigmoid(row)
        out = loop.predict(1, scores)
        mse = (loop.predict(1) - out).double().square().mean()
        return float(2.0 * mse + 0.01 * scores.double().sum()), out

    wanted, out = independent(logits[1])
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)
    assert parts["error"] + parts["penalty"] == pytest.approx(parts["loss"])
    torch.testing.assert_close(student.detach(), out, atol=1e-5, rtol=1e-5)
    for site in range(len(SITES)):
        shift = torch.zeros(len(SITES))
        shift[site] = 0.02
        slope = (independent(logits[1] + shift)[0] - independent(logits[1] - shift)[0]) / 0.04
        assert float(gradient[site]) == pytest.approx(slope, rel=0.05, abs=2e-4)


@pytest.mark.parametrize("proxy", ["paper", "official"])
def test_image_errors_equal_runs_of_their_own(pipe, replay, mixer, logits, proxy):
    errors, causes = image_errors(replay.begin([3, 8], seed=2), mixer, logits, proxy)
    loop, scores, on = Loop(pipe, [3, 8], 2), torch.sigmoid(logits), torch.ones_like(logits)
    wanted, before = [0.0], loop.run(on)
    for step in range(1, STEPS):
        if proxy == "paper":
            used = on.clone()
            used[step] = scores[step]
            wanted.append(float((loop.run(used) - before).square().sum() / len(before)))
        else:
            used = torch.cat([on[:1], scores[1 : step + 1], on[step + 1 :]])
            now = loop.run(used)
            wanted.append(float((now - before).square().mean()))
            before = now
    assert errors.tolist() == pytest.approx(wanted, rel=1e-3)
    assert min(wanted[1:]) > 0
    assert causes.tolist() == pytest.approx(causes_of(loop, scores, proxy), rel=1e-3)


def test_typical_errors_are_geometric_means_of_the_papers(pipe, replay, mixer, logits):
    errors, causes = image_errors(replay.begin([3, 8], seed=2), mixer, logits, "typical")
    loop, scores, on = Loop(pipe, [3, 8], 2), torch.sigmoid(logits), torch.ones_like(logits)
    before, wanted = loop.run(on), []
    for step in range(1, STEPS):
        used = on.clone()
        used[step] = scores[step]
        squares = (loop.run(used) - before).double().square().flatten(1).sum(1)
        wanted.append(float(squares.log().mean().exp()))
    assert errors[1:].tolist() == pytest.approx(wanted, rel=1e-3)
    plain = image_errors(replay.begin([3, 8], seed=2), mixer, logits, "paper")
    assert bool((errors <= plain[0] * (1 + 1e-9))[1:].all())
    assert bool((causes <= plain[1] * (1 + 1e-9))[1:].all())


@pytest.mark.parametrize(("name", "sites"), [("FluxPipeline", 16), ("WanPipeline", 12), ("PixArtAlphaPipeline", 12)])
def test_the_replay_ends_where_the_pipeline_ends(name, sites):
    case = pipes()[name]
    pipe = case.build(0)
    given = case.call(pipe, 1, 3)
    given.pop("generator")
    wanted = pipe(**given, generator=torch.Generator().manual_seed(5))[0]
    replay = Replay(pipe, {}, [given])
    assert (replay.total, len(replay.sites())) == (3, sites)
    track = replay.begin([given], seed=5)
    with torch.no_grad():
        for _ in range(3):
            track.advance(track.predict())
    torch.testing.assert_close(track.sample, torch.as_tensor(wanted), atol=1e-4, rtol=1e-4)
    assert not any(module._forward_hooks for module in replay.model.modules())
    assert "step" not in vars(pipe.scheduler)


@torch.no_grad()
def test_the_replay_of_dit_equals_a_loop_of_its_own(pipe, replay):
    track, loop = replay.begin([3, 8], seed=11), Loop(pipe, [3, 8], 11)
    for step in range(STEPS):
        mine, theirs = track.predict(), loop.predict(step)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        track.advance(mine)
        loop.advance(step, theirs)
    torch.testing.assert_close(track.sample, loop.x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FluxControlNetPipeline", "'controlnet_.*' changes from step to step"),
        ("FluxKontextPipeline", "where it is given the sample alone"),
        ("WanPipeline-two", "has 2 denoisers"),
        ("LTX2Pipeline", r"calls its denoiser \[3\] times a step"),
        ("Lumina2Pipeline", r"not a \+ scale \* \(b - a\)"),
        ("HunyuanDiTPipeline", "does not end where the pipeline ended"),  # DDPM draws noise
    ],
)
def test_other_loops_are_refused(name, message):
    case = pipes()[name]
    pipe = case.build(0)
    given = case.call(pipe, 1, 3)
    with pytest.raises(AttachError, match=message):
        Replay(pipe, {}, [given])
    assert all("step" not in vars(part) for part in [pipe.scheduler])


def test_wrapped_pipelines_and_bare_models_are_refused(pipe):
    with diffcache.wrapped(pipe, "taylorseer"), pytest.raises(AttachError, match="unwrap it before training"):
        Replay(pipe, CALL, [3])
    with pytest.raises(AttachError, match="on a pipeline, not a model"):
        Replay(pipe.transformer, CALL, [3])


def plan_of(**changed):
    return CollectPlan(
        **{"prompts": [1, 3, 5, 8], "steps": 3, "batch_size": 2, "seed": 4, "call": {"guidance_scale": 4.0}, **changed}
    )


def loop_of(pipe, plan, number):
    generator = _generator(plan.seed, number + 1)
    labels = list(_drawn(plan, generator))
    return Loop(pipe, labels, int(torch.randint(2**31, (), generator=generator)), 0.3, plan.steps)


def proxies(loop, scores, proxy):
    used, errors = torch.ones_like(scores), [0.0]
    before = loop.run(used)
    for step in range(1, len(scores)):
        used[step] = scores[step]
        gap = (loop.run(used) - before).square()
        if proxy == "paper":
            errors.append(float(gap.sum() / len(gap)))
            used[step] = 1.0
        else:
            errors.append(float(gap.mean()))
            before = loop.run(used)
    return torch.tensor(errors)


@pytest.mark.parametrize(("proxy", "relative"), [("official", False), ("paper", True)])
def test_a_training_equals_a_loop_of_its_own(pipe, proxy, relative):
    beta = 1.0 if relative else 1e-4
    method = HarmoniCa(0.3, epochs=3, rate=0.2, beta=beta, beta_sites=16, proxy=proxy, refresh=6, relative=relative)
    plan = plan_of()
    state = torch.get_rng_state()
    trained = train(pipe, method, plan)
    assert torch.equal(torch.get_rng_state(), state)
    logits = torch.randn(3, 8, generator=_generator(4, 1)).clamp(-5, 5)
    logits[0] = 5.0
    moments = [(torch.zeros(8), torch.zeros(8)) for _ in range(3)]
    for epoch in range(3):
        if epoch in (0, 2):  # 3 iterations an epoch, 6 between refreshes
            loop = loop_of(pipe, plan, 1)
            errors = proxies(loop, torch.sigmoid(logits), proxy)
            if relative:
                errors[1:] /= torch.tensor(causes_of(loop, torch.sigmoid(logits), proxy))[1:]
        loop = loop_of(pipe, plan, 2 + epoch)
        with torch.no_grad():
            loop.advance(0, loop.predict(0, torch.sigmoid(logits[0])))
        for step in (1, 2):
            row = logits[step].clone().requires_grad_(True)
            teacher, student = loop.predict(step).detach(), loop.predict(step, torch.sigmoid(row))
            mse = (teacher - student).square().mean()
            loss = errors[step] * mse + 2 * beta * torch.sigmoid(row).sum()
            loss.backward()
            mean, square = moments[step]
            mean.mul_(0.9).add_(0.1 * row.grad)
            square.mul_(0.999).add_(0.001 * row.grad**2)
            unbiased = mean / (1 - 0.9 ** (epoch + 1))
            root = (square / (1 - 0.999 ** (epoch + 1))).sqrt()
            logits[step] = (row.detach() - 0.2 * unbiased / (root + 1e-8)).clamp(-5, 5)
            loop.advance(step, student)
    learned = trained.measured()["logits"]
    torch.testing.assert_close(learned, logits, atol=5e-3, rtol=0)
    assert (learned[1:] - torch.randn(3, 8, generator=_generator(4, 1))[1:]).abs().min() > 0.01


def test_calibrate_trains_saves_and_leaves_the_pipeline_alone(pipe, tmp_path):
    modules = [dict(module.__dict__) for module in pipe.transformer.modules()]
    wanted = [p.requires_grad for p in pipe.transformer.parameters()]
    seen = []
    settings = {"steps": 3, "batch_size": 1, "guidance_scale": 4.0, "out": tmp_path / "router.safetensors"}
    with torch.inference_mode():
        method = calibrate(
            pipe, HarmoniCa(0.5, epochs=2, beta=1e-4), [1, 3], progress=lambda *given: seen.append(given), **settings
        )
    assert [dict(module.__dict__) for module in pipe.transformer.modules()] == modules
    assert [p.requires_grad for p in pipe.transformer.parameters()] == wanted
    assert [given[:2] for given in seen] == [(1, 2), (2, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.safetensors"]
    again = HarmoniCa(0.5, epochs=2, beta=1e-4, tables=str(tmp_path / "router.safetensors"))
    assert again == method
    curve = curve_of(again.measured())
    assert len(curve) == 2 and set(curve[0]) == set(COLUMNS)
    for record in curve:
        assert record["loss"] == pytest.approx(record["error"] + record["penalty"])
    header = again.measured().header
    assert (header["steps"], header["sites"], header["shape"]) == (3, SITES, [4, 8, 8])
    json.dumps(dict(header))
    with diffcache.wrapped(pipe, again):
        pipe([1], num_inference_steps=3, output_type="np")


class Stopped(KeyboardInterrupt):
    pass


def test_an_interrupted_training_ends_with_the_same_logits(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.offline.harmonica.training.SAVE_EVERY", 2)
    method = HarmoniCa(epochs=5, rate=0.1, beta=1e-4, refresh=6)
    plan = dict(steps=2, batch_size=1)
    whole = train(pipe, method, plan_of(**plan)).measured()

    def stop(done, total, word):
        if done == 3:
            raise Stopped

    out = tmp_path / "router.safetensors"
    with pytest.raises(Stopped):
        train(pipe, method, plan_of(out=out, progress=stop, **plan))
    assert [path.name for path in tmp_path.iterdir()] == ["router.safetensors.part"]
    assert not any(module._forward_hooks for module in pipe.transformer.modules())
    done = []
    resumed = train(pipe, method, plan_of(out=out, progress=lambda d, *_: done.append(d), **plan))
    assert done == [3, 4, 5]
    assert torch.equal(resumed.measured()["logits"], whole["logits"])
    assert torch.equal(resumed.measured()["curve"], whole["curve"])


def test_the_state_of_another_training_is_refused(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.offline.harmonica.training.SAVE_EVERY", 1)

    def stop(done, total, word):
        raise Stopped

    out, short = tmp_path / "router.safetensors", dict(steps=2, batch_size=1)
    with pytest.raises(Stopped):
        train(pipe, HarmoniCa(epochs=2), plan_of(out=out, progress=stop, **short))
    with pytest.raises(TablesError, match=r"another training \(beta: 7e-08, now 0.1\); delete it"):
        train(pipe, HarmoniCa(epochs=2, beta=0.1), plan_of(out=out, **short))
    with pytest.raises(TablesError, match=r"another training \(seed: 4, now 5\)"):
        train(pipe, HarmoniCa(epochs=2), plan_of(out=out, **{**short, "seed": 5}))
    longer = train(pipe, HarmoniCa(epochs=3), plan_of(out=out, **short))  # more of the same
    assert len(curve_of(longer.measured())) == 3
    out.with_name("router.safetensors.part").write_bytes(b"nonsense")
    with pytest.raises(TablesError, match="not the state of a training"):
        train(pipe, HarmoniCa(epochs=2), plan_of(out=out, **short))
    assert len(curve_of(train(pipe, HarmoniCa(epochs=1), plan_of(out=out, resume=False, **short)).measured())) == 1


def test_fewer_epochs_than_were_trained_are_refused(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.offline.harmonica.training.SAVE_EVERY", 1)

    def full(tensors, path, metadata=None):
        raise OSError("No space left on device")

    out, short = tmp_path / "router.safetensors", dict(steps=2, batch_size=1)
    noise = {"generator": torch.Generator().manual_seed(1)}
    with monkeypatch.context() as patch:
        patch.setattr("diffcache.features.tables.save_file", full)
        with pytest.raises(OSError, match="No space"):
            train(pipe, HarmoniCa(epochs=3), plan_of(out=out, call=noise, **short))
    assert [path.name for path in tmp_path.iterdir()] == ["router.safetensors.part"]

    def anew():
        return {"generator": torch.Generator().manual_seed(1)}

    with pytest.raises(TablesError, match=r"epochs=2: .* holds 3 already; give at least as many"):
        train(pipe, HarmoniCa(epochs=2), plan_of(out=out, call=anew(), **short))
    done = []
    goes_on = plan_of(out=out, call=anew(), progress=lambda *given: done.append(given), **short)
    made = train(pipe, HarmoniCa(epochs=3), goes_on).measured()
    assert len(curve_of(made)) == 3 and done == []
    assert made.header["guidance"] == {"guidance_scale": 4.0}
    assert [path.name for path in tmp_path.iterdir()] == ["router.safetensors"]


def test_one_step_is_refused_before_anything_runs(pipe, monkeypatch):
    monkeypatch.setattr(Replay, "__init__", None)
    with pytest.raises(ValueError, match="steps=1: HarmoniCa always computes the first step"):
        train(pipe, HarmoniCa(epochs=2), plan_of(steps=1))
    with pytest.raises(ValueError, match="steps=1"):
        train(pipe, HarmoniCa(epochs=2), plan_of(steps=None, call={"num_inference_steps": 1}))
