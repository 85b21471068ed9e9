import type { status } from "@grpc/grpc-js";

/** The names of gRPC's status codes, by number. grpc-js has them too, but browsers cannot load it. */
export const CODE_NAMES: readonly string[] = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
];

export const DEADLINE_EXCEEDED: status.DEADLINE_EXCEEDED = 4;
export const RESOURCE_EXHAUSTED: status.RESOURCE_EXHAUSTED = 8;
export const INTERNAL: status.INTERNAL = 13;
export const UNAVAILABLE: status.UNAVAILABLE = 14;
export const UNAUTHENTICATED: status.UNAUTHENTICATED = 16;
