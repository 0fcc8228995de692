"""The wire: long lines are cut, floods end, and only strict JSON becomes a message."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.tools.mcp.lines import FLOODED, PROTOCOL, Bucket, LineCutter, WireFault, message_of, salvage
from surefoot.tools.mcp.servers import Server, ServerLimits
from surefoot.tools.mcp.stdio import Pipe, ServerProcess


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 20))
def test_lines_do_not_depend_on_how_the_bytes_arrive(pieces: list[bytes], keep: int) -> None:
    whole = b"".join(pieces) + b"\n"
    cutter = LineCutter(keep, 10_000)
    got = [line for piece in [*pieces, b"\n"] for line in cutter.feed(piece)]
    assert got == [(line[:keep], len(line)) for line in whole.split(b"\n")[:-1]]


def test_a_line_without_end_is_a_flood_and_is_never_kept() -> None:
    cutter = LineCutter(keep=10, most=1000)
    for _ in range(10):
        assert list(cutter.feed(b"x" * 100)) == []
        assert len(cutter._line) == 10
    with pytest.raises(WireFault, match="beyond 1000 bytes") as caught:
        list(cutter.feed(b"x"))
    assert caught.value.reason == FLOODED


def test_a_bucket_allows_its_rate_and_no_more() -> None:
    now = [0.0]
    bucket = Bucket(10.0, clock=lambda: now[0])
    assert [bucket.take(1) for _ in range(11)] == [True] * 10 + [False]
    now[0] += 1.0
    assert bucket.take(5)
    now[0] += 100.0
    assert bucket.take(10)
    assert not bucket.take(1)


@given(st.text(min_size=1, max_size=60), st.integers(0, 400))
def test_the_beginning_of_a_huge_answer_is_read_wherever_it_was_cut(text: str, extra: int) -> None:
    whole = json.dumps(
        {"jsonrpc": "2.0", "id": 7, "result": {"content": [{"type": "text", "text": text * 50}]}}
    ).encode()
    start = whole.index(b'"text": "') + len(b'"text": "')
    at = min(start + extra, len(whole) - 6)
    message = salvage(whole[:at], len(whole))
    said = message["result"]["content"][0]["text"]
    assert message["id"] == 7
    assert (text * 50).startswith(said[:-1])  # the last may be half of a character that takes two


@pytest.mark.parametrize("head", [b"[[[[", b'{"id": 1, "result": [1, 2', b'{"result": {"text": "aaa', b'{"id": "x'])
def test_a_huge_answer_that_says_nothing_in_part_is_a_flood(head: bytes) -> None:
    try:
        message = salvage(head, 10**6)
    except WireFault as fault:
        assert fault.reason == FLOODED
    else:
        assert message == {"id": "x"}


@given(
    st.one_of(
        st.binary(max_size=80),
        st.text(alphabet='{}[]",:0123456789.eE+-NaInfity\\\\utrl \\n\\x00é', max_size=80).map(str.encode),
    ),
    st.integers(0, 1000),
)
def test_whatever_a_server_says_is_a_message_or_a_fault(line: bytes, more: int) -> None:
    try:
        assert isinstance(message_of(line, len(line) + more), dict)
    except WireFault as fault:
        assert fault.reason in (PROTOCOL, FLOODED)


@pytest.mark.parametrize("line", [
    b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 10**5, b'{"a": ' * 10**5, b'{"a": ' + b"9" * 5000 + b"}", b"7", b'"x"', b"\xff", b"{}{}",
])  # fmt: skip
def test_what_two_readers_would_understand_differently_is_no_message(line: bytes) -> None:
    with pytest.raises(WireFault) as caught:
        message_of(line, len(line))
    assert caught.value.reason == PROTOCOL


def test_a_pipe_that_nobody_reads_can_be_given_up() -> None:
    async def story() -> bool:
        read, write = os.pipe()
        pipe = Pipe(write)
        try:
            async with asyncio.timeout(0.05):
                await pipe.write(b"x" * 10**7)
        except TimeoutError:
            return True
        finally:
            pipe.close()
            os.close(read)
        return False

    assert asyncio.run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_program_that_does_not_exist_says_so_on_its_standard_error(sandbox: bool) -> None:
    async def story() -> tuple[int | None, str]:
        process = ServerProcess(Server("x", command=("/nowhere/at all",), sandbox=sandbox), ServerLimits())
        status = await process.exit_status(60.0)
        await process.end(0.0)
        assert not os.path.exists(process.child.folder)
        return status, process.tail()

    status, tail = asyncio.run(story())
    assert status == 127
    assert "No such file or directory" in tail


@pytest.mark.parametrize("sandbox", [True, False])
def test_of_a_server_that_ended_only_what_it_wrote_after_its_last_message_is_told(sandbox: bool) -> None:
    script = """echo earlier >&2; echo '{"a": 1}'; sleep 0.3; echo last words >&2; exit 9"""

    async def story() -> tuple[int | None, str, str]:
        process = ServerProcess(Server("x", command=("sh", "-c", script), sandbox=sandbox), ServerLimits())
        said = [message async for message, _ in process.messages()]
        assert said == [{"a": 1}]
        status = await process.exit_status(60.0)
        process.keep_stderr()
        tails = process.tail(since_it_spoke=True), process.tail()
        await process.end(0.0)
        return status, *tails

    assert asyncio.run(story()) == (9, "last words", "earlier\nlast words")


def test_whoever_waits_for_a_pipe_that_is_closed_here_is_woken() -> None:
    """A server that is given up by its writer: else calls that wait for its answers would wait for their deadlines."""

    async def story() -> tuple[bytes, str]:
        (read, theirs), (ours, write) = os.pipe(), os.pipe()
        reader, writer = Pipe(read), Pipe(write)
        waiting = asyncio.create_task(reader.read()), asyncio.create_task(writer.write(b"x" * 10**7))
        await asyncio.sleep(0.05)
        for end in (reader, writer):
            end.close()
        async with asyncio.timeout(10.0):
            got = await asyncio.gather(*waiting, return_exceptions=True)
        for descriptor in (theirs, ours):
            os.close(descriptor)
        return got[0], type(got[1]).__name__  # type: ignore[return-value]

    assert asyncio.run(story()) == (b"", "BrokenPipeError")
