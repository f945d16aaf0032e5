"""The model that these tests share."""

from pathlib import Path

import pytest

from tests.kv.eval import small


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("recall"))


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that can write any text."""
    return small.save_with_words(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six texts of 20 made-up sentences."""
    return small.texts(tmp_path_factory.mktemp("texts"))
