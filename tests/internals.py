"""What tests look at inside a wrapped denoiser."""

from diffcache.attach.handle import Handle
from diffcache.attach.reuse.extension import FeatureReuse


def reuse_in(handle: Handle, number: int = 0) -> FeatureReuse:
    """Return the feature reuse of one of a handle's denoisers."""
    extensions = handle.denoisers[number].extensions
    (found,) = [extension for extension in extensions if isinstance(extension, FeatureReuse)]
    return found
