"""Decides which plan an application should run next: observe, forecast, plan, and roll out what is worth it."""
