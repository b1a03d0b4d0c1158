"""Text is split the same way every time; its order is seeded, complete, resumable."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.data import ByteLoader, Corpus, Shuffle, Span, Text, evaluation_batches
from infinity.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for index in range(60):
        name = tmp_path / f"d{index % 3}" / f"f{index}.txt"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(f"file {index}: ".encode() + bytes(32 + (index * 7 + i * i) % 90 for i in range(100 + index)))
    return tmp_path


def contents(text: Text) -> list[bytes]:
    return [span.path.read_bytes()[span.start : span.start + span.length] for span in text.spans]


def test_the_split_is_the_same_wherever_the_files_lie(directory: Path, tmp_path: Path) -> None:
    first = Corpus.open(directory)
    moved = directory.rename(tmp_path.with_name("moved"))
    second = Corpus.open(moved)
    assert contents(first_held := second.held_back) == contents(Corpus.open(moved).held_back)
    assert first.fingerprint == second.fingerprint
    assert len(first_held) == len(first.held_back) > 0
    assert len(first.train) + len(first.held_back) == sum(path.stat().st_size for path in moved.rglob("*.txt"))


def test_a_new_file_moves_no_other_across_the_split(directory: Path) -> None:
    before = set(contents(Corpus.open(directory).train))
    for index in range(20):
        (directory / f"new{index}").write_text(f"one more {index}")
    after = set(contents(Corpus.open(directory).train))
    assert before <= after


def test_copies_of_a_file_stay_on_one_side(directory: Path) -> None:
    for path in list(directory.rglob("*.txt")):
        path.with_suffix(".copy").write_bytes(path.read_bytes())
    corpus = Corpus.open(directory)
    train, held_back = contents(corpus.train), contents(corpus.held_back)
    assert len(train) + len(held_back) == 120
    assert held_back
    assert not set(train) & set(held_back)


def test_two_files_are_split_one_to_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("alpha")
    (tmp_path / "b").write_text("beta")
    corpus = Corpus.open(tmp_path)
    assert sorted(contents(corpus.train) + contents(corpus.held_back)) == [b"alpha", b"beta"]
    assert len(corpus.held_back.spans) == len(corpus.train.spans) == 1


def test_a_single_file_holds_back_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(32, 132)) * 10)
    corpus = Corpus.open(path)
    assert corpus.train.read(0, 950) + corpus.held_back.read(0, 50) == path.read_bytes()


def test_binary_hidden_and_empty_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("more text")
    (tmp_path / "empty").write_text("")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    corpus = Corpus.open(tmp_path)
    assert {span.path.name for span in corpus.train.spans + corpus.held_back.spans} == {"a.txt", "b.txt"}


@pytest.mark.parametrize("create", [False, True])
def test_no_text_is_one_sentence_that_names_the_key(tmp_path: Path, create: bool) -> None:
    source = tmp_path / "nothing"
    if create:
        source.mkdir()
    with pytest.raises(ConfigError, match=r"run\.data: .*nothing.*'stdlib'"):
        Corpus.open(source)


def test_the_standard_library_is_there() -> None:
    corpus = Corpus.open("stdlib")
    names = {span.path.name for span in corpus.train.spans}
    assert len(corpus.train) > 5_000_000
    assert len(corpus.held_back) > 100_000
    assert "typing.py" in names | {span.path.name for span in corpus.held_back.spans}
    assert 2.8 < corpus.unigram_entropy < 3.6


def test_unigram_entropy_of_four_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("abcd" * 100)
    assert Corpus.open(tmp_path / "t").unigram_entropy == pytest.approx(math.log(4))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_reading_across_files_gives_the_bytes_end_to_end(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("text")
    whole, spans = b"", []
    for index, length in enumerate(lengths):
        piece = bytes((index * 17 + i) % 256 for i in range(length))
        (root / str(index)).write_bytes(b"skip" + piece + b"rest")
        spans.append(Span(root / str(index), 4, length))
        whole += piece
    start = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(0, len(whole) - start))
    assert Text(tuple(spans)).read(start, length) == whole[start : start + length]


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("x" * 1000)
    corpus = Corpus.open(path)
    path.write_text("x")
    with pytest.raises(ConfigError, match="shorter than when it was listed"):
        corpus.train.read(500, 10)


@given(st.integers(1, 700), st.integers(0, 2**32), st.integers(0, 3))
def test_shuffle_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Shuffle(size, seed, epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_shuffle_depends_on_seed_and_epoch_and_leaves_no_run_in_place() -> None:
    orders = [[Shuffle(1000, seed, epoch)[i] for i in range(1000)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for order in orders:
        assert sum(after == before + 1 for before, after in pairwise(order)) < 20
        assert sum(index == image for index, image in enumerate(order)) < 20


def loader(corpus: Corpus, **changed: int) -> ByteLoader:
    return ByteLoader(corpus, **{"batch_size": 3, "sequence_length": 16, "seed": 5, **changed})


def test_targets_are_the_next_bytes_and_an_epoch_serves_every_window_once(directory: Path) -> None:
    corpus = Corpus.open(directory)
    windows = (len(corpus.train) - 1) // 16
    one = loader(corpus, batch_size=1)
    seen = []
    for _ in range(windows):
        tokens, targets = one.next_batch()
        assert tokens.shape == targets.shape == (1, 16)
        assert torch.equal(tokens[0, 1:], targets[0, :-1])
        seen.append(bytes(tokens[0].tolist()))
    assert sorted(seen) == sorted(corpus.train.read(index * 16, 16) for index in range(windows))
    assert one.state_dict()["epoch"] == 1


@pytest.mark.parametrize("served", [0, 1, 7, 400])
def test_the_order_after_a_resume_is_the_one_it_would_have_been(directory: Path, served: int) -> None:
    corpus = Corpus.open(directory)
    straight = loader(corpus)
    for _ in range(served):
        straight.next_batch()
    resumed = loader(Corpus.open(directory), seed=99)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.state_dict() == straight.state_dict()
    for _ in range(300):
        for one, other in zip(straight.next_batch(), resumed.next_batch(), strict=True):
            assert torch.equal(one, other)


def test_ranks_share_what_one_rank_would_serve_and_any_number_may_go_on(directory: Path) -> None:
    corpus = Corpus.open(directory)
    alone = loader(corpus, batch_size=6)
    ranks = [loader(corpus, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(120):
        assert torch.equal(alone.next_batch()[0], torch.cat([rank.next_batch()[0] for rank in ranks]))
    assert ranks[0].state_dict() == ranks[1].state_dict() == alone.state_dict()
    four = [loader(corpus, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    for rank in four:
        rank.load_state_dict(alone.state_dict())
    assert torch.equal(alone.next_batch()[0], torch.cat([rank.next_batch()[0] for rank in four]))


def test_other_text_or_windows_cannot_be_resumed(directory: Path) -> None:
    corpus = Corpus.open(directory)
    state = loader(corpus).state_dict()
    with pytest.raises(ConfigError, match=r"run\.sequence_length"):
        loader(corpus, sequence_length=8).load_state_dict(state)
    (directory / "more.txt").write_text("changed")
    with pytest.raises(ConfigError, match="saved order is of text"):
        loader(Corpus.open(directory)).load_state_dict(state)


def test_too_little_text_names_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x" * 100)
    corpus = Corpus.open(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"95 bytes .* run\.sequence_length 128"):
        loader(corpus, sequence_length=128)
    with pytest.raises(ConfigError, match="5 bytes of held-back"):
        evaluation_batches(corpus, batches=1, batch_size=1, sequence_length=16)


def test_evaluation_is_the_same_held_back_text_from_end_to_end(directory: Path) -> None:
    corpus = Corpus.open(directory)
    batches = evaluation_batches(corpus, batches=3, batch_size=2, sequence_length=16)
    assert [tokens.shape for tokens, _ in batches] == [(2, 16)] * 3
    assert bytes(batches[0][0][0].tolist()) == corpus.held_back.read(0, 16)
    assert bytes(batches[-1][1][-1].tolist()) == corpus.held_back.read(len(corpus.held_back) - 16, 16)
