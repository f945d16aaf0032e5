"""The pages as a site: `make site`, which has mkdocs call this file as a hook (`mkdocs.yml`).

The site is made from what the repository shows anyway. Pages that only it has are made here while
it is built, and are in no commit: one for each card of a shipped model; the notebook as a page; the
reference. Links are turned to where their targets stand on the site; one to nowhere is an error.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffcache
from diffcache.eval.record import ROOT
from diffcache.registry import rows_of

# Package -> what its page begins with, besides what the package names.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "kv": (),
    "dllm": ("diffcache.pipelines.diffusion_lm.DiffusionLM",),
    "video": (
        "diffcache.pipelines.causal_video.CausalVideo",
        "diffcache.pipelines.causal_checkpoint.load_causal",
        "diffcache.pipelines.streaming_vae.WanDecoder",
    ),
    "quant": (
        "diffcache.quant.linear.QuantizedLinear",
        "diffcache.quant.conv.QuantizedConv2d",
        "diffcache.quant.plan.LayerPlan",
        "diffcache.quant.plan.QuantPlan",
    ),
}
FENCE = r"^(?P<indent> *)```.*?^(?P=indent)```$"
LINK = re.compile(
    rf"{FENCE}|(?P<text>!?\[(?:[^\[\]`]|`[^`]*`)*\]\()(?P<to>[^)\s]+)\)|`[^`\n]+`", re.MULTILINE | re.DOTALL
)


class Website:
    """Pages and files of the site.

    Attributes:
        pages: Place on the site -> text, with the links of the site.
        files: Place on the site -> file of the repository that a page shows or links to.

    Raises:
        ValueError: If a page links to what is not there.
    """

    def __init__(self) -> None:
        self.files = {"site.css": ROOT / "docs" / "site.css"}
        texts = dict(_texts())
        self._places: dict[str, str] = {}
        for place, (source, _) in texts.items():
            self._places.setdefault(source, place)
        self.pages = {
            place: self._with_links(place, source, text) if source else text for place, (source, text) in texts.items()
        }

    def _with_links(self, place: str, source: str, text: str) -> str:
        """Return the text of a page with links that hold on the site."""

        def turned(found: re.Match[str]) -> str:
            to = found["to"]
            if to is None or re.match(r"#|[a-z]+:", to):
                return found[0]
            path, _, anchor = to.partition("#")
            beside = posixpath.join(posixpath.dirname(source), path)
            target = self._place(posixpath.normpath(beside))
            if target is None:
                raise ValueError(f"{source}: a link to {to}, which is not there")
            if target == place:  # the notebook from its page
                target = posixpath.basename(source)
                self.files[target] = ROOT / source
            link = posixpath.relpath(target, posixpath.dirname(place) or ".")
            return f"{found['text']}{link}{'#' if anchor else ''}{anchor})"

        return LINK.sub(turned, text)

    def _place(self, source: str) -> str | None:
        """Return where a file of the repository stands on the site, None where it is not there."""
        if source in self._places or not (ROOT / source).is_file():
            return self._places.get(source)
        place = source.removeprefix("docs/")
        self.files[place] = ROOT / source
        return place


def _texts() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield place of each page -> its file in the repository, if it has one, and its text."""
    named = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    named |= {file.name: f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))}
    for file in sorted((ROOT / "assets" / "models").glob("*/README.md")):
        named[f"models/{file.parent.name}.md"] = file.relative_to(ROOT).as_posix()
    for place, source in named.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        yield place, (source, re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL))
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    yield "tour.md", ("docs/tour.ipynb", "\n\n".join(_cells(notebook)) + "\n")
    yield from ((place, ("", text)) for place, text in _reference())


def _cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook and what they showed, as Markdown."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                yield f'<img alt="shown by the cell above" src="data:image/png;base64,{png}">'
            elif "text/html" in data:
                html = "".join(data["text/html"])
                yield f'<div class="output">{html}</div>'
            else:
                shown = "".join(output.get("text", data.get("text/plain", ())))
                yield f"```text\n{shown.rstrip()}\n```"


def _reference() -> Iterator[tuple[str, str]]:
    """Yield place and text of the pages of the reference, as mkdocstrings reads them."""
    methods = {row.load().__name__ for row in rows_of("method").values()}
    lines = ["# diffcache", "", _about("diffcache"), "Methods have [a page of their own](../methods.md).", ""]
    names = [name for name in diffcache.__all__ if name not in PACKAGES]
    paths = [_path_of(getattr(diffcache, name)) for name in names]
    lines += [_entry(path) for path in paths if path.rpartition(".")[2] not in methods]
    yield "api/diffcache.md", "\n".join(lines)
    for package, first in PACKAGES.items():
        module = getattr(diffcache, package)
        held = {name: value for name, value in vars(module).items() if name[0] != "_"}
        listed = getattr(module, "__all__", sorted(held, key=str.lower))
        paths = [
            _path_of(getattr(module, name))
            for name in listed
            if name not in rows_of("recipe") and _is_ours(getattr(module, name))
        ]
        entries = [_entry(path) for path in dict.fromkeys([*first, *paths])]
        yield f"api/{package}.md", "\n".join([f"# diffcache.{package}", "", _about(module.__name__), *entries])


def _is_ours(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return hasattr(value, "__qualname__") and module.startswith("diffcache.")


def _path_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _about(module: str) -> str:
    options = "members: false", "show_root_heading: false", "show_root_toc_entry: false"
    return "\n".join([f"::: {module}", "    options:", *(f"      {option}" for option in options), ""])


def _entry(path: str) -> str:
    return f"::: {path}\n    options:\n      heading_level: 2\n"


def on_startup(command: str, dirty: bool) -> None:
    """Copy the modules of the package, as mkdocstrings follows no links and needs `__init__.py`; called by mkdocs."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        files = [n for n in names if not n.endswith(".py") and Path(folder, n).is_file()]
        return [*files, "__pycache__", "assets", "workshop"]

    place = ROOT / "build" / "package"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(ROOT / "diffcache", place / "diffcache", ignore=left_out)
    for folder in (path for path in place.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()


def on_files(files: Any, config: Any) -> Any:
    """Put pages and files in the place of those of `docs/`; called by mkdocs."""
    from mkdocs.structure.files import File

    site = Website()
    for file in [file for file in files if file.src_dir == config.docs_dir]:  # not the theme's
        files.remove(file)
    for place, text in site.pages.items():
        files.append(File.generated(config, place, content=text))
    for place, path in site.files.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files
