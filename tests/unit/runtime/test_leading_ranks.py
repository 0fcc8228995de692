"""How rank 0 finds out what is wrong with the others, before anything is computed together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from surefoot.errors import ConfigError, InvariantError, LearnerLostError, LearnerStartError, ModelError
from surefoot.runtime import learner_ranks
from surefoot.runtime.learner_ranks import FollowerRanks, FollowingRank, MeetingPlace

MODEL: Any = SimpleNamespace(name="a model")


class Answers:
    """A rank that answers what it was told to, or nothing any more."""

    def __init__(self, answer: Any, *, how: str | None = None) -> None:
        self.answer, self.how, self.ended = answer, how, False
        self.asked: list[Any] = []

    def ask(self, line: bytes, seconds: float) -> bytes:
        self.asked.append(json.loads(line))
        if self.how is not None:
            raise ConnectionError("it has gone")
        return json.dumps(self.answer).encode()

    def killed(self, wait_s: float) -> str | None:
        return self.how

    @property
    def is_running(self) -> bool:
        return self.how is None

    def last_lines(self, count: int) -> list[str]:
        return ["what it said last"]

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FollowerRanks]]:
    """`led(*followers)`: they, behind a rank 0 whose weights have the digest `ours`."""
    monkeypatch.setattr(learner_ranks, "digest_of_weights", lambda policy: "ours")
    made: list[FollowerRanks] = []

    def lead(*followers: Answers) -> FollowerRanks:
        others: Any = dict(enumerate(followers, 1))
        made.append(FollowerRanks(others, ["a config"], deadline_s=1.0, start_timeout_s=5.0))
        return made[-1]

    yield lead
    for each in made:
        each.close()


def test_every_rank_is_told_its_place_and_the_config(led: Callable[..., FollowerRanks]) -> None:
    first, second = Answers({"made": "ours"}), Answers({"made": "other"})
    with pytest.raises(ModelError):
        led(first, second).join(MODEL)
    assert (first.asked, second.asked) == ([["begin", 1, 3, 1.0, "a config"]], [["begin", 2, 3, 1.0, "a config"]])


def test_planted_other_weights_are_refused_by_the_ranks_number(led: Callable[..., FollowerRanks]) -> None:
    same, other = Answers({"made": "ours"}), Answers({"made": "theirs"})
    with pytest.raises(ModelError, match="rank 2 of the learner loaded other weights than rank 0 from a model"):
        led(same, other).join(MODEL)
    assert same.ended
    assert other.ended


def test_a_rank_that_is_lost_at_the_start_is_named_with_how_and_its_last_words(
    led: Callable[..., FollowerRanks],
) -> None:
    fine, lost = Answers({"made": "ours"}), Answers(None, how="was ended by SIGKILL")
    with pytest.raises(LearnerStartError, match=r"rank 2 was ended by SIGKILL\n  its last lines:\n    \| what it said"):
        led(fine, lost).join(MODEL)
    assert fine.ended, "there is no going on with fewer"


def test_an_error_of_ours_on_a_rank_arrives_as_itself(led: Callable[..., FollowerRanks]) -> None:
    told = {"error": ["ConfigError", "this and that", "a reason", "a remedy"]}
    with pytest.raises(ConfigError, match="rank 1 of the learner: this and that"):
        led(Answers(told)).join(MODEL)


def fails(error: Exception) -> Callable[[], Any]:
    def own() -> Any:
        raise error

    return own


def test_planted_other_question_for_a_rank_is_seen_when_rank_0_waits_in_vain(led: Callable[..., FollowerRanks]) -> None:
    alone = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 1000ms")
    ranks = led(Answers({"made": 3}))
    with pytest.raises(InvariantError, match=r"rank 0 of the learner waited for ranks that were through: .*Timed out"):
        ranks.together("learn", [], fails(alone), str)
    with pytest.raises(LearnerLostError, match="waited for ranks that were through"):
        ranks.together("learn", [], lambda: 3, int)


def test_a_bug_of_ours_on_rank_0_stays_one(led: Callable[..., FollowerRanks]) -> None:
    with pytest.raises(KeyError, match="x"):
        led(Answers({"made": 3})).together("learn", [], fails(KeyError("x")), str)


def test_what_a_rank_made_of_a_call_has_to_be_what_rank_0_made(led: Callable[..., FollowerRanks]) -> None:
    ranks = led(Answers({"made": [3, "0.5"]}))
    assert ranks.together("learn", [], lambda: (3, "0.5"), list) == (3, "0.5")
    with pytest.raises(InvariantError, match="rank 1 of the learner made something else of learn"):
        ranks.together("learn", [], lambda: (3, "0.25"), list)


def test_a_rank_says_what_it_could_not_do_and_does_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(index: int, config: str) -> Any:
        raise ModelError(f"rank {index} finds no {config}", "why", "fix")

    rank = FollowingRank(refused)
    told = json.loads(rank.reply(b'["begin", 1, 2, 1.0, "model"]'))
    assert told == {"error": ["ModelError", "rank 1 finds no model", "why", "fix"]}
    assert rank.failed
    assert json.loads(rank.reply(b'["no such call"]')) == {"error": [None]}
    assert "KeyError" in capsys.readouterr().err, "what is not ours stands in the log"


def test_a_port_to_meet_on_is_listened_on_at_one_address_only() -> None:
    place = MeetingPlace(2, "127.0.0.1")
    try:
        port = int(place.name.rpartition(":")[2])
        found = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.laddr.port == port]
        assert found
        assert set(found) == {"127.0.0.1"}
    finally:
        place.close()
    folder = MeetingPlace(2)
    path = Path(folder.name.partition(":")[2]).parent
    assert path.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert not path.exists()
