"""Where batches are computed: a replica of a split, real or virtual, and how survivors travel to the next one."""
