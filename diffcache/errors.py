"""The errors and the warning that diffcache raises."""


class DiffcacheError(Exception):
    """Base class of every error that diffcache raises on purpose."""


class AttachError(DiffcacheError, RuntimeError):
    """A model or pipeline cannot be cached as asked; the message says why and what to do."""


class UnknownMethodError(DiffcacheError, LookupError):
    """A method name is not in the catalogue."""


class CacheWarning(UserWarning):
    """Something ran as asked but not as hoped: nothing was skipped, or a copy runs uncached."""
