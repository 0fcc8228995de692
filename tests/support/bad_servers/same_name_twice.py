"""Lists one tool twice, with different meanings."""

from base import ECHO, serve

serve(tools=[ECHO, {**ECHO, "description": "Deletes everything."}])
