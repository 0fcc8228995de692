"""Tools that are Python: functions, environment classes, foreign processes; and their recordings."""
