"""The order log: one sequence for all, drops before the next order, and parts of bounded size."""

from __future__ import annotations

import threading

import pytest
from icehouse.group.v1.group_service_pb2 import Begin, Chunk, Order, Run
from icehouse_server.group import order_log
from icehouse_server.group.order_log import KeptOnRanks, OrderLog


def taken(log: OrderLog, rank: int = 1) -> list[Order]:
    """Return all that a follower is to do."""
    orders: list[Order] = []
    while (response := log.take(rank, len(orders), timeout_s=0)) is not None:
        assert response.sequence == len(orders)
        orders += response.orders
    return orders


def passes(orders: list[Order]) -> list[int]:
    return [order.run.number for order in orders if order.HasField("run")]


def test_all_followers_get_the_same_orders() -> None:
    log = OrderLog(3)
    for number in range(1000):
        log.add(Order(run=Run(number=number)))
    assert taken(log, 1) == taken(log, 2)
    assert taken(log, 1) == []


def test_an_order_comes_in_its_place() -> None:
    log = OrderLog(2)
    for number in range(1000):
        log.add(Order(run=Run(number=number)))
    assert passes(taken(log)) == list(range(1000))


def test_what_is_dropped_goes_before_the_next_order() -> None:
    log = OrderLog(2)
    kept = [KeptOnRanks(log) for _ in range(3)]
    numbers = [each.number for each in kept]
    assert len(set(numbers)) == 3
    del kept[1:]
    assert taken(log) == [], "drops alone are no order"
    log.add(Order(begin=Begin()))
    dropping, order = taken(log)
    assert sorted(dropping.drop.numbers) == numbers[1:] and order.HasField("begin")
    kept.clear()
    log.add(Order(begin=Begin()))
    assert list(taken(log)[0].drop.numbers) == numbers[:1]


def test_large_orders_go_alone() -> None:
    log = OrderLog(2)
    for number in range(4):
        chunk = Chunk(token_ids=[1 << 30] * 1_000_000)
        log.add(Order(run=Run(number=number, chunks=[chunk])))
    sizes: list[int] = []
    while (response := log.take(1, len(sizes), timeout_s=0)) is not None:
        sizes.append(response.ByteSize())
    assert len(sizes) == 4 and max(sizes) < 8 << 20


def test_a_rank_that_is_too_far_behind_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_log, "ORDER_LIMIT", 5)
    log = OrderLog(3)
    theirs: list[Order] = []
    for number in range(8):
        log.add(Order(run=Run(number=number)))
        response = log.take(2, len(theirs), timeout_s=0)
        assert response is not None
        theirs += response.orders
    assert log.behind == {1} and passes(theirs) == list(range(8))
    assert passes(taken(log, 1)) == list(range(5))
    log.add(Order(run=Run(number=8)))
    assert taken(log, 1) == [], "it has missed some"


def test_many_threads_add_and_drop() -> None:
    log = OrderLog(3)
    together = threading.Barrier(4)

    def add(first: int) -> None:
        together.wait()
        for number in range(first, first + 2000):
            KeptOnRanks(log)
            log.add(Order(run=Run(number=number)))

    threads = [threading.Thread(target=add, args=(2000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.add(Order(begin=Begin()))
    ours, theirs = taken(log, 1), taken(log, 2)
    assert ours == theirs
    assert sorted(passes(ours)) == list(range(8000))
    dropped = [number for order in ours for number in order.drop.numbers]
    assert sorted(dropped) == list(range(1, 8001))
