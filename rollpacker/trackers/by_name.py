"""Makes a tracker from its settings."""

from __future__ import annotations

from rollpacker.trackers.mlflow import MlflowTracker
from rollpacker.trackers.sending import Tracker
from rollpacker.trackers.swanlab import SwanlabTracker
from rollpacker.trackers.tracker import TrackerConfig
from rollpacker.trackers.trackio import TrackioTracker
from rollpacker.trackers.wandb import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    tracker.name: tracker
    for tracker in (WandbTracker, MlflowTracker, TrackioTracker, SwanlabTracker)
}


def make_tracker(config: TrackerConfig) -> Tracker:
    """The tracker that the config names. Its library is not imported before the run starts."""
    return TRACKERS[config.name](config)
