"""The recorder, importable without surefoot: standard library only, relative imports only."""
