"""Takes a call and never answers it."""

from base import serve

serve(lambda request: None)
