"""diffcache: feature and KV caches for diffusion models.

>>> pipe = diffcache.wrap(pipe, TaylorSeer(every=5, order=1, site="stack"))  # doctest: +SKIP
>>> images = pipe(prompt).images  # doctest: +SKIP
>>> print(diffcache.report(pipe))  # doctest: +SKIP
>>> diffcache.unwrap(pipe)  # doctest: +SKIP
"""

from diffcache.api import inspect as inspect
from diffcache.api import report as report
from diffcache.api import reset as reset
from diffcache.api import unwrap as unwrap
from diffcache.api import wrap as wrap
from diffcache.api import wrapped as wrapped
from diffcache.calibration import calibrate as calibrate
from diffcache.catalog import methods as methods
from diffcache.cite import cite as cite
from diffcache.errors import AttachError as AttachError
from diffcache.errors import CacheWarning as CacheWarning
from diffcache.errors import DiffcacheError as DiffcacheError
from diffcache.errors import TablesError as TablesError
from diffcache.errors import UncalibratedError as UncalibratedError
from diffcache.errors import UnknownMethodError as UnknownMethodError
from diffcache.features.combine import Combine as Combine
from diffcache.features.confidence_gated import ConfidenceGatedTaylor as ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock as FirstBlock
from diffcache.features.fitted import FittedForecast as FittedForecast
from diffcache.features.instead import Newton as Newton
from diffcache.features.instead import Reuse as Reuse
from diffcache.features.instead import Taylor as Taylor
from diffcache.features.interval import Interval as Interval
from diffcache.features.tables import Tables as Tables
from diffcache.features.taylorseer import TaylorSeer as TaylorSeer
from diffcache.features.when import Every as Every
from diffcache.features.when import Gate as Gate
from diffcache.features.when import Listed as Listed
from diffcache.features.when import Table as Table
from diffcache.report import Report as Report
from diffcache.step import Site as Site
from diffcache.step import Step as Step
from diffcache.tuning.tune import tune as tune

__version__ = "0.1.0"
