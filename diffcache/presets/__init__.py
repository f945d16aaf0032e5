"""Presets: settings for models that many people run, found by what the model is."""
