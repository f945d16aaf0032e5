"""Report on a cache in the last run: counts, operations, seconds, bytes and a timeline."""

from __future__ import annotations

import json
import shutil
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from io import BytesIO, StringIO
from statistics import fmean
from typing import TYPE_CHECKING, Any

from diffcache.attach.handle import Handle
from diffcache.attach.record import CallRecord
from diffcache.features.combine import reuse_of
from diffcache.memory import expectation
from diffcache.timeline import COMPUTED, PARTS, SKIPPED, steps_of, timeline_image, timeline_text

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.table import Table

    from diffcache.features.base import Method

_DECIMAL = ("", "k", "M", "G", "T")
SCHEMA = 2
_HTML_COLUMNS = 160


class Report:
    """Computed and skipped work of the last run of a wrapped pipeline or denoiser.

    A snapshot: it holds no tensors and stays as it is when the pipeline runs again.

    Attributes:
        method: The method.
        calls: The denoiser calls in order, each with `denoiser`, `index`, `timestep`, `branch`, `computed`, `reason`,
            `seconds`, `counts` (site -> computed, skipped) and `flops`.
        sites: Denoiser -> site -> (computed, skipped) evaluations of blocks or modules.
        computed: Block or module evaluations that ran.
        skipped: Block or module evaluations that were skipped.
        steps_computed: Steps in which any branch was computed.
        steps_skipped: Steps in which every branch was skipped.
        flops_computed: Floating-point operations of the sites that ran (a multiply-add is two); None where they could
            not be counted, as in compiled blocks.
        flops_saved: The same of the sites that were skipped.
        seconds: Time within the denoiser calls, on the host's clock: on an accelerator, work that is still queued at
            the end of a call is not in it.
        seconds_computed: Mean of the computed calls, None when there is none. First calls, which may include learning
            the model, are left out where there are others.
        seconds_skipped: Mean of the skipped calls, None when there is none.
        held_bytes: Bytes that features hold now; 0 between runs of a pipeline.
        peak_bytes: Most bytes held at the end of any call.
        finished: Whether the run ended without an exception, so far as the pipeline shows it.
        choice: Choice of the method by what the model is; None where the user named it.
        remarks: Remarks on the run, a sentence each, such as whether a cache is exact.
        texts: Counts of the cache of text encoders since the pipeline was wrapped; None where it has none.
    """

    def __init__(self, handle: Handle) -> None:
        record = handle.last
        self.method: Method = record.method or handle.method
        self.calls = [replace(call, counts=dict(call.counts)) for call in record.calls]
        self.sites = _sites(self.calls)
        self.computed, self.skipped = record.computed, record.skipped
        groups = steps_of(self.calls)
        self.steps_computed = sum(any(call.computed for call in group) for group in groups)
        self.steps_skipped = len(groups) - self.steps_computed
        self.flops_computed, self.flops_saved = _flops(self.calls)
        self.seconds = sum(call.seconds for call in self.calls)
        computed = [call for call in self.calls if call.computed]
        later = [call for call in computed if call.reason != "first call"]
        self.seconds_computed = _mean(later or computed)
        self.seconds_skipped = _mean([call for call in self.calls if not call.computed])
        self.held_bytes = handle.held_bytes()
        self.peak_bytes = record.peak_bytes
        self.finished = record.finished
        self.choice = handle.choice
        self.remarks = list(record.remarks)
        self.texts = None if handle.texts is None else handle.texts.counts()
        self._expected = [] if record.calls else _expected(handle)

    # plain data ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold; `schema` tells the layout."""
        pairs = ("steps_computed", "steps_skipped", "flops_computed", "flops_saved")
        seconds = ("seconds", "seconds_computed", "seconds_skipped")
        rest = ("held_bytes", "peak_bytes", "finished", "remarks")
        names = ("computed", "skipped", *pairs, *seconds, *rest)
        return {
            "schema": SCHEMA,
            "method": repr(self.method),
            "preset": self.choice.why if self.choice else None,
            **{name: getattr(self, name) for name in names},
            "texts": None if self.texts is None else asdict(self.texts),
            "sites": {
                denoiser: {site: _pair(counts) for site, counts in sites.items()}
                for denoiser, sites in self.sites.items()
            },
            "calls": [_call_dict(call) for call in self.calls],
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    # pictures and text ---------------------------------------------------------------------

    def timeline_image(self, width: int = 800, height: int = 200) -> Image:
        """Draw which steps were computed, as an RGB `PIL.Image` of `width` x `height` pixels."""
        return timeline_image(self.calls, width, height)

    def to_text(self, width: int | None = None, ascii_only: bool = False) -> str:
        """Return the report as plain text, `width` columns wide: by default as the terminal, 100 without one."""
        width = width or shutil.get_terminal_size((100, 24)).columns
        text = text_of(self.table(ascii_only), width) if self.sites else ""
        timeline = timeline_text(self.calls, width, ascii_only)
        parts = [repr(self.method), text, "\n".join(self.summary()), timeline]
        return "\n\n".join(part.strip("\n") for part in parts if part)

    def __str__(self) -> str:
        return self.to_text(ascii_only=not _prints(COMPUTED + SKIPPED + PARTS))

    def _repr_html_(self) -> str:
        """Return the report as HTML, for notebooks: table, totals, and the steps as a picture."""
        page = html_of(self.table() if self.sites else None, self.summary(), repr(self.method))
        if not self.calls:
            return page
        picture = BytesIO()
        self.timeline_image().save(picture, "PNG")
        data = b64encode(picture.getvalue()).decode("ascii")
        said = "steps, computed and skipped"
        return f'{page}<img alt="{said}" src="data:image/png;base64,{data}"/>'

    def __repr__(self) -> str:
        return f"<Report of {self.method!r}: {self.computed} computed, {self.skipped} skipped>"

    def table(self, ascii_only: bool = False) -> Table:
        """Return the counts of every site as a `rich` table."""
        from rich import box
        from rich.table import Table

        ran, skipped = self.computed, self.skipped
        style = box.ASCII2 if ascii_only else box.SIMPLE
        table = Table(box=style, show_footer=True, pad_edge=False)
        table.add_column("denoiser", footer="total")
        table.add_column("site", overflow="fold")
        table.add_column("computed", f"{ran:,}", justify="right")
        table.add_column("skipped", f"{skipped:,}", justify="right")
        table.add_column("share skipped", share(skipped, ran), justify="right")
        for denoiser, sites in self.sites.items():
            for site, (ran, skipped) in sites.items():
                table.add_row(denoiser, site, f"{ran:,}", f"{skipped:,}", share(skipped, ran))
        return table

    def summary(self) -> list[str]:
        """Return the totals, a sentence each."""
        if not self.calls:
            return [
                *self._expected,
                *self._texts(),
                *self._chosen(0),
                "No denoiser call yet: run the pipeline, then ask again.",
            ]
        total = self.steps_computed + self.steps_skipped
        whole = sum(any(call.share == 1 for call in group) for group in steps_of(self.calls))
        counts = [f"{whole} computed", f"{self.steps_skipped} skipped"]
        if whole < self.steps_computed:
            saved = share(self.skipped, self.computed)
            counts[1:1] = [f"{self.steps_computed - whole} in part"]
            counts.append(f"{saved} of all token-layers skipped")
        lines = [f"steps    {total}: {', '.join(counts)}"]
        if self.flops_computed is not None and self.flops_saved is not None:
            saved = share(self.flops_saved, self.flops_computed)
            lines.append(
                f"FLOPs    {human(self.flops_computed)} computed, {human(self.flops_saved)} saved "
                f"({saved}), of the sites above"
            )
        elif any(self.sites.values()):
            lines.append("FLOPs    not counted: the sites are compiled")
        per_call = [f"{self.seconds:.3f} s in the denoiser"]
        for name, mean in (("computed", self.seconds_computed), ("skipped", self.seconds_skipped)):
            per_call += [f"{1000 * mean:.2f} ms a {name} call"] if mean is not None else []
        lines.append(f"seconds  {', '.join(per_call)} (host clock)")
        lines.append(f"bytes    {human(self.held_bytes, 'B')} held, {human(self.peak_bytes, 'B')} at most")
        return lines + self._texts() + self._remarks(total)

    def _texts(self) -> list[str]:
        """Return the counts of the cache of text encoders."""
        said = self.texts
        if said is None:
            return []
        held, limit = human(said.held_bytes, "B"), human(said.limit_bytes, "B")
        counts = f"{said.looked_up} calls of text encoders looked up, {said.computed} computed"
        lines = [f"texts    {counts}; {held} held of {limit}"]
        if said.passed_over:
            lines.append(f"texts    the last that ran was not kept: {said.passed_over}")
        return lines

    def _remarks(self, total: int) -> list[str]:
        """Return remarks on a run for its user."""
        remarks = self._chosen(total) + ([self.method.note] if self.method.note else [])
        remarks += self.remarks
        reasons = _forced(self.calls)
        for reason in sorted(set(reasons)):
            calls = "call was" if reasons.count(reason) == 1 else "calls were"
            remarks.append(f"forced   {reasons.count(reason)} {calls} computed: {reason}")
        if not self.skipped and reuse_of(self.method) is not None:
            remarks.append(
                f"Nothing was skipped: all {total} steps were computed, so nothing was gained. "
                "Use more steps, a shorter warmup, or a larger interval or threshold."
            )
        return remarks

    def _chosen(self, total: int) -> list[str]:
        """Return how the method was chosen, and whether a run of `total` steps is as it expects."""
        if self.choice is None:
            return []
        lines = [f"preset   {self.choice.why}"]
        preset = self.choice.preset
        if preset is not None and total and total != preset.steps:
            lines.append(f"preset   it holds for {preset.steps} steps, and this run had {total}")
        return lines


def text_of(table: Any, width: int | None = None) -> str:
    """Return a table of `rich` as plain text without colors, as wide as `Report.to_text` makes it."""
    from rich.console import Console

    out = StringIO()
    width = width or shutil.get_terminal_size((100, 24)).columns
    Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html_of(table: Any, lines: Sequence[str], title: str = "") -> str:
    """Return a table of `rich`, if there is one, with a title above and lines of text below as HTML, for notebooks."""
    from rich.console import Console

    parts = [f"<p><code>{escape(title)}</code></p>"] if title else []
    if table is not None:
        console = Console(file=StringIO(), width=_HTML_COLUMNS, record=True, force_jupyter=False)
        console.print(table)
        parts.append(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
    parts += [f"<pre>{escape(chr(10).join(lines))}</pre>"] if lines else []
    return "\n".join(parts)


def human(number: float, unit: str = "") -> str:
    """Return a number with three digits and a unit.

    Kilo is 1000, as in `1.23 GFLOPs`; of bytes (`B`) it is 1024, as in `1.23 GiB`.
    """
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, _DECIMAL)
    for prefix in prefixes:
        if abs(number) < 999.5:
            digits = f"{number:.3g}" if prefix else f"{number:.0f}"
            return f"{digits} {prefix}{unit}".rstrip()
        number /= step
    return f"{number:.3g} {'Pi' if unit == 'B' else 'P'}{unit}"


def share(part: float, rest: float) -> str:
    """Return `part / (part + rest)` in percent."""
    return f"{100 * part / (part + rest):.1f} %" if part + rest else "-"


def _expected(handle: Handle) -> list[str]:
    """Return the bytes that a run will hold, in a sentence if they are known."""
    expected = expectation(handle)
    if expected is None:
        return []
    amount, size = expected
    frames = f", {size.frames} frames" if size.frames > 1 else ""
    one, two = (human(amount.of(branches), "B") for branches in (1, 2))
    where = f"at {size.width} x {size.height}{frames}"
    if amount.shared:
        calls = f"guidance in one batch doubles it, guidance in two calls holds {two}"
        return [f"bytes    {one} expected {where}; {calls}"]
    calls = "guidance doubles it, in one batch as in two calls"
    return [f"bytes    {one} expected for each guidance branch {where}; {calls}"]


def _sites(calls: Sequence[CallRecord]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the sum of all calls' counts, by denoiser and site."""
    sites: dict[str, dict[str, tuple[int, int]]] = {}
    for call in calls:
        own = sites.setdefault(call.denoiser, {})
        for site, (ran, skipped) in call.counts.items():
            before = own.get(site, (0, 0))
            own[site] = (before[0] + ran, before[1] + skipped)
    return sites


def _flops(calls: Sequence[CallRecord]) -> tuple[float | None, float | None]:
    """Return the operations that ran and that were saved, None twice if a step has no count."""
    calls = [call for call in calls if not call.writes]
    counts = [call.flops for call in calls if call.flops is not None]
    if not calls or len(counts) != len(calls):
        return None, None
    return sum(ran for ran, _ in counts), sum(saved for _, saved in counts)


def _forced(calls: Sequence[CallRecord]) -> list[str]:
    """Return the reasons of calls that were computed without asking the method."""
    return [
        call.reason
        for step in steps_of(calls)
        for call in step
        if call.computed and call.reason not in ("method", "first call") and (call is step[0] or not step[0].computed)
    ]


def _mean(calls: Sequence[CallRecord]) -> float | None:
    return fmean(call.seconds for call in calls) if calls else None


def _pair(counts: tuple[int, int]) -> dict[str, int]:
    return {"computed": counts[0], "skipped": counts[1]}


def _call_dict(call: CallRecord) -> dict[str, Any]:
    """Return one denoiser call as plain data."""
    names = ("denoiser", "index", "timestep", "branch", "computed", "reason", "seconds")
    flops = None if call.flops is None else {"computed": call.flops[0], "saved": call.flops[1]}
    counts = {site: _pair(counts) for site, counts in call.counts.items()}
    return {**{name: getattr(call, name) for name in names}, "counts": counts, "flops": flops}


def _prints(text: str) -> bool:
    """Return whether standard output can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
