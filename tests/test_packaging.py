"""Table, links and tree agree; the wheel imports from anywhere; importing stays light."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from diffcache.pipelines.shipped_models import OTHERS, PACKED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CODE_TOPS = ("eval", "kernels", "pipelines")
TOPS = ("assets", *CODE_TOPS)
WORKSHOP = ROOT / "eval" / "workshop"  # comes with the repository alone
SOURCES = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")  # not in the wheel
COMFYUI = ROOT / "pipelines" / "comfyui"  # goes into ComfyUI's custom_nodes, not into the wheel
MOST_LINES = 91_000
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def run(*command: object, cwd: Path | str = "/") -> str:
    """Run a command and return what it printed; fail with its errors."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_folder_with_python_files_is_in_the_table() -> None:
    found = {"diffcache.assets"}
    for top in ("diffcache", *CODE_TOPS):
        for file in (ROOT / top).rglob("*.py"):
            if {WORKSHOP, COMFYUI} & set(file.parents):
                continue
            names = file.parent.relative_to(ROOT).parts
            names = names if top == "diffcache" else ("diffcache", *names)
            found |= {".".join(names[:end]) for end in range(1, len(names) + 1)}
    assert sorted(found) == TABLE["packages"]


def test_package_dir_and_links_agree() -> None:
    used = {name.split(".")[1] for name in TABLE["packages"] if "." in name} & set(TOPS)
    assert TABLE["package-dir"] == {"diffcache": "diffcache"} | {f"diffcache.{n}": n for n in used}
    links = {p.name: os.readlink(p) for p in (ROOT / "diffcache").iterdir() if p.is_symlink()}
    assert links == {name: f"../{name}" for name in TOPS}


@pytest.mark.parametrize("top", CODE_TOPS)
def test_top_folders_have_no_init(top: str) -> None:
    # Hugging Face ships a package called `kernels`; an __init__.py here would shadow it.
    found = set((ROOT / top).rglob("__init__.py")) - {COMFYUI / "__init__.py"}
    assert not found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, in a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *SOURCES):
        shutil.copy2(ROOT / name, source)
    for name in (*TABLE["package-dir"].values(), "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment that borrows torch and the rest from this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-compile", wheel)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin" / "python"


def files(top: str, pattern: str) -> set[str]:
    """Name the files the wheel should hold of one top folder, as they are called in the wheel."""
    held = (p for p in (ROOT / top).glob(pattern) if not {WORKSHOP, COMFYUI} & {*p.parents})
    found = (p.relative_to(ROOT) for p in held if p.is_file())
    shown = (p.as_posix() for p in found if not p.name.startswith("."))
    return {name if name.startswith("diffcache/") else f"diffcache/{name}" for name in shown}


PACKED_ASSETS = (*(f"models/{name}" for name in PACKED), "prompts")
ASSETS = set().union(*(files("assets", f"{name}/**/*") for name in PACKED_ASSETS))


def test_wheel_holds_the_tree(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {name for top in ("diffcache", *CODE_TOPS) for name in files(top, "**/*.py")}
    data = (
        files("eval", "**/*.jinja")
        | files("pipelines", "**/*.js*")
        | files("pipelines", "**/*.css")
        | files("kernels", "*.json")
    )
    data |= files("diffcache/presets", "*.toml") | {"diffcache/citations.bib", "diffcache/py.typed"}
    data |= files("pipelines", "**/*.css")
    assert held == code | ASSETS | data


def test_the_source_distribution_holds_what_makes_and_tests_it(wheel: Path) -> None:
    (file,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    code = {p.relative_to(ROOT).as_posix() for top in ("eval/workshop", "tests") for p in (ROOT / top).rglob("*.py")}
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").iterdir()}
    assert held > code | pages | {"pyproject.toml", "README.md", "LICENSE", *SOURCES}
    assert not any("__pycache__" in name for name in held)


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 15e6
    with zipfile.ZipFile(wheel) as held:
        code = [name for name in held.namelist() if name.endswith(".py")]
        lines = sum(held.read(name).count(b"\n") for name in code)
    assert lines < MOST_LINES


def test_every_shipped_model_is_known() -> None:
    shipped = {path.name for path in (ROOT / "assets" / "models").iterdir() if path.is_dir()}
    assert sorted(PACKED + OTHERS) == sorted(shipped)


ASKED = ("run sticker-dit 7", "run chain-llada a", "kv --recipe h2o", "serve", "inspect sticker-wan")


def test_wheel_finds_its_assets_and_says_where_the_other_models_are(fresh_python: Path) -> None:
    code = f"""
import diffcache, diffcache.pipelines.small.reach, pathlib, sys
from diffcache.cli import main
package = pathlib.Path(diffcache.__file__).parent
files = (p for p in (package / "assets").rglob("*") if p.is_file())
print(package, *(p.relative_to(package.parent).as_posix() for p in files), "asked", sep="\\n")
for words in {ASKED}:
    sys.argv = ["diffcache", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(f"{{words}} ended with {{end.code}}", file=sys.stderr)
"""
    command = [str(fresh_python), "-E", "-c", code]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    told = done.stderr.split(" ended with 3\n")
    assert done.returncode == 0 and len(told) == len(ASKED) + 1, done.stderr
    for words, said in zip(ASKED, told, strict=False):
        assert said.endswith(words) and "the other models come with the repository" in said
    place, *assets = done.stdout.partition("\nasked\n")[0].splitlines()
    assert Path(place).resolve().is_relative_to(fresh_python.parents[1].resolve())
    assert set(assets) == ASSETS


@pytest.mark.slow
def test_the_repository_imports_beside_the_wheel_and_lets_hugging_face_import(fresh_python: Path) -> None:
    code = """
import diffcache, diffcache.pipelines.small.reach, transformers
from diffusers import FluxTransformer2DModel
print(diffcache.__file__)
"""
    place = run(fresh_python, "-E", "-c", code, cwd=ROOT).splitlines()[-1]
    assert Path(place).resolve().is_relative_to(ROOT.resolve())
