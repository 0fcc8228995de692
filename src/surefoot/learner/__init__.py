"""The weights: loading them, scoring with them, changing them, saving them."""
