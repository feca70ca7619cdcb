"""Claim: devices that move between applications answer more in time than divided ones."""
