"""The Open Inference Protocol (v2), over HTTP and gRPC: the protocol of Triton's clients and of KServe."""
