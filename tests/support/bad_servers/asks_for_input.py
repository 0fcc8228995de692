"""Instead of an answer, a question to the user."""

from base import answer, serve

serve(lambda request: answer(request["id"], {"resultType": "input_required", "inputRequests": {}}))
