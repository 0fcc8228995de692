"""Several sources of tools as one: no name twice, nothing left open, the same list in every process."""

from __future__ import annotations

import pytest
from tool_kit import TASK, Box, Kit

from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import ToolSpec
from surefoot.tools.toolkits import JoinedToolkit, NamedTools, ToolkitSpec, fingerprint


def kit(name: str, **box: object) -> Kit:
    made = Kit(lambda rollout: Box(lambda called, arguments: f"{name} {called}", **box))  # type: ignore[arg-type]
    made.specs = (ToolSpec(name, "about", {"type": "object"}),)
    return made


def test_calls_reach_the_source_that_offers_the_tool() -> None:
    joined = JoinedToolkit([kit("a", opening="One.", own=0.5), kit("b", opening=" Two.", own=0.25)])
    box = joined.open(TASK, "g/0", 1)
    assert [spec.name for spec in joined.specs] == ["a", "b"]
    assert (box.call("b", {}, 1.0).text, box.call("a", {}, 1.0).text) == ("b b", "a a")
    assert (box.opening, box.reward()) == ("One. Two.", 0.75)


def test_a_name_that_two_sources_offer_is_refused() -> None:
    with pytest.raises(ToolError, match="two tools are called 'a'"):
        JoinedToolkit([kit("a"), kit("a")])


def test_what_was_opened_is_closed_when_the_next_does_not_open() -> None:
    first, second = kit("a"), kit("b")

    def refuse(rollout: str) -> Box:
        raise ToolFailedError("no", "no", "no", "tool_unavailable")

    second.make = refuse
    with pytest.raises(ToolFailedError):
        JoinedToolkit([first, second]).open(TASK, "g/0", 1)
    assert first.boxes["g/0"].closed == 1


def test_closing_closes_all_of_them_even_when_one_complains() -> None:
    first, second = kit("a"), kit("b")

    def complain() -> None:
        raise OSError("busy")

    second.close = complain  # type: ignore[method-assign]
    with pytest.raises(OSError, match="busy"):
        JoinedToolkit([first, second]).close()
    assert first.closed == 1


def test_the_digest_changes_with_every_word_the_model_is_shown() -> None:
    base = ToolSpec("a", "about", {"type": "object"})
    others = [
        ToolSpec("b", "about", {"type": "object"}),
        ToolSpec("a", "About", {"type": "object"}),
        ToolSpec("a", "about", {}),
    ]
    assert len({fingerprint([spec]) for spec in (base, *others)}) == 4
    assert fingerprint([base, others[0]]) == fingerprint([others[0], base])


def test_tools_that_are_called_elsewhere_are_named_and_not_opened() -> None:
    with pytest.raises(ToolError, match="rollout workers"):
        NamedTools(kit("a").specs).open(TASK, "g/0", 1)


def test_a_recipe_of_functions_builds_the_same_tools_anywhere() -> None:
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: any.
        """
        return 2 * number

    toolkit = ToolkitSpec(functions=(double,)).build()
    try:
        assert [spec.name for spec in toolkit.specs] == ["double"]
        box = toolkit.open(TASK, "g/0", 0)
        assert box.call("double", {"number": 21}, 5.0).text == "42"
        box.close()
    finally:
        toolkit.close()
