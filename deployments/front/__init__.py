"""The front process: requests come in over HTTP and gRPC, the dispatcher forms batches, answers go out."""
