"""`docs/presets.md`: every preset, from the files of the families."""

from __future__ import annotations

import sys

from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.presets.choose import LEVELS, TITLES, known_models, presets, rows_of_model

PAGE = ROOT / "docs" / "presets.md"
HEAD = """# Presets

`diffcache.wrap(pipe)` takes settings that were published for the model. Written by `python -m
diffcache.eval.workshop.preset_page --write` from the files in `diffcache/presets`, one a family; a
test holds it to them.

```python
import diffcache

diffcache.wrap(pipe)  # the balanced preset of the model
diffcache.unwrap(pipe)
diffcache.wrap(pipe, preset="fast")  # or quality, or flux.1-dev/fast
diffcache.unwrap(pipe)
diffcache.wrap(pipe, preset="fast", threshold=0.1)  # another value for one of its settings
```

On the command line: `diffcache presets`, `diffcache presets ./my-pipeline`, `diffcache run MODEL
PROMPT --preset fast`.

- **How a model is recognized**: by the class of its denoiser, by its configuration (depth, width,
  channels, guidance embedding), by the class of its pipeline, and where nothing else differs by a
  word in the folder or hub ID it was loaded from. A finetune of the same configuration takes the
  presets of its base.
- **What was taken, and why**, is one line: the logger `diffcache` says it at level INFO, the report
  has it, and `diffcache run` prints the report. A run of another number of steps than a preset
  holds for is said there too.
- **A model that is none of these** takes `taylorseer` with its defaults, and the line says so. So
  does one that may be one of several; `preset="MODEL/LEVEL"` says which.
- **A distilled model** of a few steps is told that there is little to skip.
- **Two denoisers**, as of Wan 2.2 A14B, get settings of their own, as anybody can give them:
  `wrap(pipe, {"transformer": "dbcache:warmup=4", "transformer_2": "dbcache:warmup=2"})`.
- **Numbers are those of the sources.** The seconds are what their authors measured, on their code
  and device; none was measured here. What a setting costs on your prompts, `diffcache eval` and
  `diffcache.tune` say. A size that a source leaves out is the default of the pipeline.
- **Schedules**: on a tiny model of each class, tests hold the computed steps against the rule of
  the source, written anew in the test; what is not compared says so.

A preset is a table in the file of its family, and no other place: `[models.NAME]` says how the
model is recognized, `[teacache.NAME]` or `[magcache.NAME]` has its published list if it has one,
and `[presets.NAME.LEVEL]` the method, settings, steps, size, source, license and measurement.
"""


def page(text: str = "") -> str:
    """Return the whole page, whatever the text that is there."""
    rows = [row for name in known_models() for row in rows_of_model(name)]
    lines = [HEAD, *table(list(TITLES), rows), "", "## Sources", ""]
    origins: dict[str, list[str]] = {}
    for own in presets().values():
        for level in LEVELS:
            if level in own:
                origins.setdefault(own[level].origin, []).append(own[level].name)
    lines += table(["source, license", "presets"], ([o, ", ".join(n)] for o, n in origins.items()))
    return "\n".join(lines).rstrip() + "\n"


main = keep_pages(page, PAGE)

if __name__ == "__main__":
    sys.exit(main())
