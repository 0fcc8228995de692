"""What the fork server owes its workers, one piece at a time; tests/faults has it whole."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from surefoot.rewards.workers import CappedLog, ForkServer, _Worker


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    # In this process it must not become the parent of orphans for good: later tests count who is left.
    monkeypatch.setattr("surefoot.rewards.workers.adopt_orphans", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = ForkServer(theirs, {}, CappedLog(None), os.getppid(), 0)
        yield made
        made.selector.close()


def test_output_of_a_worker_that_was_just_ended_is_not_read_from_a_descriptor_it_no_longer_owns(
    fork_server: ForkServer,
) -> None:
    """Both were ready at once, the request to end it and its last words; the number may be another worker's by now."""
    reading, writing = os.pipe()
    os.write(writing, b"another worker's words")
    gone = _Worker(1, reading)
    fork_server._listen_if_alive(gone)
    assert gone.tail == b""
    fork_server.workers[0] = _Worker(2, reading)  # equal in every field but one: it is the object that counts
    fork_server._listen_if_alive(gone)
    assert gone.tail == b""
    fork_server._listen_if_alive(fork_server.workers[0])
    assert fork_server.workers[0].tail == b"another worker's words"
    os.close(reading)
    os.close(writing)
    fork_server._listen_if_alive(gone)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fork_server._listen(gone)  # the planted bug: this would have ended the fork server, and the run with it
