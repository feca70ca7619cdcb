"""Claim: devices that move between applications answer more inputs in time than divided devices."""
