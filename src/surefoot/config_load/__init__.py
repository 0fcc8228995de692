"""Files and command-line words become a `Config`; a `Config` becomes text again.

Read next: `load.py`, the one call; `keys.py`, which knows what each key is called elsewhere.
"""

from surefoot.config_load.dump import describe_keys, dump_toml
from surefoot.config_load.load import LoadedConfig, config_from_values, load_config

__all__ = ["LoadedConfig", "config_from_values", "describe_keys", "dump_toml", "load_config"]
