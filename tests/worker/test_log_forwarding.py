"""Forwarding of lines that replica functions print."""

from __future__ import annotations

import io
import threading

from pipedist.protocol.messages import LogLine
from pipedist.worker.context import ReplicaContext, current
from pipedist.worker.log_forwarding import CapturedStream, OutputCapture, OutputLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def capture(**limits: int) -> tuple[OutputCapture, list[LogLine], Clock]:
    lines: list[LogLine] = []
    clock = Clock()
    return OutputCapture(lines.append, OutputLimits(**limits), clock), lines, clock


def in_call(step: int) -> ReplicaContext:
    return ReplicaContext(
        replica_id_in_sync_group=1,
        num_replicas_in_sync=2,
        step=step,
        epoch=0,
        stage="s",
        elements=None,
        seed=0,
    )


def test_partial_lines_are_joined_for_each_call() -> None:
    out, lines, _ = capture()
    for step, text in [(0, "a"), (1, "x"), (0, "b\nc\n"), (1, "y\n"), (0, "rest")]:
        token = current.set(in_call(step))
        out.write(text)
        current.reset(token)
    assert lines == [LogLine("s", 0, 1, "ab"), LogLine("s", 0, 1, "c"), LogLine("s", 1, 1, "xy")]
    out.finish()
    assert lines[-1] == LogLine("s", 0, 1, "rest")


def test_lines_outside_of_a_call_name_no_call() -> None:
    out, lines, _ = capture()
    out.write("hello\n")
    assert lines == [LogLine("", 0, 0, "hello")]


def test_a_long_line_is_cut() -> None:
    out, lines, _ = capture(line_chars_max=5)
    for _ in range(100):
        out.write("x" * 100)
    out.write("\nshort\n")
    assert lines[0].text == "xxxxx [line cut]"
    assert lines[1].text == "short"


def test_a_progress_bar_is_one_line_in_its_last_state() -> None:
    """As in a terminal, a carriage return overwrites the text before it."""
    out, lines, _ = capture(line_chars_max=10)
    for percent in range(0, 101, 5):
        out.write(f"\r{percent}%")
        out.write("\r" if percent % 2 else "")
    out.write("\ndone\r\n")
    assert [line.text for line in lines] == ["100%", "done"]


def test_lines_above_the_rate_are_dropped_and_counted() -> None:
    out, lines, clock = capture(lines_per_s_max=3)
    out.write("a\n" * 10)
    assert len(lines) == 3
    clock.now = 1.0
    out.write("b\n")
    assert [line.text for line in lines[3:]] == ["[7 lines dropped: more than 3 lines a second]", "b"]
    out.write("a\n" * 10)
    out.finish()
    assert lines[-1].text == "[8 lines dropped: more than 3 lines a second]"


def test_lines_dropped_at_the_end_are_reported_for_their_call() -> None:
    out, lines, _ = capture(lines_per_s_max=3)
    token = current.set(in_call(7))
    out.write("a\n" * 10)
    current.reset(token)
    out.finish()
    assert lines[-1].text == "[7 lines dropped: more than 3 lines a second]"
    assert (lines[-1].stage, lines[-1].step, lines[-1].replica) == ("s", 7, 1)


def test_unfinished_lines_of_many_calls_are_bounded() -> None:
    out, lines, _ = capture(origins_max=2)
    for step in range(3):
        token = current.set(in_call(step))
        out.write(f"{step}")
        current.reset(token)
    assert [line.text for line in lines] == ["0"]


def test_lone_surrogates_can_be_printed() -> None:
    out, lines, _ = capture()
    out.write("a\udc80\n")
    assert lines[0].text == "a\\udc80"


def test_printing_while_printing_does_not_deadlock() -> None:
    nested: list[LogLine] = []

    def send(line: LogLine) -> None:
        nested.append(line)
        if len(nested) < 3:
            out.write("again\n")

    out = OutputCapture(send)
    thread = threading.Thread(target=out.write, args=("first\n",))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [line.text for line in nested] == ["first", "again", "again"]


def test_the_stream_behaves_like_a_text_stream() -> None:
    out, lines, _ = capture()
    stream = CapturedStream(out, None)
    print("a", 1, file=stream, flush=True)
    assert lines[0].text == "a 1"
    assert stream.writable()
    assert not stream.isatty()
    assert stream.encoding == "utf-8"
    try:
        stream.fileno()
    except io.UnsupportedOperation:
        return
    raise AssertionError("a stream above nothing has no descriptor")
