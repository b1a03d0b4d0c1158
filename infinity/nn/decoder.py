"""A decoder-only transformer in plain PyTorch: RMSNorm, rotary positions, causal attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; ``d_ff`` is the width inside the feed-forward part."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    vocabulary: int = 256
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model {self.d_model} must be a multiple of 2 * n_heads = {2 * self.n_heads}")

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model

    @property
    def parameters(self) -> int:
        """Parameters of the whole decoder; embedding and head are separate."""
        return self.n_layers * self.block_parameters + (2 * self.vocabulary + 1) * self.d_model


def rotary(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each ``(length, width / 2)`` in fp32."""
    frequency = base ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + width / 2])`` by its position's angle."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then feed-forward, each added to what came in."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.d_model
        self.n_heads = config.n_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)
        # What a block adds starts small enough that the sum over all blocks keeps the scale of the input.
        for linear in (self.qkv, self.gate_up):
            nn.init.normal_(linear.weight, std=width**-0.5)
        nn.init.normal_(self.attention_out.weight, std=(2 * config.n_layers * width) ** -0.5)
        nn.init.normal_(self.down.weight, std=(2 * config.n_layers * config.d_ff) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.n_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Decoder(nn.Module):
    """Tokens to logits, or to the mean cross-entropy in nats when the targets are given too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.25 * config.d_model**-0.5)  # the first guess is nearly uniform

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        head_width = self.config.d_model // self.config.n_heads
        cos, sin = rotary(tokens.shape[1], head_width, self.config.rotary_base, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
