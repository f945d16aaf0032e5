"""Write the settings of a wrapped cache as YAML, and read them again.

Measured tables stand in a safetensors file beside it, as `calibrate` writes them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from diffcache.features.base import Method, check_int
from diffcache.features.parts.hold import FORMS, Form, Held
from diffcache.features.serialize import from_plain, to_plain
from diffcache.features.tables import Tables
from diffcache.files import check_target, write_file
from diffcache.registry import WORDS, find

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".yaml", ".yml")
_MOST_BYTES = 2**20  # a thousand ratios take some 20 kB
_DEEPEST = 24  # lists and mappings in each other


@dataclass(frozen=True)
class Saved:
    """Contents of a file of settings."""

    method: str | Method  # name of a method, policy or recipe, or a method put together from parts
    settings: dict[str, Any] = field(default_factory=dict)  # settings of one that is named
    components: tuple[str, ...] | None = None  # names of the pipeline's denoisers; None for all of them
    hold: Form | None = None  # form of the held features; None for as they are
    text_bytes: int | None = None  # most bytes of outputs of text encoders to keep; None keeps none


def is_settings_file(method: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether something that is given as a method is the name of a file of settings."""
    if not isinstance(method, (str, os.PathLike)):
        return False
    return str(method).lower().endswith(ENDINGS)


def save_settings(
    path: str | os.PathLike[str],
    method: Any,
    settings: Mapping[str, Any] | None = None,
    components: list[str] | None = None,
    text_bytes: int | None = None,
) -> None:
    """Write the settings that an object is wrapped with.

    Args:
        path: File to write, `.yaml` or `.yml`; its tables go beside it, into `.safetensors`.
        method: Method or policy, or the name of a recipe.
        settings: Settings of a name.
        components: Names of the pipeline's denoisers; None for all of them.
        text_bytes: Most bytes of outputs of text encoders to keep; None keeps none.

    Raises:
        ValueError: If the file cannot be written, or there is something in the method that cannot
            be made again, such as a class of yours.
    """
    import yaml

    from diffcache import __version__

    path = Path(path)
    check_target("path", path, ENDINGS)
    data: dict[str, Any] = {}
    if isinstance(method, Held):
        data["hold"], method = method.hold, method.method
    tensors: dict[str, Tensor] = {}
    row = find(getattr(method, "name", None) or "", *WORDS)
    if isinstance(method, str):
        said = {"method": method, "settings": _plain(dict(settings or {}), tensors)}
    elif row is not None and dataclasses.is_dataclass(method) and row.load() is type(method):
        fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}
        tables = fields.get("tables")
        if isinstance(tables, Tables):
            fields["tables"] = tables.save(path.with_suffix(".safetensors")).path.name  # type: ignore[union-attr]
        said = {"method": row.name, "settings": _plain(fields, tensors)}
    else:
        said = {"method": _native(to_plain(method, tensors))}
    if tensors:
        way_out = "wrap with the method by its name, tables='file.safetensors'"
        raise ValueError(f"{method!r}: has tables in one of its parts, which YAML cannot hold; {way_out}")
    data = said | data | ({} if components is None else {"components": list(components)})
    data |= {} if text_bytes is None else {"text_bytes": text_bytes}
    title = f'# diffcache {__version__}: diffcache.wrap(pipe, "{path.name}")\n'
    write_file(path, title + yaml.safe_dump(data, sort_keys=False, default_flow_style=None))


def _plain(settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: _native(to_plain(value, tensors)) for name, value in settings.items()}


def _native(data: Any) -> Any:
    """Return plain data with numbers that JSON does not have as YAML has them."""
    if isinstance(data, list):
        return [_native(item) for item in data]
    if isinstance(data, dict):
        if set(data) == {"float"}:
            return float(data["float"])
        return {key: _native(value) for key, value in data.items()}
    return data


def read_settings(path: str | os.PathLike[str]) -> Saved:
    """Read a file of settings; nothing in it is run, and tables alone are read besides.

    Raises:
        ValueError: If there is no such file, or it is none of settings.
    """
    path = Path(path)
    try:
        return _saved(_parsed(path), path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"method={str(path)!r}: {error}") from error


def _parsed(path: Path) -> Any:
    """Return the data of a YAML file that is not large, deep, or made of references."""
    import yaml

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"has more than {_MOST_BYTES} bytes; it is no file of settings")
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"is nested more than {_DEEPEST} deep")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"has a reference, *{event.anchor}; write the value out")
        return yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); diffcache.save writes one") from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"is not the YAML that diffcache.save writes ({said})") from error


def _saved(data: Any, path: Path) -> Saved:
    """Return the contents of a file that is read."""
    known = [entry.name for entry in dataclasses.fields(Saved)]
    if not isinstance(data, dict) or "method" not in data:
        raise ValueError("has no 'method'; it must have one, and its 'settings'")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise ValueError(f"has {unknown[0]!r}; it may have {', '.join(known)}")
    settings, hold, components = (data.get(key) for key in ("settings", "hold", "components"))
    settings = settings or {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"settings={settings!r}: must be values by name")
    method = _method(data["method"], settings)
    if hold not in (None, *FORMS):
        raise ValueError(f"hold={hold!r}: must be one of {', '.join(map(repr, FORMS))}")
    if components is not None:
        if not isinstance(components, list) or not all(isinstance(n, str) for n in components):
            raise ValueError(f"components={components!r}: must be a list of names")
        components = tuple(components)
    text_bytes = data.get("text_bytes")
    if text_bytes is not None:
        check_int("text_bytes", text_bytes, 1)
    found = {name: _setting(name, value, path) for name, value in settings.items()}
    return Saved(method, found, components, hold, text_bytes)


def _method(data: Any, settings: Mapping[str, Any]) -> str | Method:
    """Return the method of a file: its name, or the method that its parts make."""
    if isinstance(data, str) and not is_settings_file(data):
        return data
    if not isinstance(data, dict):
        raise ValueError(f"has method={data!r}; must be a name, or the parts of a method")
    if settings:
        raise ValueError(f"settings {sorted(settings)} go with a method's name")
    method = from_plain(data, {})
    if not isinstance(method, Method):
        raise ValueError(f"{method!r} is a part of a method, and no method")
    return method


def _setting(name: str, value: Any, path: Path) -> Any:
    """Return a setting as a method takes it; tables are a file beside the one that names them."""
    if name == "tables" and isinstance(value, str):
        if Path(value).name != value:
            raise ValueError(f"tables={value!r}: must be the name of a file beside this one")
        return str(path.with_name(value))
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name}={value!r}: must be a number")
    return from_plain(value, {})
