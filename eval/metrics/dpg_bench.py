"""Ask a model about pictures what DPG-Bench asks of dense prompts.

This file runs in an interpreter that has modelscope, and not diffcache.

Reference: ELLA, arXiv 2403.05135, section 4 (DPG-Bench), and its official code, which leaves out
the first row of its table of questions: so does this.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Questions:
    """Questions about one prompt.

    Attributes:
        texts: Questions by number.
        parents: Numbers of the questions that must hold for one to make sense.
    """

    texts: dict[int, str] = field(default_factory=dict)
    parents: dict[int, list[int]] = field(default_factory=dict)


def read_questions(file: str) -> dict[str, Questions]:
    """Return what is asked, by prompt.

    Args:
        file: `dpg_bench.csv`, a row for each question.
    """
    found: dict[str, Questions] = {}
    with open(file, newline="", encoding="utf-8") as rows:
        for number, row in enumerate(csv.DictReader(rows)):
            if not number:
                continue
            asked = found.setdefault(row["text"].strip(), Questions())
            at = int(row["proposition_id"])
            asked.texts[at] = row["question_natural_language"]
            parents = [int(parent) for parent in row["dependency"].split(",")]
            asked.parents[at] = [parent for parent in parents if parent]
    return found


def share_right(asked: Questions, says_yes: Mapping[int, bool]) -> float:
    """Return the share of questions that hold, as do those that they depend on."""
    holds = dict(says_yes)
    for at, parents in asked.parents.items():
        if not all(holds[parent] for parent in parents):
            holds[at] = False
    return sum(holds.values()) / len(holds)


def scorer(weights: Sequence[str], device: str) -> Callable[[str, str], float]:
    """Return what scores a picture for a prompt of DPG-Bench, from 0 to 1.

    Args:
        weights: The table of questions, and the folder of mPLUG's model of visual questions.
        device: Device of the model.
    """
    from modelscope.pipelines import pipeline
    from modelscope.utils.constant import Tasks
    from PIL import Image

    questions = read_questions(weights[0])
    model = pipeline(Tasks.visual_question_answering, model=weights[1], device=device)

    def score(prompt: str, picture: str) -> float:
        asked = questions.get(prompt.strip())
        if asked is None:
            raise ValueError(
                f"prompt {prompt[:60]!r}... is none of DPG-Bench's; draw those of {weights[0]}"
            )
        image = Image.open(picture)
        says_yes = {
            at: model({"image": image, "question": text})["text"] == "yes"
            for at, text in asked.texts.items()
        }
        return share_right(asked, says_yes)

    return score
