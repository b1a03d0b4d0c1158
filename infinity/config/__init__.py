"""Every knob once, in DeepSpeed's layout."""

from infinity.config.batch import BatchSizes
from infinity.config.config import Config
from infinity.config.size import format_bytes, parse_bytes

__all__ = ["BatchSizes", "Config", "format_bytes", "parse_bytes"]
