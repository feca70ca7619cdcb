"""The command line, the controller that re-plans, and the tools that rehearse and load an application."""
