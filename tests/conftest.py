"""Settings that every test shares: one thread, one seed, no network, and no GPU tests without a GPU."""

import atexit
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import typer.testing

from diffcache.errors import CacheWarning

pytest_plugins = ["tests.agree"]

# One test of these takes minutes: they begin first, so that no worker waits for another at the end.
LONGEST = ("test_compiler.py", "test_interpreter.py", "test_browser.py")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # A collection walks through all that torch, diffusers and transformers made when they were
    # imported: at Python's own threshold that takes an eighth of the time of the suite.
    gc.set_threshold(50_000, 20, 100)
    # Typer makes all commands anew for each one that is called, which takes longer than most of them.
    typer.testing._get_command = cache(typer.main.get_command)
    if not torch.cuda.is_available():  # torch would keep the traceback of each seed for when there is one
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu_tests)
        items[:] = [item for item in items if item not in gpu_tests]
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    # What was imported stays: where a test collects garbage it need not be walked through again.
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report of evaluations: its plots take more time than a few small pictures."""
    from diffcache.eval.runs import measure

    monkeypatch.setattr(measure, "write_report", lambda *given: [])


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Give what diffcache logs, as it comes. Pytest's own plugin takes a tenth of the time of a short test."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("diffcache")
    handler.emit = lambda record: said.append(handler.format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def quiet(no_gradients: None) -> Iterator[None]:
    """Run without gradients, and without remarks that a run skipped nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        yield


@pytest.fixture
def eager(no_gradients: None) -> Iterator[None]:
    """Run without gradients; models that compile a part of their own run it uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
