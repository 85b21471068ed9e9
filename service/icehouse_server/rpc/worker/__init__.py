"""Worker protocol `vllm.grpc.engine.VllmEngine`, which gateways speak, over the API's checks and engine."""
