"""The command line, the controller that re-plans, and the tools that rehearse and load an application."""

if __name__ != "isobatch.cluster":  # under a second name, each class would exist twice
    raise ImportError("cluster is a part of isobatch: import isobatch.cluster")
