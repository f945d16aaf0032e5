"""Feature reuse: features that are kept of a denoiser, and their stand-ins."""
