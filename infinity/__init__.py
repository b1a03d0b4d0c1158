"""Trains models that do not fit, bit for bit as if they did."""

from infinity.config import Config
from infinity.engine.access import (
    gathered,
    get_full_grad,
    get_full_optimizer_state,
    get_full_param,
    set_full_param,
)
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.engine.materialize import Init
from infinity.engine.planning import plan_model as plan
from infinity.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    InfinityError,
    NonFiniteError,
    OffloadedError,
    RankError,
    ScheduleError,
    StorageError,
)
from infinity.nn.tiled import TiledLinear

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "InfinityError",
    "Init",
    "NonFiniteError",
    "OffloadedError",
    "RankError",
    "ScheduleError",
    "StorageError",
    "TiledLinear",
    "gathered",
    "get_full_grad",
    "get_full_optimizer_state",
    "get_full_param",
    "initialize",
    "plan",
    "set_full_param",
]
