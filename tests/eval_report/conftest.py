"""A run and its report, made once."""

from pathlib import Path
from typing import Any

import pytest

from diffcache.eval.report.write import write_report
from tests.eval_report.made import make_record, make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[Path]]:
    """A record, its run's folder, and the files of its report, made once."""
    record = make_record()
    folder = make_run(tmp_path_factory.mktemp("run"), record)
    return record, folder, write_report(record, folder)
