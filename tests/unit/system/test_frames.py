"""Frames arrive whole or not at all."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.system.frames import HEADER, FrameError, pack, read_frame, take_frame


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cut_of_the_stream(payloads: list[bytes], cut: int) -> None:
    stream, inbox, got = b"".join(pack(p) for p in payloads), bytearray(), []
    for start in range(0, len(stream), cut):
        inbox += stream[start : start + cut]
        while (frame := take_frame(inbox, 100)) is not None:
            got.append(frame)
    assert got == payloads
    assert not inbox


def test_a_size_above_the_cap_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(FrameError, match="cap is 10"):
        take_frame(bytearray(HEADER.pack(2**60)), 10)


def test_the_blocking_reader_tells_a_clean_end_from_a_torn_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(pack(b"whole") + pack(b"torn")[:-1])
        assert read_frame(ours, 100) == b"whole"
        with pytest.raises(FrameError, match="after 3 of 4 bytes"):
            read_frame(ours, 100)
        assert read_frame(ours, 100) is None
