"""A share of the fuzzing; all of it: make fuzz."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipedist.errors import SpecError
from pipedist.protocol import messages as msg
from pipedist.protocol.limits import LIMITS
from pipedist.protocol.wire import unpack, unseal
from tests.acceptance import decoder_fuzz, frame_mutations, socket_fuzz, spec_fuzz, spec_mutations
from tests.acceptance.decoder_fuzz import Found
from tests.acceptance.recorded import Frames, record


@pytest.fixture(scope="module")
def corpus() -> list[Frames]:
    return record()


def test_the_decoder(corpus: list[Frames]) -> None:
    told, _ = decoder_fuzz.fuzz(corpus, range(10_000))
    assert told.total() == 10_000
    assert len(told) == len(msg.Message.__subclasses__()) + 1, (
        "every class of messages was read in some damaged form, and some were refused"
    )


def test_recorded_messages_are_decoded(corpus: list[Frames]) -> None:
    """Except payloads that are not a single tree: programs, and exchanges of gangs."""
    heads = {frames: type(unpack(unseal(memoryview(frames[0]), LIMITS)[0])) for frames in corpus}
    assert set(heads.values()) == set(msg.Message.__subclasses__())
    for frames, kind in heads.items():
        if kind not in (msg.Bind, msg.Exchange, msg.Relay):
            assert decoder_fuzz.read(frames) == kind.__name__


def test_a_live_socket(corpus: list[Frames]) -> None:
    sent, rejected, runs = asyncio.run(socket_fuzz.fuzz(corpus, range(200)))
    assert sent == 200
    assert rejected > 100
    assert runs >= 2


def test_specs(tmp_path: Path) -> None:
    told, _ = spec_fuzz.fuzz(spec_fuzz.shipped(), range(300), tmp_path)
    assert told["refused"] > 100
    assert told["read"] > 5


@pytest.mark.parametrize("seed", [0, 1, 17, 10**9])
def test_a_seed_determines_all_mutations(corpus: list[Frames], seed: int) -> None:
    assert frame_mutations.mutated(corpus, seed) == frame_mutations.mutated(corpus, seed)
    specs = spec_fuzz.shipped()
    assert spec_mutations.mutated(specs, seed) == spec_mutations.mutated(specs, seed)


def test_a_defect_of_the_decoder_is_found(corpus: list[Frames], monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(frames: list[memoryview]) -> int:
        return frames[0][100_000]

    monkeypatch.setattr(decoder_fuzz, "decode", careless)
    with pytest.raises(Found, match=r"seed \d+: IndexError"):
        decoder_fuzz.fuzz(corpus, range(1000))


def test_a_spec_error_without_a_position_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def careless(path: Path) -> None:
        try:
            real(path)
        except SpecError as error:
            raise SpecError([]) from error

    real = spec_fuzz.load
    monkeypatch.setattr(spec_fuzz, "load", careless)
    with pytest.raises(Found, match=r"seed \d+: (AssertionError|.*without a problem)"):
        spec_fuzz.fuzz(spec_fuzz.shipped(), range(50), tmp_path)


def test_quotes_in_spec_errors_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text('pipedist: 1\nname: "${' + "x" * 20_000 + '}"\n')
    with pytest.raises(SpecError) as caught:
        spec_fuzz.load(path)
    assert all(len(str(problem)) < 2_000 for problem in caught.value.problems)
    assert any("unknown reference ${xxx" in problem.message for problem in caught.value.problems)
