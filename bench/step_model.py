"""Builds the decoder that every contestant trains, on the same data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-4
SEED = 0


@dataclass(frozen=True)
class Shape:
    """A decoder; the feed-forward width is near 8/3 of the model's, as is usual with gated ones."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """How many it has: embedding and head, attention and gated feed-forward with two norms per layer, a norm."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocabulary * self.d_model + self.n_layers * layer + self.d_model

    def deeper(self, n_layers: int) -> Shape:
        """The same with another number of layers."""
        return Shape(self.d_model, n_layers, self.n_heads, self.d_ff, self.vocabulary)


SHAPES = {
    "tiny": Shape(64, 2, 2, 176, 256),
    "50m": Shape(640, 8, 10, 1728, 8192),
    "185m": Shape(1024, 12, 16, 2752, 16384),
    "400m": Shape(1280, 18, 20, 3456, 16384),
    "800m": Shape(1792, 18, 28, 4800, 16384),
    "1.3b": Shape(2048, 24, 16, 5504, 16384),
    "2b": Shape(2304, 30, 18, 6144, 16384),
}


def decoder_module() -> Any:
    """``infinity.nn.decoder`` alone, so that a peer's process holds nothing else of this package."""
    name = "bench_decoder"
    if name not in sys.modules:
        path = Path(__file__).resolve().parent.parent / "infinity" / "nn" / "decoder.py"
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def build_decoder(shape: Shape) -> Any:
    """The model in fp32 with values that the seed decides."""
    import torch

    decoder = decoder_module()
    torch.manual_seed(SEED)
    return decoder.Decoder(
        decoder.DecoderConfig(
            d_model=shape.d_model,
            n_layers=shape.n_layers,
            n_heads=shape.n_heads,
            d_ff=shape.d_ff,
            vocabulary=shape.vocabulary,
        )
    )


def batch(shape: Shape, tokens: int, index: int) -> tuple[Any, Any]:
    """Inputs with targets of micro-batch ``index``, each ``(1, tokens)``."""
    import torch

    drawn = torch.randint(0, shape.vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(1000 + index))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
