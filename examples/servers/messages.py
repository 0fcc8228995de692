"""MCP server `messages`: a mailbox of its own for every connection.

Tools: `contacts`, `inbox`, `read`, `find`, `send`. What one rollout sends, no other rollout ever sees: the mailbox
lives in this process and the process serves one connection. That is why it is not offered over HTTP, where requests of
different rollouts could not be told apart.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from serving import rows, run, unknown

MAX_SENT = 100
FIRST_SENT = 1001
"""Sent messages and the answers to them are numbered from here."""


class Mailbox:
    """The messages of one connection: those that were there, and those that it sent and got."""

    def __init__(self) -> None:
        self.contacts: dict[str, dict[str, Any]] = {row["name"]: row for row in rows("contacts.jsonl")}
        self.received: dict[int, dict[str, Any]] = {row["id"]: row for row in rows("mail.jsonl")}
        self.sent: dict[int, dict[str, Any]] = {}

    def person(self, given: str) -> str:
        """A contact by name, in any case; an error with near names when there is none."""
        for name in self.contacts:
            if name.casefold() == given.strip().casefold():
                return name
        raise unknown("contact", given, self.contacts)

    def send(self, to: str, text: str) -> tuple[int, int]:
        """Keep the message and the answer that comes by itself; the numbers of both."""
        if len(self.sent) >= MAX_SENT:
            raise ToolError(f"this mailbox has sent {MAX_SENT} messages, which is its limit")
        number = FIRST_SENT + 2 * len(self.sent)
        answer = {"id": number + 1, "from": to, "sent": "just now", "subject": "Automatic answer"}
        self.sent[number] = {"id": number, "from": "me", "sent": "just now", "subject": f"To {to}", "text": text}
        self.received[number + 1] = answer | {"text": self.contacts[to]["away_note"]}
        return number, number + 1


def line(message: dict[str, Any]) -> str:
    """One message in a list."""
    return f"[{message['id']}] {message['sent']}  {message['from']}: {message['subject']}"


def build() -> MCPServer:
    """A server with a new mailbox, ready to run or to be connected to in memory."""
    box = Mailbox()
    server = MCPServer("messages", instructions="The mailbox of a harbour office.", log_level="WARNING")
    _reading(server, box)

    @server.tool(structured_output=False)
    async def contacts() -> str:
        """List the people you can write to, with their teams."""
        return "\n".join(f"{name} ({contact['team']} team)" for name, contact in box.contacts.items())

    @server.tool(structured_output=False)
    async def send(
        to: Annotated[str, Field(description="Full name of a contact", max_length=60)],
        text: Annotated[str, Field(description="What to write", min_length=1, max_length=4000)],
    ) -> str:
        """Send a message to a contact. People who are away answer at once; read the answer by its number."""
        person = box.person(to)
        number, answer = box.send(person, text)
        return f"Sent message {number} to {person}. An automatic answer came: message {answer}."

    return server


def _reading(server: MCPServer, box: Mailbox) -> None:
    """The tools that change nothing."""

    @server.tool(structured_output=False)
    async def inbox(
        sender: Annotated[str, Field(description="Only messages of this contact", max_length=60)] = "",
        limit: Annotated[int, Field(description="How many to show, newest first", ge=1, le=40)] = 20,
    ) -> str:
        """List messages that came in, newest first, and say how many there are."""
        person = box.person(sender) if sender.strip() else None
        found = [message for message in box.received.values() if person in (None, message["from"])]
        shown = found[::-1][:limit]
        return "\n".join([f"{len(found)} messages, showing {len(shown)}", *map(line, shown)])

    @server.tool(structured_output=False)
    async def read(id: Annotated[int, Field(description="Number of the message, as lists show it")]) -> str:
        """Show a whole message, received or sent."""
        message = box.received.get(id) or box.sent.get(id)
        if message is None:
            raise ToolError("there is no message with that number; `inbox` and `find` list those that exist")
        return f"{line(message)}\n{message['text']}"

    @server.tool(structured_output=False)
    async def find(
        text: Annotated[str, Field(description="A word or phrase to look for", min_length=1, max_length=200)],
    ) -> str:
        """Find messages whose subject or text contains a phrase; at most 20 are listed, newest first."""
        wanted = text.casefold()
        found = [m for m in box.received.values() if wanted in f"{m['subject']}\n{m['text']}".casefold()]
        shown = found[::-1][:20]
        return "\n".join([f"{len(found)} messages, showing {len(shown)}", *map(line, shown)])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit("messages takes no options: its mailbox belongs to one connection, so it is served over stdio")
    run(build(), None)
