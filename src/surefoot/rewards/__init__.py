"""Reward functions in processes of their own: killed when they hang, capped, replaced."""
