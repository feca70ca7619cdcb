"""The Open Inference Protocol (v2), over HTTP and gRPC: what Triton's clients and KServe ask for."""
