"""Claim: serving adds little time to that of the devices, and plans keep their promise."""
