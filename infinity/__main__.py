"""Lets ``python -m infinity`` mean the ``infinity`` command."""

from infinity.cli.main import app

if __name__ == "__main__":
    app()
