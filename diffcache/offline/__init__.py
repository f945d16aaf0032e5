"""Offline stages: calibration, traced runs, tuning, training, and what each method collects."""
