"""What pytest finds by itself: brings in the plugin, once, whichever of its names was asked for.

Both distributions register this module under the plugin's first name, `surefoot.harness.plugin`, so that `-p` and
`-p no:` of that name go on as before; the plugin itself is `surefoot_harness.plugin`, and `-p` and `-p no:` know that
name too. pytest refuses one module under two names, so the two must not be one.
"""

pytest_plugins = ("surefoot_harness.plugin",)
