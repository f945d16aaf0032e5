"""Quantized layers with settings for every step; knows nothing of features or of attaching."""
