"""Models of every shape train as they are, equal to plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.helpers import assert_equal, attached, check_model, configure, train_attached, train_plain

D = 16


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Embedding, blocks, norm, head: the common shape."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def tokens(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (2, 5), generator=generator) for _ in range(count)]


def vectors(count: int = 3, *, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, D, generator=generator).requires_grad_(grad) for _ in range(count)]


def predict(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def energy(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def test_blocks(tmp_path: Path) -> None:
    check_model(Stack, tokens(), predict, tmp_path)


def test_dropout_draws_the_same_masks_again(tmp_path: Path) -> None:
    check_model(lambda: Stack(dropout=0.5), tokens(), predict, tmp_path)


def test_tied_weights(tmp_path: Path) -> None:
    check_model(lambda: Stack(tied=True), tokens(), predict, tmp_path)


class Outside(Stack):
    """Uses its embedding as output projection without tying."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(tokens), self.embed.weight) + self.head(self.embed(tokens)) * 0.1


def test_weight_used_outside_its_module(tmp_path: Path) -> None:
    check_model(Outside, tokens(), predict, tmp_path, exact=False)


class Twice(Stack):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0], self.blocks[1]):
            x = block(x)
        return self.norm(self.norm(x))


def test_modules_used_twice(tmp_path: Path) -> None:
    check_model(Twice, tokens(), predict, tmp_path, exact=False)


class Reordered(Stack):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        start = int(tokens.sum()) % 3
        for number in range(3):
            x = self.blocks[(start + number) % 3](x)
        return self.norm(x)


def test_another_order_each_step(tmp_path: Path) -> None:
    check_model(Reordered, tokens(5), predict, tmp_path)


class Skipping(Stack):
    """Leaves out a block now and then; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.never = nn.Linear(D, D)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        skip = int(tokens.sum()) % 3
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        return self.norm(x)


def test_unused_parameters_are_not_stepped(tmp_path: Path) -> None:
    check_model(Skipping, tokens(5), predict, tmp_path)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def lora() -> nn.Module:
    model = Stack().requires_grad_(False)
    for block in model.blocks:
        block.up = Lora(block.up)
    return model


def test_frozen_parameters_with_adapters(tmp_path: Path) -> None:
    check_model(lora, tokens(), predict, tmp_path)


def test_adapters_as_units_inside_frozen_units(tmp_path: Path) -> None:
    check_model(lora, tokens(), predict, tmp_path, units=["Block", "Lora", "Embedding"])


def half_frozen() -> nn.Module:
    model = Stack()
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    return model


def test_frozen_layers_pass_gradients_on(tmp_path: Path) -> None:
    check_model(half_frozen, tokens(), predict, tmp_path)


class Odd(nn.Module):
    """Zero-size, scalar, non-contiguous, integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(D, 2 * D).t())
        self.table = nn.Parameter(torch.arange(D), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.turned)[:, self.table] * self.scale + self.nothing.sum()


def test_scalar_and_empty_parameters(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Odd(), nn.ReLU(), Odd()), vectors(grad=True), energy, tmp_path)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D).to(torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(D))
        self.second = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x.to(torch.bfloat16)).float() * self.gain)


def test_mixed_dtypes(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Mixed(), Mixed())

    check_model(build, vectors(1, grad=True), energy, tmp_path)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.linear(x)))


def test_batch_norm_counts_each_batch_once(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Normed(), Normed(), nn.Linear(D, D)), vectors(), energy, tmp_path)


class Running(nn.Module):
    """Replaces its buffer instead of writing into it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_replaced_buffers(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Running(), Running()), vectors(), energy, tmp_path)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


def test_counters_in_a_module(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Counting(), Counting()), vectors(), energy, tmp_path)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


def test_experts_that_are_skipped(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Experts(), Experts()), vectors(5), energy, tmp_path)
    check_model(
        lambda: nn.Sequential(Experts(), Experts()), vectors(5), energy, tmp_path, units=["Experts", "Sequential"]
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * D, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def test_lstm(tmp_path: Path) -> None:
    check_model(Recurrent, tokens(), predict, tmp_path)
    check_model(Recurrent, tokens(), predict, tmp_path, units=["LSTM"])


def test_weight_norm(tmp_path: Path) -> None:
    def build() -> nn.Module:
        norm = nn.utils.parametrizations.weight_norm
        return nn.Sequential(norm(nn.Linear(D, D)), nn.Tanh(), norm(nn.Linear(D, D)), nn.LayerNorm(D))

    check_model(build, vectors(), energy, tmp_path)
    check_model(lambda: nn.Sequential(build(), build()), vectors(), energy, tmp_path)


class Grid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(D, D) for _ in range(2)) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Linear(D, D)})
        self.loose = nn.ParameterList([torch.ones(D), torch.zeros(D)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = x + sum(linear(x).tanh() for linear in row)
        return self.named["b"](self.named["a"](x)) * self.loose[0] + self.loose[1]


def test_nested_lists(tmp_path: Path) -> None:
    check_model(Grid, vectors(), energy, tmp_path)


def test_root_as_the_only_unit(tmp_path: Path) -> None:
    check_model(lambda: nn.Linear(D, D), vectors(grad=True), energy, tmp_path)


class Holders(nn.Module):
    """The forward of its children is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias))
        return x


def test_children_whose_forward_is_never_called(tmp_path: Path) -> None:
    check_model(Holders, vectors(), energy, tmp_path)


class Position(nn.Module):
    """Returns a view of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, D))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight[:length]


class Positioned(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.ModuleList([Position(), Position()])

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().hidden(tokens) + self.positions[0](tokens.shape[1]) + self.positions[1](tokens.shape[1])


def test_units_that_return_a_view_of_their_weight(tmp_path: Path) -> None:
    check_model(Positioned, tokens(), predict, tmp_path)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.pool = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        return self.pool(x, x, x)[0]


def test_attention_of_torch(tmp_path: Path) -> None:
    batches = [batch.view(2, 2, D) for batch in vectors()]
    check_model(Attention, batches, energy, tmp_path)


def test_convolutions(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, padding=1), nn.ReLU(inplace=True),
            nn.Flatten(), nn.Linear(4 * D, D),
        )  # fmt: skip

    check_model(build, [batch[:, None] for batch in vectors()], energy, tmp_path)


def test_sparse_embedding_gradients(tmp_path: Path) -> None:
    def build(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(11, D, sparse=sparse), nn.Linear(D, D))

    plain = train_plain(build(False), tokens(), energy)  # torch's AdamW does not take sparse gradients
    with attached(build(True), configure(tmp_path)) as engine:
        assert_equal(plain, train_attached(engine, tokens(), energy), exact=False)


class Statistics(nn.Module):
    """Running statistics that only a kernel writes to."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(self.linear(x), self.mean, self.var, training=self.training)
        return self.instance(y[None])[0] + self.mean


def test_statistics_written_by_kernels(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Statistics(), Statistics()), vectors(), energy, tmp_path)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.weight_norm, nn.utils.parametrizations.orthogonal]
)
def test_other_reparametrizations(tmp_path: Path, norm: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, D)) for _ in range(2)])

    check_model(build, vectors(grad=True), energy, tmp_path)


def test_one_module_in_many_places(tmp_path: Path) -> None:
    def build() -> nn.Module:
        block = Block()
        return nn.Sequential(block, block, nn.ModuleDict({"inner": block})["inner"], Block())

    check_model(build, vectors(grad=True), energy, tmp_path, exact=False)


def test_weights_tied_between_blocks(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Block(), Block(), Block())
        model[2].up.weight = model[0].up.weight
        model[1].down.bias = model[1].norm.bias
        return model

    check_model(build, vectors(grad=True), energy, tmp_path, exact=False)


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(D, dtype=torch.complex64), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain * self.phase.conj() * self.phase).real + torch.view_as_real(self.phase).mean()


def test_frozen_complex_parameters(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Frequencies(), Frequencies()), vectors(grad=True), energy, tmp_path, exact=False)


class Fed(nn.Module):
    """Takes nothing, or keeps what it saw; some of it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.ModuleList([Start(), Start()])
        self.act = nn.ReLU()
        self.memory: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.start[0]() * self.start[1]()
        if self.memory:
            x = x + self.memory[-1]
        self.memory.append(x.detach())
        return self.act(x)


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(D))

    def forward(self) -> torch.Tensor:
        return self.value * 2


def test_units_without_arguments(tmp_path: Path) -> None:
    check_model(Fed, vectors(), energy, tmp_path)


class Remembering(nn.Module):
    """A unit with a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.memory: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) + (self.memory[-1] if self.memory else 0)
        self.memory.append(x.detach())
        return x


def test_units_with_a_memory(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Remembering(), Remembering()), vectors(5), energy, tmp_path)


class Lazy(nn.Module):
    """Makes a table the first time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, D)
        return torch.tanh(self.linear(x)) * self.table


def test_units_that_fill_a_cache_once_are_recomputed_from_then_on(tmp_path: Path) -> None:
    check_model(lambda: nn.Sequential(Lazy(), Lazy()), vectors(5), energy, tmp_path)
    with attached(nn.Sequential(Lazy(), Lazy()), configure(tmp_path, recompute=True)) as engine:
        calls = []
        engine.module[1].linear.register_forward_hook(lambda module, args, result: calls.append(module.training))
        counts = []
        for batch in vectors(3):
            engine.backward(energy(engine.module, batch))
            engine.step()
            counts.append(len(calls))
            calls.clear()
    assert counts == [1, 2, 2]


def test_a_model_without_parameters_that_train(tmp_path: Path) -> None:
    model = Stack().requires_grad_(False)
    expected = model(tokens(1)[0])
    with attached(model, configure(tmp_path)) as engine:
        found = engine(tokens(1)[0])
        assert torch.equal(found, expected)
        assert not found.requires_grad
