"""The folder that goes first on PYTHONPATH of recorded processes: `sitecustomize` and the recorder it starts."""
