"""Its description and its answers hold characters that nobody sees."""

from base import ECHO, answer, serve, text

serve(
    lambda request: answer(request["id"], text("safe\u202etxt.exe\x1b[2J\u200b\u2028")),
    tools=[{**ECHO, "description": "Says it\u202e again.\u200b\U000e0041"}],
)
