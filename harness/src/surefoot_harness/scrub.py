"""Secrets out of text before it is stored: values of secret-looking variables, and tokens by their shape."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from surefoot_harness.system import text as safe_text

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY", re.IGNORECASE)
"""Beside what `system.text` calls secret: here names for places (TOKEN_FILE) count too."""
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,})"
    r"|(?<=://)[^/\s:@]+:[^/\s:@]+(?=@)"
)


def scrub(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without secrets: each value of a secret-looking variable (6 characters or more) and known token shapes.

    Example:
        >>> scrub("using s3cr3t-value", {"MY_TOKEN": "s3cr3t-value"})
        'using [hidden]'
    """
    variables = os.environ if environ is None else environ
    values = {value for name, value in variables.items() if is_secret_name(name) and len(value) >= 6}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name is treated as a secret."""
    return bool(_SECRET_NAME.search(name)) or safe_text.is_secret_name(name)
