"""Decides which plan an application should run next: observe, forecast, plan, and roll out what is worth it."""

from isobatch.cluster.controller.application import Application, RolloutError

__all__ = ["Application", "RolloutError"]
