"""The gRPC edge. The only package that imports grpc and the generated code."""
