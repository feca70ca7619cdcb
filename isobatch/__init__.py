"""Serves early-exit networks in full batches: `load(DIRECTORY).predict(inputs)` answers without a server.

Its parts are the folders at the top of the repository, to which the links in this folder lead.
"""

from isobatch.deployments import load

__all__ = ["load"]
