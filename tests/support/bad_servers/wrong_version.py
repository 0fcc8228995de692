"""Speaks a protocol that nobody else does."""

from base import serve

serve(version="1999-01-01")
