"""One file per command of `isobatch`. Heavy imports stay inside the functions, so that --help is instant."""
