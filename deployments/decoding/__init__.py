"""Networks that write token by token, with early exits, at full batches."""
