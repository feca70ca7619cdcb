"""Decides which plan an application runs next: observe, forecast, plan, and roll out a plan that is worth it."""
