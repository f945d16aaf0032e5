"""Prompts of calibrations are others than those of evaluations, which know them again."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffcache import TemporalTable
from diffcache.eval.offline import inputs_of
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.folder import batches
from diffcache.eval.runs.record import calibrated_on
from diffcache.eval.runs.task import Task
from diffcache.features.fitted import FittedForecast
from diffcache.offline.calibrate import Plan, header_of, prompt_hash
from diffcache.pipelines.small.flux import DIRECTORY
from tests.calibration.shapes_flux import PROMPTS


@pytest.mark.parametrize("prompts", ["", "pictures", "films", "shapes", "own.txt"])
@pytest.mark.parametrize("own", [True, False])
def test_the_command_line_draws_no_prompts_and_noise_of_an_evaluation(
    prompts: str, own: bool, tmp_path: Path
) -> None:
    model = "shapes-flux"
    if own:  # a user's own pipeline: any whose folder is not called shapes-
        model = str(tmp_path / "my-flux")
        shutil.copytree(DIRECTORY, model, copy_function=shutil.copyfile)
    if prompts == "own.txt":
        texts = [f"prompt {number}" for number in range(40)]
        (tmp_path / prompts).write_text("\n".join(texts))
        prompts = str(tmp_path / prompts)
    inputs = inputs_of(Task(model=model, prompts=prompts, samples=16, seed=3))
    held = f"held-out:{prompts}" if prompts.endswith(".txt") else prompts
    drawer = Drawer(Task(model=model, prompts=held, samples=256))
    evaluated = {drawer.prompts[number] for number in range(256)}
    assert len(set(inputs.prompts)) > 8
    assert not evaluated & set(inputs.prompts)
    seeds = {s for b in batches(drawer.prompts.texts, 256, 8, 0) for s in b.seeds}
    used = {torch.Generator().manual_seed(inputs.seed + i).get_state().numpy().tobytes() for i in range(4)}  # fmt: skip
    assert not used & {
        torch.Generator().manual_seed(s).get_state().numpy().tobytes() for s in seeds
    }
    assert inputs.seed != inputs_of(Task(model=model, prompts=prompts, samples=1, seed=4)).seed


def test_tables_keep_hashes_of_their_prompts(calibrated) -> None:
    assert calibrated.tables.header["prompt_hashes"] == [prompt_hash(PROMPTS[0])]
    plan = Plan([{"prompt": ["a", "b"], "image": 1}, {"prompt": "b"}, 7, {"observation": 2}])
    header = header_of(FittedForecast(), {}, plan)
    assert header["prompt_hashes"] == sorted([prompt_hash("a"), prompt_hash("b")])


def test_an_evaluation_on_prompts_of_the_calibration_says_so(calibrated) -> None:
    texts = [PROMPTS[0], "another", "a third one"]

    def said(method, prompts):
        drawn = batches(prompts, 6, 2, 0)
        return calibrated_on(
            SimpleNamespace(plan=SimpleNamespace(methods={"x": method}), batches=drawn)
        )

    for method in (calibrated, TemporalTable(calibrated)):
        (text,) = said(method, texts)
        assert text.startswith("x: 1 of the 3 prompts are among those that its tables")
        assert said(method, texts[1:]) == []
    assert said(FittedForecast(), texts) == said(object(), texts) == []
