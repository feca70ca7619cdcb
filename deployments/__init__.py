"""Running it: networks that can be cut, their exits, and the Ray Serve application."""
