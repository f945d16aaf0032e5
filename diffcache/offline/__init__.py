"""Offline stages: calibration, traced runs, tuning, training, and collectors of methods."""
