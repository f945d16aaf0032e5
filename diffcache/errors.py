"""The errors and the warning that diffcache raises."""


class DiffcacheError(Exception):
    """Base class of every error that diffcache raises on purpose."""


class AttachError(DiffcacheError, RuntimeError):
    """A model or pipeline cannot be cached as asked; the message gives reason and remedy."""


class UnknownMethodError(DiffcacheError, LookupError):
    """A method name is not in the catalogue."""


class MissingError(DiffcacheError):
    """A package or a file of weights that is needed is not installed."""


class UncalibratedError(DiffcacheError, ValueError):
    """A method needs tables that were measured on the model; the message says how to get them.

    Attributes:
        method: Catalogue name of the method, empty if `diffcache calibrate` cannot make its tables.
    """

    def __init__(self, message: str, method: str = "") -> None:
        super().__init__(message)
        self.method = method


class TablesError(DiffcacheError, ValueError):
    """A file of tables cannot be read, or was made for another method, model or schedule."""


class CacheWarning(UserWarning):
    """Something ran as asked but not as hoped: nothing was skipped, or a copy runs uncached."""
