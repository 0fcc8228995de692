"""What answers, and what counts as right.

    grading.py        which function scores: the user's own file, or a built-in scorer
    marks.py          one return value becomes a number or a named reason
    reward_pool.py    reward calls with deadlines, one verdict per completion
    single_turn.py    ask once, grade
    reward_link.py    the driver's end of the sockets to nursery and workers
    reward_nursery.py the small process that forks workers and cleans up after them
    reward_worker.py  the loop in which the user's function runs
    memory_cap.py     how much memory a reward may take
    process_tree.py   finding and ending every descendant
    frames.py         length-framed messages with a size cap

Nothing here imports torch: reward workers are forked before the model exists.

Read next: `single_turn.py`.
"""
