"""Text that a page may show: escaped, bounded, and with everything invisible made visible.

Model output is hostile until proven otherwise: it may hold markup, characters that turn the reading direction around,
or terminal codes. Here all of it becomes plain characters; a control character becomes its name in a box of its own.
"""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Sequence

from surefoot.safe_text import printable

LONGEST = 4000


def esc(text: object, limit: int = 500) -> str:
    """A short text of ours or of a config: secrets hidden, control characters spelled out, escaped."""
    whole = printable(str(text))
    return html.escape(whole if len(whole) <= limit else whole[:limit] + " …", quote=True)


def local(text: object) -> str:
    """The same text with its absolute paths cut to their last two names: a page is for others, who have other folders.

    Example:
        >>> local("model = '/srv/jo/my runs/qwen', saved in /srv/x/run/checkpoints/step_3; http://a/b/c/d")
        "model = '…/my runs/qwen', saved in …/checkpoints/step_3; http://a/b/c/d"
    """
    whole = str(text)
    if whole.startswith("/") and "\n" not in whole:
        return _ending(whole)
    return _BARE.sub(lambda found: _ending(found[0]), _QUOTED.sub(lambda found: _ending(found[0]), whole))


_QUOTED = re.compile(r"""(?<=")/[^"\n]+(?=")|(?<=')/[^'\n]+(?=')""")
_BARE = re.compile(r"""(?<![\w.…/:~<-])/(?:[^\s"'<>|;,:()]+/)+[^\s"'<>|;,:()]*""")


def _ending(path: str) -> str:
    names = [name for name in path.split("/") if name]
    return path if len(names) <= 2 else "…/" + "/".join(names[-2:])


def foreign(text: str, limit: int = LONGEST) -> str:
    """A model's or a task's text, to the letter as far as it is shown; what is invisible is marked."""
    shown, more = text[:limit], len(text) - limit
    parts = []
    for hidden, run in itertools.groupby(shown, key=_is_hidden):
        piece = "".join(run)
        parts.append(f'<span class="ctl">{_name(piece)}</span>' if hidden else html.escape(piece, quote=True))
    if more > 0:
        parts.append(f'<span class="more"> … {more} more characters</span>')
    return "".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: int = 0) -> str:
    """A table of escaped cells; the last `numbers` columns are aligned to the right, an empty header is left out."""
    first = len(header) - numbers

    def cells(kind: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{kind}{' class=num' if index >= first else ''}>{esc(cell)}</{kind}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', header)}</tr></thead>" if any(header) else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _HIDDEN


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _name(piece: str) -> str:
    spelled = piece.encode("unicode_escape", errors="surrogatepass").decode("ascii")
    return html.escape(spelled, quote=True)
