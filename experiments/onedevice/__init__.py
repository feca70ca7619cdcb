"""One device, no Ray: what constant batches gain there, with real inputs or a given survival."""
