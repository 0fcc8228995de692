"""Answers with something that no two readers would understand alike: which, is the first argument."""

import sys

from base import answer, send, serve, text, write

TEXT = '{"type": "text", "text": "ok"}'


def call(request):
    number = request["id"]
    result = '{"content": [' + TEXT + "]}"
    begin = f'{{"jsonrpc": "2.0", "id": {number}, "result": '
    raw = {
        "not_json": "Traceback (most recent call last):",
        "a_list": "[1, 2, 3]",
        "nan": begin + '{"content": [' + TEXT + '], "structuredContent": {"a": NaN}}}',
        "duplicate_keys": begin + result + ', "result": ' + result + "}",
        "deep": begin + "[" * 100_000 + "]" * 100_000 + "}",
        "long_int": begin + "7" * 5000 + "}",
        "wrong_shape": begin + '{"content": 7}}',
        "no_envelope": '{"hello": true}',
    }
    kind = sys.argv[1]
    if kind in raw:
        write(raw[kind].encode() + b"\n")
    elif kind == "bad_utf8":
        write(b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "\xff\xfe"}]}}\n' % number)
    elif kind == "wrong_id":
        answer(number + 1000, text("ok"))
    elif kind == "id_as_text":
        answer(str(number), text("ok"))
    elif kind == "null_id":
        answer(None, text("ok"))
    elif kind == "two_replies":
        answer(number, text("ok"))
        answer(number, text("ok"))
    elif kind == "internal_error":
        send({"id": number, "error": {"code": -32603, "message": "database is locked"}})
    elif kind in ("sampling/createMessage", "roots/list", "elicitation/create"):
        send({"id": 99, "method": kind, "params": {}})


serve(call)
