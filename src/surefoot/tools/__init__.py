"""What answers a rollout that calls tools.

    session.py      many turns: budgets, and the way from a completion to tools' answers
    parsing.py      what a model wrote, read as calls
    toolkits.py     everything that a run's rollouts may call, from its config
    mcp/            tools behind MCP
    python/         tools that are Python: functions, environment classes, foreign processes
    recording.py    tools that answer as they once did

Nothing here imports torch: reward workers are forked before the model exists.

Read next: `session.py`; `rewards/grading.py`, what counts as right.
"""
