"""Trains models that do not fit the accelerator, by moving their states between device, host, NVMe."""

__version__ = "0.1.0"
