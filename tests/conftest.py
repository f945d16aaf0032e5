"""What every test shares: one thread, one seed, no network, and no GPU tests without a GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu_tests)
        items[:] = [item for item in items if item not in gpu_tests]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
