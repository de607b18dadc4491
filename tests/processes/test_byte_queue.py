"""A queue that is full makes whoever puts wait, and nobody else. 0.1 s."""

from __future__ import annotations

import threading

from npu_runner.processes.byte_queue import ByteBoundedQueue


def test_messages_come_in_their_order_and_none_is_none() -> None:
    messages = ByteBoundedQueue(10)
    for number in range(3):
        messages.put(number, 3)
    assert [messages.get() for _ in range(4)] == [0, 1, 2, None]
    assert messages.get(0.01) is None


def test_who_puts_waits_while_it_is_full_by_bytes_or_by_number() -> None:
    for messages in (ByteBoundedQueue(10), ByteBoundedQueue(1000, max_messages=2)):
        messages.put("a", 4)
        assert not messages.is_full
        messages.put("b", 90)  # one more than fits: a message larger than all is no deadlock
        assert messages.is_full
        messages.put("c", 0, waits=False)
        writer = threading.Thread(target=messages.put, args=("d", 1))
        writer.start()
        writer.join(0.05)
        assert writer.is_alive(), "it waits"
        assert [messages.get(), messages.get(), messages.get()] == ["a", "b", "c"]
        writer.join()
        assert messages.get(1.0) == "d"
        assert not messages.is_full


def test_what_waits_is_taken_at_once_up_to_a_number_of_bytes() -> None:
    messages = ByteBoundedQueue(10)
    assert messages.get_waiting(100) == []
    for number in range(4):
        messages.put(number, 4, waits=False)
    writer = threading.Thread(target=messages.put, args=("d", 1))
    writer.start()
    assert messages.get_waiting(0) == []
    assert messages.get_waiting(5) == [0, 1]
    writer.join()
    assert not messages.is_full
    assert messages.get_waiting(100) == [2, 3, "d"]


def test_once_closed_nobody_waits_and_nothing_comes() -> None:
    messages = ByteBoundedQueue(1)
    messages.put("a", 1)
    writers = [threading.Thread(target=messages.put, args=("late", 1)) for _ in range(3)]
    for writer in writers:
        writer.start()
    messages.close()
    for writer in writers:
        writer.join()
    messages.put("later", 1)
    assert messages.get() is None
