"""Per-site errors of a toy of two blocks, against closed forms."""

import pytest
import torch
from torch import nn

import diffcache
from diffcache import Combine, Gate, TaylorSeer
from diffcache.eval.oracle import observe
from diffcache.features.parts.instead import Newton, Reuse
from diffcache.features.parts.when import Every, Listed


def skipped_steps(errors):
    """Steps at which any site has an error."""
    return [s for s in errors.steps if any(row[s] is not None for row in errors.values)]


def check(row, expected):
    """None where None is expected, else the number within what float32 norms allow."""
    assert [value is None for value in row] == [value is None for value in expected]
    for value, number in zip(row, expected, strict=True):
        assert value is None or value == pytest.approx(number, rel=1e-6)


class Block(nn.Module):
    """Adds 1 + s^2 times a vector, s being the step, ten minus the timestep."""

    def __init__(self, vector):
        super().__init__()
        self.vector = nn.Parameter(vector)

    def forward(self, hidden_states, growth):
        return hidden_states + growth * self.vector


class Toy(nn.Module):
    """Two blocks between nothing."""

    def __init__(self):
        super().__init__()
        vectors = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]], dtype=torch.float64)
        self.blocks = nn.ModuleList(map(Block, vectors))

    def forward(self, hidden_states, timestep):
        growth = 1 + (10 - timestep) ** 2
        for block in self.blocks:
            hidden_states = block(hidden_states, growth)
        return hidden_states


def run_toy(toy, times=1, passes=1, steps=8):
    for seed in range(times):
        x = torch.zeros(2, 4, 3, dtype=torch.float64) + seed
        with torch.no_grad(), diffcache.run(toy):
            for step in range(steps):
                for branch in range(passes):
                    with diffcache.branch(str(branch)):
                        toy(x + branch, torch.tensor(10.0 - step, dtype=torch.float64))


def test_taylor_on_a_parabola():
    """Computed at 0, 1, 4, 7: two lines through 1 + s^2, whose errors are known."""
    toy = Toy()
    before = {name: dict(module.__dict__) for name, module in toy.named_modules()}
    method = TaylorSeer(every=3, order=1, warmup=2, site="block")
    expected = [None, None, 2 / 5, 6 / 10, None, 4 / 26, 10 / 37, None]
    for times, passes in ((1, 1), (3, 1), (2, 2)):  # means over runs and branches of equal numbers
        errors = observe(toy, method, lambda t=times, p=passes: run_toy(toy, t, p))
        assert errors.sites == ["blocks.0", "blocks.1"]
        assert errors.steps == list(range(8))
        for row in errors.values:
            check(row, expected)
    after = {name: dict(module.__dict__) for name, module in toy.named_modules()}
    assert {n: list(d) for n, d in before.items()} == {n: list(d) for n, d in after.items()}
    assert type(toy.blocks) is nn.ModuleList


def test_newton_is_exact_on_a_parabola_and_reuse_is_not():
    toy, steps = Toy(), Listed([0, 1, 2, 5])
    wrong = observe(toy, Combine(steps, Reuse(), "block"), lambda: run_toy(toy))
    exact = observe(toy, Combine(steps, Newton(2), "block"), lambda: run_toy(toy))
    check(wrong.values[1], [None, None, None, 5 / 10, 12 / 17, None, 11 / 37, 24 / 50])
    for row in exact.values:
        assert [s for s, value in enumerate(row) if value is not None] == [3, 4, 6, 7]
        assert all(value is None or value < 1e-12 for value in row)


def test_a_branch_that_pauses_within_a_gap_is_observed_as_a_real_run_has_it():
    """The second branch misses step 2, which is skipped anyway: step 3 is a skip for both."""
    toy = Toy()

    def guided():
        x = torch.zeros(1, 4, 3, dtype=torch.float64)
        with torch.no_grad(), diffcache.run(toy):
            for step in range(8):
                t = torch.tensor(10.0 - step, dtype=torch.float64)
                with diffcache.branch("0"):
                    toy(x, t)
                if step not in (2, 4):
                    with diffcache.branch("1"):
                        toy(x + 1, t)

    method = Combine(Every(4), Reuse(), "block")
    errors = observe(toy, method, guided)
    with diffcache.api.wrapped(toy, method) as handle:
        guided()
        real = [(c.index, c.branch) for c in handle.last.calls if c.computed]
    # the second is computed at 5, after its pause at 4
    assert real == [(0, "0"), (0, "1"), (4, "0"), (5, "1")]
    f = [1.0 + s * s for s in range(8)]
    expected = [
        None if s in (0, 4) else
        (f[s] - f[0 if s < 4 else 4]) / f[s] if s < 6 else
        ((f[s] - f[4]) / f[s] + (f[s] - f[5]) / f[s]) / 2
        for s in range(8)
    ]  # fmt: skip
    check(errors.values[0], expected)


def test_two_denoisers_are_told_apart():
    first, second = Toy(), Toy()

    class Both:
        def __init__(self):
            self.components = {"transformer": first, "transformer_2": second}

    both = Both()

    def call():
        run_toy(first)
        run_toy(second)

    errors = observe(both, Combine(Every(2), Reuse(), "stack"), call)
    assert errors.sites == ["transformer.blocks", "transformer_2.blocks"]
    assert errors.values[0] == errors.values[1]


def test_a_zero_feature_has_an_error_only_if_the_estimate_is_zero_too():
    toy = Toy()
    with torch.no_grad():
        toy.blocks[0].vector.zero_()
    errors = observe(toy, Combine(Every(2), Reuse(), "block"), lambda: run_toy(toy, steps=4))
    assert errors.values[0] == [None, 0.0, None, 0.0]
    check(errors.values[1], [None, 1 / 2, None, 5 / 10])


def test_a_gate_reads_a_toy_as_a_real_run_does():
    """First block: the residual 1 + s^2; skip while it is within 0.9 of the last computed one."""
    toy = Toy()
    method = Combine(Gate(0.9, relative_to="forecast"), Reuse(), "stack", lead=1)
    computed, last = [0], 1.0
    for step in range(1, 8):
        value = 1.0 + step * step
        if abs(value - last) / last >= 0.9:
            computed.append(step)
            last = value
    errors = observe(toy, method, lambda: run_toy(toy))
    assert skipped_steps(errors) == [s for s in range(8) if s not in computed]
    assert 2 < len(computed) < 8
