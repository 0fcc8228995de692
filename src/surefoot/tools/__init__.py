"""What answers, and what counts as right.

    single_turn.py  ask once, grade
    grading.py      which function scores: the user's own file, or a built-in scorer
    verifiers.py    one grader that chooses by the kind of task; `verify/` has the kinds
    components.py   one reward from several facts about a rollout with tools
    tools.py        many turns: budgets, and the way from a completion to tools' answers
    tool_calls.py   what a model wrote, read as calls
    toolkits.py     everything that a run's rollouts may call, from its config
    mcp_client.py   tools behind MCP; `servers/` has the parts
    sandbox.py      model-written code, contained; `sandboxes/` has the walls
    rewards/        reward functions in processes of their own
    sources/        tools that are Python: functions, environment classes, foreign processes, recordings

Nothing here imports torch: reward workers are forked before the model exists.

Read next: `rewards/single_turn.py`.
"""
