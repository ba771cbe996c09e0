"""Reading ahead: in order, exactly once, bounded, and no thread is left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.datasets.logical import Dataset
from pipedist.datasets.read_ahead import ReadAhead


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pipedist-read-ahead"]


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(5)
    return not any(thread.is_alive() for thread in threads)


@given(st.integers(0, 50), st.integers(1, 5))
def test_nothing_is_lost_or_reordered(size: int, buffer: int) -> None:
    with ReadAhead(range(size), buffer) as reader:
        assert list(reader) == list(range(size))
        assert list(reader) == []
    assert readers() == []


def test_at_most_buffer_elements_are_ahead() -> None:
    read: list[int] = []
    produced = threading.Semaphore(0)

    def source() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            produced.release()
            yield number

    with ReadAhead(source(), 3) as reader:
        assert next(reader) == 0
        for _ in range(4):  # the one taken, and three that wait
            assert produced.acquire(timeout=5)
        assert not produced.acquire(timeout=0.05)
        assert read == [0, 1, 2, 3]


def test_the_sources_error_comes_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("boom")

    with ReadAhead(source(), 2) as reader:
        assert next(reader) == 1
        with pytest.raises(KeyError, match="boom"):
            next(reader)
        assert list(reader) == []


def test_closing_early_ends_the_thread_and_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    with ReadAhead(source(), 1) as reader:
        next(reader)
        threads = readers()
        assert threads
    assert gone(threads)
    assert closed.wait(5)
    assert list(reader) == []


def test_a_forgotten_reader_ends_its_thread() -> None:
    iterator = iter(Dataset.range(10).repeat().prefetch(2))
    next(iterator)
    threads = readers()
    assert threads
    del iterator
    gc.collect()
    assert gone(threads)


def test_nothing_is_read_before_the_first_demand() -> None:
    ReadAhead(iter([]), 1).close()
    reader = ReadAhead(range(3), 1)
    assert readers() == []
    reader.close()
    assert list(reader) == []
