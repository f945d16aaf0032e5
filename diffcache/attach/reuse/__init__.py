"""Feature reuse: what is kept of a denoiser, and what stands in for it."""
