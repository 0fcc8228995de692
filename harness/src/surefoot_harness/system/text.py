"""Text from anywhere, made safe to keep and to show: secrets out, control characters spelled out; numbers in words.

Owns       what counts as a secret: values of variables whose names say so, credentials in addresses, authorization
           headers, named values such as `password="..."`, and well-known shapes of keys.
Promises   a secret is hidden as it is and as `repr`, JSON or an address would spell it; a long hostile text costs
           time in proportion to its length; text without a secret stays as it is; what `remember` was told stays
           hidden when its variable is gone.
Never      hides task data or rollouts: those are the user's own, and are kept to the letter.

Read next: `tracking/process_logs.py`, the same for what foreign code prints.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

HIDDEN = "***"
SHORTEST = 8
"""A shorter value would hide ordinary words along with itself."""
_NAMES = (
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SIGNING_?KEY|CREDENTIAL"
    r"|AUTHORIZATION|COOKIE|CONNECTION_STRING"
)
_KEYS = r"(?<!PUBLIC)_KEYS?"
_SECRET_NAME = re.compile(rf"{_NAMES}|WEBHOOK|(?:^|_)JWT$|(?:_(?:PASS|PWD|PAT|AUTH|DSN|SALT)|{_KEYS})$", re.IGNORECASE)
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|HOME|SOCK|(?<!WEBHOOK_)UR[LI])$", re.IGNORECASE)
"""Of these only the address of a webhook is a secret itself: whoever has it may post there."""
_COMMON = frozenset("disabled required optional undefined anonymous password changeme not-set localhost".split())
_WORD = r"[A-Za-z0-9_-]"
_SHAPES = (  # each begins where no word is under way, so that no text is scanned twice
    rf"(?<!{_WORD})(?:"
    rf"(?:sk|rk|pk)[-_](?={_WORD}*\d){_WORD}{{16,}}"
    r"|(?:hf|npm|gsk|r8)_[A-Za-z0-9]{16,}|wandb_v\d{1,3}_\w{8,}"
    r"|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
    rf"|xox[a-z]-{_WORD}{{10,}}|AIza{_WORD}{{30,}}|ya29\.{_WORD}{{16,}}|nvapi-{_WORD}{{16,}}|pypi-{_WORD}{{16,}}"
    rf"|eyJ{_WORD}{{8,}}\.{_WORD}{{8,}}(?:\.{_WORD}*)?"
    r")"
)
_QUOTED_NAME = (
    r"(?i:(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key|credentials?"
    r"|(?<![a-z])(?:auth|access|refresh|session|bearer|api|hf|github|gitlab)[_-]token))"
)
_BEARERS = r"(?:(?:auth|access|refresh|session|bearer|api|hf|github|gitlab)[_-])?token"
_WORDS = r"passw(?:or)?d|passphrase"
_KEYLIKE = r"secret|(?:secret|api|access|private)[_-]?key"
_VALUE = r"[^\s\"'<>]"
_NO_VALUE = r"(?!\*\*\*|[\w.]{1,200}[\[(])"
"""Hidden already, or the beginning of an expression (`os.environ[...]`, `get(...)`): code that has no value yet."""
_SCHEME = r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,3}"
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("private key-----",), re.compile(
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!----)){0,20000}+(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
    ), HIDDEN),
    # One slash is enough: an address that was taken for a path has lost the other.
    ((":/",), re.compile(rf"({_SCHEME})[^\s/?#\"'<>]{{1,300}}(?=@)"), rf"\1{HIDDEN}"),
    # A password with an unescaped slash; a port and a path are none.
    ((":/",), re.compile(
        rf"({_SCHEME})[^\s/@:\"'<>]{{1,100}}:(?!\d{{1,5}}[/?#])[^\s@\"'<>]{{1,200}}(?=@)"
    ), rf"\1{HIDDEN}"),
    (("authorization", "api-key", "private-token"), re.compile(
        r"((?i:(?:proxy-)?authorization|x-api-key|api-key|private-token)[\"']?\s{0,8}[:=]\s{0,8}[\"']?"
        r"(?i:(?:basic|bearer|token|digest|negotiate)\s{1,8})?+)[^\s\"',;]+"
    ), rf"\1{HIDDEN}"),
    (("cookie:",), re.compile(r"((?i:set-)?(?i:cookie):[ \t]{0,8})[^\r\n\"']{4,}"), rf"\1{HIDDEN}"),
    (("bearer ",), re.compile(rf"\b([Bb]earer\s{{1,8}})(?=[^\s]{{0,60}}\d)[\w.~+/=-]{{{SHORTEST},}}"), rf"\1{HIDDEN}"),
    (("?", "&"), re.compile(
        r"([?&;](?i:[\w.-]{0,40}?(?:token|secret|passw(?:or)?d|api_?-?key|access_?-?key|signature|sig|auth))=)[^\s&;#\"'<>]{4,}"
    ), rf"\1{HIDDEN}"),
    (('"', "'"), re.compile(
        rf"({_QUOTED_NAME}[\"']?\s{{0,8}}[:=]\s{{0,8}}(?P<quote>[\"']))(?:(?!(?P=quote))[^\r\n]){{4,500}}"
    ), rf"\1{HIDDEN}"),
    (("=",), re.compile(
        rf"\b((?:[A-Z][A-Z0-9_]{{0,60}}?(?:(?:{_NAMES})S?|_PASS|_PWD|_SALT|_JWT|WEBHOOK(?:_UR[LI])?|{_KEYS})|JWT)=)"
        rf"[^\s\"']{{{SHORTEST},}}"
    ), rf"\1{HIDDEN}"),
    (("accountkey=", "sharedaccess"), re.compile(
        r"((?i:\b(?:accountkey|sharedaccess(?:key|signature))=))[^\s;\"']+"
    ), rf"\1{HIDDEN}"),
    (("--",), re.compile(
        rf"(--(?i:(?:[a-z]{{1,20}}[_-]){{0,3}}?(?:{_WORDS}|{_KEYLIKE})|{_BEARERS})(?:=|[ \t]{{1,8}}))"
        rf"(?![\s-]){_NO_VALUE}{_VALUE}{{6,}}"
    ), rf"\1{HIDDEN}"),
    (("passw", "passphrase"), re.compile(
        rf"((?i:{_WORDS})\s{{0,8}}[:=]\s{{0,8}}){_NO_VALUE}{_VALUE}{{6,}}"
    ), rf"\1{HIDDEN}"),
    (("token", "secret", "key"), re.compile(
        rf"((?<![A-Za-z0-9_-])(?i:{_BEARERS}|{_KEYLIKE})\s{{0,8}}[:=]\s{{0,8}}){_NO_VALUE}"
        rf"(?:(?={_VALUE}{{0,60}}\d){_VALUE}{{{SHORTEST},}}|{_VALUE}{{16,}})"
    ), rf"\1{HIDDEN}"),
)  # fmt: skip
"""(one of these must occur in the text in lower case, pattern, what is left of it)."""
_SHAPE = re.compile(_SHAPES)
_remembered: frozenset[str] = frozenset()
_BARS = "▁▂▃▄▅▆▇█"


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with every secret replaced by `***`.

    Args:
        environ: where to look for values of secret-looking variables; this process's own, and what `remember` was
            told, when left out.

    Example:
        >>> redact("cannot log in with s3cr3t-value", {"MY_TOKEN": "s3cr3t-value"})
        'cannot log in with ***'
        >>> redact("https://me:pass@example.org/x", {})
        'https://***@example.org/x'
    """
    known = _known(_secret_values(os.environ) | _remembered if environ is None else _secret_values(environ))
    if known is not None:
        text = known.sub(HIDDEN, text)
    lower = text.lower()
    for triggers, pattern, left in _RULES:
        if any(trigger in lower for trigger in triggers):
            text = pattern.sub(left, text)
    return _SHAPE.sub(HIDDEN, text)


def remember(environ: Mapping[str, str]) -> None:
    """Keep hiding the secrets of these variables in this process, also when they are gone from its environment."""
    global _remembered
    _remembered |= _secret_values(environ)


def printable(text: str) -> str:
    """`text` for a terminal or a log: no secrets; control, bidirectional and unassigned characters spelled out,
    line and paragraph separators (U+2028, U+2029) too.

    Example:
        >>> printable("ok\\x1b[31m")
        'ok\\\\x1b[31m'
    """
    return spelled_out(redact(text))


def spelled_out(text: str) -> str:
    """`text` in which nothing moves the cursor; newlines and tabs stay."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_spelled(c) if c not in "\n\t" and _moves(c) else c for c in text)


def _moves(char: str) -> bool:
    """Whether a terminal, an editor or a reader of lines may take it for something else than a character."""
    kind = unicodedata.category(char)
    return kind[0] == "C" or kind in ("Zl", "Zp")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as bars between their own extremes; a gap where there is no number.

    Example:
        >>> sparkline([9.0, 0.0, 1.0, None, 2.0], 4)
        '▁▅?█'
    """
    shown = list(values)[-width:]
    numbers = [value for value in shown if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    span = high / 2 - low / 2  # halves: the whole of two large numbers is no number

    def bar(value: float) -> str:
        return _BARS[round((value / 2 - low / 2) / span * (len(_BARS) - 1))] if span else _BARS[0]

    return "".join("?" if value is None else bar(value) for value in shown)


def redact_values(value: Any) -> Any:
    """The same data with every text in it redacted, names of a mapping too; lists, tuples and mappings are walked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_values(name): redact_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_values(each) for each in value)
    return value


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable of this name is treated as a secret; a name for a place is not.

    Example:
        >>> [is_secret_name(name) for name in ("HF_TOKEN", "SSH_KEY", "TOKENIZERS_PARALLELISM", "TOKEN_FILE")]
        [True, True, False, False]
    """
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)


def _spelled(char: str) -> str:
    return char.encode("unicode_escape", errors="surrogatepass").decode("ascii")


def _secret_values(environ: Mapping[str, str]) -> frozenset[str]:
    return frozenset(value for name, value in environ.items() if len(value) >= SHORTEST and _is_secret_name(name))


_is_secret_name = lru_cache(maxsize=4096)(is_secret_name)


@lru_cache(maxsize=8)
def _known(values: frozenset[str]) -> re.Pattern[str] | None:
    """One pattern for all spellings of all values, the longest first: a part must not be hidden before the whole."""
    spellings = {form for value in values for form in _spellings(value.strip()) if len(form) >= SHORTEST}
    if not spellings:
        return None
    return re.compile("|".join(re.escape(form) for form in sorted(spellings, key=lambda form: (-len(form), form))))


def _spellings(value: str) -> set[str]:
    """A value as it may occur in a text: plain, quoted once or twice, in an address, line by line."""
    from urllib.parse import quote, quote_plus

    if len(value) < SHORTEST or value.lower() in _COMMON or (os.path.isabs(value) and os.path.exists(value)):
        return set()  # a file that holds a secret is not one
    raw = os.fsencode(value) if _encodable(value) else value.encode("utf-8", errors="replace")
    forms = {value, quote(raw, safe=""), quote(raw), quote_plus(raw), repr(raw)[2:-1]}
    for _ in range(2):
        quoted = {json.dumps(f)[1:-1] for f in forms} | {json.dumps(f, ensure_ascii=False)[1:-1] for f in forms}
        forms |= quoted | {repr(f)[1:-1] for f in forms} | {spelled_out(f) for f in forms}
    return forms | {line for line in value.splitlines() if len(line) >= 2 * SHORTEST}


def _encodable(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


# -- Numbers, times and paths as people read them --------------------------------------------------


def number(value: float) -> str:
    """Four significant digits for the screen; the log keeps them all."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """`45s`, `3m 05s`, `2h 10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def size(count: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def python_call(function: str, run: Path, arguments: Sequence[str]) -> str:
    """What to write in Python about a run: `surefoot.evaluate("runs/1", tasks=rows)`."""
    return f"surefoot.{function}({', '.join([json.dumps(str(run), ensure_ascii=False), *arguments])})"


def shown_path(path: Path) -> str:
    """Relative to the current folder where it lies inside it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
