"""The replica process runs one launch after another on its device, real or virtual."""
