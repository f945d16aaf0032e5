"""The shipped model of pictures, called without guidance: once a step."""

from diffcache.eval.workshop.small.sticker_flux import CALL as GUIDED
from diffcache.eval.workshop.small.sticker_flux import DIRECTORY, load

__all__ = ["CALL", "DIRECTORY", "load"]
CALL = {key: GUIDED[key] for key in ("height", "width", "max_sequence_length")}
