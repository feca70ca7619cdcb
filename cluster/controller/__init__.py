"""Decides which plan an application should run next: observe, forecast, optimise, roll out if it is worth it."""

from cluster.controller.application import Application, RolloutError

__all__ = ["Application", "RolloutError"]
