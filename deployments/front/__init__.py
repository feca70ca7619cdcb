"""Where requests come in: HTTP and gRPC, what they are checked for, and what is counted of them."""
