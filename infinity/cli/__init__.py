"""The ``infinity`` command."""
