"""Which tools a server offered when the run began, and whether it still does.

Owns       the names that tools go by in a run, and the SHA-256 that a server's list is pinned by.
Promises   a changed, new or missing tool is refused by server and tool name; two tools never share a name; characters
           that a person cannot see in a description are spelled out.

Read next: `toolkit.py`, which checks every new connection.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import ToolError
from surefoot.protocols import ToolSpec
from surefoot.system.files import sha256_of
from surefoot.tools.mcp.servers import Server
from surefoot.tools.schema import MAX_SCHEMA_BYTES
from surefoot.tools.text import shown

MAX_TOOLS = 128
MAX_DESCRIPTION = 8000
_FOREIGN = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(frozen=True)
class Offer:
    """One tool as its server lists it."""

    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 over everything that a model or our own checks could see of it."""
        return _sha([self.name, self.description, self.schema])


@dataclass(frozen=True)
class Listing:
    """What one server offers of what a run wants."""

    server: str
    offers: tuple[Offer, ...]

    @property
    def pin(self) -> str:
        """SHA-256 over all of it, in the order of names."""
        return _sha([[o.name, o.description, o.schema] for o in sorted(self.offers, key=lambda o: o.name)])

    @property
    def digests(self) -> dict[str, str]:
        """Tool name -> digest."""
        return {offer.name: offer.digest for offer in self.offers}


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sha256_of(text)


def listing_of(server: Server, offers: Iterable[Offer]) -> Listing:
    """What the run may use of a server's list; a `ToolError` when it is malformed or something asked for is missing."""
    found = list(offers)
    names = [offer.name for offer in found]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise _refused(server.name, f"lists {shown(doubled[0])!r} more than once", "a call could reach either")
    _refuse_strangers(server, names)
    kept = [offer for offer in found if server.tools is None or offer.name in server.tools]
    if not kept:
        raise _refused(server.name, "lists no tools", "there is nothing to call")
    if len(kept) > MAX_TOOLS:
        raise _refused(server.name, f"lists {len(kept)} tools, at most {MAX_TOOLS}", "the model reads all of them")
    for offer in kept:
        _check_size(server.name, offer)
    return Listing(server.name, tuple(kept))


def _refuse_strangers(server: Server, names: Sequence[str]) -> None:
    """Every tool that the servers file names is one that the server lists; a misspelt one is told the nearest."""
    probed = (server.probe[0],) if server.probe else ()
    for key, wanted in (("tools", server.tools or ()), ("idempotent", server.idempotent), ("probe", probed)):
        missing = sorted(set(wanted) - set(names))
        if missing:
            offered = ", ".join(map(shown, names[:20])) or "none"
            near = difflib.get_close_matches(missing[0], names, n=1, cutoff=0.5)
            raise _refused(
                server.name, f"has no tool {shown(missing[0])!r}, which its key `{key}` names; it has {offered}",
                "the run was told to use it",
                fix=f"under `{key}` write " + (repr(shown(near[0])) if near else f"one of {offered}"),
            )  # fmt: skip


def _check_size(server: str, offer: Offer) -> None:
    if len(offer.description) > MAX_DESCRIPTION or len(json.dumps(offer.schema)) > MAX_SCHEMA_BYTES:
        raise _refused(
            server,
            f"describes {shown(offer.name)!r} in {len(offer.description)} characters and a schema of "
            f"{len(json.dumps(offer.schema))} bytes, at most {MAX_DESCRIPTION} and {MAX_SCHEMA_BYTES}",
            "the model reads all of it before every task",
        )


def check_unchanged(pinned: Listing, now: Listing) -> None:
    """Refuse a list that is not the one the run began with, by the first tool that differs."""
    before, after = pinned.digests, now.digests
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name):
            continue
        what = "is new" if name not in before else "is missing now" if name not in after else "was changed"
        raise _refused(
            pinned.server,
            f"changed its tools during the run: {shown(name)!r} {what}",
            "rollouts before and after would not have had the same tools, and a tool that changes may be hostile",
        )


def check_pin(listing: Listing, expected: str) -> None:
    """Refuse a list whose SHA-256 is not the one that was written down."""
    if listing.pin != expected:
        raise _refused(
            listing.server,
            f"is pinned to {expected} and its tools are {listing.pin}: {', '.join(map(shown, listing.digests))}",
            "its tools are not those that somebody looked at",
            fix="look at the tools, then write the new number down",
        )


def specs_of(listings: Sequence[Listing]) -> dict[str, tuple[Listing, Offer, ToolSpec]]:
    """Every tool by the name it goes by in the run, `server__tool`; refuses two with one name."""
    table: dict[str, tuple[Listing, Offer, ToolSpec]] = {}
    for listing in listings:
        for offer in listing.offers:
            name = spec_name(listing.server, offer.name)
            if name in table:
                other = table[name][0].server
                raise _refused(
                    listing.server,
                    f"and {other} would both offer {name!r}",
                    "a call could reach either",
                    fix="rename a server, or leave the tool out with the server's list of tools",
                )
            table[name] = (listing, offer, ToolSpec(name, shown(offer.description), offer.schema))
    return table


def spec_name(server: str, tool: str) -> str:
    """The name a model uses; characters that names cannot have become _.

    Example:
        >>> spec_name("files", "read.text")
        'files__read_text'
    """
    name = f"{server}__{_FOREIGN.sub('_', tool)}"
    if not tool or len(name) > 64:
        raise _refused(
            server, f"has a tool with the name {shown(tool)[:80]!r}, {len(name)} characters with its own",
            "names have 64 characters at most", fix="give the server a shorter name, or leave the tool out",
        )  # fmt: skip
    return name


def _refused(server: str, what: str, why: str, fix: str = "ask whoever runs the server; then start again") -> ToolError:
    return ToolError(f"tool server {server} {what}", why, fix)
