"""What a run lives in: its config, what the user brought, its folder, its helpers and its screen."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from surefoot.assemble.inputs import Inputs
from surefoot.assemble.keeper import Keeper
from surefoot.config import Config
from surefoot.config_load import LoadedConfig
from surefoot.envs.rewards.reward_pool import RewardPool
from surefoot.stopping import StopSignals
from surefoot.tracking.console import View
from surefoot.tracking.lookout import Lookout
from surefoot.tracking.sinks import Sinks


@dataclass(frozen=True)
class Surroundings:
    """Everything around the loop. Whoever makes one closes it."""

    loaded: LoadedConfig
    inputs: Inputs
    keeper: Keeper
    pool: RewardPool
    sinks: Sinks
    stop: StopSignals
    view: View
    lookout: Lookout
    began: float = field(default_factory=time.perf_counter)
    """When this life of the run began."""
    later: ExitStack = field(default_factory=ExitStack)
    """What else has to be closed, the last one first: the runtime with its processes, above all."""

    @property
    def config(self) -> Config:
        """The checked config."""
        return self.loaded.config

    def close(self) -> None:
        """Engines, workers, sinks and screen first, the folder's lock last."""
        try:
            self.later.close()
            self.pool.close()
            self.sinks.close()
            self.view.close()
        finally:
            self.keeper.close()
