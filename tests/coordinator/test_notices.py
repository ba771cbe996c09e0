"""Lines about deaths and repeated calls: what they say, and how many there are."""

from __future__ import annotations

import logging

import pytest

from pipedist.coordinator.notices import LINE_S, LINES_MAX, LOGGER, Notices


def test_lines_are_limited_and_those_skipped_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    notices = Notices(lambda: now_s)
    with caplog.at_level(logging.WARNING, logger="pipedist.cluster"):
        for number in range(LINES_MAX + 1000):
            notices.add(f"worker w{number} died")
        assert len(caplog.messages) == LINES_MAX
        assert caplog.messages[0] == "pipedist: worker w0 died"
        now_s = LINE_S
        notices.add("worker x died")
        notices.add("worker y died")
    assert len(caplog.messages) == LINES_MAX + 1
    assert caplog.messages[-1] == "pipedist: worker x died (1,000 such lines before it were skipped)"


def test_a_line_is_one_bounded_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pipedist.cluster"):
        Notices().add("ValueError: one\ntwo \x1b[31m" + "x" * 10_000)
    (line,) = caplog.messages
    assert line.startswith("pipedist: ValueError: one two \N{REPLACEMENT CHARACTER}[31mxxx")
    assert len(line) < 600


def test_information_is_not_limited_and_takes_no_place_of_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    notices = Notices(lambda: 0.0)
    seen: list[tuple[int, str]] = []
    notices.sinks.append(lambda level, text: seen.append((level, text)))
    for _ in range(LINES_MAX + 5):
        notices.add("worker w0 joined", logging.INFO)
    notices.add("worker w0 died")
    assert len(caplog.records) == len(seen) == LINES_MAX + 6
    assert seen[-1] == (logging.WARNING, "worker w0 died")
