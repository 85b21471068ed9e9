import { type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { type Any, anyUnpack } from "@bufbuild/protobuf/wkt";
import type { status } from "@grpc/grpc-js";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { CODE_NAMES } from "./status.js";

/** A status as the transport delivered it. */
export interface StatusFacts {
  readonly code: status;
  readonly message: string;
  readonly details: readonly Any[];
  readonly cause: unknown;
}

/** Thrown by every failed call: the server's status with its details. */
export class IcehouseError extends Error {
  override readonly name = "IcehouseError";
  /** gRPC's status code, as in `status` of @grpc/grpc-js. */
  readonly code: status;
  /**
   * A value of ErrorReason without its prefix, such as "QUEUE_FULL". If the status came from the network and not from
   * the server, the name of the code, such as "UNAVAILABLE".
   */
  readonly reason: string;
  /** The values in the message, by name. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The field at fault, as the protos spell it, such as "prompt.text". Undefined if no field is. */
  readonly field: string | undefined;
  /** When it makes sense to try again. Undefined if the server did not say. */
  readonly retryAfterMs: number | undefined;

  constructor({ code, message, details, cause }: StatusFacts) {
    const codeName = CODE_NAMES[code] ?? "UNKNOWN";
    const info = find(details, ErrorInfoSchema);
    const reason = info?.reason || codeName;
    super(`${codeName}${reason === codeName ? "" : ` (${reason})`}: ${message}`, { cause });
    this.code = code;
    this.reason = reason;
    this.metadata = info?.metadata ?? {};
    this.field = find(details, BadRequestSchema)?.fieldViolations[0]?.field;
    const delay = find(details, RetryInfoSchema)?.retryDelay;
    this.retryAfterMs = delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
}

function find<T extends DescMessage>(details: readonly Any[], schema: T): MessageShape<T> | undefined {
  for (const detail of details) {
    const found = anyUnpack(detail, schema);
    if (found) return found;
  }
  return undefined;
}
