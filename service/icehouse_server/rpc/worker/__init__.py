"""Worker protocol `vllm.grpc.engine.VllmEngine`: what gateways speak, over the API's checks and engine."""
