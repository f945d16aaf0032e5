"""Step reuse: windows, against the lifecycle of SGLang's controller written as a loop."""

import pytest
import torch

import diffcache
from diffcache.features.step_reuse import StepReuse
from tests.zoo.catalog import cases

STEPS = 16


@pytest.mark.parametrize("threshold", [0.25, 0.5])
@pytest.mark.parametrize("longest", [1, 3])
def test_peer_step_reuse_step_by_step(threshold, longest, agrees):
    """What is reused is neither compared nor counted as real; the first two and the last are."""
    case = cases()["FluxTransformer2DModel"]
    model = case.build()
    given = [case.kwargs(model, 0, step=s, steps=STEPS) for s in range(STEPS)]
    first, second = given[0]["hidden_states"], case.kwargs(model, 1, step=0)["hidden_states"]
    for step in range(STEPS):  # a path that is first straight, then bent
        share = step / STEPS / 8 if step < 9 else step / STEPS
        given[step]["hidden_states"] = (1 - share) * first + share * second
    expected, computed, history, left = [], [], None, 0
    with torch.no_grad():
        for step in range(STEPS):
            if left and 2 <= step < STEPS - 1:
                left -= 1
                expected.append(history)
                continue
            real = model(**given[step], return_dict=False)[0]
            alike = history is not None and (real - history).abs().mean() < (threshold * history.abs().mean())
            history, left = real, longest if alike else 0
            computed.append(step)
            expected.append(real)
        with diffcache.wrapped(model, StepReuse(threshold, longest)) as handle:
            with diffcache.run(model, steps=STEPS):
                found = [model(**each, return_dict=False)[0] for each in given]
            steps = [call.index for call in handle.last.calls if call.computed], computed
    agrees("step-reuse", "SGLang's code, as a loop", found, expected, 0.0, steps)
    assert 2 < len(computed) < STEPS
