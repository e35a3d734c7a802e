"""Long recurrences as a Scan over chunks: compiled size independent of the sequence length, and equal results."""

from __future__ import annotations

import numpy as np
import pytest
from recurrent_models import Net

from rammer.frontend.bind.binder import bind
from rammer.frontend.loops.loop_chunk import even_steps
from rammer.frontend.read.reader import read_model
from rammer.ir.graph import Graph
from rammer.passes.loops.chunk_recurrent import MOST_STEPS, MOST_TURN, ChunkRecurrent
from rammer_testing.nonempty import some


def graph_of(net: Net) -> Graph:
    return bind(read_model(net.model(np.random.default_rng(0))), {})


def test_short_sequences_stay() -> None:
    for steps in (1, 100, MOST_STEPS):
        graph = graph_of(Net("LSTM", steps, layers=2))
        assert ChunkRecurrent()(graph) is graph


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_layers_take_their_turns_together(direction: str) -> None:
    graph = ChunkRecurrent()(graph_of(Net("LSTM", 5000, direction, layers=3)))
    scans = [n for n in some(graph.nodes) if n.op == "Scan"]
    # Both directions of a layer are one Scan; the next layer reads all steps of both.
    assert len(scans) == (3 if direction == "bidirectional" else 1)
    assert not [n for n in some(graph.nodes) if n.op == "LSTM"]  # 5,000 steps are 100 chunks of 50
    assert {graph.types[n.outputs[-1]].shape[0] for n in scans} == {100}


def test_turns() -> None:
    for steps in range(2, 600):
        turn = even_steps(steps, MOST_TURN)
        assert 1 <= turn <= min(64, steps // 2) and (steps % turn == 0 or turn == min(64, steps // 2))


def test_the_pass_has_a_spelling() -> None:
    made = [str(p) for p in (ChunkRecurrent(), ChunkRecurrent(7, 3))]
    assert made == ["chunk_recurrent", "chunk_recurrent{max_steps=7,chunk=3}"]
