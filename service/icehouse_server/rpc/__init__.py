"""The gRPC edge. The only room that imports grpc and the generated code."""
