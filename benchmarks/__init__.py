"""Measurements of lossguard against native torch: ``python -m benchmarks``."""
