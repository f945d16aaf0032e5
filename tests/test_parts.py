"""A long benchmark goes on where it ended, and never with results of other settings."""

from pathlib import Path

import pytest
import torch
from torch import nn

from diffcache.eval.workshop.parts import Parts, digest_of


def test_parts_are_kept_until_the_end(tmp_path: Path) -> None:
    file = tmp_path / "a.unfinished"
    first = Parts(file, {"samples": 2})
    assert first.take("one", lambda: [1.5, None]) == [1.5, None]
    with pytest.raises(KeyboardInterrupt):
        first.take("two", interrupted)

    again = Parts(file, {"samples": 2})
    assert again.take("one", interrupted) == [1.5, None]
    assert again.take("two", lambda: {"a": 1}) == {"a": 1}
    assert set(again.end()) == {"one", "two"} and not file.exists()


def test_parts_of_other_settings_are_made_again(tmp_path: Path) -> None:
    file = tmp_path / "a.unfinished"
    Parts(file, {"samples": 2}).take("one", lambda: 1)
    assert Parts(file, {"samples": 3}).take("one", lambda: 2) == 2
    assert Parts(None, {}).take("one", lambda: 3) == 3


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_digest_is_of_names_shapes_and_values() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert digest_of(one) != digest_of(other)
    other.load_state_dict(one.state_dict())
    assert digest_of(one) == digest_of(other)
    assert digest_of(nn.Sequential(one)) != digest_of(one)
    assert digest_of(one.to(torch.bfloat16)) != digest_of(other)
