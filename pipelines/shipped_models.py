"""The folder of shipped models, of which an installed wheel holds only those of the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diffcache.errors import MissingError

MODELS = Path(__file__).resolve().parents[1] / "assets" / "models"
PACKED = ("sticker-features", "sticker-flux")  # what a wheel holds
OTHERS = (
    "chain-block", "chain-guide", "chain-guide-probe", "chain-llada", "chain-llada-probe", "chain-llada-walk",
    "reach-policy", "recall-llama", "sticker-causal", "sticker-dit", "sticker-judge", "sticker-kontext", "sticker-wan",
)  # fmt: skip


def present(directory: str | Path) -> Path:
    """Return the directory of any model; check first that it is here if it is a shipped one.

    Raises MissingError if it is a shipped model that this installation does not have.
    """
    path = Path(directory)
    if path.parent == MODELS and path.name in (*PACKED, *OTHERS) and not path.exists():
        raise MissingError(
            f"{path.name}: this installation does not hold it, since a wheel carries sticker-flux "
            "alone; the other models come with the repository: install a clone of it "
            "(`pip install -e .`), or name the directory of a model, such as "
            f"assets/models/{path.name} of a clone"
        )
    return path


def places(model: str) -> Iterator[Path]:
    """Yield places where a model that a command line names may be: its path, then a shipped one.

    Raises:
        MissingError: If it is the name of a shipped model that is not here.
    """
    yield Path(model)
    yield present(MODELS / model)
