"""diffcache: feature and KV caches for diffusion models.

Examples:
    >>> pipe = diffcache.wrap(pipe, TaylorSeer(every=5, order=1))  # doctest: +SKIP
    >>> images = pipe(prompt).images  # doctest: +SKIP
    >>> print(diffcache.report(pipe))  # doctest: +SKIP
    >>> diffcache.unwrap(pipe)  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

from diffcache.api import branch as branch
from diffcache.api import expected_bytes as expected_bytes
from diffcache.api import inspect as inspect
from diffcache.api import report as report
from diffcache.api import reset as reset
from diffcache.api import run as run
from diffcache.api import save as save
from diffcache.api import settings as settings
from diffcache.api import stream as stream
from diffcache.api import unwrap as unwrap
from diffcache.api import update as update
from diffcache.api import wrap as wrap
from diffcache.api import wrapped as wrapped
from diffcache.api import writing as writing
from diffcache.catalog import methods as methods
from diffcache.citation import cite as cite
from diffcache.errors import AttachError as AttachError
from diffcache.errors import CacheWarning as CacheWarning
from diffcache.errors import DiffcacheError as DiffcacheError
from diffcache.errors import TablesError as TablesError
from diffcache.errors import UncalibratedError as UncalibratedError
from diffcache.errors import UnknownMethodError as UnknownMethodError
from diffcache.features.combine import Combine as Combine
from diffcache.features.confidence_gated import ConfidenceGatedTaylor as ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock as FirstBlock
from diffcache.features.interval import Interval as Interval
from diffcache.features.parts.hold import Held as Held
from diffcache.features.parts.instead import Newton as Newton
from diffcache.features.parts.instead import Reuse as Reuse
from diffcache.features.parts.instead import Taylor as Taylor
from diffcache.features.parts.when import Every as Every
from diffcache.features.parts.when import Gate as Gate
from diffcache.features.parts.when import Listed as Listed
from diffcache.features.parts.when import Table as Table
from diffcache.features.tables import Tables as Tables
from diffcache.features.taylorseer import TaylorSeer as TaylorSeer
from diffcache.registry import places
from diffcache.run_report import Report as Report
from diffcache.step import Site as Site
from diffcache.step import Step as Step

if TYPE_CHECKING:
    from diffcache import dllm as dllm
    from diffcache import kv as kv
    from diffcache import quant as quant
    from diffcache import video as video
    from diffcache.attach.call import Call as Call
    from diffcache.attach.extension import Extension as Extension
    from diffcache.attach.handle import Handle as Handle
    from diffcache.features.bac import BAC as BAC
    from diffcache.features.base import Ability as Ability
    from diffcache.features.base import Instead as Instead
    from diffcache.features.base import Method as Method
    from diffcache.features.base import When as When
    from diffcache.features.cachequant import CacheQuant as CacheQuant
    from diffcache.features.combine import FeatureMethod as FeatureMethod
    from diffcache.features.dbcache import DBCache as DBCache
    from diffcache.features.dbprune import DBPrune as DBPrune
    from diffcache.features.dmd import DMD as DMD
    from diffcache.features.dpcache import DPCache as DPCache
    from diffcache.features.each import Each as Each
    from diffcache.features.easycache import EasyCache as EasyCache
    from diffcache.features.ertacache import ERTACache as ERTACache
    from diffcache.features.fastercache import FasterCache as FasterCache
    from diffcache.features.fitted import FittedForecast as FittedForecast
    from diffcache.features.foca import FoCa as FoCa
    from diffcache.features.freqca import FreqCa as FreqCa
    from diffcache.features.harmonica import HarmoniCa as HarmoniCa
    from diffcache.features.hicache import HiCache as HiCache
    from diffcache.features.lazycache import LazyCache as LazyCache
    from diffcache.features.magcache import MagCache as MagCache
    from diffcache.features.pab import PAB as PAB
    from diffcache.features.profilingdit import ProfilingDiT as ProfilingDiT
    from diffcache.features.regione import RegionE as RegionE
    from diffcache.features.seacache import SeaCache as SeaCache
    from diffcache.features.speca import SpeCa as SpeCa
    from diffcache.features.spectrum import Spectrum as Spectrum
    from diffcache.features.step_mask import StepMask as StepMask
    from diffcache.features.teacache import TeaCache as TeaCache
    from diffcache.features.temporal_table import TemporalTable as TemporalTable
    from diffcache.features.tuned import Tuned as Tuned
    from diffcache.offline.calibrate import calibrate as calibrate
    from diffcache.offline.tune.tune import tune as tune

__version__ = "0.1.0"

# Imported when they are first asked for, so that `import diffcache` stays light: name -> module.
_LATER = {
    **places("method"),
    "calibrate": "diffcache.offline.calibrate",
    **dict.fromkeys(("evaluate", "latency"), "diffcache.eval.live"),
    "export": "diffcache.offline.export",
    "predict": "diffcache.eval.cost.predict",
    "tune": "diffcache.offline.tune.tune",
    "Call": "diffcache.attach.call",
    "Extension": "diffcache.attach.extension",
    "Each": "diffcache.features.each",
    "FeatureMethod": "diffcache.features.combine",
    "Handle": "diffcache.attach.handle",
    **dict.fromkeys(("Ability", "Instead", "Method", "When"), "diffcache.features.base"),
}
_PACKAGES = ("dllm", "kv", "quant", "video")

__all__ = sorted({
    *_LATER, *_PACKAGES, "AttachError", "CacheWarning", "Combine", "DiffcacheError", "Every",
    "Gate", "Held", "Listed", "Newton", "Report", "Reuse", "Site", "Step", "Table", "Tables",
    "TablesError", "Taylor", "UncalibratedError", "UnknownMethodError", "branch", "cite",
    "expected_bytes", "inspect", "methods", "report", "reset", "run", "save", "settings", "stream",
    "unwrap", "update", "wrap", "wrapped", "writing",
})  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"diffcache.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'diffcache' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
