"""The walls around model-written code, and tests of it that it cannot see."""
