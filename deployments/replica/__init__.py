"""The replica: a process that runs one launch after another on its device, real or virtual."""
