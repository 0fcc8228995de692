"""Keeps what it was told, and says it to the next who asks."""

from base import answer, serve, text

heard = []


def call(request):
    heard.append(request["params"]["arguments"]["text"])
    answer(request["id"], text(" ".join(heard)))


serve(call)
