"""MCP server `search`: an encyclopedia of a country that does not exist, searched with BM25.

Tools: `search` finds articles, `open` shows one. The index is built from the shipped corpus when the server starts.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from serving import rows, serve, unknown

SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""BM25's k1 and b: how soon repeating a word stops helping, how much long articles are held back."""
TITLE_WEIGHT = 3
"""A word of the title counts as often as this in the text."""


def words(text: str) -> list[str]:
    """Lower-case words without accents: what is compared."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall(r"[a-z0-9]+", "".join(letter for letter in plain if not unicodedata.combining(letter)))


class Index:
    """Which word stands how often in which article.

    Example:
        >>> index = Index([{"id": "a", "title": "Rope", "text": "Made of hemp."}])
        >>> index.rank("hemp")
        ['a']
    """

    def __init__(self, articles: list[dict[str, str]]) -> None:
        self.articles = {article["id"]: article for article in articles}
        self._places: dict[str, dict[str, int]] = defaultdict(dict)
        self._lengths: dict[str, int] = {}
        for article in articles:
            counts = Counter(words(article["title"]) * TITLE_WEIGHT + words(article["text"]))
            self._lengths[article["id"]] = counts.total()
            for word, count in counts.items():
                self._places[word][article["id"]] = count
        self._mean = sum(self._lengths.values()) / max(1, len(self._lengths))

    def rank(self, query: str) -> list[str]:
        """Ids of the articles that share a word with the query, best first; equals in order of their ids."""
        scores: dict[str, float] = defaultdict(float)
        for word in sorted(set(words(query))):
            places = self._places.get(word, {})
            rarity = math.log(1 + (len(self.articles) - len(places) + 0.5) / (len(places) + 0.5))
            for id_, count in places.items():
                held_back = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * self._lengths[id_] / self._mean
                scores[id_] += rarity * count * (SATURATION + 1) / (count + SATURATION * held_back)
        return sorted(scores, key=lambda id_: (-round(scores[id_], 9), id_))

    def snippet(self, id_: str, query: str) -> str:
        """The sentence of the article that shares most words with the query."""
        wanted = set(words(query))
        sentences = re.split(r"(?<=[.!?]) ", self.articles[id_]["text"])
        return max(sentences, key=lambda sentence: len(wanted & set(words(sentence))))


def build() -> MCPServer:
    """The server, ready to run or to be connected to in memory."""
    index = Index(rows("corpus.jsonl"))
    about = f"An encyclopedia of the country of Talverne: {len(index.articles)} short articles."
    server = MCPServer("search", instructions=about, log_level="WARNING")

    @server.tool(structured_output=False)
    async def search(
        query: Annotated[str, Field(description="Words to look for", min_length=1, max_length=400)],
        k: Annotated[int, Field(description="How many articles to show", ge=1, le=20)] = 5,
    ) -> str:
        """Find articles about places, people, books, bridges, ships and more. Shows id, title and one sentence each."""
        if not words(query):
            raise ToolError("the query holds no word to look for; write a name or a few plain words")
        found = index.rank(query)[:k]
        if not found:
            return "Nothing found. Try other words, such as the name of the thing itself."
        return "\n".join(f"[{id_}] {index.articles[id_]['title']}: {index.snippet(id_, query)}" for id_ in found)

    @server.tool(name="open", structured_output=False)
    async def open_article(
        id: Annotated[str, Field(description="An article's id, as search shows it in brackets", max_length=80)],
    ) -> str:
        """Show a whole article."""
        article = index.articles.get(id.strip().strip("[]"))
        if article is None:
            raise unknown("article id", id, index.articles)
        return f"{article['title']}\n{article['text']}"

    return server


if __name__ == "__main__":
    serve(build())
