"""A list of tools that has always one more page."""

import json
import sys

from base import ECHO, answer, send

for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        spoken = request["params"]["protocolVersion"]
        answer(
            request["id"],
            {"protocolVersion": spoken, "capabilities": {"tools": {}}, "serverInfo": {"name": "b", "version": "0"}},
        )
    elif request.get("method") == "tools/list":
        answer(request["id"], {"tools": [ECHO], "nextCursor": "more"})
    elif "id" in request:
        send({"id": request["id"], "error": {"code": -32601, "message": "no"}})
