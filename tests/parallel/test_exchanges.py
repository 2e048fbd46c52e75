"""The order of a stage's actions and messages: complete, the same at both ends, and free of deadlock under the strictest way to deliver.

Strictest: a rank's exchanges are blocking and in order, none of their messages is stored anywhere (both ends have to be there), and an
action of a cp group runs when all its lanes are there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megadcp.parallel.exchanges import Exchange, Item, forwards, lane_programme, programmes, with_exchanges
from megadcp.plan.actions import Action, Deadlock, dense_actions, stage_actions, waits_for

SHAPES = [(1, 1, 3), (2, 1, 5), (3, 1, 7), (4, 1, 2), (4, 1, 9), (2, 2, 4), (3, 2, 6), (4, 2, 8), (2, 3, 6), (4, 3, 8), (8, 1, 12), (8, 2, 16)]
Rank = tuple[int, int]  # stage, lane


def runs(ranks: dict[Rank, Sequence[Item]], blocks: dict[tuple[int, int], tuple[int, int]]) -> bool:
    """Whether all programmes come to their end. blocks: (slot, lane) -> first and last lane of the microbatch there."""
    at = dict.fromkeys(ranks, 0)

    def now(rank: Rank) -> Item | None:
        return ranks[rank][at[rank]] if at[rank] < len(ranks[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            item, (stage, lane) = now(rank), rank
            if isinstance(item, Action):
                first, last = blocks[item.slot, lane]
                members = [(stage, each) for each in range(first, last + 1)]
                if all(now(member) == item for member in members):
                    for member in members:
                        at[member] += 1
                    moved = True
            elif item is not None:
                # It ends when everybody it is tied to, directly or through others, is at an exchange with these messages.
                tied, open_ = {rank}, [rank]
                good = True
                while open_ and good:
                    here = open_.pop()
                    exchange = now(here)
                    assert isinstance(exchange, Exchange)
                    for parts, mirror in ((exchange.sends, 1), (exchange.receives, 0)):
                        for one in parts:
                            other = (one.stage, lane)
                            theirs = now(other)
                            if not isinstance(theirs, Exchange) or not any(
                                each.made == one.made and each.stage == here[0] for each in theirs[mirror]
                            ):
                                good = False
                            elif other not in tied:
                                tied.add(other)
                                open_.append(other)
                if good:
                    for member in tied:
                        at[member] += 1
                    moved = True
    return all(now(rank) is None for rank in ranks)


def random_blocks(rng: random.Random, lanes: int, slots: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Aligned blocks at random, with holes."""
    blocks = {}
    density = rng.choice((0.3, 0.7, 1.0))
    for slot in range(slots):
        lane = 0
        while lane < lanes:
            cp = rng.choice([size for size in (1, 2, 4) if lane % size == 0 and lane + size <= lanes])
            if rng.random() < density:
                for each in range(lane, lane + cp):
                    blocks[slot, each] = lane, lane + cp - 1
            lane += cp
    return blocks


def all_lanes(made: Sequence[Sequence[Item]], blocks: dict[tuple[int, int], tuple[int, int]], lanes: int) -> dict[Rank, Sequence[Item]]:
    own: list[dict[int, None]] = [{slot: None for slot, each in blocks if each == lane} for lane in range(lanes)]
    return {(stage, lane): lane_programme(programme, own[lane]) for stage, programme in enumerate(made) for lane in range(lanes)}


@pytest.mark.parametrize(("stages", "chunks", "slots"), SHAPES)
def test_every_message_is_once_at_each_end_and_in_one_order(stages: int, chunks: int, slots: int) -> None:
    made = programmes(tuple(range(slots)), slots, stages, chunks)
    lists = dense_actions(slots, stages, chunks)
    assert [tuple(item for item in own if isinstance(item, Action)) for own in made] == list(lists)
    ways: dict[tuple[int, int], list[list[tuple[Action, Action]]]] = {}
    for stage, own in enumerate(made):
        for item in own:
            for end, parts in enumerate(item if isinstance(item, Exchange) else ()):
                for one in parts:
                    way = (stage, one.stage) if end == 0 else (one.stage, stage)
                    ways.setdefault(way, [[], []])[end].append((one.made, one.wanted))
    assert all(sent == received for sent, received in ways.values())
    needed = sorted(
        (source[0], stage, source[1], action)
        for stage, own in enumerate(lists)
        for action in own
        if (source := waits_for(action, stage, stages, chunks)) is not None and source[0] != stage
    )
    assert sorted((*way, *pair) for way, (sent, _) in ways.items() for pair in sent) == needed
    assert len(needed) == (2 * slots * (stages * chunks - 1) if stages > 1 else 0)


@pytest.mark.parametrize(("stages", "chunks", "slots"), SHAPES)
def test_inputs_arrive_before_they_are_used_and_results_are_sent_after_they_are_made(stages: int, chunks: int, slots: int) -> None:
    for own in programmes(tuple(range(slots)), slots, stages, chunks):
        place = {item: index for index, item in enumerate(own) if isinstance(item, Action)}
        for index, item in enumerate(own):
            if isinstance(item, Exchange):
                assert all(place[one.made] < index for one in item.sends)
                assert all(index < place[one.wanted] for one in item.receives)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_deadlocks(seed: int) -> None:
    rng = random.Random(seed)
    stages, chunks, _ = rng.choice(SHAPES)
    slots, lanes = -(-rng.randint(1, 9) // stages) * stages if chunks > 1 else rng.randint(1, 9), rng.choice((1, 2, 3, 4))
    blocks = random_blocks(rng, lanes, slots)
    used = tuple(sorted({slot for slot, _ in blocks}))
    made = programmes(used, slots, stages, chunks)
    ranks = all_lanes(made, blocks, lanes)
    assert runs(ranks, blocks)
    only_forwards = {rank: forwards(own) for rank, own in ranks.items()}
    assert runs(only_forwards, blocks)
    assert not any(action.kind == "B" for own in only_forwards.values() for action in own if isinstance(action, Action))


def test_compact_lists_of_each_lane_do_deadlock() -> None:
    """The smallest case (pipeline.md's): each lane's list made for its own slots alone. So the check above can fail."""
    blocks = {(0, 0): (0, 1), (0, 1): (0, 1), (0, 2): (2, 3), (0, 3): (2, 3), (1, 2): (2, 2), **{(2, lane): (0, 3) for lane in range(4)}}
    dense, compact = programmes((0, 1, 2), 3, 2, 1), {}
    for lane in range(4):
        own = [slot for slot, each in sorted(blocks) if each == lane]
        lists = [[Action(one.kind, own[one.slot], 0) for one in stage_actions(len(own), 2, 1, stage)] for stage in range(2)]
        for stage, programme in enumerate(with_exchanges(lists, 1)):
            compact[stage, lane] = programme
    assert not runs(compact, blocks)
    assert runs(all_lanes(dense, blocks, 4), blocks)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    first = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 0, 0), Action("B", 1, 0)]
    second = [Action("F", 1, 0), Action("F", 0, 0), Action("B", 1, 0), Action("B", 0, 0)]
    assert with_exchanges([first, second], 1)
    with pytest.raises(Deadlock):
        with_exchanges([[first[0], first[2], first[1], first[3]], [second[0], second[2], second[1], second[3]]], 1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_1f1b_sends_a_forward_as_it_receives_a_backward(stage: int) -> None:
    """pipeline.md's exchanges in the steady state of stage s of 4: (send F(i + w), receive B(i)) with the stage behind, w = 3 - s."""
    own = programmes(tuple(range(12)), 12, 4, 1)[stage]
    pairs = [
        (sent.made, received.made)
        for item in own
        if isinstance(item, Exchange)
        for sent in item.sends
        for received in item.receives
        if sent.stage == received.stage == stage + 1
    ]
    warm = 3 - stage
    assert len(pairs) >= 12 - 2 * warm - 2
    assert all((sent.kind, received.kind, sent.slot - received.slot) == ("F", "B", warm) for sent, received in pairs)
